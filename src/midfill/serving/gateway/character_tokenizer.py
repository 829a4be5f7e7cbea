"""CharacterTokenizer: stands in for the tokenizer of a model that another server runs.

Where a model's tokenizer is not at hand, the other server tokenises. Until then a prompt is a list
of characters, in which sentinels are ids that no text can spell, as in every prompt.
"""

import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from midfill.errors import InvalidRequestError
from midfill.models.tokens.healing import Healing
from midfill.models.tokens.tokenizer import Tokenizer

CHARACTERS_PER_TOKEN = 3.0
"""A low estimate for source code; models' own figures are 3 to 4."""

_CHARACTERS = 0x110000  # ids below are characters of plain text
_RAW = 0x200000  # ids from here on are characters of text in which special tokens are parsed
_CODEC = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"
_BYTES = 4  # of a character in it
_MAX_HEALED = 32  # characters
# A word joins the blank before it in nearly all vocabularies.
_UNFINISHED = re.compile(r"(?:(?<!\s) )?[^\W_]\w*\Z|(?<!\s) \Z")


@dataclass(frozen=True, slots=True)
class PromptText:
    """A part of a prompt.

    Attributes:
        text: its text.
        special: whether special tokens in it are meant: a sentinel, or a raw prompt.
    """

    text: str
    special: bool


class CharacterTokenizer(Tokenizer):
    """See the module's text.

    Args:
        special: the model's special tokens that are known, and their ids in the model; None where
            only the spelling is known.
    """

    def __init__(self, special: Mapping[str, int | None]) -> None:
        # The base class's own attributes; it has no backend here.
        self.special_tokens = MappingProxyType(
            {text: _CHARACTERS + number for number, text in enumerate(special)}
        )
        self.vocab_size = _RAW + _CHARACTERS
        self.bos_token_id = None
        self.add_bos = False
        self.eos_token_ids = ()
        self.chat_template = None
        self._named = tuple(special)
        self._ids = tuple(special.values())

    def parts(self, ids: Sequence[int]) -> list[PromptText]:
        """Return a prompt as text, adjacent parts of one kind joined."""
        found: list[PromptText] = []
        data = array("I", ids).tobytes()
        start = 0
        while start < len(data):
            try:
                found.append(PromptText(data[start:].decode(_CODEC), special=False))
                break
            except UnicodeDecodeError as error:  # a special token, or raw text
                at = start + error.start
            if at > start:
                found.append(PromptText(data[start:at].decode(_CODEC), special=False))
            place = at // _BYTES
            if ids[place] >= _RAW:
                end = place + 1
                while end < len(ids) and ids[end] >= _RAW:
                    end += 1
                raw = array("I", [token_id - _RAW for token_id in ids[place:end]])
                found.append(PromptText(raw.tobytes().decode(_CODEC), special=True))
            else:
                found.append(PromptText(self._named[ids[place] - _CHARACTERS], special=True))
                end = place + 1
            start = end * _BYTES
        return found

    def model_ids(self, ids: Iterable[int]) -> tuple[list[int], list[str]]:
        """Return special tokens as the model's own ids, and the texts of those that have none."""
        known: list[int] = []
        spelled: list[str] = []
        for token_id in ids:
            number = token_id - _CHARACTERS
            if not 0 <= number < len(self._ids):
                known.append(token_id)  # a client's own, which only the model can check
            elif (model_id := self._ids[number]) is not None:
                known.append(model_id)
            else:
                spelled.append(self._named[number])
        return known, spelled

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return a text's characters; see the base class."""
        try:
            characters = array("I", text.encode(_CODEC))
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text is not valid Unicode at character {error.start}"
            ) from None
        return [_RAW + each for each in characters] if parse_special else characters.tolist()

    def encode_continuation(self, text: str) -> list[int]:
        """Return a text's characters."""
        return self.encode(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a character in UTF-8; b"" for a special token."""
        code = token_id - _RAW if token_id >= _RAW else token_id
        return chr(code).encode(errors="replace") if 0 <= code < _CHARACTERS else b""

    def token_text(self, token_id: int) -> str:
        """Return a character, or a special token's name."""
        number = token_id - _CHARACTERS
        named = 0 <= number < len(self._named)
        return self._named[number] if named else self.token_bytes(token_id).decode()

    def longest_token(self) -> int:
        """Return 1: a token is a character."""
        return 1

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Refuse prompts of token ids, whose text is unknown."""
        raise InvalidRequestError(
            "a prompt of token ids needs the model's tokenizer, which this gateway doesn't have:"
            " send text, or start it with --tokenizer",
            param="prompt",
        )

    def spell(self, text: bytes) -> list[int]:
        """Return the characters of a text in UTF-8."""
        return self.encode(text.decode(errors="replace"))

    def back_off(self, token_ids: Sequence[int], fixed: int = 0) -> Healing:
        """Return the unfinished word at a prompt's end, with the blank before it."""
        start = max(fixed, len(token_ids) - _MAX_HEALED - 1)
        end = token_ids[start:]
        if not end or max(end) >= _CHARACTERS:
            return Healing(0, b"")
        match = _UNFINISHED.search(_text(end))
        if match is None or (match.start() == 0 and start > fixed):
            return Healing(0, b"")
        return Healing(len(match.group()), match.group().encode())


def _text(ids: Sequence[int]) -> str:
    return array("I", ids).tobytes().decode(_CODEC)
