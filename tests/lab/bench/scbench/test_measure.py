"""A whole run on a tiny model: what is asked, what is cached, continued, shown."""

import dataclasses
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from midfill.errors import MidfillError
from midfill_lab.bench.methods.results import FULL, Variant
from midfill_lab.bench.scbench import measure as bench
from midfill_lab.bench.scbench.measure import SampleRun, ask, measure_scbench, reuses_of
from midfill_lab.bench.scbench.packages import PackageTexts
from midfill_lab.bench.scbench.plot import families, lines_of, plot_scbench
from midfill_lab.bench.scbench.report import (
    CONDITIONS,
    DIVERGENCE,
    LOGPROB,
    LengthResults,
    scbench_tables,
)
from midfill_lab.bench.scbench.results import ResultFile, Row, SCBenchOptions, SCBenchReport
from midfill_lab.bench.scbench.samples import Sample, SampleMaker
from midfill_lab.bench.scbench.session import Asked, SharedContextSession
from midfill_lab.bench.scbench.tasks import TASKS
from midfill_lab.reporting import markdown

LENGTH = 900
OPTIONS = SCBenchOptions(tasks=("kv", "many_shot"), lengths=(LENGTH,), contexts=2, turns=3)
SNAPKV = Variant("snapkv:budget=0.25,window=8", "snapkv:window=8", 0.25)
EVERY_KIND = ("flexprefill", "cacheblend:min_run=16", "cachecraft:alpha=0", "ape", "lazyllm")
Measure = Callable[..., SCBenchReport]


@pytest.fixture(scope="module")
def measure(tiny_model: str, texts: PackageTexts) -> Measure:
    def measure(
        variants: list[Variant], results: ResultFile, options: SCBenchOptions = OPTIONS
    ) -> SCBenchReport:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench, "read_packages", lambda seed, files: texts)
            return measure_scbench(tiny_model, variants, options, results=results, threads=1)

    return measure


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scbench") / "rows.jsonl"


@pytest.fixture(scope="module")
def report(measure: Measure, results: Path) -> SCBenchReport:
    return measure([SNAPKV], ResultFile(results))


@pytest.fixture(scope="module")
def sample(session: SharedContextSession, texts: PackageTexts) -> Sample:
    return make_sample(session, texts, seed=0)


def make_sample(session: SharedContextSession, texts: PackageTexts, seed: int) -> Sample:
    continuation = session.tokenizer.encode_continuation
    maker = SampleMaker(session.encode, continuation, texts, LENGTH, turns=3, seed=seed)
    return maker.make("kv", TASKS["kv"].draft, 0)


def run(session: SharedContextSession, sample: Sample, *methods: str) -> list[Row]:
    one = SampleRun(session, sample, LENGTH, methods, ResultFile(None))
    one.measure()
    return list(one.rows())


def test_the_method_sees_less_than_is_asked_where_what_it_keeps_is_held(sample: Sample) -> None:
    context, first = len(sample.context), len(sample.asked_alone(0))
    for reuse, mode, seen in (("held", "turns", first), ("held", "requests", context)):
        assert [each.compress_after for each in ask(sample, mode, reuse)] == [seen] * 3
    for mode in ("turns", "requests"):
        for each in ask(sample, mode, "anew"):
            assert each.compress_after == len(each.tokens)
    turns = ask(sample, "turns", "anew")
    for before, after in itertools.pairwise(turns):
        assert after.tokens[: len(before.tokens)] == before.tokens
        answered = before.tokens + before.exchange.answer
        assert after.tokens[: len(answered)] == answered, "the right answer stands between them"


def test_what_can_be_held_depends_on_the_kind_of_method() -> None:
    assert reuses_of(FULL) == ("anew",)
    assert reuses_of("snapkv:budget=0.25") == reuses_of("minference+snapkv") == ("held", "anew")
    assert reuses_of("cacheblend") == reuses_of("lazyllm") == reuses_of("ape+snapkv") == ("anew",)


def test_modes_differ_in_what_is_cached(session: SharedContextSession, texts: PackageTexts) -> None:
    sample = make_sample(session, texts, seed=1)  # of which other tests have cached nothing
    rows = {(row.mode, row.turn): row for row in run(session, sample)}
    context = len(sample.context)
    assert rows["turns", 0].cached_tokens == 0, "nothing is known of the context yet"
    for turn in (1, 2):
        asked, alone = rows["turns", turn], rows["requests", turn]
        assert asked.cached_tokens >= len(sample.asked_in_turn(turn - 1))
        assert context <= alone.cached_tokens < len(sample.asked_alone(turn))
        assert asked.prompt_tokens == len(sample.asked_in_turn(turn))
        assert alone.prompt_tokens == len(sample.asked_alone(turn))
        assert asked.cached_tokens > alone.cached_tokens


def test_turns_are_one_pass_over_the_whole_conversation(
    session: SharedContextSession, sample: Sample
) -> None:
    rows = [row for row in run(session, sample) if row.mode == "turns"]
    last = sample.exchanges[-1]
    tokens = sample.asked_in_turn(2) + list(last.answer)
    session.tenant = "nothing is cached of it"
    whole = session.log_likelihoods(tokens, FULL, 0, 1)
    for turn, row in enumerate(rows):
        start, answer = len(sample.asked_in_turn(turn)), sample.exchanges[turn].answer
        own = whole[start - 1 : start - 1 + len(answer)]
        assert row.logprob == float(own[np.arange(len(answer)), np.array(answer)].mean())


def test_the_order_of_requests_does_not_matter(
    session: SharedContextSession, sample: Sample
) -> None:
    backwards = dataclasses.replace(sample, exchanges=sample.exchanges[::-1])
    names = (SNAPKV.specification,)

    def answers(sample: Sample) -> dict[object, object]:
        return {
            (row.method, row.reuse, sample.exchanges[row.turn].question): (row.answer, row.logprob)
            for row in run(session, sample, *names)
            if row.mode == "requests"
        }

    assert answers(sample) == answers(backwards)


def test_a_method_that_keeps_everything_changes_nothing(
    session: SharedContextSession, sample: Sample
) -> None:
    rows = run(session, sample, "snapkv:budget=4000")
    full = {(row.mode, row.turn): row for row in rows if row.method == FULL}
    others = [row for row in rows if row.method != FULL]
    assert len(others) == 4 * len(sample.exchanges)
    for row in others:
        assert row.same
        assert row.logprob == full[row.mode, row.turn].logprob
        assert row.divergence == 0.0


def test_contexts_begin_as_raw_prompts_do(
    session: SharedContextSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = session.encode("one = 1")
    monkeypatch.setattr(session._prompts, "raw_bos", 7)
    assert session.encode("one = 1") == [7, *plain]


def test_answers_of_a_batch_are_those_of_each_alone(
    session: SharedContextSession, sample: Sample
) -> None:
    asked = [
        Asked(tuple(sample.asked_alone(turn)), method, 12, "t", len(sample.context))
        for turn in (0, 1)
        for method in (FULL, SNAPKV.specification)
    ]
    together = [answer.tokens for answer in session.generate(asked)]
    assert together == [session.generate([each])[0].tokens for each in asked]
    until = dataclasses.replace(asked[0], ends=lambda text: len(text) > 2)
    (cut,) = session.generate([until])
    assert cut.tokens == together[0][: len(cut.tokens)]
    assert len(cut.tokens) < 12


def test_what_is_held_differs_from_what_is_chosen_anew(
    session: SharedContextSession, sample: Sample
) -> None:
    rows = run(session, sample, SNAPKV.specification)
    found = {(row.mode, row.reuse, row.turn): row for row in rows if row.method != FULL}
    assert found["turns", "held", 0].logprob == found["turns", "anew", 0].logprob
    assert found["turns", "held", 2].logprob != found["turns", "anew", 2].logprob
    assert found["requests", "held", 0].logprob != found["requests", "anew", 0].logprob
    for row in found.values():
        assert row.divergence is not None
        assert row.divergence > 0.0
    assert found["turns", "anew", 0].held_slots == pytest.approx(row.prompt_tokens / 4, abs=3)


def test_methods_of_every_kind_are_asked(session: SharedContextSession, sample: Sample) -> None:
    rows = run(session, sample, *EVERY_KIND)
    assert {row.method for row in rows} == {FULL, *EVERY_KIND}
    likely = {row.method for row in rows if row.logprob is not None}
    assert likely == {FULL, "flexprefill"}, "others leave no log-probabilities"
    blended = [row for row in rows if row.method == "cacheblend:min_run=16"]
    assert blended[0].reused_tokens + blended[0].cached_tokens > len(sample.context) / 2
    assert any(row.reused_tokens for row in blended), "parts are found in another order"
    crafted = [row for row in rows if row.method == "cachecraft:alpha=0"]
    assert crafted[0].reused_tokens > 0, "what it keeps of parts it kept where it computed them"


def test_a_run_is_continued_with_what_it_lacks(
    measure: Measure, report: SCBenchReport, results: Path
) -> None:
    lines = results.read_text().splitlines()
    assert len(lines) == len(report.rows) == 2 * 2 * (2 * 3 + 4 * 3)
    again = measure([SNAPKV], ResultFile(results))
    assert again.rows == report.rows
    assert results.read_text().splitlines() == lines, "nothing is measured twice"
    results.write_text("".join(f"{line}\n" for line in lines[:-7]) + lines[-7][:30])
    continued = measure([SNAPKV], ResultFile(results))

    def answers(rows: list[Row]) -> list[Row]:  # but for what depends on what else is answered
        return [msgspec.structs.replace(row, cached_tokens=0, held_slots=None) for row in rows]

    assert answers(continued.rows) == answers(report.rows)
    assert len(results.read_text().splitlines()) == len(lines)


def test_a_length_beyond_the_model_is_refused(measure: Measure) -> None:
    options = msgspec.structs.replace(OPTIONS, lengths=(900, 5000))
    with pytest.raises(MidfillError, match="--length 5000 is beyond the 4096 tokens that"):
        measure([SNAPKV], ResultFile(None), options)


def test_tables_and_plots_show_every_method(report: SCBenchReport, tmp_path: Path) -> None:
    text = markdown(scbench_tables(report))
    assert text.count(f"| {SNAPKV.specification} | ") == 4 + 2
    assert re.search(r"prompts that were in the prefix cache: \d+ of \d+ in turns, \d+ of", text)
    assert f"**What full KV answers at {LENGTH} tokens**" in text
    found = LengthResults(report, LENGTH)
    assert found.held_share(SNAPKV.specification) == pytest.approx(0.25, abs=0.01)
    assert found.answered == frozenset(), "a model of random weights answers nothing"
    assert "These are: none." in text
    change = found.change(SNAPKV.specification, CONDITIONS[0], LOGPROB, "kv")
    firsts = {
        (row.method, row.number): row.logprob or 0.0
        for row in report.rows
        if row.task == "kv" and row.mode == "turns" and row.reuse == "anew" and row.turn == 0
    }
    expected = [firsts[SNAPKV.specification, n] - firsts[FULL, n] for n in (0, 1)]
    assert change is not None
    assert change.mean == pytest.approx(sum(expected) / 2)
    plot_scbench(report, tmp_path / "scbench.png")
    assert (tmp_path / "scbench.png").read_bytes().startswith(b"\x89PNG")


def test_methods_are_plotted_by_family() -> None:
    names = ["lazyllm", "snapkv:budget=0.5", "minference+snapkv", "cake"]
    assert families(names) == {
        "evict": ["snapkv:budget=0.5", "cake"],
        "prefill": ["minference+snapkv"],
        "rows": ["lazyllm"],
    }


def test_as_many_families_are_drawn_beside_each_other_as_stay_readable() -> None:
    counts = {"evict": 13, "quantize": 4, "prefill": 3, "reuse": 5, "decode": 1}
    groups = {kind: ["method"] * count for kind, count in counts.items()}
    assert lines_of(groups) == [["evict"], ["quantize", "prefill", "reuse"], ["decode"]]


@pytest.mark.slow
@pytest.mark.quality
@pytest.mark.real_model
def test_what_a_method_drops_before_it_is_asked_for_is_lost() -> None:
    options = SCBenchOptions(tasks=("kv", "many_shot"), lengths=(1000,), contexts=3, turns=3)
    sparse = Variant("streamingllm:budget=0.125", "streamingllm", 0.125)
    half = Variant("snapkv:budget=0.5", "snapkv", 0.5)
    report = measure_scbench("smollm2-135m", [sparse, half], options, results=ResultFile(None))
    found = LengthResults(report, 1000)
    first, later, _, requests, anew = CONDITIONS
    for condition in (later, requests):
        lost = found.change(sparse.specification, condition, DIVERGENCE)
        assert lost is not None
        assert lost.low > 0.0
    mean: dict[str, float] = {}
    for condition in CONDITIONS:
        change = found.change(half.specification, condition, DIVERGENCE)
        assert change is not None
        mean[condition.title] = change.mean
    assert mean[requests.title] > 2 * mean[anew.title], "with the question in view it keeps more"
    assert mean[later.title] > 2 * mean[first.title], "it has seen the first question alone"
