"""Statistics: what was asked, answered and accepted while the language server runs."""

from collections import OrderedDict

import msgspec

_MAX_REMEMBERED = 1000  # suggestions whose acceptance can still be counted


class Counts(msgspec.Struct, rename="camel"):
    """Numbers since the start, as the command ``midfill.statistics`` returns them.

    Attributes:
        requests: requests for completions.
        completions: completions that were sent.
        continued: requests answered with the rest of the last completion.
        empty: requests for which the model had no completion.
        obsolete: requests that a change or another request made obsolete.
        cancelled: requests that the client cancelled.
        failed: requests that no server answered.
        shown: completions that the client says it has shown; few clients do.
        accepted: completions that were accepted whole.
        partially_accepted: completions of which a part was accepted, as far as clients tell.
        accepted_characters: UTF-16 code units that were accepted.
        prompt_tokens: tokens of all prompts.
        cached_tokens: those of them that the server had computed before.
        last_prompt_tokens, last_cached_tokens: the same of the last prompt.
    """

    requests: int = 0
    completions: int = 0
    continued: int = 0
    empty: int = 0
    obsolete: int = 0
    cancelled: int = 0
    failed: int = 0
    shown: int = 0
    accepted: int = 0
    partially_accepted: int = 0
    accepted_characters: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    last_prompt_tokens: int = 0
    last_cached_tokens: int = 0


class _Sent(msgspec.Struct):
    """A suggestion that was sent.

    Attributes:
        replaced: UTF-16 code units at its item's beginning that stood in the document before.
        length: code units of its text.
        accepted: those that were accepted.
        shown, whole: whether it was shown, and accepted whole.
    """

    replaced: int
    length: int
    accepted: int = 0
    shown: bool = False
    whole: bool = False


class Statistics:
    """Counts, and what became of each suggestion.

    Attributes:
        counts: the numbers.
    """

    def __init__(self) -> None:
        self.counts = Counts()
        self._sent: OrderedDict[str, _Sent] = OrderedDict()

    def record_prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Count the tokens of a prompt that the server has answered."""
        counts = self.counts
        counts.prompt_tokens += prompt_tokens
        counts.cached_tokens += cached_tokens
        counts.last_prompt_tokens, counts.last_cached_tokens = prompt_tokens, cached_tokens

    def record_sent(self, suggestion: str, replaced: int, length: int) -> None:
        """Count a suggestion that is sent, once, and note the lengths of its item's parts."""
        self.counts.completions += suggestion not in self._sent
        self._sent[suggestion] = _Sent(replaced, length)
        if len(self._sent) > _MAX_REMEMBERED:
            self._sent.popitem(last=False)

    def record_shown(self, suggestion: object) -> None:
        """Count that a suggestion was shown, once."""
        sent = self._find(suggestion)
        if sent is not None:
            self.counts.shown += not sent.shown
            sent.shown = True

    def record_accepted(self, suggestion: object) -> None:
        """Count that a suggestion was accepted whole, once."""
        sent = self._find(suggestion)
        if sent is not None:
            self.counts.accepted += not sent.whole
            sent.whole = True
            self._accept_up_to(sent, sent.length)

    def record_partially_accepted(self, suggestion: object, length: int) -> None:
        """Count how much of a suggestion was accepted.

        Args:
            suggestion: its id, as the client sends it.
            length: code units of its item's text that were accepted so far.
        """
        sent = self._find(suggestion)
        if sent is not None and length > sent.replaced:
            self.counts.partially_accepted += sent.accepted == 0
            self._accept_up_to(sent, min(length - sent.replaced, sent.length))

    def _find(self, suggestion: object) -> _Sent | None:
        return self._sent.get(suggestion) if isinstance(suggestion, str) else None

    def _accept_up_to(self, sent: _Sent, length: int) -> None:
        self.counts.accepted_characters += max(length - sent.accepted, 0)
        sent.accepted = max(sent.accepted, length)
