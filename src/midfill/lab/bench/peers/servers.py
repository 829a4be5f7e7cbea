"""How midfill's own server and its peers are started: a ``Launch`` each, or why it is missing."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from midfill.lab.bench.peers.compared_model import ComparedModel
from midfill.lab.bench.peers.loads import ALL_LAYOUTS, LOADS
from midfill.lab.bench.peers.results import MIDFILL, MIDFILL_PLAIN
from midfill.runners.cpu.runner import multiplies_bfloat16
from midfill.version import __version__

_BANNER_WEIGHTS = re.compile(r"weights (?P<size>[\d.]+) (?P<unit>bytes|KB|MB|GB)")
_BANNER_KV = re.compile(r"\((?P<bytes>\d+) bytes\), (?P<slots>\d+) tokens")
_UNITS = {"bytes": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}


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
    model: ComparedModel, room: Room, *, speculation: bool, kinds: tuple[str, ...]
) -> Launch:
    """Describe midfill's own server, run by this interpreter.

    The model goes without the adapter that a registered one has: peers compute the bare one.

    Args:
        speculation: whether it drafts tokens, as it does by default.
        kinds: of loads to measure on it; "decode" alone is a server of its own.
    """
    decode_alone = kinds == ("decode",)
    flags = ["--threads", str(room.threads), "--adapter", "none"]
    flags += ["--kv-memory", str(room.kv_tokens * _kv_bytes(model))]
    if not speculation:
        flags.append("--no-speculation")
    tokens = [] if model.own_sentinels else ["--fim-tokens", ",".join(model.sentinels)]
    identity = ["--port", PORT, "--served-name", model.name]
    command = [sys.executable, "-m", "midfill", "serve", str(model.path), *identity]
    quantised = _is_quantised(model)
    return Launch(
        name=MIDFILL_PLAIN if decode_alone else MIDFILL,
        version=__version__,
        precision=(
            f"weights {model.stored_kinds} as stored; activations int8, KV "
            f"{'and attention bfloat16' if multiplies_bfloat16() else 'float16'}"
            if quantised
            else "weights, activations and KV float32"
        ),
        settings=" ".join(flags),
        command=[*command, *flags, *tokens],
        layouts=ALL_LAYOUTS,
        kinds=kinds,
        read_bytes=lambda banner: _read_bytes(banner, model),
        first_start=not decode_alone,
    )


def _is_quantised(model: ComparedModel) -> bool:
    return not model.stored_kinds.startswith(("f32", "f16", "bf16"))


def _kv_bytes(model: ComparedModel) -> int:
    """Return the bytes of a token's KV with ``--kv-cache-dtype auto``."""
    return model.kv_values_per_token * (2 if _is_quantised(model) else 4)


def _read_bytes(banner: str, model: ComparedModel) -> ReadBytes:
    """Return the bytes that the server's banner states; weights are packed in its own format."""
    weights, kv = _BANNER_WEIGHTS.search(banner), _BANNER_KV.search(banner)
    return ReadBytes(
        weights=(
            round(float(weights["size"]) * _UNITS[weights["unit"]])
            if weights is not None
            else model.stored_bytes_read
        ),
        kv_per_token=(int(kv["bytes"]) // int(kv["slots"]) if kv is not None else _kv_bytes(model)),
    )
