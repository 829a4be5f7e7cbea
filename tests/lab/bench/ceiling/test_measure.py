"""Loads of all phases are measured and stand beside what the model and the machine allow."""

from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny
from typer.testing import CliRunner

from midfill.errors import OptionError
from midfill_lab.bench.ceiling.measure import measure_ceiling
from midfill_lab.bench.ceiling.report import ceiling_tables
from midfill_lab.bench.ceiling.results import CeilingOptions, CeilingReport
from midfill_lab.bench.roofline import ceilings
from midfill_lab.bench.roofline.ceilings import Resource
from midfill_lab.bench.roofline.work import ATTENTION
from midfill_lab.cli.bench.app import app

pytestmark = pytest.mark.usefixtures("small_roofline")

OPTIONS = CeilingOptions(prefill=(70, 200), contexts=(20, 150), streams=(1, 3), rounds=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny("llama", tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def report(model: str) -> CeilingReport:
    return measure_ceiling(model, OPTIONS, threads=1)


def test_every_load_is_bounded_and_measured(report: CeilingReport) -> None:
    assert [each.load.name for each in report.loads] == [load.name for _, load in OPTIONS.loads()]
    for ceiling in report.loads:
        assert ceiling.bound.seconds > 0
        assert ceiling.seconds is not None
        assert ceiling.reached is not None
        assert ceiling.reached.lowest <= ceiling.reached.median <= ceiling.reached.highest


def test_decodes_that_memory_binds_are_compared_with_a_plain_read(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "cache_bytes", lambda: 0)  # nothing lies in a cache
    options = CeilingOptions(prefill=(70,), contexts=(20,), streams=(1,), rounds=2)
    found = {each.phase: each for each in measure_ceiling(model, options, threads=1).loads}
    assert found["prefill"].of_plain_read is None
    assert found["mixed"].of_plain_read is None
    assert found["decode"].bound.resource is Resource.MEMORY
    assert found["decode"].of_plain_read is not None
    assert 0.0 < found["decode"].of_plain_read.lowest < 1.0  # a tiny model's step does much else


def test_bounds_grow_with_context_and_batch(report: CeilingReport) -> None:
    least = {each.load.name: each.bound for each in report.loads}
    assert least["prefill of 70"].operations < least["prefill of 200"].operations
    one, three = least["decode at 20, 1 stream"], least["decode at 20, 3 streams"]
    longer = least["decode at 150, 1 stream"]
    assert three.operations == pytest.approx(3 * one.operations)
    assert one.bytes < three.bytes < longer.bytes + 2 * longer.bytes


def test_a_step_reads_the_engines_kv(report: CeilingReport) -> None:
    """Within a round the middle step's context counts; a stream has the rows of the prompt, too."""
    slot = report.engine.kv_bytes / report.engine.slots
    decode = next(each for each in report.loads if each.load.name == "decode at 150, 3 streams")
    read = sum(part.bytes for part in decode.bound.parts if part.name == ATTENTION)
    keys = read / slot / 3
    assert keys == int(keys)
    assert 150 < keys <= 150 + decode.load.repeats


def test_a_prompt_beside_streams_counts_with_their_tokens(report: CeilingReport) -> None:
    beside = next(each for each in report.loads if each.load.prompt and each.load.streams == 3)
    steps = (beside.tokens - 70) / 3
    assert steps == int(steps) >= 1


def test_tables_say_what_was_measured_where(report: CeilingReport) -> None:
    loads, moved = (table.markdown() for table in ceiling_tables(report))
    assert "| prefill of 200 |" in loads
    assert report.machine.processor in loads
    assert "GB/s from memory" in loads
    assert "| a quarter of the KV kept |" in moved


def test_loads_that_exceed_the_context_are_bounded_only(model: str) -> None:
    options = CeilingOptions(prefill=(50,), contexts=(495,), streams=(1,), rounds=1)
    prompt, decode, _ = measure_ceiling(model, options, threads=1).loads
    assert prompt.seconds is not None
    assert decode.seconds is None
    assert decode.bound.seconds > 0


def test_too_long_a_prompt_is_refused(model: str) -> None:
    with pytest.raises(OptionError, match=r"^--prefill 512: the model's context is 512 tokens"):
        measure_ceiling(model, CeilingOptions(prefill=(512,)), threads=1)


def test_the_command_writes_figures_table_and_plot(model: str, tmp_path: Path) -> None:
    json, docs, plot = (tmp_path / name for name in ("c.json", "c.md", "c.svg"))
    small = ["--prefill", "40", "--contexts", "20", "--streams", "1,2", "--rounds", "1"]
    files = ["--json", str(json), "--docs", str(docs), "--plot", str(plot)]
    result = CliRunner().invoke(app, ["ceiling", model, "--threads", "1", *small, *files])
    assert result.exit_code == 0, result.output
    assert '"roofline"' in json.read_text()
    assert "<!-- ceiling -->" in docs.read_text()
    assert "</svg>" in plot.read_text()


def test_what_is_no_list_of_numbers_is_refused(model: str) -> None:
    result = CliRunner().invoke(app, ["ceiling", model, "--streams", "many"])
    assert result.exit_code != 0
    assert "'many' is no list of numbers" in result.output
