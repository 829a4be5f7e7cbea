"""LoraConfig: adapter_config.json as PEFT writes it, as far as it matters after training."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

from midfill.errors import CheckpointError
from midfill.models.tokens.huggingface_tokenizer import read_json

# PEFT's options beyond plain LoRA; each of them changes what is computed.
_UNSUPPORTED = (
    "alora_invocation_tokens",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)
# Initialisations that leave the base unchanged. Others (PiSSA, OLoRA, ...) change its weights, too.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


class LoraConfig:
    """Ranks, scales and trained tokens of a plain LoRA adapter.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        """Read and check a file.

        Raises:
            CheckpointError: it is missing, malformed or not of a plain LoRA.
        """
        self.path = path
        self._fields = read_json(path)
        self._check_kind()
        self._rank_pattern = self._patterns("rank_pattern")
        self._alpha_pattern = self._patterns("alpha_pattern")
        self._rank = self._number(self._fields.get("r"), "r")
        self._alpha = self._number(self._fields.get("lora_alpha"), "lora_alpha")

    def rank(self, module: str) -> int:
        """Return the rank for a module, given its name in transformers."""
        rank = self._number(self._for_module(self._rank_pattern, module, self._rank), "r")
        if not rank.is_integer() or rank < 1:
            raise CheckpointError(f"{self.path}: a rank r of {rank:g} is not possible")
        return int(rank)

    def scale(self, module: str) -> float:
        """Return the factor that B @ A is multiplied by."""
        alpha = self._number(self._for_module(self._alpha_pattern, module, self._alpha), "alpha")
        rank = self.rank(module)
        return float(alpha / rank**0.5 if self._fields.get("use_rslora") else alpha / rank)

    def token_ids(self, module: str) -> tuple[int, ...]:
        """Return trainable_token_indices for an embedding or LM head."""
        value = self._fields.get("trainable_token_indices")
        if isinstance(value, Mapping):
            matching = [key for key in value if module == key or module.endswith(f".{key}")]
            value = value[matching[0]] if matching else None
        elif module.rsplit(".", 1)[-1] != "embed_tokens":
            value = None
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise CheckpointError(
                f"{self.path}: trainable_token_indices does not list the tokens of {module!r}"
            )
        return tuple(value)

    def _check_kind(self) -> None:
        kind = self._fields.get("peft_type")
        if kind != "LORA":
            raise CheckpointError(f"{self.path}: peft_type is {kind!r}; midfill merges LORA only")
        if (bias := self._fields.get("bias", "none")) != "none":
            raise CheckpointError(
                f"{self.path}: bias {bias!r} is not supported; train with bias 'none'"
            )
        for field in _UNSUPPORTED:
            if self._fields.get(field):
                raise CheckpointError(
                    f"{self.path}: {field} is not supported; midfill merges plain LoRA only"
                )
        start = self._fields.get("init_lora_weights")
        if start not in _PLAIN_STARTS:
            raise CheckpointError(
                f"{self.path}: init_lora_weights {start!r} changes the base's own weights; save "
                "the adapter converted to plain LoRA (PEFT: path_initial_model_for_weight_"
                "conversion)"
            )

    def _patterns(self, field: str) -> Mapping[str, object]:
        patterns = self._fields.get(field) or {}
        if not isinstance(patterns, Mapping):
            raise CheckpointError(f"{self.path}: {field} must be an object")
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise CheckpointError(
                    f"{self.path}: {field} has the pattern {pattern!r}: {error}"
                ) from None
        return patterns

    def _for_module(self, patterns: Mapping[str, object], module: str, default: object) -> object:
        """Return the value of the first pattern that matches a module name's end, as in PEFT."""
        for pattern, value in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return default

    def _number(self, value: object, field: str) -> float:
        try:
            if isinstance(value, int | float) and not isinstance(value, bool):
                number = float(value)
                if math.isfinite(number):
                    return number
        except OverflowError:
            pass
        raise CheckpointError(f"{self.path}: {field} must be a number, not {value!r:.40}")
