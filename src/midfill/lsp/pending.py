"""Which requests are still worth an answer: the policy, apart from all that runs.

A client asks for completions after every few keystrokes, and its requests carry no version of the
document. So a request means the state that the document is in when the request arrives, and is
obsolete as soon as the document changes: the client will ask again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["inline", "menu"]


@dataclass(frozen=True)
class Request:
    """A request for completions.

    Attributes:
        number: requests are numbered as they arrive.
        uri: the document.
        revision: how often the document had been changed.
        index: the caret's, in the document's text.
        kind: "inline" for ``textDocument/inlineCompletion``, "menu" for
            ``textDocument/completion``.
        invoked: whether the user asked for completions, rather than the editor by itself.
    """

    number: int
    uri: str
    revision: int
    index: int
    kind: Kind
    invoked: bool

    def same_place(self, other: "Request") -> bool:
        """Whether both were made at one caret in one state of a document."""
        return (self.uri, self.revision, self.index) == (other.uri, other.revision, other.index)

    def supersedes(self, earlier: "Request") -> bool:
        """Whether an earlier request needs no answer once this one has arrived.

        An editor shows one answer per document. What the user asked for is not given up for a
        request that the editor makes by itself at the same place.
        """
        if self.uri != earlier.uri or self.kind != earlier.kind:
            return False
        return self.invoked or not earlier.invoked or not self.same_place(earlier)

    def delay(self, debounce: float) -> float:
        """Return the seconds to wait for further changes before the model is asked."""
        return 0.0 if self.invoked else debounce


@dataclass(frozen=True)
class PendingRequests:
    """Requests that are not answered yet."""

    requests: tuple[Request, ...] = ()

    def arrived(self, request: Request) -> "PendingRequests":
        """Return what is pending once a request has arrived."""
        kept = self._without(request.supersedes)
        return PendingRequests((*kept.requests, request))

    def changed(self, uri: str) -> "PendingRequests":
        """Return what is pending once a document was changed, opened or closed."""
        return self._without(lambda request: request.uri == uri)

    def answered(self, request: Request) -> "PendingRequests":
        """Return what is pending once a request was answered or cancelled."""
        return self._without(lambda pending: pending == request)

    def _without(self, obsolete: Callable[[Request], bool]) -> "PendingRequests":
        return PendingRequests(tuple(each for each in self.requests if not obsolete(each)))
