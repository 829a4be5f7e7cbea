"""Trimming: how a whole answer is cut before it is shown."""

from dataclasses import dataclass
from typing import get_args

from midfill.errors import InvalidRequestError
from midfill.infill.trim import Brackets, Lines, trim, with_closed_brackets


@dataclass(frozen=True, slots=True, kw_only=True)
class Trimming:
    """What to cut off an answer; nothing by default.

    Whether text stays is known only at an answer's end, so a streamed one that is trimmed comes in
    one piece.

    Attributes:
        overlap: cut the answer where it begins to repeat the suffix.
        lines: "single" ends it at its first line break (no more is generated), "block" where the
            block around the caret ends, by indentation.
        brackets: "close" closes what the answer leaves open and the suffix doesn't close.

    Raises:
        InvalidRequestError: no such mode.
    """

    overlap: bool = False
    lines: Lines = "all"
    brackets: Brackets = "keep"

    def __post_init__(self) -> None:
        for field, modes in (("lines", get_args(Lines)), ("brackets", get_args(Brackets))):
            if getattr(self, field) not in modes:
                names = " or ".join(map(repr, modes))
                raise InvalidRequestError(f"{field} must be {names}", param=field)

    def __bool__(self) -> bool:
        """Whether an answer has to be held back for it."""
        return self != Trimming()

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings it adds: nothing after them can stay."""
        return ("\n", "\r\n") if self.lines == "single" else ()

    def apply(self, answer: str, prefix: str, suffix: str) -> str:
        """A whole answer, trimmed.

        Args:
            answer: what the model wrote.
            prefix, suffix: the text before and after it.
        """
        kept = trim(answer, prefix, suffix if self.overlap else "", lines=self.lines)
        return with_closed_brackets(kept, suffix) if self.brackets == "close" else kept
