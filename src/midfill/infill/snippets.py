"""Snippets: text of other places that a plugin sends by itself, shown where that costs little.

Some plugins send parts of other texts with every request: a ring of chunks (llama.vim), the files
that were opened last (Continue), what a search has found (Tabby). They stand before the document,
so a change among them costs the document, too, and there is nearly always one: they are whatever
the plugin happens to have seen. How much of them a model profits from is measured (``midfill eval
snippets``). They are hints: a document keeps those that it shows until others are worth their
price.

Everything is counted in characters. *Standing* snippets begin the document's cached prompts,
*offered* ones came with its last request. To adopt these costs what they hold behind their common
start with the standing ones, and whatever is cached of the document behind the standing ones. For
that the model is shown the *news*: lines that are in no standing snippet. Snippets are adopted

* on a request, if the price is at most 1.5 times the news, as where the document has to be computed
  anyway;
* in idle time, if it is at most 3 times the news.

Those that are no longer offered stay as long as no others come. Where a client has stopped to offer
any, they go once the document has to be computed anyway.

Bound: nothing is adopted whose price would bring a tenant's costs above ``allowance + SHARE *
computed``, where ``computed`` is what its prompts would have cost without any change of snippets.
So with snippets, however their ring turns, a session costs about ``1 + SHARE`` times what it would
cost if they never changed, and the allowance once. It can be more by what the last change costs
later: prompts with the caret elsewhere in the document are lost with it. That is added to the costs
where it comes up, so it delays the next change. The allowance is one set of snippets: a client's
first ones are shown at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from midfill.infill.context import ContextFile

DEFAULT_SNIPPET_CHARACTERS = 6000
"""For models that don't say how much they profit from."""

SHARE = 1 / 16
_ON_REQUEST, _IN_IDLE_TIME = 1.5, 3.0  # how many times the news a price may be

_NEXT_TO_NOTHING = 64  # characters

Snippets = tuple[ContextFile, ...]


@dataclass(slots=True)
class SnippetAccount:
    """What snippets have cost a tenant, and what they may cost; in characters.

    Attributes:
        allowance: what they may cost before anything was computed.
        computed: what prompts would have cost if their snippets never changed.
        spent: what changes of snippets have cost.
        standing: the snippets of the last prompt.
    """

    allowance: int
    computed: int = 0
    spent: int = 0
    standing: Snippets = ()

    def record_prompt(self, characters: int, cached: int, was_cached: int) -> None:
        """Record what a prompt costs.

        Args:
            characters: of the document in it.
            cached: how many of them are in the cache.
            was_cached: how many would be if its snippets had not changed last.
        """
        self.computed += characters - max(cached, was_cached)
        self.spent += max(0, was_cached - cached)

    def affords(self, price: int) -> bool:
        """Return whether a price may be paid now."""
        return self.spent + price <= self.allowance + SHARE * self.computed


@dataclass(slots=True)
class DocumentSnippets:
    """The snippets of one document.

    Attributes:
        standing: those that its cached prompts begin with.
        offered: those of its last request.
        preparing: those that are paid for, and will stand once idle time has come.
    """

    standing: Snippets = ()
    offered: Snippets = ()
    preparing: Snippets | None = None

    def files(self) -> Snippets:
        """Return all that are held; some are the same objects."""
        return *self.standing, *self.offered, *(self.preparing or ())

    def adopt_on_request(self, account: SnippetAccount, offered: Snippets, cached: int) -> None:
        """Record what a request offers, and let it stand if that costs little.

        Args:
            account: of the tenant.
            offered: the request's snippets. A new document takes what another one has shown last
                if that is of any of the same files, and so from the same client.
            cached: characters of the document in the cache behind the standing snippets.
        """
        self.offered = offered
        if not (self.standing or cached) and _of_same_files(offered, account.standing):
            self.standing = account.standing  # in the cache, behind which the document is new
        if self._buys(account, cached, _ON_REQUEST):
            self.standing, self.preparing = _ordered(offered, self.standing), None
        account.standing = self.standing

    def prepare(self, account: SnippetAccount, cached: int) -> Snippets | None:
        """Return the snippets to compute the document with in idle time; None keeps those it has.

        What was decided and paid for once stands until it is computed.

        Args:
            account: of the tenant.
            cached: characters of what is to be computed that are in the cache now.
        """
        if self.preparing is None and self._buys(account, cached, _IN_IDLE_TIME):
            self.preparing = _ordered(self.offered, self.standing)
        return self.preparing

    def record_computed(self, account: SnippetAccount) -> None:
        """Record that what was prepared is in the cache now."""
        if self.preparing is not None:
            self.standing, self.preparing = self.preparing, None
            account.standing = self.standing

    def _buys(self, account: SnippetAccount, cached: int, most: float) -> bool:
        """Return whether the offered snippets are worth their price, and pay it."""
        shown, none_left = news(self.offered, self.standing), self.standing and not self.offered
        if not shown and not (none_left and cached <= _NEXT_TO_NOTHING):
            return False
        ordered = _ordered(self.offered, self.standing)
        price = _length(ordered) - _length(_common_start(ordered, self.standing)) + cached
        if (shown and price > most * shown) or not account.affords(price):
            return False
        account.spent += price
        return True


def newest(files: Sequence[ContextFile], characters: int) -> Snippets:
    """Return the last files that have so many characters in all; the first of them is shortened.

    Files are shortened to whole lines, from their beginning on.
    """
    kept: list[ContextFile] = []
    left = characters
    for file in reversed(files):
        text = file.text if len(file.text) <= left else _whole_lines(file.text[:left])
        if not text.strip():
            break
        kept.append(ContextFile(text, file.path))
        left -= len(text)
    return tuple(reversed(kept))


def news(offered: Snippets, standing: Snippets) -> int:
    """Return how many characters are in lines of the offered files that no standing one has.

    A path counts with the first line.
    """
    known = {line for file in standing for line in file.text.splitlines()}
    found = 0
    for file in offered:
        new = [line for line in file.text.splitlines() if line not in known]
        found += sum(len(line) + 1 for line in new) + (len(file.path) if new else 0)
    return found


def _ordered(offered: Snippets, standing: Snippets) -> Snippets:
    """Return the offered files, those first that stand first and are among them."""
    start = tuple(takewhile(offered.__contains__, standing))
    return *start, *(file for file in offered if file not in start)


def _common_start(one: Snippets, other: Snippets) -> Snippets:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(file for file, _ in pairs)


def _of_same_files(one: Snippets, other: Snippets) -> bool:
    """Return whether two clients' snippets have a file in common, by path or by text."""
    return not {file.path or file.text for file in one}.isdisjoint(
        file.path or file.text for file in other
    )


def _length(files: Snippets) -> int:
    return sum(len(file.path) + len(file.text) for file in files)


def _whole_lines(text: str) -> str:
    return text[: text.rfind("\n") + 1]
