"""PostProcessing: how a complete answer is cut or completed before it is shown."""

from dataclasses import dataclass
from typing import get_args

from midfill.errors import InvalidRequestError
from midfill.infill.trim import Brackets, Lines, trim, with_closed_brackets


@dataclass(frozen=True, slots=True, kw_only=True)
class PostProcessing:
    """What to change in an answer; nothing by default.

    Which text stays is known only at the answer's end, so a streamed answer that is post-processed
    arrives in one piece.

    Attributes:
        overlap: cut the answer where it begins to repeat the suffix.
        lines: "single" ends the answer at its first line break and stops generation there; "block"
            ends it where the block around the caret ends, by indentation.
        brackets: "close" closes the brackets that the answer leaves open and the suffix does not
            close.

    Raises:
        InvalidRequestError: an unknown mode.
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
        """Whether any change is asked for, so that the answer has to be held back."""
        return self != PostProcessing()

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings that end generation where nothing after them would be kept."""
        return ("\n", "\r\n") if self.lines == "single" else ()

    def apply(self, answer: str, prefix: str, suffix: str) -> str:
        """Return a complete answer as it is shown.

        Args:
            answer: what the model wrote.
            prefix, suffix: the text before and after it.
        """
        kept = trim(answer, prefix, suffix if self.overlap else "", lines=self.lines)
        return with_closed_brackets(kept, suffix) if self.brackets == "close" else kept
