"""The model that servers are compared on, and how midfill's own server is started on it.

A server that can be started is a ``Launch``; one that can't is ``Missing``, with the reason.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path

from midfill.errors import MidfillError
from midfill.infill.formats import find_format
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.model_store import resolve
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import tensor_shapes
from midfill.runners.loading import memory_with_states
from midfill.system.python_child import python_command
from midfill.version import __version__
from midfill_lab.bench.clients import SPARE_TOKENS, Sentinels
from midfill_lab.bench.peers.loads import ALL_LAYOUTS
from midfill_lab.bench.peers.results import CPU, LOADS, MIDFILL, MIDFILL_PLAIN

_BANNER_WEIGHTS = re.compile(r"weights (?P<size>[\d.]+) (?P<unit>bytes|KB|MB|GB)")
_BANNER_KV = re.compile(r"\((?P<bytes>\d+) bytes\), (?P<slots>\d+) tokens")
_UNITS = {"bytes": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}


@dataclass(frozen=True)
class ComparedModel:
    """A model on disk.

    Attributes:
        name: as the user names it.
        path: a GGUF file or a Hugging Face folder.
        sentinels: texts of the PRE, SUF and MID tokens that prompts are laid out with.
        own_sentinels: whether the checkpoint itself names them.
        random_weights: whether its weights are random, so that it repeats itself endlessly.
    """

    name: str
    path: Path
    checkpoint: Checkpoint
    sentinels: Sentinels
    own_sentinels: bool
    random_weights: bool = False

    @property
    def gguf(self) -> Path | None:
        """The model's file if it is in GGUF format."""
        path = self.checkpoint.path
        return path if path.is_file() else None

    @property
    def context(self) -> int:
        """Maximum tokens of a sequence."""
        return self.checkpoint.config.context

    @property
    def kv_values_per_token(self) -> int:
        """Values of K and V per token of context."""
        config = self.checkpoint.config
        layers = len(config.kv_layers)
        return config.vectors_per_cell * layers * config.kv_heads * config.head_dim

    @cached_property
    def parameters_read(self) -> int:
        """Parameters read per decoded token.

        All but an embedding that is not the output head, and of experts those that a token is sent
        to.
        """
        shapes = tensor_shapes(self.checkpoint.config)
        return round(sum(prod(shape) * self._read_share(name) for name, shape in shapes.items()))

    @cached_property
    def stored_bytes_read(self) -> int:
        """Bytes of these parameters as stored."""
        tensors = map(self.checkpoint.tensor, self.checkpoint.names())
        return round(sum(each.data.nbytes * self._read_share(each.name) for each in tensors))

    @cached_property
    def reads_everything(self) -> bool:
        """Whether a token reads all parameters: none is only looked up, or another expert's."""
        return all(self._read_share(name) == 1 for name in self.checkpoint.names())

    @cached_property
    def layer_kinds(self) -> tuple[str, ...]:
        """Formats of its layers' matrices, such as ("q4_1",)."""
        tensors = [self.checkpoint.tensor(name) for name in self.checkpoint.names()]
        layers = {t.kind for t in tensors if len(t.shape) > 1 and t.name.startswith("layers.")}
        return tuple(sorted(layers))

    @cached_property
    def stored_kinds(self) -> str:
        """Formats of all its matrices, such as "q4_1, embedding q8_0"."""
        embedding = self.checkpoint.tensor("embed.weight").kind
        return f"{', '.join(self.layer_kinds)}, embedding {embedding}"

    def _read_share(self, name: str) -> float:
        config = self.checkpoint.config
        if name == "embed.weight" and not config.tied_embeddings:
            return 0.0  # only looked up
        if name == "layer_embed.weight":
            return 0.0  # so are tokens' embeddings for layers
        if config.experts is not None and ".experts." in name:
            return config.experts.per_token / config.experts.count
        return 1.0


def open_compared(
    name: str, sentinels: Sentinels | None, *, random_weights: bool = False
) -> ComparedModel:
    """Open a model by path or name, fetched if needed.

    Args:
        sentinels: PRE, SUF and MID; None takes the checkpoint's own, or spare tokens of it.
        random_weights: whether its weights are random.

    Raises:
        MidfillError: there is no such model, or it lacks tokens to use as sentinels.
    """
    path = resolve(name)
    checkpoint = open_checkpoint(path)
    special = checkpoint.tokenizer.special_tokens
    format = find_format(checkpoint.config.family, special, checkpoint.metadata)
    own = None
    if format is not None and format.order == "psm" and format.middle is not None:
        own = (format.prefix.text, format.suffix.text, format.middle.text)
    chosen = sentinels or own or SPARE_TOKENS
    if absent := [text for text in chosen if text not in special]:
        raise MidfillError(
            f"{name} has no token {absent[0]!r}: name three of its special tokens with --fim-tokens"
        )
    label = Path(name).stem if Path(name).exists() else name
    return ComparedModel(label, path, checkpoint, chosen, chosen == own, random_weights)


@dataclass(frozen=True)
class Room:
    """Resources that every server gets alike.

    Attributes:
        threads: of computation.
        sequence: maximum tokens of a prompt with its answer.
        sequences: how many of them at once.
    """

    threads: int
    sequence: int
    sequences: int

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV."""
        return self.sequence * self.sequences


@dataclass(frozen=True)
class ReadBytes:
    """Bytes that decoding reads from memory.

    Attributes:
        weights: per step.
        kv_per_token: per token of context of each answer.
    """

    weights: int
    kv_per_token: int


@dataclass(frozen=True)
class Launch:
    """A server, ready to be started.

    Attributes:
        name, version, precision, settings: as in ``ServerResult``.
        command: program and arguments; an argument ``PORT`` is replaced by a port.
        environment: variables added to this process's own.
        layouts: those of ``ALL_LAYOUTS`` that it understands.
        kinds: of loads to measure on it.
        first_start: whether to start it once before, because the first start compiles kernels and
            packs weights for later ones.
        stored: a file that the first start writes beside its first answers, if any.
        read_bytes: what the running server reads, given its output so far.
    """

    name: str
    version: str
    precision: str
    settings: str
    command: Sequence[str]
    layouts: tuple[str, ...]
    read_bytes: Callable[[str], ReadBytes]
    environment: Mapping[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = LOADS
    first_start: bool = False
    stored: Path | None = None


PORT = "{port}"


@dataclass(frozen=True)
class Missing:
    """A server that can't be started here.

    Attributes:
        name: as in ``ServerResult``.
        reason: one line, with the command that installs it where that helps.
    """

    name: str
    reason: str


def launch_midfill(
    model: ComparedModel,
    room: Room,
    *,
    speculation: bool,
    kinds: tuple[str, ...],
    device: str = CPU,
) -> Launch:
    """Describe midfill's own server, run by this interpreter.

    The model goes without the adapter that a registered one has: peers compute the bare one.

    Args:
        speculation: whether it drafts tokens, as it does by default.
        kinds: of loads to measure on it; "decode" alone is a server of its own.
        device: of PyTorch, or "cpu" for midfill's own kernels.
    """
    from midfill.runners.cpu.packed_model import packed_path
    from midfill.runners.cpu.runner import multiplies_bfloat16

    decode_alone = kinds == ("decode",)
    quantised = _is_quantised(model) and device == CPU
    kv_bytes = _kv_bytes(model, device)
    flags = ["--threads", str(room.threads), "--adapter", "none"]
    flags += ["--kv-memory", str(_kv_memory(model, room, kv_bytes))]
    if device != CPU:
        flags += ["--backend", "torch", "--device", device]
    if not speculation:
        flags.append("--no-speculation")
    tokens = [] if model.own_sentinels else ["--fim-tokens", ",".join(model.sentinels)]
    identity = ["--port", PORT, "--served-name", model.name]
    command = python_command("-m", "midfill", "serve", str(model.path), *identity)
    number = "float32" if device == CPU else "bfloat16"
    return Launch(
        name=MIDFILL_PLAIN if decode_alone else MIDFILL,
        version=__version__,
        precision=(
            f"weights {model.stored_kinds} as stored; activations int8, KV "
            f"{'and attention bfloat16' if multiplies_bfloat16() else 'float16'}"
            if quantised
            else f"weights, activations and KV {number}"
        ),
        settings=" ".join(flags),
        command=[*command, *flags, *tokens],
        layouts=ALL_LAYOUTS,
        kinds=kinds,
        read_bytes=lambda banner: _read_bytes(banner, model, kv_bytes),
        first_start=not decode_alone,
        stored=packed_path(model.checkpoint) if device == CPU else None,
    )


def _is_quantised(model: ComparedModel) -> bool:
    """Return whether a model has matrices in fewer bits; a mixture's routers stay floats."""
    kinds = {*model.layer_kinds, model.checkpoint.tensor("embed.weight").kind}
    return not kinds <= {"f32", "f16", "bf16"}


def _kv_bytes(model: ComparedModel, device: str) -> int:
    """Return the bytes of a token's KV with ``--kv-cache-dtype auto``."""
    return model.kv_values_per_token * (2 if _is_quantised(model) or device != CPU else 4)


def _kv_memory(model: ComparedModel, room: Room, kv_bytes: int) -> int:
    """Return bytes for KV, and for states beside it, which get half where a model has any."""
    needed, config = room.kv_tokens * kv_bytes, model.checkpoint.config
    if config.state_space is None:
        return needed
    return max(2 * needed, memory_with_states(config, room.sequences))


def _read_bytes(banner: str, model: ComparedModel, kv_bytes: int) -> ReadBytes:
    """Return the bytes that the server's banner states; weights are packed in its own format.

    It states those of all parameters; where a token reads some of them, what is stored counts.
    """
    weights, kv = _BANNER_WEIGHTS.search(banner), _BANNER_KV.search(banner)
    return ReadBytes(
        weights=(
            round(float(weights["size"]) * _UNITS[weights["unit"]])
            if weights is not None and model.reads_everything
            else model.stored_bytes_read
        ),
        kv_per_token=int(kv["bytes"]) // int(kv["slots"]) if kv is not None else kv_bytes,
    )
