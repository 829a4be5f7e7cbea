"""FIM formats: which sentinel tokens a model was trained with, and in which order.

A family is one entry of ``FAMILIES``. Two orders exist:

* ``psm``: ``PRE P SUF S MID I``. The cut between P and I is free: the whole prefix before SUF is
  PSM, all of it after MID is the SPM variant the same models were trained on (Bavarian et al.,
  2022, "Efficient Training of Language Models to Fill in the Middle"), anything between is EFIM.
* ``spm``: ``SUF S PRE P [MID]``, the suffix first. What is typed is appended at the end, so the
  family's own order already reuses everything EFIM would; there is nothing to cut.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from midfill.errors import InvalidRequestError

Order = Literal["psm", "spm"]


@dataclass(frozen=True, slots=True)
class Sentinel:
    """A token that stands for itself in a prompt, never for text.

    Attributes:
        text: its name in the vocabulary, for messages and for parsing filled-in templates.
        token_id: its id.
    """

    text: str
    token_id: int


@dataclass(frozen=True, slots=True)
class FimFormat:
    """The sentinels of one loaded model.

    Attributes:
        name: the entry of ``FAMILIES``, "custom", or "metadata" where only ids are known.
        prefix, suffix, middle: before P, before S, and before the answer; ``middle`` is None in
            suffix-first families that continue right after the prefix.
        order: see the module's text.
        stop: tokens that end an infilled answer, beside the model's own end tokens. The
            sentinels are among them: a model that writes one has finished the gap.
        repository, file_separator: tokens before a repository's name and before each file's path,
            in families trained on whole repositories.
    """

    name: str
    prefix: Sentinel
    suffix: Sentinel
    middle: Sentinel | None
    order: Order = "psm"
    stop: tuple[Sentinel, ...] = ()
    repository: Sentinel | None = None
    file_separator: Sentinel | None = None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids of ``stop``, each once."""
        return tuple(dict.fromkeys(sentinel.token_id for sentinel in self.stop))


@dataclass(frozen=True, slots=True)
class Family:
    """The token texts of one family of models; ids come from a model's own vocabulary.

    Attributes:
        name: the entry's name.
        models: architecture names (``ModelConfig.family``) that usually carry it; decides only
            between entries with the same spelling of sentinels.
        named: what the names of its models contain, in lower case; the entry is for these alone.
            For models that share a vocabulary with others, but not the order.
        prefix, suffix, middle, order, stop, repository, file_separator: see ``FimFormat``.
    """

    name: str
    prefix: str
    suffix: str
    middle: str | None
    order: Order = "psm"
    stop: tuple[str, ...] = ()
    repository: str | None = None
    file_separator: str | None = None
    models: tuple[str, ...] = ()
    named: tuple[str, ...] = ()


FAMILIES: tuple[Family, ...] = (
    Family(
        name="codellama",
        prefix="▁<PRE>",
        suffix="▁<SUF>",
        middle="▁<MID>",
        stop=("▁<EOT>", "</s>"),
        models=("llama",),
    ),
    Family(
        name="starcoder2",
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        stop=("<|endoftext|>", "<fim_pad>", "<file_sep>"),
        repository="<repo_name>",
        file_separator="<file_sep>",
        models=("starcoder2",),
    ),
    Family(  # also Granite Code, StableCode, Refact and other children of StarCoder
        name="starcoder",
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        stop=("<|endoftext|>", "<fim_pad>", "<filename>"),
        repository="<reponame>",
        file_separator="<filename>",
        models=("gpt_bigcode", "granite", "llama", "stablelm"),
    ),
    Family(  # StarCoder's vocabulary; JetBrains' model card has the suffix first
        name="mellum",
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        order="spm",
        stop=("<|endoftext|>", "<fim_pad>", "<filename>"),
        repository="<reponame>",
        file_separator="<filename>",
        models=("llama",),
        named=("mellum",),
    ),
    Family(
        name="santacoder",
        prefix="<fim-prefix>",
        suffix="<fim-suffix>",
        middle="<fim-middle>",
        stop=("<|endoftext|>", "<fim-pad>"),
        models=("gpt2", "gpt_bigcode"),
    ),
    Family(
        name="qwen2.5-coder",
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        stop=("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|im_end|>"),
        repository="<|repo_name|>",
        file_separator="<|file_sep|>",
        models=("qwen2", "qwen2moe", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe"),
    ),
    Family(
        name="granite",
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        stop=("<|end_of_text|>", "<|fim_pad|>", "<|filename|>"),
        repository="<|reponame|>",
        file_separator="<|filename|>",
        models=("granite", "granitehybrid"),
    ),
    Family(
        name="codegemma",
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        stop=("<eos>", "<|file_separator|>"),
        file_separator="<|file_separator|>",
        models=("gemma",),
    ),
    Family(
        name="deepseek-coder",
        prefix="<｜fim▁begin｜>",  # noqa: RUF001 (the model's own spelling)
        suffix="<｜fim▁hole｜>",  # noqa: RUF001
        middle="<｜fim▁end｜>",  # noqa: RUF001
        stop=("<｜end▁of▁sentence｜>", "<|EOT|>"),  # noqa: RUF001
        models=("llama", "deepseek2", "deepseekv3"),
    ),
    Family(
        name="aixcoder",
        prefix="▁<AIX-SPAN-PRE>",
        suffix="▁<AIX-SPAN-POST>",
        middle="▁<AIX-SPAN-MIDDLE>",
        stop=("</s>",),
        models=("llama",),
    ),
    Family(
        name="seed-coder",
        prefix="<[fim-prefix]>",
        suffix="<[fim-suffix]>",
        middle="<[fim-middle]>",
        order="spm",
        models=("llama",),
    ),
    Family(  # CodeGeeX and GLM, which do without an end token of their own
        name="codegeex",
        prefix="<|code_prefix|>",
        suffix="<|code_suffix|>",
        middle="<|code_middle|>",
        order="spm",
        stop=("<|endoftext|>", "<|user|>"),
        models=("glm", "glm4"),
    ),
    Family(  # Mistral's later vocabularies also hold [MIDDLE]; its FIM prompts never use it
        name="codestral",
        prefix="[PREFIX]",
        suffix="[SUFFIX]",
        middle=None,
        order="spm",
        stop=("</s>", "[MIDDLE]"),
        models=("mistral", "mamba2"),
    ),
)

# A checkpoint's own statement of its sentinels, newest key first. GGUF keys hold token ids. Names
# without a dot are those of a Hugging Face tokenizer_config.json and hold token texts. Several stop
# tokens may be given as a list.
_PREFIX_KEYS = (
    "tokenizer.ggml.fim_pre_token_id",
    "tokenizer.ggml.prefix_token_id",
    "prefix_token",
)
_SUFFIX_KEYS = (
    "tokenizer.ggml.fim_suf_token_id",
    "tokenizer.ggml.suffix_token_id",
    "suffix_token",
)
_MIDDLE_KEYS = (
    "tokenizer.ggml.fim_mid_token_id",
    "tokenizer.ggml.middle_token_id",
    "middle_token",
)
_REPOSITORY_KEYS = ("tokenizer.ggml.fim_rep_token_id",)
_SEPARATOR_KEYS = ("tokenizer.ggml.fim_sep_token_id",)
_NAME_KEY = "general.name"
_STOP_KEYS = (
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.fim_pad_token_id",
    "eot_token",
)


def find_format(
    family: str, special_tokens: Mapping[str, int], metadata: Mapping[str, object]
) -> FimFormat | None:
    """Return the FIM format of a model, None if it has no sentinels.

    The checkpoint's own metadata comes first, then the known family whose sentinels the vocabulary
    holds. Where several families share a spelling, the one that the model's name tells is taken,
    then the one with most of its other tokens present. A vocabulary can hold sentinels that the
    model was never trained on; this can't be detected here.

    Args:
        family: architecture name, ``ModelConfig.family``; only breaks ties.
        special_tokens: every added or control token's text -> id.
        metadata: GGUF keys (``tokenizer.ggml.fim_pre_token_id``, ...) or the fields of a Hugging
            Face tokenizer_config.json (``prefix_token``, ...); and the model's name.
    """
    names = {token_id: text for text, token_id in special_tokens.items()}
    prefix = _from_metadata(_PREFIX_KEYS, metadata, special_tokens, names)
    suffix = _from_metadata(_SUFFIX_KEYS, metadata, special_tokens, names)
    middle = _from_metadata(_MIDDLE_KEYS, metadata, special_tokens, names)
    known = _known_format(family, str(metadata.get(_NAME_KEY, "")).lower(), special_tokens)
    if prefix is None or suffix is None:
        return known
    if known is not None and (known.prefix, known.suffix) != (prefix, suffix):
        known = None
    if known is not None and (middle is None or known.middle is None):
        middle = known.middle
    elif middle is None:
        return None  # two sentinels of an unknown family do not determine its order
    own_stop = [
        _from_metadata((key,), {key: value}, special_tokens, names)
        for key in _STOP_KEYS
        for value in _each(metadata.get(key))
    ]
    repository = _from_metadata(_REPOSITORY_KEYS, metadata, special_tokens, names)
    separator = _from_metadata(_SEPARATOR_KEYS, metadata, special_tokens, names)
    return FimFormat(
        name=known.name if known is not None else "metadata",
        prefix=prefix,
        suffix=suffix,
        middle=middle,
        order=known.order if known is not None else "psm",
        stop=_distinct([prefix, suffix, middle, *own_stop, *(known.stop if known else ())]),
        repository=repository or (known.repository if known else None),
        file_separator=separator or (known.file_separator if known else None),
    )


def custom_format(
    prefix: str,
    suffix: str,
    middle: str,
    special_tokens: Mapping[str, int],
    *,
    order: Order = "psm",
) -> FimFormat:
    """Return a format of three token texts that the user names, for unknown models.

    Raises:
        InvalidRequestError: a text is no special token of the model, or two are equal.
    """
    for text in (prefix, suffix, middle):
        if text not in special_tokens:
            nearest = difflib.get_close_matches(text, special_tokens, n=3, cutoff=0.0)
            raise InvalidRequestError(
                f"the FIM token {text!r} is not a special token of this model; "
                + (f"the nearest are {', '.join(nearest)}" if nearest else "it has none"),
                param="fim_tokens",
            )
    if len({prefix, suffix, middle}) < 3:
        raise InvalidRequestError(
            f"the three FIM tokens must differ, not {prefix!r}, {suffix!r}, {middle!r}",
            param="fim_tokens",
        )
    before, after, gap = (Sentinel(text, special_tokens[text]) for text in (prefix, suffix, middle))
    return FimFormat("custom", before, after, gap, order=order, stop=(before, after, gap))


def _known_format(family: str, model: str, special_tokens: Mapping[str, int]) -> FimFormat | None:
    """Return the best-fitting entry of ``FAMILIES`` with the vocabulary's ids."""
    best: Family | None = None
    best_fit = (False, -1, False)
    for entry in FAMILIES:
        required = [entry.prefix, entry.suffix] + ([entry.middle] if entry.middle else [])
        if not all(text in special_tokens for text in required):
            continue
        is_named = any(part in model for part in entry.named)
        if entry.named and not is_named:
            continue
        others = {*entry.stop, entry.repository, entry.file_separator} - {None}
        present = sum(text in special_tokens for text in others)
        fit = (is_named, present, family in entry.models)
        if fit > best_fit:
            best, best_fit = entry, fit
    if best is None:
        return None

    def sentinel(text: str | None) -> Sentinel | None:
        found = special_tokens.get(text) if text is not None else None
        return Sentinel(text, found) if text is not None and found is not None else None

    prefix = Sentinel(best.prefix, special_tokens[best.prefix])
    suffix = Sentinel(best.suffix, special_tokens[best.suffix])
    middle = sentinel(best.middle)
    return FimFormat(
        name=best.name,
        prefix=prefix,
        suffix=suffix,
        middle=middle,
        order=best.order,
        stop=_distinct([prefix, suffix, middle, *map(sentinel, best.stop)]),
        repository=sentinel(best.repository),
        file_separator=sentinel(best.file_separator),
    )


def _each(value: object) -> Iterable[object]:
    """Return the items of a list; anything else counts as one item."""
    return value if isinstance(value, list) else (value,)


def _from_metadata(
    keys: tuple[str, ...],
    metadata: Mapping[str, object],
    special_tokens: Mapping[str, int],
    names: Mapping[int, str],
) -> Sentinel | None:
    """Return the sentinel that the first usable key names by id or text; None if there is none."""
    for key in keys:
        value = metadata.get(key)
        if isinstance(value, Mapping):  # tokenizer_config.json: {"content": "<PRE>", ...}
            value = value.get("content")
        if isinstance(value, str) and value in special_tokens:
            return Sentinel(value, special_tokens[value])
        # bool is an int, and 2**32 - 1 is how some converters write "none"
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
            return Sentinel(names.get(value, f"<token {value}>"), value)
    return None


def _distinct(sentinels: Iterable[Sentinel | None]) -> tuple[Sentinel, ...]:
    """Return the sentinels that are present, each token once, in order."""
    found = {sentinel.token_id: sentinel for sentinel in sentinels if sentinel is not None}
    return tuple(found.values())
