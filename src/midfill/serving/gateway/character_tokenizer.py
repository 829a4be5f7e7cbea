"""CharacterTokenizer: stands in for the tokenizer of a model that another server runs.

Where a model's tokenizer is not at hand, the other server tokenises. Until then a prompt is a list
of characters, in which sentinels are ids that no text can spell, as in every prompt.
"""

import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from midfill.errors import InvalidRequestError
from midfill.infill.formats import FAMILIES, Family
from midfill.models.tokens.healing import Healing
from midfill.models.tokens.tokenizer import END_TOKENS, Tokenizer

CHARACTERS_PER_TOKEN = 3.0
"""A low estimate for source code; models' own figures are 3 to 4."""

_CHARACTERS = 0x110000  # ids below are characters of plain text
_RAW = 0x200000  # ids from here on are characters of text in which special tokens are parsed
_CODEC = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"
_BYTES = 4  # of a character in it
_MAX_HEALED = 32  # characters
# A word joins the blank before it in nearly all vocabularies.
_UNFINISHED = re.compile(r"(?:(?<!\s) )?[^\W_]\w*\Z|(?<!\s) \Z")

WORD_JOINER = "\u2060"
"""Shows as nothing and joins what it stands between."""
_COMMON = (
    "<s>", "</s>", "<unk>", "<pad>", "<bos>", "<eos>", "<mask>", "[INST]", "[/INST]", "<<SYS>>",
    "<</SYS>>", "<start_of_turn>", "<end_of_turn>", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "[MIDDLE]", "<fim_pad>", "<fim-pad>", "<filename>", "<gh_stars>",
    "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>",
    "<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>", "<commit_before>",
    "<commit_msg>", "<commit_after>",
)  # fmt: skip
_CONTROL = r"<\|[^|<>\s]{1,64}\|>|<｜[^｜<>\s]{1,64}｜>"  # noqa: RUF001 (DeepSeek's own spelling)
_FAMILIES = (
    ("qwen2.5-coder", r"qwen[\d.-]*.*coder|qwen2\.5|qwen3"),
    ("mellum", r"mellum"),
    ("starcoder2", r"starcoder-?2"),
    ("starcoder", r"starcoder|stable-?code|granite.*code|refact"),
    ("santacoder", r"santacoder"),
    ("codellama", r"code-?llama"),
    ("granite", r"granite"),
    ("codegemma", r"code-?gemma"),
    ("deepseek-coder", r"deepseek"),
    ("aixcoder", r"aixcoder"),
    ("seed-coder", r"seed-?coder"),
    ("codegeex", r"codegeex|glm-?4"),
    ("codestral", r"codestral"),
)


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


def family_tokens() -> tuple[str, ...]:
    """Return the tokens of all FIM formats that are known, each once."""
    return tuple(dict.fromkeys(text for family in FAMILIES for text in _tokens_of(family)))


def _tokens_of(family: Family) -> list[str]:
    """Return all tokens of a family's FIM format."""
    tokens = (family.prefix, family.suffix, family.middle, *family.stop)
    further = (family.repository, family.file_separator)
    return [text for text in (*tokens, *further) if text is not None]


class SpelledTokens:
    """Finds special tokens that are spelled out in user text, where a server would parse them.

    A server that is sent text looks for its special tokens in it, and can't know which of them a
    user has written. Text that spells one is therefore cut inside it, and its parts are tokenised
    apart; or, where the server can't do that, gets an invisible character there.

    Args:
        further: tokens to look for beside all that are known, such as those that a user names.
    """

    def __init__(self, further: tuple[str, ...] = ()) -> None:
        texts = {*family_tokens(), *END_TOKENS, *_COMMON, *further}
        texts |= {text.removeprefix("▁") for text in texts}
        longest_first = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, longest_first), _CONTROL]))

    def split(self, text: str) -> list[str]:
        """Return the text in parts, none of which spells a special token."""
        cuts = [0, *(match.start() + 1 for match in self._pattern.finditer(text)), len(text)]
        return [text[start:end] for start, end in pairwise(cuts) if start < end]

    def escape(self, text: str) -> str:
        """Return the text with a word joiner inside each special token that it spells."""
        return WORD_JOINER.join(self.split(text))


def tokens_by_name(model: str) -> tuple[str, ...]:
    """Return the FIM tokens of the family that a model's name tells; none if it tells none.

    For models whose server can't be asked for its vocabulary.
    """
    for name, pattern in _FAMILIES:
        if re.search(pattern, model.lower()):
            family = next(each for each in FAMILIES if each.name == name)
            return tuple(dict.fromkeys(_tokens_of(family)))
    return ()
