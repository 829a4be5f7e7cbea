"""Checkpoint: a model on disk, seen through canonical tensor names whatever its file format.

Canonical names (weights are [out_features, in_features], rotary halves in NEOX order):

    embed.weight  final_norm.weight  final_norm.bias  lm_head.weight (absent when tied)
    layers.{i}.{attn_norm,mlp_norm}.weight|bias (of what attention and the MLP read; not in all)
    layers.{i}.{attn_post_norm,mlp_post_norm}.weight (of what is added to the hidden rows)
    layers.{i}.{q,k,v,o}.weight|bias    layers.{i}.{q_norm,k_norm}.weight    layers.{i}.attn.sinks
    layers.{i}.q_gate.weight (of what attention puts out)
    layers.{i}.{gate,up,down}.weight|bias   (no gate when the MLP is not gated)

in the place of q, k, v and o, where a layer has a state space instead of attention:

    layers.{i}.{ssm_in,ssm_out}.weight      layers.{i}.ssm_conv.weight|bias
    layers.{i}.ssm.{A_log,D,dt_bias} (or A) layers.{i}.ssm_norm.weight

or the delta rule, which has these four in the place of ssm_in, and no D:

    layers.{i}.ssm_{gate,qkv,beta,alpha}.weight

and in the place of the last line, where it has a mixture of experts:

    layers.{i}.router.weight|bias           layers.{i}.experts.{e}.{gate,up,down}.weight|bias
    layers.{i}.shared_router.weight         layers.{i}.shared.{gate,up,down}.weight

and with streams of hidden rows (``altup.AltUp``):

    layer_embed.weight  layer_project.weight  layer_project_norm.weight
    altup_proj.{s}.weight                     altup_unembed.{s}.weight
    layers.{i}.{altup_router,altup_router_norm,altup_predict,altup_correct}.weight
    layers.{i}.altup.correct_output_scale     layers.{i}.laurel_{left,right,norm}.weight
    layers.{i}.layer_{gate,out,norm}.weight
"""

import hashlib
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from midfill.errors import CheckpointError
from midfill.models.config import ModelConfig, tensor_shapes
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.stored_tensor import StoredTensor

ADAPTER_KEY = "midfill.adapter"
"""Metadata key: name of the adapter that was merged into a model when it was opened."""

FRAGMENTS_KEY = "midfill.fragments"
"""Metadata key: true where a model was trained on text tokenised in fragments, as in EFIM."""

END_BIAS_KEY = "midfill.end_logit_bias"
"""Metadata key: what is added to the logits of the tokens that end an infilled answer."""

EMPTY_THRESHOLD_KEY = "midfill.empty_threshold"
"""Metadata key: how probable an empty answer must be for an infilled answer to be empty."""

CONFIDENCE_LINE_KEY = "midfill.confidence.line"
CONFIDENCE_START_KEY = "midfill.confidence.start"
CONFIDENCE_THRESHOLD_KEY = "midfill.confidence.threshold"
"""Metadata keys: how sure answers are, and should be in an editor, see ``infill/confidence.py``."""

OPENS_LINES_KEY = "midfill.opens_lines"
RAW_BOS_KEY = "midfill.raw_prompt_bos"
"""Metadata key: true where a caret at the start of a line that has text is to be answered as on an
empty line above it, see ``infill/planner.py``."""

LEAST_INCREMENT_KEY = "midfill.least_increment"
"""Metadata key: characters before the caret that a model needs after the suffix, at least."""

WINDOW_BEFORE_KEY, WINDOW_AFTER_KEY = "midfill.window.before", "midfill.window.after"
"""Metadata keys: characters of a long document around the caret that a model should see."""

SNIPPETS_KEY = "midfill.snippets.characters"
"""Metadata key: characters of an editor's snippets of other text that a model should see."""

REUSE_KEY = "midfill.reuse.method"
"""Metadata key: method by which infilling prompts take KV from elsewhere; "off" for none."""

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_TENSOR_SAMPLES = 16
_TENSOR_SAMPLE_BYTES = 512


class DescribedModel(Protocol):
    """What prompts need to know of a model, which may be served elsewhere."""

    @property
    def path(self) -> Path:
        """File or folder that it, or its description, was opened from."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """What it states apart from its architecture: key to plain value.

        FIM token ids, chat template, name, licence, ...
        """

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built at first use.

        Raises:
            CheckpointError: it is missing, broken or of an unsupported kind.
        """


class Checkpoint(DescribedModel, Protocol):
    """An opened model: its configuration, tokenizer and tensors.

    Attributes:
        config: the architecture.
    """

    config: ModelConfig

    @property
    def fingerprint(self) -> str:
        """Hex digest that changes with the content; cheap. Keys caches of derived data."""

    @property
    def content_digest(self) -> str:
        """Hex sha256 of the model itself: the same wherever and whenever it was stored.

        It covers names, shapes, kinds and samples of all tensors, see ``digest_tensors``. A
        fine-tuned or differently quantised model therefore has another digest. Adapters name their
        base by it.
        """

    def names(self) -> list[str]:
        """Return the canonical names of the tensors it holds."""

    def kind(self, name: str) -> str:
        """Return the kind of one tensor, ``StoredTensor.kind``; raises what ``tensor`` does."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, without reading it; raises what ``tensor`` does."""

    def tensor(self, name: str) -> StoredTensor:
        """Return one tensor by canonical name.

        Raises:
            CheckpointError: it is missing, truncated or of an unknown type.
        """


class MappedFile:
    """An opened file of tensors. Its data is memory-mapped, not read.

    Attributes:
        path: the file.
        header_bytes: bytes before the first tensor's data; the format's reader sets it.
    """

    header_bytes: int

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self._map = content

    def bytes_at(self, where: slice) -> bytes:
        """Return a copy of a range of the file."""
        return self._map[where]

    def __len__(self) -> int:
        """Return the file's size in bytes."""
        return len(self._map)

    def fingerprint(self) -> bytes:
        """Return size and modification time, the header, and samples spread over the data."""
        start, stop = self.header_bytes, len(self)
        last = max(stop - _SAMPLE_BYTES, start)
        starts = [start + (last - start) * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
        samples = [self._map[at : min(at + _SAMPLE_BYTES, stop)] for at in starts]
        written = f"{stop} {self.path.stat().st_mtime_ns}".encode()
        return b"".join([written, self._map[:start], *samples])


def digest_tensors(tensors: Iterable[StoredTensor]) -> str:
    """Return the hex sha256 over tensors in order of their names.

    It covers name, kind, shape and data. Small tensors are hashed whole, others by 16 stretches of
    512 bytes spread over the data.
    """
    digest = hashlib.sha256()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        digest.update(f"{tensor.name} {tensor.kind} {list(tensor.shape)}\n".encode())
        if tensor.exponents is not None:
            digest.update(tensor.exponents[:1].tobytes())
        data = tensor.data.reshape(-1).view(np.uint8)
        last = len(data) - _TENSOR_SAMPLE_BYTES
        if len(data) <= _TENSOR_SAMPLES * _TENSOR_SAMPLE_BYTES:
            digest.update(data.tobytes())
            continue
        for i in range(_TENSOR_SAMPLES):
            at = last * i // (_TENSOR_SAMPLES - 1)
            digest.update(data[at : at + _TENSOR_SAMPLE_BYTES].tobytes())
    return digest.hexdigest()


def check_layers(config: ModelConfig, tensors: int, source: object) -> None:
    """Check that there are enough tensors for layers and experts, before all names are built.

    Raises:
        CheckpointError: there are fewer tensors than layers, or than experts in all layers.
    """
    if tensors < config.layers:
        raise CheckpointError(
            f"{source}: {tensors} tensors are too few for the {config.layers} layers that the "
            "model's configuration asks for"
        )
    experts, mixed = config.experts, len(config.expert_layers)
    if experts is not None and tensors < experts.count * mixed:
        raise CheckpointError(
            f"{source}: {tensors} tensors are too few for the {experts.count} experts in each of "
            f"{mixed} layers that the model's configuration asks for"
        )


def check_tensors(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    stored_names: Mapping[str, str],
    source: object,
) -> None:
    """Check that a checkpoint holds exactly the tensors its configuration calls for.

    Args:
        config: the architecture.
        shapes: canonical name -> shape of the stored tensor.
        stored_names: canonical name -> name in the files where it is known, for error messages.
        source: name of the checkpoint for error messages.

    Raises:
        CheckpointError: a tensor is missing, has another shape or is unknown; names the first.
    """
    check_layers(config, len(shapes), source)
    expected = tensor_shapes(config)
    for name, shape in expected.items():
        shown = stored_names.get(name, name)
        if name not in shapes:
            raise CheckpointError(f"{source}: tensor {shown!r} is missing")
        if shapes[name] != shape:
            raise CheckpointError(
                f"{source}: tensor {shown!r} has shape {list(shapes[name])}, the model's "
                f"configuration asks for {list(shape)}"
            )
    for name in shapes:
        if name not in expected:
            raise CheckpointError(
                f"{source}: tensor {stored_names.get(name, name)!r} is no part of a "
                f"{config.family} model as configured"
            )
