"""Pre-tokenizers by the names GGUF files give them: how text is split before BPE merges it.

GGUF stores a vocabulary and its merges, but only the name of the split (``tokenizer.ggml.pre``).
The rules are those of the models' own tokenizer.json files. The names are llama.cpp's. To add one,
add an entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers import pre_tokenizers as library


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
_SEED_CODER = PreTokenizer(
    patterns=(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
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
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": _GPT2,
    "granite-docling": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "mellum": _GPT2,
    "mellum2": _DIGITS_THEN_GPT2,
    "phi-2": _GPT2,
    "qwen2": _QWEN2,
    "refact": _DIGITS_THEN_GPT2,
    "seed-coder": _SEED_CODER,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "tekken": _TEKKEN,
}
