"""ContextPlanner: what prompts begin with, before the document: other files, or snippets.

Files that a user names are shown as they are, at once, in an order in which a change costs little.
Snippets that a plugin sends by itself are shown where that costs little (``context_files``).
"""

from collections import OrderedDict
from collections.abc import Callable
from sys import getsizeof
from typing import TypeVar

from midfill.infill.context_files import (
    ContextOrder,
    DocumentSnippets,
    SnippetAccount,
    Snippets,
    context_segments,
    newest,
)
from midfill.infill.document_store import Document, Heading, Memory
from midfill.infill.formats import FimFormat
from midfill.infill.layout import PromptLayout, Segment, TextSegment
from midfill.infill.prefix_cut import CachedPrompt, cached_characters
from midfill.infill.request import InfillRequest
from midfill.infill.window import ShownText

T = TypeVar("T")
_MAX_TENANTS = 4096  # whose files and snippets are remembered
_TENANT_BYTES = 1500  # of a tenant's objects; a test measures that these suffice
_ENTRY_BYTES = 320  # of a remembered file or path


class ContextPlanner:
    """Chooses the context of one model's prompts. It updates the documents that it is given.

    Args:
        format: the model's FIM format; None for a model without sentinels, which sees no context.
        snippet_characters: how much to show of snippets.
        max_bytes: memory for what is remembered of all tenants. One tenant's is always kept.
    """

    def __init__(self, format: FimFormat | None, snippet_characters: int, max_bytes: int) -> None:
        self._format = format
        self._snippet_characters = snippet_characters
        self._orders: OrderedDict[str, ContextOrder] = OrderedDict()
        self._accounts: OrderedDict[str, SnippetAccount] = OrderedDict()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._held_bytes = 0
        self._max_bytes = max_bytes

    def memory(self) -> Memory:
        """Return what the orders and accounts of all tenants take."""
        return Memory(self._held_bytes, self._max_bytes)

    def _record_size(self, tenant: str) -> None:
        """Count what a tenant takes now; forget those that came longest ago beyond the bound."""
        size = _TENANT_BYTES
        if (order := self._orders.get(tenant)) is not None:
            size += _ENTRY_BYTES * order.entries
        if (account := self._accounts.get(tenant)) is not None:
            size += sum(getsizeof(file.text) + getsizeof(file.path) for file in account.standing)
        self._held_bytes += size - self._sizes.get(tenant, 0)
        self._sizes[tenant] = size
        self._sizes.move_to_end(tenant)
        while (self._held_bytes > self._max_bytes or len(self._sizes) > _MAX_TENANTS) and (
            len(self._sizes) > 1
        ):
            oldest, released = self._sizes.popitem(last=False)
            self._held_bytes -= released
            self._orders.pop(oldest, None)
            self._accounts.pop(oldest, None)

    def newest(self, request: InfillRequest) -> Snippets:
        """Return as much of a request's other files as may be shown of them."""
        if self._format is None:
            return ()
        limit = request.context_characters
        if limit is None and request.snippets:
            limit = self._snippet_characters
        return request.context_files if limit is None else newest(request.context_files, limit)

    def order_and_record(self, request: InfillRequest) -> tuple[Segment, ...]:
        """Return the context as the request has it; snippets, too."""
        files = self.newest(request)
        if files and not request.snippets:
            order = _of_tenant(self._orders, request.tenant, ContextOrder)
            files = tuple(order.order_and_record(files))
            self._record_size(request.tenant)
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
        if document.context_segments == self._segments(standing, document.heading):
            cached = cached_characters(document.cuts.prompts, prefix, suffix)
        was_cached = cached_characters(document.lost, prefix, suffix)
        account.record_prompt(len(prefix) + len(suffix), cached, was_cached)
        snippets.adopt_on_request(account, self.newest(request), cached)
        self._record_size(document.tenant)
        if snippets.standing != standing:
            document.lost = tuple(document.cuts.prompts)
        return self._segments(snippets.standing, document.heading)

    def prepare(self, document: Document, prompt: CachedPrompt) -> tuple[Segment, ...] | None:
        """Return the context to prepare a document with in idle time; None keeps what it has.

        Args:
            document: the document.
            prompt: what would be prepared of it, or its last one.
        """
        if document.context_segments != self._segments(
            document.snippets.standing, document.heading
        ):
            return None
        cached = cached_characters(document.cuts.prompts, prompt.prefix, prompt.suffix)
        files = document.snippets.prepare(self._account(document.tenant), cached)
        return None if files is None else self._segments(files, document.heading)

    def record_computed(self, document: Document, layout: PromptLayout) -> None:
        """Record that a document's prepared layout is in the engine's cache now."""
        files = document.snippets.preparing
        if files is not None and layout.context_segments == self._segments(files, document.heading):
            document.snippets.record_computed(self._account(document.tenant))
            document.lost = tuple(document.cuts.prompts)

    def prepare_alone(self, tenant: str, offered: Snippets) -> tuple[Segment, ...] | None:
        """Return a context that is computed before there is a document; None if it isn't worth it.

        It is taken to be in the cache from now on.
        """
        account = self._account(tenant)
        self._record_size(tenant)
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
    return found
