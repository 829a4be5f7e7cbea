"""The tokenizer of a GGUF file, built from its metadata (keys ``tokenizer.*``).

Keys and their meaning: the GGUF specification in ggml's docs/gguf.md. GGUF stores a vocabulary and
its merges, but only the name of the rule by which text is split before BPE merges it
(``tokenizer.ggml.pre``). The rules in ``PRE_TOKENIZERS`` are those of the models' own
tokenizer.json files. The names are llama.cpp's. To add one, add an entry.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import chain
from operator import add
from typing import NoReturn

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import pre_tokenizers as library

from midfill.errors import CheckpointError
from midfill.models.tokens.tokenizer import Tokenizer, looks_like_control

_PREFIX = "tokenizer.ggml."
_SPACE = "\u2581"
_SPECIAL_NAMES = (
    *("bos", "eos", "eot", "eom"),
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
    *("prefix", "suffix", "middle"),
)
"""Keys ``tokenizer.ggml.*_token_id`` of control tokens. Padding and unknown are left out, since
converters write ids of ordinary tokens there."""


class _TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises:
        CheckpointError: the description is missing, malformed or of an unsupported kind.
    """
    reader = _Reader(metadata)
    kind = reader.text("model")
    if kind == "gpt2":
        backend, add_bos = _build_byte_level(reader)
    elif kind == "llama":
        backend, add_bos = _build_sentencepiece(reader)
    else:
        reader.fail("model", f"{kind!r} is not a tokenizer midfill knows; it knows gpt2 and llama")
    backend.add_tokens(reader.added_tokens())
    bos = reader.token_id("bos_token_id")
    ends = [reader.token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        bos_token_id=bos,
        add_bos=reader.flag("add_bos_token", add_bos),
        eos_token_ids=[token_id for token_id in ends if token_id is not None],
        chat_template=template if isinstance(template, str) else None,
    )


def _build_byte_level(reader: "_Reader") -> tuple[tokenizers.Tokenizer, bool]:
    """Build byte-level BPE (GPT-2's scheme); also return whether BOS is added by default."""
    name = reader.text("pre")
    if name not in PRE_TOKENIZERS:
        reader.fail("pre", f"{name!r} is not a split midfill knows ({', '.join(PRE_TOKENIZERS)})")
    split = PRE_TOKENIZERS[name]
    # The space that separates a merge's halves is never its first character.
    merges = [
        (merge[: (space := merge.find(" ", 1))], merge[space + 1 :])
        for merge in reader.texts("merges")
    ]
    model = reader.bpe(merges, ignore_merges=split.whole_words)
    backend = tokenizers.Tokenizer(model)
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split.build()
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _build_sentencepiece(reader: "_Reader") -> tuple[tokenizers.Tokenizer, bool]:
    """Build SentencePiece BPE (Llama 2's scheme) as transformers does; add BOS by default.

    SentencePiece merges the neighbours that form the best-scored piece. As BPE merges, these are
    all ways to form a piece from two others, best score first. The two schemes differ only where
    one piece can be formed in several ways at once.
    """
    vocabulary = reader.ordinary_tokens()
    scores = reader.numbers("scores")
    merges = sorted(
        (
            (score, len(left), len(right), left, right)
            for piece, score in zip(reader.tokens, scores, strict=True)
            if piece in vocabulary
            for left, right in _halves(piece, vocabulary)
        ),
        key=lambda merge: merge[:3],
        reverse=True,
    )
    model = reader.bpe(
        [(left, right) for *_, left, right in merges],
        unk_token=reader.unknown_token(),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    if reader.flag("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend, True


def _halves(piece: str, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all ways to split a piece into two others, in the order of their ids."""
    cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
    found = [(left, right) for left, right in cuts if left in vocabulary and right in vocabulary]
    return sorted(found, key=lambda halves: (vocabulary[halves[0]], vocabulary[halves[1]]))


class _Reader:
    """Typed reading of the ``tokenizer.ggml.*`` keys; errors name the key.

    A start waits for this, so what looks at all 10^5 tokens and merges is mostly not Python's.
    """

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.tokens = self.texts("tokens")
        self._types = self._token_types()
        unused = self._unused()
        self.vocabulary: dict[str, int] = {
            token: token_id for token_id, token in enumerate(self.tokens) if token_id not in unused
        }
        if len(self.vocabulary) + len(unused) < len(self.tokens):
            twice = next(
                token
                for token_id, token in enumerate(self.tokens)
                if token_id not in unused and self.vocabulary[token] != token_id
            )
            self.fail("tokens", f"holds {twice!r} twice")

    def text(self, key: str) -> str:
        value = self._value(key)
        if not isinstance(value, str):
            self.fail(key, "must be a string")
        return value

    def texts(self, key: str) -> Sequence[str]:
        value = self._value(key)
        if not isinstance(value, list) or not {str}.issuperset(map(type, value)):
            self.fail(key, "must be a list of strings")
        return value

    def numbers(self, key: str) -> Sequence[float]:
        """Return a list of numbers, one per token."""
        value = self._value(key)
        if not isinstance(value, list) or not {bool, int, float}.issuperset(map(type, value)):
            self.fail(key, "must be a list of numbers")
        if len(value) != len(self.tokens):
            self.fail(key, f"has {len(value)} entries for {len(self.tokens)} tokens")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            self.fail(key, "must be true or false")
        return value

    def token_id(self, key: str) -> int | None:
        """Return a token id; None if it is missing or (as some converters write) out of range."""
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, "must be a token id")
        return value if 0 <= value < len(self.tokens) else None

    def ordinary_tokens(self) -> dict[str, int]:
        """Return piece -> id of the pieces that text may be merged into."""
        ordinary = self._of_type(_TokenType.NORMAL) - self._special_ids
        return {token: i for token, i in self.vocabulary.items() if i in ordinary}

    def unknown_token(self) -> str | None:
        """Return the piece that stands for uncovered text, None if there is none."""
        named = self.token_id("unknown_token_id")
        if named is not None:
            return self.tokens[named]
        unknown = (t for i, t in enumerate(self.tokens) if self._types[i] == _TokenType.UNKNOWN)
        return next(unknown, None)

    def added_tokens(self) -> list[AddedToken]:
        """Return the tokens that no merge creates: control tokens and user-defined ones."""
        control = self._special_ids | self._of_type(_TokenType.CONTROL, _TokenType.UNKNOWN)
        added = control | self._of_type(_TokenType.USER_DEFINED)
        return [
            AddedToken(token, normalized=False, special=token_id in control)
            for token_id in sorted(added)
            if (token := self.tokens[token_id]) and self.vocabulary.get(token) == token_id
        ]

    def bpe(self, merges: list[tuple[str, str]], **options: object) -> models.BPE:
        """Return the BPE model over all tokens."""
        # The library panics on merges that do not fit; no except clause catches that.
        if not self._fit(merges):
            left, right = next(merge for merge in merges if not self._fit([merge]))
            self.fail("merges", f"do not fit the vocabulary: {left!r} + {right!r}")
        try:
            return models.BPE(vocab=self.vocabulary, merges=merges, **options)
        except Exception as error:  # the library raises bare Exception
            self.fail("merges", f"do not fit the vocabulary: {error}")

    def _fit(self, merges: Sequence[tuple[str, str]]) -> bool:
        """Return whether all halves are pieces and make pieces; a start waits for 10^5 of them."""
        lefts, rights = zip(*merges, strict=True) if merges else ((), ())
        pieces = chain(lefts, rights, map(add, lefts, rights))
        return (
            "" not in lefts and "" not in rights and all(map(self.vocabulary.__contains__, pieces))
        )

    @cached_property
    def _special_ids(self) -> Set[int]:
        """Ids that are special by their spelling or because a key names them."""
        named = {self.token_id(f"{name}_token_id") for name in _SPECIAL_NAMES}
        spelled = {
            token_id
            for token, token_id in self.vocabulary.items()
            if token[-1:] == ">" and looks_like_control(token)
        }
        return spelled | {token_id for token_id in named if token_id is not None}

    def _of_type(self, *kinds: _TokenType) -> Set[int]:
        wanted = set(map(int, kinds))
        return {token_id for token_id, kind in enumerate(self._types) if kind in wanted}

    def _unused(self) -> Set[int]:
        """Return the ids of tokens that only pad the vocabulary to the embedding's size."""
        padding = {
            token_id
            for token_id, token in enumerate(self.tokens)
            if token[:4] == "[PAD" and token == f"[PAD{token_id}]"
        }
        return padding | self._of_type(_TokenType.UNUSED)

    def _token_types(self) -> Sequence[int]:
        if _PREFIX + "token_type" not in self._metadata:
            return [int(_TokenType.NORMAL)] * len(self.tokens)
        types = self.numbers("token_type")
        if not {bool, int}.issuperset(map(type, types)):
            self.fail("token_type", "must be a list of whole numbers")
        return list(map(int, types))

    def _value(self, key: str) -> object:
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            self.fail(key, "is missing; convert the model again with a current converter")
        return value

    def fail(self, key: str, problem: str) -> NoReturn:
        raise CheckpointError(f"tokenizer in GGUF metadata: {_PREFIX + key} {problem}")


@dataclass(frozen=True)
class PreTokenizer:
    """One way to split text into the words that BPE works on.

    Attributes:
        patterns: regular expressions (Oniguruma), applied in order; every match becomes a word,
            and so does the text between matches.
        digits: whether every digit is a word; applied after ``patterns``.
        gpt2: whether GPT-2's split is applied last.
        nfc: whether text is first normalised to Unicode's composed form.
        whole_words: whether a word in the vocabulary is one token whatever the merges say.
        add_bos: whether prompts begin with BOS if the file doesn't say.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def build(self) -> library.PreTokenizer:
        """Return the splitter, including the step to byte-level characters."""
        steps: list[library.PreTokenizer] = [
            library.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        if self.digits:
            steps.append(library.Digits(individual_digits=True))
        steps.append(library.ByteLevel(add_prefix_space=False, use_regex=self.gpt2))
        return library.Sequence(steps)


def _cl100k(digits: str) -> str:
    """Return the pattern of GPT-4's cl100k_base; ``digits`` matches a word of digits."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = PreTokenizer(gpt2=True)
_DIGITS_THEN_GPT2 = PreTokenizer(digits=True, gpt2=True)
_QWEN2 = PreTokenizer(patterns=(_cl100k(r"\p{N}"),), nfc=True)
_LLAMA3 = PreTokenizer(patterns=(_cl100k(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_DEEPSEEK_CODER = PreTokenizer(
    patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+"), digits=True
)
# llama.cpp lists the letters that upper and lower case distinguish as of an older Unicode; all that
# has been added since is in no model's text.
_DEEPSEEK_LLM = PreTokenizer(
    patterns=(
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[一-龥\u0800-一가-\ud7ff]+",
    ),
    digits=True,
)
_DEEPSEEK_V3 = PreTokenizer(
    patterns=(
        r"\p{N}{1,3}",
        "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_SEED_CODER = PreTokenizer(
    patterns=(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_O200K = PreTokenizer(
    patterns=(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    whole_words=True,
)
_TEKKEN = PreTokenizer(
    patterns=(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    whole_words=True,
    add_bos=True,
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "codeshell": _DIGITS_THEN_GPT2,
    "command-r": PreTokenizer(digits=True, gpt2=True, nfc=True),
    "dbrx": PreTokenizer(patterns=(_cl100k(r"\p{N}{1,3}"),)),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": _DEEPSEEK_V3,
    "gpt-2": _GPT2,
    "gpt-4o": _O200K,
    "granite-docling": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "mellum": _GPT2,
    "mellum2": _DIGITS_THEN_GPT2,
    "olmo": PreTokenizer(gpt2=True, nfc=True),
    "phi-2": _GPT2,
    "qwen2": _QWEN2,
    "refact": _DIGITS_THEN_GPT2,
    "seed-coder": _SEED_CODER,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "tekken": _TEKKEN,
}
