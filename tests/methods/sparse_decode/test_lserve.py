"""LServe: what its options mean, and which are refused."""

from pathlib import Path

import pytest
from fake_keys import CONFIG
from tiny_checkpoints import write_variant

from midfill.errors import InvalidRequestError
from midfill.methods.registry import resolve_method
from midfill.methods.served_model import ServedModel
from midfill.methods.sparse_decode.lserve import LServe
from midfill.methods.sparse_decode.method import ChosenPages
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.forward.page_selection import PageRule


def test_a_budget_is_pages_of_64_keys_with_summaries_of_16() -> None:
    method = resolve_method("lserve:budget=1024,static=0,interval=2")
    assert isinstance(method, LServe)
    ready = method.for_model(ServedModel(config=CONFIG, digest="d"))
    assert ready == ChosenPages(PageRule(16, 64, 16), 2)
    assert ready.choosing_heads(CONFIG).all()


@pytest.mark.parametrize(
    ("specification", "error"),
    [
        ("lserve:budget=500", "budget must be a multiple of 64 tokens, from 192 on, not 500"),
        ("lserve:budget=128", "budget must be a multiple of 64 tokens, from 192 on, not 128"),
        ("lserve:static=1.5", "static must be from 0 to 1, not 1.5"),
        ("lserve:interval=0", "interval must be at least 1, not 0"),
        ("lserve:sinks=-1", "sinks must be at least 0, not -1"),
    ],
)
def test_nonsense_is_refused(specification: str, error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        resolve_method(specification)


def test_streaming_heads_need_gates_and_layers_that_see_everything(tmp_path: Path) -> None:
    windowed = open_checkpoint(write_variant("mistral", tmp_path / "mistral")).config
    error = r"lserve with heads that stream \(static above 0\) needs .* of this one see 24 tokens"
    with pytest.raises(InvalidRequestError, match=error):
        LServe().for_model(ServedModel(config=windowed, digest="d"))
    assert LServe(static=0).for_model(ServedModel(config=windowed, digest="d"))
    with pytest.raises(InvalidRequestError, match="duoattention has to be calibrated"):
        LServe().for_model(ServedModel(config=CONFIG, digest="d"))


@pytest.mark.parametrize("dtype", ["i8", "i4"])
def test_quantised_pools_are_refused(dtype: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"lserve: .* f16, bf16 or f32, not {dtype} "):
        LServe().for_model(ServedModel(CONFIG, kv_cache_dtype=dtype))
