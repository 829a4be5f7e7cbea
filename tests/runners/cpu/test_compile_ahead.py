"""What is compiled before there is a model is what models run."""

from pathlib import Path

from midfill.kernels.cpu.decoder import forward
from midfill.kernels.cpu.kv_cache import KVCacheDtype
from midfill.models.checkpoints.opening import open_model
from midfill.runners.cpu.compile_ahead import compile_ahead
from midfill.runners.cpu.runner import CpuRunner


def test_a_model_needs_nothing_more(tiny_folder: Path) -> None:
    compile_ahead(KVCacheDtype.F32)
    compiled = list(forward.signatures)  # type: ignore[attr-defined]
    CpuRunner.load(open_model(tiny_folder, None, "auto"), slots=64, kv_cache_dtype="f32").close()
    assert list(forward.signatures) == compiled  # type: ignore[attr-defined]
