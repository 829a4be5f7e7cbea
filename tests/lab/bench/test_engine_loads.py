"""What a load's steps compute: rows per stream, at the contexts that they have by then."""

import pytest
from tiny_checkpoints import write_tiny

from midfill.errors import MidfillError
from midfill_lab.bench.engine_loads import Load, LoadBench, open_engine, steps_of
from midfill_lab.bench.roofline.work import Rows

DECODE = Load(name="decode", streams=3, context=50, repeats=12)
EXTEND = Load(name="extend", streams=2, context=50, rows=8, repeats=4)
BESIDE = Load(name="beside", streams=3, context=50, prompt=40, repeats=4)


def test_the_middle_step_of_a_round_stands_for_all() -> None:
    assert steps_of(DECODE, 0, 1, 1) == [[Rows(3, 50)]]
    assert steps_of(DECODE, 0, 5, 1) == [[Rows(3, 52)]]
    assert steps_of(DECODE, 6, 6, 1) == [[Rows(3, 58)]]


def test_cached_prompts_grow_by_the_same_tokens_each_time() -> None:
    assert steps_of(EXTEND, 2, 2, 3) == [[Rows(2, 50, 8)]]


def test_a_prompt_beside_streams_is_cut_into_the_steps_that_it_took() -> None:
    assert steps_of(BESIDE, 0, 1, 3) == [
        [Rows(3, 50), Rows(1, 0, 13, outputs=0)],
        [Rows(3, 51), Rows(1, 13, 13, outputs=0)],
        [Rows(3, 52), Rows(1, 26, 14, outputs=1)],
    ]
    assert steps_of(BESIDE, 2, 1, 2)[0][0] == Rows(3, 50)  # streams begin anew with each prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny("llama", tmp_path_factory.mktemp("tiny")))


def test_streams_that_end_too_early_are_an_error(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(model, 1, lambda _: None) as engine:
        monkeypatch.setattr(LoadBench, "answer_tokens", staticmethod(lambda _: DECODE.repeats))
        with (
            pytest.raises(MidfillError, match=r"^decode: an answer ended before"),
            engine.bench.running(DECODE) as spend,
        ):
            spend(DECODE.repeats)


def test_a_repeat_counts_its_steps(model: str) -> None:
    with open_engine(model, 1, lambda _: None) as engine:
        with engine.bench.running(DECODE) as spend:
            assert spend(5).steps == 1
        with engine.bench.running(BESIDE) as spend:
            spent = spend(2)
    assert spent.steps >= 1
    assert 0 < spent.forward <= spent.busy
