"""Context files: other files or snippets in the prompt, chosen and ordered to cost little.

They come before everything else, so the prefix cache serves them to all requests that begin with
the same ones in the same order. A file that changes invalidates everything after it in any case.
From there on the order is free, and what has changed least often goes first. A file that is being
edited therefore moves to the end with its first change and costs only itself afterwards. Among
others, the newest go first: clients that send a ring of snippets (llama.vim) drop the oldest, which
then has the fewest after it. Orders are kept for several such clients at a time, which are told
apart by what they send.

Files that a user names are all shown. *Snippets* are what a plugin sends by itself, and are shown
where that costs little: a ring of chunks (llama.vim), the files that were opened last (Continue),
what a search has found (Tabby). They stand before the document, so a change among them costs the
document, too, and there is nearly always one: they are whatever the plugin happens to have seen.
How much of them a model profits from is measured (``midfill eval snippets``). They are hints: a
document keeps those that it shows until others are worth their price.

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

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile

from midfill.infill.formats import FimFormat
from midfill.infill.layout import Segment, TextSegment

_MAX_PATHS = 1024
_MAX_ORDERS = 8
_HASH_COMMENTS = (".py", ".rb", ".sh", ".pl", ".r", ".toml", ".yaml", ".yml", ".cmake", ".mk")
DEFAULT_SNIPPET_CHARACTERS = 6000
"""For models that don't say how much they profit from."""

SHARE = 1 / 16
_ON_REQUEST, _IN_IDLE_TIME = 1.5, 3.0  # how many times the news a price may be
_NEXT_TO_NOTHING = 64  # characters
_MAX_SHARE, _MIN_SHARE = 9 / 16, 7 / 16  # of the context, that files may take
_MAX_TENANTS = 4096


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A file, or a part of one, that the model should see beside the document.

    Attributes:
        text: its text.
        path: its path; "" if that is unknown.
    """

    text: str
    path: str = ""


Snippets = tuple[ContextFile, ...]
_Key = tuple[int, int]  # hash of the path, hash of the text
_NO_PATH = hash("")


@dataclass(slots=True)
class _Order:
    """The files of one client's last request.

    Attributes:
        since: the files in their order, each with the number of the request that first held it.
        requests: how many requests the client has sent.
    """

    since: dict[_Key, int] = field(default_factory=dict)
    requests: int = 0


class ContextOrder:
    """Keeps the order of one tenant's context from request to request; holds hashes only."""

    def __init__(self) -> None:
        self._orders: list[_Order] = []  # the one used last comes first
        self._texts: OrderedDict[int, int] = OrderedDict()  # hash of a path -> of its last text
        self._changes: Counter[int] = Counter()  # hash of a path -> how often its text changed

    @property
    def entries(self) -> int:
        """Number of files and paths that are remembered."""
        return len(self._texts) + sum(len(order.since) for order in self._orders)

    def order_and_record(self, files: Sequence[ContextFile]) -> list[ContextFile]:
        """Return the files (each once) in the order to send them, and record the order.

        As long as the last request's files come again unchanged, they keep their places. After the
        first one that is missing or changed, files that changed less often come first, and of
        these the ones that came last.
        """
        waiting = {_key(file): file for file in files}
        if not waiting:
            return []
        snippets = Counter(path for path, _ in waiting)
        for path, text in waiting:
            if snippets[path] == 1:  # several are parts of a file, and none is a change
                self._record_text(path, text)
        last = self._order_of(waiting)
        standing = list(takewhile(waiting.__contains__, last.since))
        seen, now = {*standing}, last.requests
        known = [key for key in last.since if key in waiting]
        rest = [key for key in dict.fromkeys([*known, *waiting]) if key not in seen]
        rest.sort(key=lambda key: (self._changes[key[0]], -last.since.get(key, now)))
        last.since = {key: last.since.get(key, now) for key in (*standing, *rest)}
        last.requests += 1
        return [waiting[key] for key in last.since]

    def _order_of(self, keys: Collection[_Key]) -> _Order:
        """Return the order that shares most files with these; a new one if none shares enough.

        That is the order's first file, whose place in the cache is at stake, or half of the files.
        """

        def shared(order: _Order) -> int:
            return len(order.since.keys() & keys)

        similar = [
            order
            for order in self._orders
            if next(iter(order.since)) in keys
            or 2 * shared(order) >= min(len(order.since), len(keys))
        ]
        best = max(similar, key=shared, default=_Order())
        others = [order for order in self._orders if order is not best]
        self._orders = [best, *others][:_MAX_ORDERS]
        return best

    def _record_text(self, path: int, text: int) -> None:
        """Record a path's text, and count whether it changed."""
        if path == _NO_PATH:
            return
        if self._texts.get(path, text) != text:
            self._changes[path] += 1
        self._texts[path] = text
        self._texts.move_to_end(path)
        if len(self._texts) > _MAX_PATHS:
            oldest, _ = self._texts.popitem(last=False)
            del self._changes[oldest]


def _key(file: ContextFile) -> _Key:
    return hash(file.path), hash(file.text)


def context_segments(
    format: FimFormat, files: Sequence[ContextFile], *, path: str = "", repository: str = ""
) -> tuple[Segment, ...]:
    """Return context in the family's own repository format; empty where there is none.

    Families without a file separator get each path in a comment line before its file.

    Args:
        format: the model's FIM format.
        files: in the order to send them.
        path: the document's own path.
        repository: the repository's name.
    """
    if not files and not path:
        return ()
    separator = format.file_separator
    segments: list[Segment] = []
    if separator is None:
        texts = [shown_text(format, file) for file in files]
        text = "".join(texts) + _path_comment(path)
        places = tuple(accumulate(map(len, texts), initial=0)) if files else ()
        return (TextSegment(text, "context", places),) if text else ()
    if format.repository is not None and repository:
        segments += [format.repository, TextSegment(f"{repository}\n", "context")]
    for file in files:
        segments += [separator, TextSegment(shown_text(format, file), "context")]
    segments.append(separator)
    if path:
        segments.append(TextSegment(f"{path}\n", "context"))
    return tuple(segments)


def shown_text(format: FimFormat, file: ContextFile) -> str:
    """Return a file as the model sees it, without the separator token before it."""
    head = _path_comment(file.path) if format.file_separator is None else f"{file.path}\n"
    return head + _with_newline(file.text)


def _with_newline(text: str) -> str:
    return text if text.endswith("\n") or not text else f"{text}\n"


def _path_comment(path: str) -> str:
    if not path:
        return ""
    mark = "#" if path.lower().endswith(_HASH_COMMENTS) else "//"
    return f"{mark} {path}\n"


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


def _common_start(first: Snippets, other: Snippets) -> Snippets:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, other, strict=False))
    return tuple(file for file, _ in pairs)


def _of_same_files(first: Snippets, other: Snippets) -> bool:
    """Return whether two clients' snippets have a file in common, by path or by text."""
    return not {file.path or file.text for file in first}.isdisjoint(
        file.path or file.text for file in other
    )


def _length(files: Snippets) -> int:
    return sum(len(file.path) + len(file.text) for file in files)


def _whole_lines(text: str) -> str:
    return text[: text.rfind("\n") + 1]


class FittingFiles:
    """Remembers where each tenant's last choice of files began.

    The first files are left out. If that were done to the last token, a client that sends one more
    file each time would have its first one left out each time, and what follows it computed again.
    So a choice stands while the files take up to 9/16 of the context; then the first are left out
    until they take 7/16 at most. The share does not depend on the document, so that typing does not
    change what is left out.

    Args:
        context: the model's, in tokens.
        count: returns the tokens of a file as it is shown; of a very long one, any large number.
    """

    def __init__(self, context: int, count: Callable[[ContextFile], int]) -> None:
        self._most, self._least = int(_MAX_SHARE * context), int(_MIN_SHARE * context)
        self._count = count
        self._firsts: OrderedDict[str, int] = OrderedDict()  # hash of the first file, by tenant

    def choose_and_record(
        self, files: Sequence[ContextFile], tenant: str
    ) -> tuple[ContextFile, ...]:
        """Return the last of the files, as many as fit."""
        sizes = []
        for total in accumulate(self._count(file) for file in reversed(files)):
            sizes.append(total)
            if total > self._most:
                break
        most = sum(size <= self._most for size in sizes)
        if most == len(files):
            return tuple(files)
        least = sum(size <= self._least for size in sizes)
        standing = self._firsts.get(tenant)
        kept = next(
            (count for count in range(most, least, -1) if hash(files[-count]) == standing), least
        )
        if kept:
            self._firsts[tenant] = hash(files[-kept])
            self._firsts.move_to_end(tenant)
        if len(self._firsts) > _MAX_TENANTS:
            self._firsts.popitem(last=False)
        return tuple(files[len(files) - kept :])
