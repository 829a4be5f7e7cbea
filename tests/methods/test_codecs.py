"""Codecs of stored KV by name, and the profile that CacheGen keeps of a model."""

from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import write_variant

from midfill.errors import InvalidRequestError
from midfill.methods.codecs import check_codec, open_codec
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.system.cache import cache_folder
from serving import torch_runner


@pytest.mark.parametrize(
    "text", ["none", "cachegen", "cachegen:deep=8", "cachegen:shallow=9,deep=8"]
)
def test_codecs_are_known_by_name(text: str) -> None:
    check_codec(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("zip", "there is no codec 'zip'; there are none, cachegen"),
        ("none:deep=3", "there is no codec 'none'"),
        ("cachegen:depth=3", "did you mean 'deep'"),
        ("cachegen:deep=2", "from 4 to 256"),
    ],
)
def test_nonsense_is_refused(text: str, error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        check_codec(text)


def test_a_profile_is_computed_once_and_again_if_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MIDFILL_CACHE", str(tmp_path / "cache"))
    checkpoint = open_checkpoint(write_variant("llama", tmp_path / "llama"))
    runner = CpuRunner.load(checkpoint, slots=512, threads=1, weights="f32")

    def name() -> str:
        codec = open_codec("cachegen", runner, checkpoint.tokenizer, lambda: "model")
        assert codec is not None
        return codec.name

    first = name()
    (file,) = (cache_folder() / "kv-profiles").iterdir()
    stored = np.load(file)
    assert (stored[..., -1] == 4096).all()
    np.save(file, stored[..., ::-1])
    assert name() == first
    assert "is made again" in caplog.text
    file.write_bytes(b"no tables")
    assert name() == first
    assert (np.load(file) == stored).all()


def test_other_formats_of_kv_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("llama", tmp_path / "llama"))
    runner = CpuRunner.load(checkpoint, slots=64, threads=1, weights="f32", kv_cache_dtype="i8")
    with pytest.raises(InvalidRequestError, match="f16 or f32, not i8"):
        open_codec("cachegen", runner, checkpoint.tokenizer, lambda: "model")


@pytest.mark.parametrize(
    ("variant", "reason"),
    [("deepseek2", "latent attention"), ("gemma3n", "layers share their KV")],
    ids=["keys are values", "shared KV"],
)
def test_a_codec_is_refused_where_kv_is_of_another_kind(
    variant: str, reason: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(write_variant(variant, tmp_path))
    runner = torch_runner(checkpoint, slots=64)
    assert open_codec("none", runner, checkpoint.tokenizer, lambda: "model") is None
    message = f"'cachegen' is not possible with .*{reason}"
    with pytest.raises(InvalidRequestError, match=message) as caught:
        open_codec("cachegen", runner, checkpoint.tokenizer, lambda: "model")
    assert "\n" not in str(caught.value)
