"""Kernels compiled before there is a model: they are the same for all of one KV cache dtype.

A first start fetches a model, which takes the network, and compiles the kernels, which takes the
cores. ``python -m midfill.runners.cpu.compile_ahead`` compiles them beside an installation that
isn't complete yet: it imports no other libraries than the Makefile's KERNEL_LIBRARIES.
"""

from pathlib import Path

import numpy as np

from midfill.kernels.cpu.kv_cache import KVCacheDtype
from midfill.models.checkpoints.lora_merge import merge_calls
from midfill.models.config import ModelConfig, tensor_shapes
from midfill.runners.cpu.packed_model import pack_model
from midfill.runners.cpu.runner import CpuRunner, usual_kv_cache_dtype
from midfill.stored_tensor import StoredTensor
from midfill.system.progress import Progress

_SLOTS = 16  # too few to measure tiles with


class _BlankModel:
    """A model of zeros, as small as the kernels take."""

    config = ModelConfig(
        "llama", layers=1, hidden=32, query_heads=1, kv_heads=1, head_dim=32, ffn=32, vocab=32,
        context=32,
    )  # fmt: skip
    path = Path()

    def names(self) -> list[str]:
        return list(tensor_shapes(self.config))

    def tensor(self, name: str) -> StoredTensor:
        shape = tensor_shapes(self.config)[name]
        return StoredTensor(name, shape, "f32", np.zeros(shape, np.float32))


def compile_ahead(
    kv_cache_dtype: KVCacheDtype,
    threads: int | None = None,
    progress: Progress | None = None,
    *,
    adapted: bool = False,
) -> None:
    """Compile, or load, what a ``CpuRunner`` of that KV cache dtype and so many threads runs.

    Args:
        kv_cache_dtype: how K and V are stored.
        threads: that a step runs on; None is one per available core.
        progress: called with (stage, done, total).
        adapted: whether an adapter will be merged into the model.
    """
    blank = _BlankModel()
    model = pack_model(blank)
    runner = CpuRunner(
        blank.config, model, kv_cache_dtype, slots=_SLOTS, threads=threads, progress=progress,
        compiles=merge_calls() if adapted else (),
    )  # fmt: skip
    runner.close()


if __name__ == "__main__":
    compile_ahead(usual_kv_cache_dtype("auto"), adapted=True)  # as the default model is
