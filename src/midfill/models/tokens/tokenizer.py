"""Tokenizer: text to token ids and back, exactly as the model's own tokenizer does it.

The ``tokenizers`` library does the work. This file adds special tokens that are parsed only on
request, the exact bytes of every token, text that arrives token by token, and errors that a client
can act on.

Two spellings of a vocabulary's pieces are in use. *Byte-level* BPE (Radford et al., 2019, GPT-2)
writes every byte as one printable character. *SentencePiece* (Kudo and Richardson, 2018) writes
text as it is, a space as U+2581, and a byte that no piece covers as ``<0xNN>``.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from midfill.errors import InvalidRequestError
from midfill.infill.cut_places import KeepsTokens
from midfill.models.tokens.healing import Healing, TokenTrie

END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<EOT>",
    "▁<EOT>",
    "<|EOT|>",
    "<|return|>",
    "<|call|>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001 (DeepSeek's own spelling)
)
"""Tokens that end a text or a turn in every model that has them. Checkpoints often name only one of
them, and an instruct model that ends a plain text would then not stop. llama.cpp has such a list,
too."""

_FIM_TOKENS = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
_CONTROL = re.compile(r"<\|.*\|>|<｜.*｜>", re.DOTALL)  # noqa: RUF001
_SPACE = "\u2581"
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
_SHORT = 8192  # characters, which take few milliseconds
_CACHED = 1024  # pairs of texts, a few hundred characters each


def looks_like_control(text: str) -> bool:
    """Return whether an added token's spelling marks it as a control token, which has no text.

    Checkpoints do not always flag such tokens: Qwen's FIM sentinels are ordinary added tokens.
    GGUF converters decide by the same spellings.
    """
    return text in _FIM_TOKENS or _CONTROL.fullmatch(text) is not None


class Tokenizer:
    """A model's tokenizer. Thread-safe.

    *Added* tokens (``special_tokens``) are parsed from text only on request. Most of them are
    *control* tokens, which stand for no text (end of text, FIM sentinels); the others
    (``<think>``) stand for their own name. Those that are blank (Gemma's runs of spaces and line
    breaks) are text like any other, and always parsed.

    Attributes:
        vocab_size: highest token id + 1; a model's embedding may have more rows.
        bos_token_id: the token that begins a sequence; None if there is none.
        add_bos: whether prompts of this model begin with it; ``encode`` itself never adds it.
        eos_token_ids: tokens that end an answer.
        chat_template: Jinja source; None if there is none.
        special_tokens: text -> id of every added token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        add_bos: bool = False,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """Wrap a complete tokenizer; this object takes ownership of it.

        Args:
            backend: the tokenizer with all its added tokens.
            bos_token_id, add_bos, eos_token_ids, chat_template: see the class. End tokens with
                well-known names need not be listed.
        """
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.special_tokens: Mapping[str, int] = MappingProxyType(
            {token.content: token_id for token_id, token in sorted(added.items())}
        )
        self.vocab_size = _highest_id(backend) + 1
        self.bos_token_id = bos_token_id
        self.add_bos = add_bos and bos_token_id is not None
        ends = [self.special_tokens[text] for text in END_TOKENS if text in self.special_tokens]
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *ends]))
        self.chat_template = chat_template

        self._parsing = backend
        blank = {
            token_id: token
            for token_id, token in added.items()
            if not token.content.strip() and backend.model.token_to_id(token.content) == token_id
        }
        self._plain = _without_added_tokens(backend, keep_leading_space=True)
        self._continuing = _without_added_tokens(backend, keep_leading_space=False)
        for plain in (self._plain, self._continuing):
            plain.add_tokens(list(blank.values()))
        self._piece_bytes = piece_decoder(backend)
        self._bytes: dict[int, bytes] = {
            token_id: b""
            for token_id, token in added.items()
            if token.special or looks_like_control(token.content)
        }
        self._control_ids = frozenset(self._bytes)
        self._unwanted_ids = frozenset(added) - frozenset(blank) - {_unknown_token_id(backend)}
        self._names = [token.content for token_id, token in added.items() if token_id not in blank]

    def save(self, path: Path) -> None:
        """Write a Hugging Face tokenizer.json."""
        self._parsing.save(str(path))

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text; BOS is never added.

        As in the model's own tokenizer, bytes without a token in the vocabulary are left out:
        SmolLM2's lacks six control characters and planes 4 to 11 of Unicode.

        Args:
            text: the text.
            parse_special: whether the text of added tokens is parsed as these tokens, as in vLLM
                and transformers; otherwise it is plain text.

        Raises:
            InvalidRequestError: the text is not valid Unicode.
        """
        _check_unicode(text)
        if parse_special:
            return _ids(self._parsing, text)
        return self._encode_plain(text, self._plain)

    def encode_continuation(self, text: str) -> list[int]:
        """Return the token ids of plain text that follows other text.

        This differs from ``encode`` only where the tokenizer puts a space before a text's first
        word (SentencePiece). No space is added here, so the ids stand for exactly the text's bytes.

        Raises:
            InvalidRequestError: the text is not valid Unicode.
        """
        _check_unicode(text)
        return self._encode_plain(text, self._continuing)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without control tokens; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes a token stands for; b"" for control tokens and unused ids."""
        known = self._bytes.get(token_id)
        if known is None:
            if not 0 <= token_id < self.vocab_size:
                return b""
            piece = self._parsing.id_to_token(token_id)
            known = b"" if piece is None else self._piece_bytes(piece)
            self._bytes[token_id] = known
        return known

    def longest_token(self) -> int:
        """Return the bytes of the longest token; a token stands for at most as many characters."""
        return max(
            max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size)),
            max((len(text) for text in self.special_tokens), default=1),
        )

    def prepare(self) -> None:
        """Sort the tokens now, and not when ``back_off`` or ``spell`` is called first."""
        _ = self._trie

    def back_off(self, token_ids: Sequence[int], fixed: int = 0) -> Healing:
        """Return the tokens at a prompt's end to be written again; see ``TokenTrie.back_off``."""
        return self._trie.back_off(token_ids, fixed)

    def spell(self, text: bytes) -> list[int]:
        """Return tokens that stand for some bytes, the longest first, where there are any."""
        ids: list[int] = []
        while text:
            length = next((n for n in range(len(text), 0, -1) if self._trie.spelling(text[:n])), 0)
            ids += self._trie.spelling(text[:length])[:1]
            text = text[length or 1 :]
        return ids

    @cached_property
    def _trie(self) -> TokenTrie:
        return TokenTrie([self.token_bytes(token_id) for token_id in range(self.vocab_size)])

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Check that a client's token ids can be a prompt.

        Raises:
            InvalidRequestError: the model doesn't have one of them.
        """
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"prompt holds token id {str(token_id)[:24]}; "
                    f"this model's ids go from 0 to {self.vocab_size - 1}",
                    param="prompt",
                )

    def token_text(self, token_id: int) -> str:
        """Return a token in readable form: added tokens by name, lone bytes as ``\\xNN``."""
        if token_id not in self._control_ids:
            text = self.token_bytes(token_id).decode("utf-8", errors="backslashreplace")
            return text or f"<token {token_id}>"
        return self._parsing.id_to_token(token_id) or f"<token {token_id}>"

    def readable(self, token_id: int) -> str:
        """Return a token's text for people: U+FFFD for a part of a character, or its name."""
        return self.token_bytes(token_id).decode(errors="replace") or self.token_text(token_id)

    def _encode_plain(self, text: str, backend: tokenizers.Tokenizer) -> list[int]:
        ids = _ids(backend, text)
        if self._unwanted_ids.isdisjoint(ids):
            return ids
        # If the vocabulary also holds added tokens as ordinary pieces, the model finds them there.
        head, *rest = self._split_special(text)
        return _ids(backend, head) + [i for part in rest for i in _ids(self._continuing, part)]

    def _split_special(self, text: str) -> list[str]:
        """Split the text inside every spelled-out added token, so that none can result."""
        names = sorted((name for name in self._names if len(name) > 1), key=len)
        pattern = re.compile("|".join(map(re.escape, reversed(names))) or r"(?!)")
        cuts = [0, *(match.start() + 1 for match in pattern.finditer(text)), len(text)]
        return [text[start:end] for start, end in pairwise(cuts)]


class Detokenizer:
    """Turns one answer's tokens into text incrementally.

    A token may end inside a UTF-8 character; its bytes are held back until the rest arrives. All
    texts together are exactly ``Tokenizer.decode`` of all tokens: bytes that are not UTF-8 become
    U+FFFD at the same places.

    Args:
        tokenizer: the model's tokenizer.
        skip: bytes to leave out at the start because the prompt already contains them.

    Attributes:
        skip: bytes that are still to be left out.
    """

    def __init__(self, tokenizer: Tokenizer, skip: int = 0) -> None:
        self.skip = skip
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens, and return the text that they complete; it may be empty."""
        return self.push_bytes(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    def push_bytes(self, written: bytes) -> str:
        """Add what tokens stand for, and return the text that it completes."""
        shown = written[self.skip :]
        self.skip -= len(written) - len(shown)
        return self._decoder.decode(shown)

    def flush(self) -> str:
        """Return the rest at the answer's end: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)


def keeps_tokens_of(tokenizer: Tokenizer) -> KeepsTokens:
    """Return a model's ``KeepsTokens``; it remembers recent answers and is thread-safe."""

    @lru_cache(_CACHED)
    def keeps_tokens(before: str, after: str) -> bool:
        encode = tokenizer.encode_continuation
        return encode(before) + encode(after) == encode(before + after)

    return keeps_tokens


def _highest_id(backend: tokenizers.Tokenizer) -> int:
    """Return the highest id of a token, -1 without any."""
    count = backend.get_vocab_size(with_added_tokens=True)
    if None not in map(backend.id_to_token, range(count)):
        return count - 1  # where no id is left out, as mostly
    return max(backend.get_vocab(with_added_tokens=True).values())


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    if len(text) <= _SHORT:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    else:
        # This one lets other threads run meanwhile.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        ids = encoding.ids
    return ids


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at "
            f"character {error.start}"
        ) from None


def _unknown_token_id(backend: tokenizers.Tokenizer) -> int | None:
    unknown = getattr(backend.model, "unk_token", None)
    return backend.token_to_id(unknown) if unknown is not None else None


def _without_added_tokens(
    backend: tokenizers.Tokenizer, *, keep_leading_space: bool
) -> tokenizers.Tokenizer:
    """Return a tokenizer over the same model (shared, not copied) that parses no added tokens."""
    plain = tokenizers.Tokenizer(backend.model)
    normalizer, pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    if not keep_leading_space:
        steps = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
        description = {
            name: step and _without_leading_space(json.loads(step.__getstate__()))
            for name, step in steps.items()
        }
        description["model"] = {"type": "BPE", "vocab": {}, "merges": []}
        rebuilt = tokenizers.Tokenizer.from_str(json.dumps(description))
        normalizer, pre_tokenizer = rebuilt.normalizer, rebuilt.pre_tokenizer
    if normalizer is not None:
        plain.normalizer = normalizer
    if pre_tokenizer is not None:
        plain.pre_tokenizer = pre_tokenizer
    return plain


def _without_leading_space(step: dict[str, Any]) -> dict[str, Any] | None:
    """Return a normalizer's or pre-tokenizer's JSON without what adds a space before the text."""
    kind = step["type"]
    if kind == "Prepend":
        return None
    if kind == "Sequence":
        inner = "normalizers" if "normalizers" in step else "pretokenizers"
        kept = [_without_leading_space(part) for part in step[inner]]
        return {**step, inner: [part for part in kept if part is not None]}
    if kind == "Metaspace":
        return {**step, "prepend_scheme": "never"}
    if kind == "ByteLevel":
        return {**step, "add_prefix_space": False}
    return step


def piece_decoder(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Return the function from piece to bytes for a tokenizer's vocabulary."""
    kinds = {step["type"] for part in _parts(backend) for step in _steps(part)}
    if "ByteLevel" in kinds:
        return byte_level_bytes
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        return sentencepiece_bytes
    return str.encode


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a byte-level piece; any other added token stands for its text."""
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def sentencepiece_bytes(piece: str) -> bytes:
    """Return the bytes of a SentencePiece piece."""
    byte = _BYTE_PIECE.fullmatch(piece)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return piece.replace(_SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Return character -> byte. Printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def _parts(backend: tokenizers.Tokenizer) -> Iterator[dict[str, Any]]:
    # A decoder decides; a tokenizer without one is judged by how it splits.
    for part in (backend.decoder, backend.pre_tokenizer, backend.normalizer):
        if part is not None:
            yield json.loads(part.__getstate__())
            return


def _steps(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the steps of a decoder, pre-tokenizer or normalizer, with sequences flattened."""
    if part["type"] != "Sequence":
        yield part
        return
    for inner in ("decoders", "pretokenizers", "normalizers"):
        for step in part.get(inner, ()):
            yield from _steps(step)
