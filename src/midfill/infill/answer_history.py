"""Answer history: the last answers in a document, and what they say of the next one.

Editors ask again while their user types, and what is typed is often what the last answer proposed.
Then the next answer is most likely the rest of it. So the rest is drafted, which changes no answer:
each token is verified, many in one step. (SuffixDecoding, Oliaro et al., 2024, arXiv 2411.04975,
drafts from earlier outputs, too, by the tokens that were generated last; here the document says
where the new answer continues the old one.)
"""

from collections.abc import Iterable
from dataclasses import dataclass

_BEFORE = 200  # characters before the caret that have to be the same
_LONGEST = 1000  # characters of an answer that are kept
MAX_ANSWERS = 4
"""Of a document. Who deletes what they have typed comes back to an earlier one."""


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """An answer as the model gave it.

    Attributes:
        before: the last characters before the caret.
        from_start: whether these are all that there were.
        text: what the model wrote after the caret, before anything was trimmed.
        end_token: id of the token that ended it; None if no token did.
    """

    before: str
    from_start: bool
    text: str
    end_token: int | None = None

    @classmethod
    def at(cls, prefix: str, text: str, end_token: int | None = None) -> "GivenAnswer":
        """Return an answer after ``prefix``, of which as much is kept as is needed."""
        is_long = len(text) > _LONGEST
        return cls(
            prefix[-_BEFORE:],
            len(prefix) <= _BEFORE,
            text[:_LONGEST],
            None if is_long else end_token,
        )

    def after(self, prefix: str) -> "GivenAnswer | None":
        """Return what is left of the answer after ``prefix``; None if that differs from it."""
        if self.from_start:
            start = 0 if prefix.startswith(self.before) else -1
        else:
            earliest = len(prefix) - len(self.before) - len(self.text)
            start = prefix.rfind(self.before, max(earliest, 0))
        if start < 0:
            return None
        typed = prefix[start + len(self.before) :]
        rest = self.text[len(typed) :]
        if not rest or not self.text.startswith(typed):
            return None
        return GivenAnswer.at(prefix, rest, self.end_token)


def predicted_answer(answers: Iterable[GivenAnswer], prefix: str) -> GivenAnswer | None:
    """Return the answer that the latest of ``answers`` predicts after ``prefix``; None: none does.

    Where that was broken off, an earlier one that says the same may say more.

    Args:
        answers: of the document, the latest one first.
        prefix: the text before the caret.
    """
    found: GivenAnswer | None = None
    for each in answers:
        rest = each.after(prefix)
        if rest is None:
            continue
        if found is None or (found.end_token is None and rest.text.startswith(found.text)):
            found = rest
    return found
