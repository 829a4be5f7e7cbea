"""ContextPlanner: what prompts begin with, before the document: other files, or snippets.

Files that a user names are shown as they are, at once, in an order in which a change costs little
(``context``). Snippets that a plugin sends by itself are shown where that costs little
(``snippets``).
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from midfill.infill.context import ContextOrder, context_segments
from midfill.infill.document_store import Document, Heading
from midfill.infill.formats import FimFormat
from midfill.infill.layout import PromptLayout, Segment, TextSegment
from midfill.infill.prefix_cut import CachedPrompt, cached_characters
from midfill.infill.request import InfillRequest
from midfill.infill.snippets import DocumentSnippets, SnippetAccount, Snippets, newest
from midfill.infill.window_history import ShownText

T = TypeVar("T")

_MAX_TENANTS = 4096  # whose files and snippets are remembered


class ContextPlanner:
    """Chooses the context of one model's prompts. It updates the documents that it is given.

    Args:
        format: the model's FIM format; None for a model without sentinels, which sees no context.
        snippet_characters: how much to show of snippets.
    """

    def __init__(self, format: FimFormat | None, snippet_characters: int) -> None:
        self._format = format
        self._snippet_characters = snippet_characters
        self._orders: OrderedDict[str, ContextOrder] = OrderedDict()
        self._accounts: OrderedDict[str, SnippetAccount] = OrderedDict()

    def newest(self, request: InfillRequest) -> Snippets:
        """Return as much of a request's other files as may be shown of them."""
        if self._format is None:
            return ()
        limit = request.context_characters
        if limit is None and request.snippets:
            limit = self._snippet_characters
        return request.context if limit is None else newest(request.context, limit)

    def order_and_record(self, request: InfillRequest) -> tuple[Segment, ...]:
        """Return the context as the request has it; snippets, too."""
        files = self.newest(request)
        if files and not request.snippets:
            order = _of_tenant(self._orders, request.tenant, ContextOrder)
            files = tuple(order.order_and_record(files))
        return self._segments(files, _heading_of(request))

    def choose_and_record(
        self, document: Document, request: InfillRequest, shown: ShownText
    ) -> tuple[Segment, ...]:
        """Return the context of a document's next prompt.

        Args:
            document: its prompts are those before this one.
            request: for it.
            shown: what the prompt will show of it.
        """
        document.heading = _heading_of(request)
        if not request.snippets or request.layout != "auto":
            document.snippets, document.lost = DocumentSnippets(), ()
            return self.order_and_record(request)
        account, snippets, cached = self._account(document.tenant), document.snippets, 0
        prefix, suffix, standing = shown.prefix, shown.suffix, snippets.standing
        if document.context == self._segments(standing, document.heading):
            cached = cached_characters(document.cuts.prompts, prefix, suffix)
        was_cached = cached_characters(document.lost, prefix, suffix)
        account.record_prompt(len(prefix) + len(suffix), cached, was_cached)
        snippets.adopt_on_request(account, self.newest(request), cached)
        if snippets.standing != standing:
            document.lost = tuple(document.cuts.prompts)
        return self._segments(snippets.standing, document.heading)

    def prepare(self, document: Document, prompt: CachedPrompt) -> tuple[Segment, ...] | None:
        """Return the context to prepare a document with in idle time; None keeps what it has.

        Args:
            document: the document.
            prompt: what would be prepared of it, or its last one.
        """
        if document.context != self._segments(document.snippets.standing, document.heading):
            return None
        prefix = prompt.head + prompt.increment
        cached = cached_characters(document.cuts.prompts, prefix, prompt.suffix)
        files = document.snippets.prepare(self._account(document.tenant), cached)
        return None if files is None else self._segments(files, document.heading)

    def record_computed(self, document: Document, layout: PromptLayout) -> None:
        """Record that a document's prepared layout is in the engine's cache now."""
        files = document.snippets.preparing
        if files is not None and layout.context == self._segments(files, document.heading):
            document.snippets.record_computed(self._account(document.tenant))
            document.lost = tuple(document.cuts.prompts)

    def prepare_alone(self, tenant: str, offered: Snippets) -> tuple[Segment, ...] | None:
        """Return a context that is computed before there is a document; None if it isn't worth it.

        It is taken to be in the cache from now on.
        """
        account = self._account(tenant)
        snippets = DocumentSnippets(standing=account.standing, offered=offered)
        if (files := snippets.prepare(account, cached=0)) is None:
            return None
        snippets.record_computed(account)
        return self._segments(files, Heading())

    def _account(self, tenant: str) -> SnippetAccount:
        allowance = self._snippet_characters
        return _of_tenant(self._accounts, tenant, lambda: SnippetAccount(allowance))

    def _segments(self, files: Snippets, heading: Heading) -> tuple[Segment, ...]:
        bos = (TextSegment(heading.bos, "raw"),) if heading.bos else ()
        if self._format is None:
            return bos
        return bos + context_segments(
            self._format, files, path=heading.path, repository=heading.repository
        )


def _heading_of(request: InfillRequest) -> Heading:
    return Heading(request.bos, request.path, request.repository)


def _of_tenant(kept: OrderedDict[str, T], tenant: str, new: Callable[[], T]) -> T:
    """Return what is kept for a tenant, the most recently used last; new if there is nothing."""
    found = kept.get(tenant)
    if found is None:
        found = kept[tenant] = new()
    kept.move_to_end(tenant)
    if len(kept) > _MAX_TENANTS:
        kept.popitem(last=False)
    return found
