"""Adapter: a LoRA adapter's folder, read and checked against its base model.

LoRA (Hu et al., 2021, "LoRA: Low-Rank Adaptation of Large Language Models") adds scale * B @ A to a
weight. The PEFT library writes adapter_config.json (``LoraConfig``, as far as it matters after
training) and adapter_model.safetensors. midfill may add midfill.json (``AdapterRecord``): what
PEFT's files don't say.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import cast, get_args

import numpy as np

from midfill.config import FimTokens
from midfill.errors import CheckpointError, ModelNotFoundError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.fused_projections import in_key_order
from midfill.models.checkpoints.gathered_rows import Rows, gathered_rows
from midfill.models.checkpoints.lora_update import (
    DEFAULT_ROUNDING,
    LoraUpdate,
    ReplacedRows,
    Rounding,
)
from midfill.models.checkpoints.model_record import RECORD_FILE, RECORD_FORMAT, read_needs
from midfill.models.checkpoints.safetensors_file import SafetensorsFile
from midfill.models.config import DeltaRule, ModelConfig, tensor_shapes
from midfill.models.families import FAMILIES, huggingface_names
from midfill.models.tokens.huggingface_tokenizer import read_json
from midfill.stored_tensor import StoredTensor

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+?)\."
    r"(?:lora_(?P<side>[AB])\.weight|(?:token_adapter\.)?trainable_tokens_delta)"
)

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


@dataclass(frozen=True)
class AdapterRecord:
    """The content of midfill.json; the defaults hold where the file or a field is missing.

    Attributes:
        fim_tokens: the sentinels that the adapter taught its model; None where it doesn't say.
        stop_tokens: special tokens that end an infilled answer.
        fragments: whether it was trained on text tokenised in fragments (EFIM).
        base_digest: ``Checkpoint.content_digest`` of the base; None where it doesn't say.
        rounding: how a merge into quantised weights is rounded. An adapter that was trained through
            that rounding depends on it.
        needs: what it says about prompts and answers, as the adapted model's metadata.
    """

    fim_tokens: FimTokens | None = None
    stop_tokens: tuple[str, ...] = ()
    fragments: bool = False
    base_digest: str | None = None
    rounding: Rounding = DEFAULT_ROUNDING
    needs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Adapter:
    """An adapter that is known to fit its base.

    Attributes:
        path: its folder.
        updates: canonical tensor name -> the update that is added to it.
        rows: canonical tensor name -> rows of it that are replaced.
        record: the content of its midfill.json.
        config, weights: the files that say how weights change.
    """

    path: Path
    updates: Mapping[str, LoraUpdate]
    rows: Mapping[str, ReplacedRows]
    record: AdapterRecord
    config: "LoraConfig"
    weights: SafetensorsFile

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything that changes weights."""
        digest = hashlib.sha256(self.config.content)
        digest.update(self.weights.bytes_at(slice(0, len(self.weights))))
        return digest.hexdigest()

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name


def load_adapter(path: Path, base: Checkpoint) -> Adapter:
    """Read an adapter's folder, and check it against a base.

    Args:
        path: the folder.
        base: only its configuration, tokenizer and digest are read.

    Raises:
        ModelNotFoundError: there is no adapter.
        CheckpointError: it is broken, of a kind midfill can't merge, or for another base.
    """
    if not path.is_dir():
        raise ModelNotFoundError(f"{path}: no such folder; --adapter names the folder of a LoRA")
    if not (path / CONFIG_FILE).is_file():
        raise ModelNotFoundError(f"{path}: holds no {CONFIG_FILE}, so it is no adapter")
    if not (path / WEIGHTS_FILE).is_file():
        raise CheckpointError(f"{path}: holds no {WEIGHTS_FILE}; save the adapter as safetensors")
    config = LoraConfig(path / CONFIG_FILE)
    record = read_record(path / RECORD_FILE, base)
    weights = SafetensorsFile(path / WEIGHTS_FILE)
    updates, rows = _TensorReader(config, weights, base.config).read()
    return Adapter(path, updates, rows, record, config, weights)


def read_record(path: Path, base: Checkpoint) -> AdapterRecord:
    """Read midfill.json, and check it against the base.

    Args:
        path: the file; it may be missing.
        base: only its tokenizer and digest are looked at.

    Raises:
        CheckpointError: the file is malformed, or the adapter is for another base.
    """
    record = read_json(path, optional=True)
    if not record:
        return AdapterRecord()
    if record.get("format") != RECORD_FORMAT:
        raise CheckpointError(
            f"{path}: format {record.get('format')!r} is not known; this midfill reads "
            f"{RECORD_FORMAT}"
        )
    digest = _checked_digest(path, record.get("base"), base)
    fragments = record.get("fragments", False)
    if not isinstance(fragments, bool):
        raise CheckpointError(f"{path}: 'fragments' must be true or false")
    rounding = record.get("rounding", DEFAULT_ROUNDING)
    if rounding not in get_args(Rounding):
        raise CheckpointError(
            f"{path}: 'rounding' must be one of {', '.join(get_args(Rounding))}, not {rounding!r}"
        )
    fim_tokens, stop_tokens = _read_fim(path, record.get("fim"), base)
    return AdapterRecord(
        fim_tokens,
        stop_tokens,
        fragments,
        digest,
        cast(Rounding, rounding),
        read_needs(path, record),
    )


def _checked_digest(path: Path, trained_on: object, base: Checkpoint) -> str | None:
    """Return the digest of the base the adapter was trained on, which must be this one."""
    if trained_on is None:
        return None
    if not isinstance(trained_on, Mapping) or not isinstance(trained_on.get("digest"), str):
        raise CheckpointError(f"{path}: 'base' must be an object with a 'digest'")
    digest = str(trained_on["digest"])
    if digest != base.content_digest:
        named = trained_on.get("name") or "another model"
        raise CheckpointError(
            f"{path.parent}: was trained on {named} (digest {digest[:12]}), not on {base.path} "
            f"(digest {base.content_digest[:12]}); serve that model, or this one with "
            "--adapter none"
        )
    return digest


def _read_fim(
    path: Path, fim: object, base: Checkpoint
) -> tuple[FimTokens | None, tuple[str, ...]]:
    """Return the sentinels and the stop tokens."""
    if fim is None:
        return None, ()
    fields = dict(fim) if isinstance(fim, Mapping) else {}
    stop = fields.get("stop", [])
    texts = [fields.get("prefix"), fields.get("suffix"), fields.get("middle")]
    texts += stop if isinstance(stop, list) else [stop]
    known = base.tokenizer.special_tokens
    for text in texts:
        if not isinstance(text, str):
            raise CheckpointError(
                f"{path}: 'fim' must name the tokens 'prefix', 'suffix', 'middle' and a list 'stop'"
            )
        if text not in known:
            raise CheckpointError(
                f"{path}: the FIM token {text!r} is not a special token of {base.path}"
            )
    if len(set(texts[:3])) < 3:
        raise CheckpointError(f"{path}: the FIM tokens prefix, suffix and middle must differ")
    prefix, suffix, middle, *stops = (str(text) for text in texts)
    return FimTokens(prefix, suffix, middle), tuple(stops)


class LoraConfig:
    """Ranks, scales and trained tokens of a plain LoRA adapter.

    Attributes:
        path: the file.
        content: its bytes.
    """

    def __init__(self, path: Path) -> None:
        """Read and check a file.

        Raises:
            CheckpointError: it is missing, malformed or not of a plain LoRA.
        """
        self.path = path
        self._fields = read_json(path)
        self.content = path.read_bytes()
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
        for option in _UNSUPPORTED:
            if self._fields.get(option):
                raise CheckpointError(
                    f"{self.path}: {option} is not supported; midfill merges plain LoRA only"
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


class _TensorReader:
    """Sorts the tensors of adapter_model.safetensors by the tensors of the base they change."""

    def __init__(self, config: LoraConfig, weights: SafetensorsFile, model: ModelConfig) -> None:
        self._config = config
        self._weights = weights
        self._model = model
        self._shapes = tensor_shapes(model)
        self._modules = {
            theirs.removesuffix(".weight"): name
            for name, theirs in huggingface_names(model).items()
            if theirs.endswith(".weight") and len(self._shapes[name]) == 2
        }
        self._parts = self._find_parts()

    def _find_parts(self) -> dict[str, list[tuple[str, Rows]]]:
        """Return module -> tensors that are some of its rows, and which, where it isn't one."""
        modules = FAMILIES[self._model.family].huggingface_modules
        found = {}
        for source, own in gathered_rows(self._model).items():
            for layer in range(self._model.layers):
                parts = [(f"layers.{layer}.{part}.weight", rows) for part, rows in own.items()]
                if source in modules and parts[0][0] in self._shapes:
                    found[f"model.layers.{layer}.{modules[source]}"] = parts
        return found

    def read(self) -> tuple[Mapping[str, LoraUpdate], Mapping[str, ReplacedRows]]:
        """Return updates and replaced rows by canonical tensor name.

        Raises:
            CheckpointError: a tensor is unknown, has no counterpart, or does not fit.
        """
        sides: dict[str, dict[str, str]] = {}
        rows: dict[str, ReplacedRows] = {}
        for key in self._weights.entries:
            match = _KEY.fullmatch(key)
            if match is None:
                raise CheckpointError(
                    f"{self._weights.path}: tensor {key!r} is no part of a plain LoRA on linear "
                    "layers, which is what midfill merges"
                )
            module = match["module"]
            self._check_module(key, module)
            if match["side"] is None:
                rows[self._modules[module]] = self._rows(key, module)
            else:
                sides.setdefault(module, {})[match["side"]] = key
        updates: dict[str, Callable[[], LoraUpdate]] = {}
        for module, keys in sides.items():
            updates |= self._updates(module, keys)
        return _Updates(updates), rows

    def _check_module(self, key: str, module: str) -> None:
        if module in self._modules or module in self._parts:
            self._check_order(key, module)
            return
        layer = re.match(r"model\.layers\.(\d+)\.", module)
        if layer is not None and int(layer[1]) >= self._model.layers:
            reason = f"the base has {self._model.layers} layers"
        elif module == "lm_head" and self._model.tied_embeddings:
            reason = "the base's LM head is its embedding"
        else:
            reason = f"a {self._model.family} model has no such layer"
        raise CheckpointError(f"{self._weights.path}: tensor {key!r} fits nothing: {reason}")

    def _check_order(self, key: str, module: str) -> None:
        """Check that a module's heads are in the order in which adapters have them."""
        rule = self._model.state_space
        if not isinstance(rule, DeltaRule) or not rule.tiled or rule.heads == rule.key_heads:
            return
        if any(part.startswith("ssm_") for part in self._modules.get(module, "").split(".")):
            raise CheckpointError(
                f"{self._weights.path}: tensor {key!r} fits nothing: GGUF files of the base have "
                "heads in another order there; serve the adapter with the Hugging Face folder"
            )

    def _updates(self, module: str, keys: Mapping[str, str]) -> dict[str, Callable[[], LoraUpdate]]:
        """Check an update; return what reads it, by the tensors that it changes."""
        if len(keys) < 2:
            (present,) = keys.values()
            missing = "B" if "A" in keys else "A"
            raise CheckpointError(
                f"{self._weights.path}: {present!r} has no lora_{missing} beside it"
            )
        parts = self._parts.get(module)
        if parts is None:
            name = self._modules[module]
            parts = [(name, np.arange(self._shapes[name][0]))]
        if parts[0][0] == "embed.weight":
            raise CheckpointError(
                f"{self._weights.path}: {keys['A']!r} is a LoRA on the embedding, which is not "
                "supported; use trainable_token_indices"
            )
        outputs, inputs = sum(len(rows) for _, rows in parts), self._shapes[parts[0][0]][1]
        rank = self._config.rank(module)
        down = self._stored(keys["A"], (rank, inputs))
        up = self._stored(keys["B"], (outputs, rank))
        scale = self._config.scale(module)
        return {
            name: partial(_read_update, self._model, name, down, up, rows, scale)
            for name, rows in parts
        }

    def _rows(self, key: str, module: str) -> ReplacedRows:
        vocab, hidden = self._shapes[self._modules[module]]
        token_ids = self._config.token_ids(module)
        for token_id in token_ids:
            if not 0 <= token_id < vocab:
                raise CheckpointError(
                    f"{self._config.path}: trainable_token_indices names token {token_id}, the "
                    f"base's go from 0 to {vocab - 1}"
                )
        if len(set(token_ids)) < len(token_ids):
            raise CheckpointError(f"{self._config.path}: trainable_token_indices repeats a token")
        return ReplacedRows(token_ids, self._stored(key, (len(token_ids), hidden)).to_float32())

    def _stored(self, key: str, shape: tuple[int, ...]) -> StoredTensor:
        entry = self._weights.entries[key]
        if entry.shape != shape:
            raise CheckpointError(
                f"{self._weights.path}: tensor {key!r} has shape {list(entry.shape)}, the base and "
                f"{CONFIG_FILE} ask for {list(shape)}"
            )
        return StoredTensor(key, entry.shape, entry.kind, self._weights.data(key))


def _read_update(
    model: ModelConfig,
    name: str,
    down: StoredTensor,
    up: StoredTensor,
    rows: Rows,
    scale: float,
) -> LoraUpdate:
    """Return the update of one tensor, which is some rows of a module, in the tensor's order."""
    own = up.to_float32()[rows]
    heads = model.heads_of(name)
    if model.rotated is not None and heads:
        own = in_key_order(own, heads, model.rotated).astype(np.float32, copy=False)
    return LoraUpdate(down.to_float32(), own, scale)


class _Updates(Mapping[str, LoraUpdate]):
    """Updates by tensor name, each read when it is asked for; a server never asks."""

    def __init__(self, readers: Mapping[str, Callable[[], LoraUpdate]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> LoraUpdate:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)
