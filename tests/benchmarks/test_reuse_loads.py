"""A whole run on a tiny model: three loads, counted, and the table of them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny
from typer.testing import CliRunner

from benchmarks.__main__ import make_app
from benchmarks.reuse_loads import FULL, LoadOptions, LoadReport, load_table, measure_loads
from benchmarks.reuse_prompts import AGENTS, CHUNKS, EDITS, LoadSizes

COMM, CRAFT, SHARE = "kvcomm:gamma=1", "cachecraft", "kvshare:eps=0,refresh=0"
REPAIRING = {CHUNKS: CRAFT, EDITS: SHARE}
OPTIONS = LoadOptions(
    methods={AGENTS: [COMM, "kvcomm:gamma=0"], CHUNKS: [CRAFT], EDITS: [SHARE, "kvshare"]},
    sizes=LoadSizes(prompts=4, piece=70, families=1, texts=2, pool=5, shown=3),
    steps=8,
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> LoadReport:
    folder: Path = tmp_path_factory.mktemp("tiny") / "long"
    write_tiny("llama", folder, max_position_embeddings=8192)
    saved: list[int] = []
    report = measure_loads(
        str(folder), OPTIONS, threads=1, save=lambda one: saved.append(len(one.results))
    )
    assert saved == [1, 2, 3]
    return report


def rows(report: LoadReport, load: str, name: str) -> Sequence[int]:
    (result,) = (each for each in report.results if each.load == load)
    return [each.row_layers for each in result.by_method[name].answers]


def test_every_load_is_answered_with_each_method_and_the_nulls_of_the_first(
    report: LoadReport,
) -> None:
    agents, chunks, edits = report.results
    nulls = {
        AGENTS: ["no offsets", "random anchor", "mean of anchors"],
        CHUNKS: ["no repair", "random tokens", "first tokens"],
        EDITS: ["no repair", "random tokens", "first tokens"],
    }
    for result in report.results:
        first, *others = OPTIONS.methods[result.load]
        named = [f"{first} {title}" for title in nulls[result.load]]
        assert list(result.by_method) == [FULL, first, *named, *others]
    assert (len(agents.tokens), len(chunks.tokens), len(edits.tokens)) == (12, 4, 2 + 4)


def test_exact_answers_are_exact_and_methods_take_kv_from_elsewhere(report: LoadReport) -> None:
    for result in report.results:
        full = result.by_method[FULL].answers
        assert all(one.divergence == 0 and one.first_same for one in full)
        assert not any(one.reused_tokens for one in full)
        taken = [
            one.reused_tokens for one in result.by_method[OPTIONS.methods[result.load][0]].answers
        ]
        assert taken[0] == 0 < max(taken)
        for name, found in result.by_method.items():
            for one in found.answers:
                assert (one.divergence > 1e-9) == (one.reused_tokens > 0), name


@pytest.mark.parametrize("load", [CHUNKS, EDITS])
def test_nulls_compute_as_many_rows_as_the_method(report: LoadReport, load: str) -> None:
    method = REPAIRING[load]
    nothing = rows(report, load, f"{method} no repair")
    assert sum(nothing) < sum(rows(report, load, method)) < sum(rows(report, load, FULL))
    for title in ("random tokens", "first tokens"):
        assert sum(rows(report, load, f"{method} {title}")) == sum(rows(report, load, method))


def test_prompts_of_agents_are_assembled_or_computed_as_the_gate_says(report: LoadReport) -> None:
    agents = report.results[0]
    always, never = (agents.by_method[name] for name in OPTIONS.methods[AGENTS])
    # Of each agent, two prompts are computed before any is assembled.
    assert [one.reused_tokens > 0 for one in always.answers] == [False] * 6 + [True] * 6
    assert not any(one.reused_tokens for one in never.answers)
    assert sum(rows(report, AGENTS, COMM)) == sum(rows(report, AGENTS, f"{COMM} no offsets"))
    assert never.method_bytes > always.method_bytes > 0, "each whole prompt leaves anchors"
    assert agents.by_method[FULL].method_bytes == 0


def test_the_table_has_a_row_for_each_load_and_method(report: LoadReport) -> None:
    table = load_table(report)
    assert [row["method"] for row in table.rows] == [
        name for result in report.results for name in result.by_method
    ]
    by_method = {row["method"]: row for row in table.rows if row["load"].startswith(CHUNKS)}
    assert by_method[FULL]["rows x layers"] == "1.00"
    assert by_method[CRAFT]["minus the method's"] == "" == by_method[FULL]["KL"]
    assert by_method[f"{CRAFT} no repair"]["minus the method's"][0] in "+-"
    assert "numpy" in table.markdown()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loads", "agents,mails"], "--loads takes agents, chunks, edits, not 'mails'"),
        (
            ["--methods", "cake"],
            "--methods takes cacheblend, cachecraft, kvshare, kvcomm, not cake",
        ),
        (["--methods", "kvcomm:gamma=2"], "kvcomm: gamma must be from 0 to 1, not 2"),
    ],
)
def test_bad_options_are_one_clear_line(arguments: list[str], message: str) -> None:
    found = CliRunner().invoke(make_app("reuse-loads"), ["reuse-loads", *arguments])
    assert str(found.exception) == message
