"""How long steps take on a GPU, as CUDA graphs of fused kernels and in PyTorch's operations.

Random weights of real shapes: how fast a step is depends on shapes. Times are those of a whole
step as the engine sees it: inputs copied to the GPU, all layers, the largest logit copied back.
"""

import math
import statistics
import time
from collections.abc import Iterable
from typing import Annotated, cast

import numpy as np
import torch
import typer

from benchmarks.report import publish
from midfill.errors import MidfillError, OptionError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.config import Experts, ModelConfig, tensor_shapes
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.runner import CAPTURED_ROWS, TorchRunner, load_torch_runner
from midfill.stored_tensor import StoredTensor
from midfill_lab.bench.roofline.gpu import bfloat16_per_second, copied_per_second
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

SHAPES = {
    "135m": ModelConfig(
        "llama", 30, 576, 9, 3, 64, 1536, 49_152, 8192, tied_embeddings=True, rope_theta=1e5
    ),
    "1.5b": ModelConfig(
        "qwen2", 28, 1536, 12, 2, 128, 8960, 151_936, 32_768, tied_embeddings=True, qkv_bias=True
    ),
    "7b": ModelConfig("qwen2", 28, 3584, 28, 4, 128, 18_944, 152_064, 32_768, qkv_bias=True),
    "30b-a3b-8-layers": ModelConfig(
        "qwen3moe", 8, 2048, 32, 4, 128, 6144, 151_936, 32_768, qk_norm=True,
        experts=Experts(count=128, per_token=8, ffn=768, normalised=True),
    ),
}  # fmt: skip
"""SmolLM2-135M, Qwen2.5-Coder 1.5B and 7B, and a sixth of Qwen3-Coder-30B-A3B."""
_DEFAULT_SHAPES = "135m,1.5b,30b-a3b-8-layers"
CONTEXT = 1500
STEPS = {
    "decode, 1 stream": (1, 1, CONTEXT),
    "decode, 8 streams": (8, 1, CONTEXT),
    "decode, 64 streams": (64, 1, CONTEXT),
    "keystroke, 12 rows": (1, 12, CONTEXT),
    "prompt of 512": (1, 512, 0),
    "prompt of 2,000": (1, 2000, 0),
}
"""Requests of a step, new rows of each, and how many tokens are before them."""
_SLOTS = 100_000
_WARM_UPS = 3


class RandomCheckpoint:
    """Random weights of a shape; has what loading asks of a checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._shapes = tensor_shapes(config)
        self._noise = np.random.default_rng(0).standard_normal(1 << 20, np.float32)

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor: the same numbers over and over, scaled to keep rows near unit size."""
        shape = self._shapes[name]
        if len(shape) == 1:
            value = 0.0 if name.endswith("bias") else 1.0
            return cast(StoredTensor, _Floats(np.full(shape, value, np.float32)))
        repeated = np.resize(self._noise, math.prod(shape)).reshape(shape)
        repeated *= np.float32(shape[-1] ** -0.5)
        return cast(StoredTensor, _Floats(repeated))


class _Floats:
    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def to_float32(self) -> np.ndarray:
        return self._values


def step_of(config: ModelConfig, requests: int, rows: int, context: int) -> ForwardBatch:
    """Return a batch of equal requests, whose slots are scattered over the cache."""
    rng = np.random.default_rng(0)
    length = context + rows
    slots = rng.permutation(_SLOTS)[: requests * length].reshape(requests, length)
    return ForwardBatch(
        token_ids=rng.integers(0, config.vocab, requests * rows).astype(np.int32),
        positions=np.tile(np.arange(context, length, dtype=np.int32), requests),
        write_slots=slots[:, context:].ravel().astype(np.int32),
        query_indptr=np.arange(0, requests * rows + 1, rows, dtype=np.int32),
        kv_indptr=np.arange(0, requests * length + 1, length, dtype=np.int32),
        kv_slots=slots.ravel().astype(np.int32),
        logit_rows=np.arange(rows - 1, requests * rows, rows, dtype=np.int32),
    )


def seconds_of(runner: TorchRunner, batch: ForwardBatch, repeats: int) -> float:
    """Return the median seconds of a step, from the batch to its tokens."""

    def once() -> float:
        started = time.perf_counter()
        runner.argmax_tokens(runner.forward(batch))
        return time.perf_counter() - started

    for _ in range(_WARM_UPS):
        once()
    return statistics.median(once() for _ in range(repeats))


def bound_of(
    config: ModelConfig, weights: int, step: tuple[int, int, int], bandwidth: float, rate: float
) -> float:
    """Return the seconds that a step takes at least: bytes or operations, whichever take longer."""
    requests, rows, context = step
    tokens = requests * rows
    head, experts, chosen = 2 * config.vocab * config.hidden, 0, 0
    if config.experts is not None:
        one = 6 * config.hidden * config.experts.ffn * config.layers
        experts, chosen = config.experts.count * one, config.experts.per_token * one
    dense = weights - head * (1 if config.tied_embeddings else 2) - experts
    # Chosen at random, tokens leave some experts out.
    read = dense + head + experts * (1 - (1 - chosen / experts) ** tokens if experts else 0)
    read += requests * (context + rows) * 4 * config.layers * config.kv_heads * config.head_dim
    pairs = tokens * (context + (rows + 1) / 2)
    operations: float = tokens * (dense + chosen) + requests * head
    operations += 4 * pairs * config.layers * config.query_heads * config.head_dim
    return max(read / bandwidth, operations / rate)


def gpu_steps(
    shapes: Annotated[str, typer.Option(help="Shapes, separated by commas.")] = _DEFAULT_SHAPES,
    repeats: Annotated[int, typer.Option(min=1, help="Steps of each kind.")] = 30,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure steps on a CUDA GPU, beside what its memory and arithmetic allow."""
    if not torch.cuda.is_available():
        raise MidfillError("gpu-steps needs a CUDA GPU, and torch finds none")
    names = shapes.split(",")
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise OptionError(f"no shape {unknown[0]!r}; there are {', '.join(SHAPES)}")
    bandwidth, rate = copied_per_second("cuda"), bfloat16_per_second("cuda")
    figures: list[dict[str, object]] = []
    for name in names:
        checkpoint = cast(Checkpoint, RandomCheckpoint(SHAPES[name]))
        runner = load_torch_runner(
            checkpoint, slots=_SLOTS, device="cuda", dtype=torch.bfloat16,
            captured_rows=CAPTURED_ROWS,
        )  # fmt: skip
        graphs = runner.graphs
        for what, step in STEPS.items():
            batch = step_of(SHAPES[name], *step)
            runner.graphs = graphs
            fused = seconds_of(runner, batch, repeats)
            runner.graphs = None
            eager = seconds_of(runner, batch, repeats)
            bound = bound_of(SHAPES[name], runner.weight_bytes, step, bandwidth, rate)
            figures.append(
                {"shape": name, "step": what, "graphs": fused, "eager": eager, "bound": bound}
            )
            print(f"{name} {what}: {fused * 1e3:.3f} ms, eager {eager * 1e3:.3f}", flush=True)
        del runner, graphs
        torch.cuda.empty_cache()
    report = {
        "device": torch.cuda.get_device_name(), "torch": str(torch.__version__),
        "bandwidth": bandwidth, "rate": rate, "steps": figures,
    }  # fmt: skip
    publish(report, steps_table(report), section="gpu-steps", json=json, docs=docs)


def steps_table(report: dict[str, object]) -> ResultTable:
    """A row per shape and step."""
    steps = cast(Iterable[dict[str, float]], report["steps"])
    rows = [
        {
            "shape": str(each["shape"]),
            "step": str(each["step"]),
            "graphs, ms": f"{each['graphs'] * 1e3:.2f}",
            "eager, ms": f"{each['eager'] * 1e3:.2f}",
            "times as fast": f"{each['eager'] / each['graphs']:.1f}",
            "bound, ms": f"{each['bound'] * 1e3:.2f}",
            "of the bound": f"{each['bound'] / each['graphs']:.0%}",
        }
        for each in steps
    ]
    return ResultTable(
        title="Steps on a GPU",
        rows=rows,
        caption=f"{report['device']}, torch {report['torch']}, bfloat16; a copy moves"
        f" {cast(float, report['bandwidth']) / 1e12:.2f} TB/s, products reach"
        f" {cast(float, report['rate']) / 1e12:.0f} TFLOP/s.",
    )
