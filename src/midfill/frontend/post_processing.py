"""PostProcessing: where an answer is cut, and how it is completed."""

import math
from dataclasses import dataclass
from typing import get_args

from midfill.errors import InvalidRequestError
from midfill.infill.trim import Brackets, Lines, Trimmer


@dataclass(frozen=True, slots=True, kw_only=True)
class PostProcessing:
    """What to change in an answer.

    Attributes:
        overlap: end the answer where it begins to repeat the suffix. None does so if the request is
            one for infilling, and not for a raw prompt.
        lines: "single" ends the answer at its first line break; "block" ends it where the block
            around the caret ends, by indentation. Generation stops there, too.
        min_indent: end the answer before its first line that is indented by fewer characters; the
            caret's own line and blank lines don't count.
        max_seconds: once so many seconds have passed since its first token, end the answer at its
            next line break. It never ends inside a line for that reason.
        soft_max_tokens: the same once the answer has so many tokens; 0 is off.
        brackets: "close" closes the brackets that the answer leaves open and the suffix does not
            close.

    Raises:
        InvalidRequestError: an unknown mode, or a negative number.
    """

    overlap: bool | None = None
    lines: Lines = "all"
    min_indent: int = 0
    max_seconds: float = math.inf
    soft_max_tokens: int = 0
    brackets: Brackets = "keep"

    def __post_init__(self) -> None:
        for field in ("min_indent", "max_seconds", "soft_max_tokens"):
            if not getattr(self, field) >= 0:
                raise InvalidRequestError.of_field(field, "must be at least 0")
        for field, modes in (("lines", get_args(Lines)), ("brackets", get_args(Brackets))):
            if getattr(self, field) not in modes:
                names = " or ".join(map(repr, modes))
                raise InvalidRequestError(f"{field} must be {names}", param=field)

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings that end generation where nothing after them would be kept."""
        return ("\n", "\r\n") if self.lines == "single" else ()

    @property
    def ends_at_lines(self) -> bool:
        """Whether a line break can show that the answer has ended."""
        limited = self.max_seconds < math.inf or self.soft_max_tokens > 0
        return self.lines != "all" or self.min_indent > 0 or limited

    def trimmer(self, prefix: str, suffix: str, *, infilling: bool) -> Trimmer | None:
        """Return what changes an answer while it arrives; None if nothing does.

        Args:
            prefix, suffix: the text before and after the answer.
            infilling: whether the request is one for infilling.
        """
        overlap = infilling if self.overlap is None else self.overlap
        if not overlap and not self.ends_at_lines and self.brackets == "keep":
            return None
        return Trimmer(
            prefix,
            suffix,
            lines=self.lines,
            min_indent=self.min_indent,
            overlap=overlap,
            brackets=self.brackets,
        )

    def apply(self, answer: str, prefix: str, suffix: str, *, broken_off: bool = False) -> str:
        """Return a whole answer to an infilling request as it is shown.

        Args:
            answer: what the model wrote.
            prefix, suffix: the text before and after it.
            broken_off: whether the answer reached its maximum length.
        """
        trimmer = self.trimmer(prefix, suffix, infilling=True)
        if trimmer is None:
            return answer
        return trimmer.push(answer) + trimmer.finish(broken_off=broken_off)
