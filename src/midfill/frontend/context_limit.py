"""ContextLimit: refuses what is too long for the model's context, and what is empty."""

from collections.abc import Sequence
from dataclasses import dataclass

from midfill.errors import InvalidRequestError
from midfill.infill.layout import PromptLayout, TextSegment

_TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """Checks the lengths of what clients send.

    Attributes:
        context: maximum number of tokens of a prompt and its answer.
        longest_token: characters of the longest token.
    """

    context: int
    longest_token: int

    @property
    def max_characters(self) -> int:
        """No longer text fits, however few tokens it has."""
        return self.context * self.longest_token

    def check_characters(self, characters: int, field: str = "prompt") -> None:
        """Refuse a text that can't fit, before time is spent on tokenising it.

        Raises:
            InvalidRequestError: it can't fit.
        """
        if characters > self.max_characters:
            raise InvalidRequestError.of_field(
                field,
                f"has {characters} characters; the context is {self.context} tokens",
                code=_TOO_LONG,
            )

    def check_tokens(self, count: int, field: str = "prompt") -> None:
        """Refuse a prompt that is empty or leaves no room for an answer.

        Raises:
            InvalidRequestError: it is, or does.
        """
        if count == 0:
            raise InvalidRequestError.of_field(field, "is empty")
        if count >= self.context:
            has = "and prompt together have" if field == "context" else "has"
            raise InvalidRequestError.of_field(
                field,
                f"{has} {count} tokens; the context of {self.context} tokens leaves no room for"
                " an answer",
                code=_TOO_LONG,
            )

    def check_layout(self, layout: PromptLayout, parts: Sequence[Sequence[int]]) -> None:
        """Do the same for a laid-out prompt, naming "context" if it would fit without other files.

        Args:
            layout: the layout.
            parts: the ids of its parts, as of ``LayoutEncoder.encode_parts``.
        """
        tokens, extra = sum(map(len, parts)), context_tokens(layout, parts)
        too_long = "context" if extra and tokens - extra < self.context else "prompt"
        self.check_tokens(tokens, too_long)


def context_tokens(layout: PromptLayout, parts: Sequence[Sequence[int]]) -> int:
    """Return how many of a layout's tokens show other files; ``parts`` as in ``check_layout``."""
    return sum(
        len(part)
        for segment, part in zip(layout.segments, parts[1:], strict=True)
        if isinstance(segment, TextSegment) and segment.role == "context"
    )
