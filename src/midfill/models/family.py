"""Family: how the descriptions of one model family are read and its tensors are named."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

from midfill.errors import CheckpointError
from midfill.models.config import ModelConfig


class ConfigFields:
    """A mapping of keys to plain values (``config.json``, GGUF metadata), read key by key.

    A key whose value is None counts as missing. Where a method takes a default and none is given, a
    missing key is an error. All errors are ``CheckpointError`` and name the source and the key.

    Args:
        values: the mapping.
        source: its name in error messages, such as "config.json".
        prefix: prepended to every key, such as "llama." for GGUF's per-architecture keys.
    """

    def __init__(self, values: Mapping[str, object], source: str, prefix: str = "") -> None:
        self._values = values
        self.source = source
        self._prefix = prefix

    def get(self, key: str) -> object:
        """Return the plain value, None if the key is missing."""
        return self._values.get(self._prefix + key)

    def states(self, key: str) -> bool:
        """Return whether the key is present, even with the value None."""
        return self._prefix + key in self._values

    def with_value(self, key: str, value: object) -> "ConfigFields":
        """Return the same fields with another value of one of them."""
        changed = {**self._values, self._prefix + key: value}
        return ConfigFields(changed, self.source, self._prefix)

    def error(self, message: str) -> CheckpointError:
        """Return a CheckpointError that starts with the source, for the caller to raise."""
        return CheckpointError(f"{self.source}: {message}")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer; a float without a fraction counts as one."""
        value = self._value(key, default)
        number = self._finite(value)
        if number is None or not number.is_integer():
            raise self._wrong(key, "a whole number", value)
        return int(number)

    def size(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 1."""
        value = self.integer(key, default)
        if value < 1:
            raise self._wrong(key, "at least 1", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._value(key, default)
        number = self._finite(value)
        if number is None:
            raise self._wrong(key, "a finite number", value)
        return number

    def optional_number(self, key: str) -> float | None:
        """Return a finite number, None if the key is missing."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty if the key is missing."""
        value = self.get(key)
        if value is None:
            return ()
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self._wrong(key, "a list of strings", value)
        if not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings", value)
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return the token ids of a single id or a list; empty if the key is missing."""
        value = self.get(key)
        if value is None:
            return ()
        items = [value] if isinstance(value, Integral) else value
        if isinstance(items, str) or not isinstance(items, Sequence):
            raise self._wrong(key, "a token id or a list of them", value)
        for item in items:
            if isinstance(item, bool) or not isinstance(item, Integral) or item < 0:
                raise self._wrong(key, "a token id or a list of them", value)
        return tuple(int(item) for item in items)

    def whole_numbers(self, key: str) -> tuple[int, ...]:
        """Return a list of numbers of at least 0; empty if the key is missing."""
        value = self.get(key)
        if value is None:
            return ()
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self._wrong(key, "a list of whole numbers", value)
        for item in value:
            if isinstance(item, bool) or not isinstance(item, Integral) or item < 0:
                raise self._wrong(key, "a list of whole numbers", value)
        return tuple(int(item) for item in value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers; empty if the key is missing."""
        value = self.get(key)
        if value is None:
            return ()
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self._wrong(key, "a list of numbers", value)
        found = [self._finite(item) for item in value]
        known = tuple(number for number in found if number is not None)
        if len(known) != len(found):
            raise self._wrong(key, "a list of numbers", value)
        return known

    def table(self, key: str) -> Mapping[str, object]:
        """Return a nested mapping; empty if the key is missing."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, "a mapping", value)
        return value

    def _value(self, key: str, default: object) -> object:
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.error(f"{self._prefix + key!r} is missing")
        return default

    @staticmethod
    def _finite(value: object) -> float | None:
        if isinstance(value, bool) or not isinstance(value, Real):
            return None
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if math.isfinite(number) else None

    def _wrong(self, key: str, expected: str, value: object) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        return self.error(f"{self._prefix + key!r} must be {expected}, not {shown}")


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Family:
    """One model family. Each has a file of its own and is listed in ``families``.

    Attributes:
        name: the family's name, in a Hugging Face config.json and in GGUF.
        from_huggingface: reads a config.json.
        model_type: its name in a config.json, if that is another.
        norm_offset: what is added to the norm weights of Hugging Face files.
        huggingface_modules: canonical module name without "layers.{i}." -> Hugging Face's name
            without "model.layers.{i}."; an expert's number is left out of the canonical name, and
            is "{expert}" in the other.
        from_gguf: reads GGUF metadata (keys below "{name}.") and the shapes by canonical name;
            None if GGUF has no architecture of this name.
        gguf_interleaved_rotary: whether GGUF files store the rows of q and k (weights and biases)
            with the two rotary halves interleaved (GGML's NORM order) instead of consecutive (NEOX
            order).
        gguf_modules: GGUF's name of a layer's module -> canonical name, where they mean another one
            than in most families.
        interleaved_experts: whether Hugging Face files hold experts as gpt-oss does, see
            ``checkpoints.interleaved_experts``.
        fused_projections: whether they hold q, k and v as one matrix, and gate and up.
        multimodal_type: name in a config.json of models that see images, too, whose part for text
            is of this family; empty if there are none.
        skips_predictors: whether layers that predict further tokens are left out; in GGUF files
            they come last.
    """

    name: str
    from_huggingface: Callable[[ConfigFields], ModelConfig]
    huggingface_modules: Mapping[str, str]
    from_gguf: Callable[[ConfigFields, Shapes], ModelConfig] | None = None
    gguf_interleaved_rotary: bool = False
    model_type: str = ""
    norm_offset: float = 0.0
    gguf_modules: Mapping[str, str] = field(default_factory=dict)
    interleaved_experts: bool = False
    fused_projections: bool = False
    multimodal_type: str = ""
    skips_predictors: bool = False


LLAMA_MODULES: Mapping[str, str] = {
    "embed": "model.embed_tokens",
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}
"""Llama's module names in transformers; most families share them."""

EXPERT_MODULES: Mapping[str, str] = {
    **LLAMA_MODULES,
    "router": "mlp.gate",
    **{f"experts.{part}": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")},
    "shared_router": "mlp.shared_expert_gate",
    **{f"shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
"""The same with the mixtures of experts that Qwen introduced."""
