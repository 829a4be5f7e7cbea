"""A whole run of bench prefill on a tiny model: what is counted, compared and shown."""

import numpy as np
import pytest
from tiny_checkpoints import write_tiny
from typer.testing import CliRunner

from benchmarks import prefill as bench
from benchmarks.__main__ import make_app
from benchmarks.prefill import (
    QUICK,
    AShape,
    OwnBlock,
    PrefillOptions,
    PrefillReport,
    RandomBlocks,
    RandomCross,
    measure_prefill,
    of_equal_cost,
    prefill_table,
)
from midfill.errors import MidfillError
from midfill.methods.registry import methods_of
from midfill.methods.sparse_prefill.method import ChunkRule
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.runners.forward.attention import QUERY_BLOCK, LayerProbe

METHOD = "flexprefill:gamma=0.4,least=64,chunk=128,dense=128"
OPTIONS = PrefillOptions(tokens=900, depths=(0.3, 0.7), scored=10, repeats=2)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> PrefillReport:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny("llama", folder, max_position_embeddings=1200)
    return measure_prefill(str(folder), [METHOD], OPTIONS)


def test_dense_attention_the_method_and_three_baselines_of_its_cost(report: PrefillReport) -> None:
    dense, method, *baselines = report.results
    assert (dense.name, method.name) == ("dense", METHOD)
    assert dense.divergence == 0.0 < method.divergence
    assert dense.pairs == []
    assert np.array(method.pairs).sum() < method.causal * np.array(method.pairs).size
    assert len(baselines) == 3
    for baseline in baselines:
        assert baseline.causal == method.causal
        cost = np.array(baseline.pairs).mean() / np.array(method.pairs).mean()
        assert cost == pytest.approx(1, abs=0.15)
        assert baseline.divergence > 0


def test_times_are_taken_in_turn(report: PrefillReport) -> None:
    dense, method, *baselines = report.results
    assert len(dense.seconds) == len(method.seconds) == OPTIONS.repeats
    assert method.dense_seconds == dense.seconds
    assert all(not one.seconds for one in baselines)


def test_the_table_has_a_row_each(report: PrefillReport) -> None:
    text = prefill_table(report).markdown()
    assert text.count(METHOD) == 4
    assert "A-shape beside" in text
    assert "random beside" in text
    assert "random blocks beside" in text


class Shape:
    """A probe of nothing but sizes."""

    layer, first, rows, query_heads, kv_heads, scale = 0, 256, 100, 2, 1, 1.0


@pytest.mark.parametrize("make", [AShape, RandomCross, RandomBlocks])
def test_baselines_hold_each_rows_own_block(make: type[AShape]) -> None:
    rule = ChunkRule(128, 0)
    probe: LayerProbe = Shape()  # type: ignore[assignment]
    own = OwnBlock(rule).plan(probe)
    assert (own.spans[:, 1] - own.spans[:, 0] <= QUERY_BLOCK).all()
    lists = make(rule, 0.2).plan(probe)
    assert len(lists.indptr) == len(own.indptr)
    for unit in range(4):
        spans = lists.spans[lists.indptr[unit] : lists.indptr[unit + 1]]
        assert spans[-1, 1] == own.spans[unit, 1]
        assert spans[-1, 0] <= own.spans[unit, 0]


def test_equal_cost_is_found_by_counting() -> None:
    rule = ChunkRule(128, 128)
    small, large = (of_equal_cost(AShape, rule, 900, pairs) for pairs in (60_000, 200_000))
    assert 0 < small.share < large.share < 2


Call = tuple[str, list[str], PrefillOptions]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Runs that are requested; none begins."""
    calls: list[Call] = []

    def measure(model: str, methods: list[str], options: PrefillOptions, *_: object) -> None:
        calls.append((model, methods, options))
        raise MidfillError("not run")

    monkeypatch.setattr(bench, "measure_prefill", measure)
    return calls


def refused(*arguments: str) -> str:
    return str(CliRunner().invoke(make_app("prefill"), ["prefill", *arguments]).exception)


def test_all_methods_of_sparse_prefill_on_the_default_model(calls: list[Call]) -> None:
    assert refused() == refused("--quick") == "not run"
    assert calls == [
        (DEFAULT_MODEL, list(methods_of("prefill")), PrefillOptions()),
        (DEFAULT_MODEL, list(methods_of("prefill")), QUICK),
    ]


def test_others_can_be_named(calls: list[Call]) -> None:
    refused("--methods", "flexprefill:gamma=0.8,least=64,minference", "--model", "m",
          "--tokens", "3000", "--repeats", "2", "--threads", "4")  # fmt: skip
    ((model, methods, options),) = calls
    assert (model, methods) == ("m", ["flexprefill:gamma=0.8,least=64", "minference"])
    assert options == PrefillOptions(tokens=3000, repeats=2, threads=4)


def test_methods_of_another_kind_are_one_clear_line(calls: list[Call]) -> None:
    assert "did you mean 'flexprefill'" in refused("--methods", "flexprefil")
    assert refused("--methods", "cake") == (
        "--methods takes methods of sparse prefill (minference, flexprefill, hip-prefill), not cake"
    )
    assert not calls
