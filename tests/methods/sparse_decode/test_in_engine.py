"""Methods of sparse decoding in the engine: exact where they read all, equal under any load."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from made_methods import (
    SEARCHED_PROMPT,
    made_up_calibrations,
    small_method,
    whole_method,
)
from method_load import Alone
from tiny_checkpoints import VOCAB

from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.methods.registry import methods_of
from midfill.methods.sparse_decode.lserve import SplitPages
from midfill.methods.sparse_decode.method import ChosenPages
from midfill.methods.sparse_decode.sequence import DecodeReads
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.page_selection import PageRule
from midfill.runners.forward.tree_search import TreeRule
from serving import (
    Answer,
    FixedCost,
    build_engine,
    preempting_every,
    request,
    same,
    serve,
    torch_runner,
)

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
THREE = EngineSamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0, n=3)
each_method = pytest.mark.parametrize("name", methods_of("decode"))
each_combination = pytest.mark.parametrize("name", [*methods_of("decode"), SEARCHED_PROMPT])
PAGES = ChosenPages(PageRule(4, page=16, summary=4), 4)
"""All heads choose, from 64 keys on."""
TREE = ChosenPages(TreeRule(16, block=2, window=24, sinks=4), 4)
"""All heads search, from 60 keys on."""
each_rule = pytest.mark.parametrize("choosing", [PAGES, TREE], ids=["pages", "tree"])


@pytest.fixture(scope="module")
def runner(llama: Checkpoint) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(llama, slots=1400, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def alone(runner: CpuRunner) -> Alone:
    return Alone(runner, PARAMS)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(1, VOCAB, length).tolist())


def reads(engine: Engine) -> DecodeReads:
    found = engine._methods.decode_reads, engine._methods.sentence_reads
    return max(found, key=lambda one: one.rows)


def ask(engine: Engine, tokens: tuple[int, ...], method: str = "", tenant: str = "") -> Answer:
    wanted = request("r", tokens, PARAMS, tenant=tenant, method=method or None)
    return serve(engine, [wanted])["r", 0]


@each_method
def test_a_budget_of_everything_gives_the_bits_of_the_whole_kv(
    runner: CpuRunner, name: str
) -> None:
    tokens = prompt(330)
    dense = ask(build_engine(runner), tokens)
    one = build_engine(runner, method=whole_method(name, runner.config))
    assert same(ask(one, tokens), dense)
    assert reads(one).pairs == reads(one).causal > 0


@each_method
def test_fewer_keys_change_the_answer_but_not_its_first_token(
    runner: CpuRunner, alone: Alone, name: str
) -> None:
    tokens = prompt(330)
    dense = ask(build_engine(runner), tokens)
    found = alone(name, tokens)
    assert found.logprobs[0] == dense.logprobs[0]
    assert found.logprobs[1:] != dense.logprobs[1:]


@each_combination
@pytest.mark.parametrize("budget", [7, 100])
def test_load_changes_no_bit(alone: Alone, name: str, budget: int) -> None:
    """Neither batching nor chunks, nor drafts: a prompt below the budget is among them."""
    alone.check_load(name, [prompt(length, length) for length in (1, 3, 191, 192, 330)], budget)


@pytest.mark.parametrize(
    "name", [name for name in (*methods_of("decode"), SEARCHED_PROMPT) if name != "sentencekv"]
)
@pytest.mark.parametrize("steps", [3, 11])
def test_preemption_changes_no_bit(alone: Alone, name: str, steps: int) -> None:
    """Rows under sentencekv run one by one, so it has preemptions of its own, which are rarer."""
    alone.check_preemption(name, [prompt(length, length) for length in (100, 250, 330)], steps)


@each_combination
def test_both_runners_give_one_answer(llama: Checkpoint, alone: Alone, name: str) -> None:
    tokens = prompt(330)
    method = small_method(name, llama.config)
    found = ask(build_engine(torch_runner(llama, slots=500), method=method), tokens)
    expected = alone(name, tokens)
    assert found.tokens == expected.tokens
    for score, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert score.logprob == pytest.approx(other.logprob, abs=1e-3)


@each_method
def test_a_request_for_several_answers_gives_each_as_if_alone(
    runner: CpuRunner, alone: Alone, name: str
) -> None:
    for step in (None, 1, 9):
        one = build_engine(runner, token_budget=100, method=small_method(name, runner.config))
        cancelled = {} if step is None else {step: ("r", 1)}
        found = serve(one, [request("r", prompt(250), THREE)], cancellations=cancelled)
        for index in (0, 2) if cancelled else (0, 1, 2):
            assert same(found["r", index], alone(name, prompt(250)))


@each_method
def test_exact_kv_of_prompts_is_shared_and_that_of_answers_never(
    runner: CpuRunner, name: str
) -> None:
    """A document that goes on with an answer finds its prompt's KV, not the answer's."""
    method = small_method(name, runner.config)
    one = build_engine(runner, methods={"sparse": method, "none": None})
    tokens = prompt(330)
    first = ask(one, tokens, "sparse")
    longer = (*tokens, *first.tokens[:30])
    dense = ask(build_engine(runner), longer)
    found = ask(one, longer, "none")
    assert found.cached_tokens == 330
    assert same(found, dense)
    assert ask(one, tokens, "sparse", tenant="another").cached_tokens == 0


def test_a_cached_prompt_needs_no_second_pass_over_its_keys(runner: CpuRunner) -> None:
    """Summaries stay with the prompt's KV, wherever in a page the prompt ends."""
    one = build_engine(runner, methods={"sparse": PAGES, "none": None})
    tokens = prompt(201)
    alone = ask(build_engine(runner, method=PAGES), tokens)
    assert same(ask(one, tokens, "sparse"), alone)
    first = reads(one).summaries
    assert first >= 200 // 4 - 2
    again = ask(one, tokens, "sparse")
    assert again.cached_tokens == 200
    assert same(again, alone)
    # Only pages that the answer fills are summarised anew.
    assert reads(one).summaries - first <= 40 // 4 + 1
    assert same(
        ask(one, (*tokens[:150], 7, 7), "sparse"),
        ask(build_engine(runner, method=PAGES), (*tokens[:150], 7, 7)),
    )


def test_summaries_are_forgotten_with_the_kv_that_they_are_of(runner: CpuRunner) -> None:
    """Prompts that take each other's slots don't find each other's summaries."""
    prompts = [prompt(length, seed) for seed in (1, 2, 3, 1, 2) for length in (400, 390)]
    expected = [ask(build_engine(runner, method=PAGES), tokens) for tokens in prompts]
    one = build_engine(runner, method=PAGES)
    for tokens, answer in zip(prompts, expected, strict=True):
        assert same(ask(one, tokens), answer)
    kind = one._methods._sparse_decode
    assert kind._state is not None
    assert kind._state.table.used <= 1400 // 4, "only cached pages are still known"


@each_rule
@pytest.mark.parametrize("interval", [1, 3, 4, 7])
def test_drafts_preemption_and_company_change_no_choice(
    runner: CpuRunner, interval: int, choosing: ChosenPages
) -> None:
    """For intervals that divide no page as well."""
    method = replace(choosing, choice_interval=interval)
    prompts = [prompt(length, length) for length in (62, 120, 199)]
    expected = [ask(build_engine(runner, method=method), tokens) for tokens in prompts]
    requests = [request(str(i), tokens, PARAMS) for i, tokens in enumerate(prompts)]
    drafting = build_engine(runner, method=method, step_cost=FixedCost(0.0))
    found = [serve(drafting, requests)]
    stats = drafting.stats()
    assert stats.draft_tokens > stats.accepted_tokens, "some are wrong"
    assert interval != 4 or stats.accepted_tokens > 0, "and some are right"
    found.append(
        serve(build_engine(runner, method=method), requests, after_step=preempting_every(5))
    )
    for answers in found:
        for index, one in enumerate(expected):
            assert same(answers[str(index), 0], one)


@each_rule
def test_rows_choose_once_an_interval(runner: CpuRunner, choosing: ChosenPages) -> None:
    counts = []
    for interval in (1, 4):
        one = build_engine(runner, method=replace(choosing, choice_interval=interval))
        ask(one, prompt(200))
        counts.append(reads(one).choices)
        assert reads(one).rows == 39
    assert counts == [39, 10]


@each_rule
def test_pages_read_are_constant_once_the_text_exceeds_the_budget(
    llama: Checkpoint, choosing: ChosenPages
) -> None:
    runner = torch_runner(llama, slots=1400)
    read = []
    for length in (100, 200, 400, 450):
        one = build_engine(runner, method=choosing)
        ask(one, prompt(length))
        found = reads(one)
        heads = llama.config.layers * llama.config.query_heads
        read.append(found.pairs / found.rows / heads)
        assert found.causal / found.rows / heads > length
    assert max(read) - min(read) < 3.5, "rows read 3 pages and a part of the newest"
    assert max(read) <= 4 * 16 + 3


@pytest.mark.parametrize(
    "retrieval",
    [
        (True, True, False, False, True, False),
        (False,) * 6,
        (True,) * 6,
    ],
)
@pytest.mark.parametrize("length", [3, 16, 130])
def test_layers_may_have_no_head_that_chooses_or_none_that_streams(
    llama: Checkpoint, runner: CpuRunner, retrieval: tuple[bool, ...], length: int
) -> None:
    """Prompts below the sinks among them; both runners agree."""
    small = small_method("lserve", llama.config)
    assert isinstance(small, SplitPages)
    method = replace(small, retrieval=retrieval, selection_rule=PAGES.selection_rule)
    found = ask(build_engine(runner, method=method), prompt(length))
    expected = ask(build_engine(torch_runner(llama, slots=300), method=method), prompt(length))
    assert found.tokens == expected.tokens


def test_streaming_heads_hold_as_much_however_long_the_text_is(runner: CpuRunner) -> None:
    """A text that is longer by 100 tokens takes as many slots more as its other heads need."""
    method = small_method("lserve", runner.config)
    assert isinstance(method, SplitPages)
    share = sum(method.retrieval) / len(method.retrieval)
    held = []
    for length in (200, 300, 400):
        one = build_engine(runner, method=method)
        one.add(request("r", prompt(length), PARAMS))
        while not any(sequence.decoding for sequence in one._queues.running):
            one.step()
        [sequence] = one._queues.running
        assert sequence.kv is not None
        held.append(sequence.kv.owned)
        one.cancel("r")
    assert np.diff(held).tolist() == pytest.approx([100 * share] * 2, abs=1)


def test_calibrations_are_those_of_duoattention(llama: Checkpoint) -> None:
    gates = next(
        one.tables["gates"]
        for one in made_up_calibrations("d" * 16, llama.config)
        if one.method == "duoattention"
    )
    method = small_method("lserve", llama.config)
    assert isinstance(method, SplitPages)
    chosen = method.choosing_heads(llama.config)
    assert chosen.shape == gates.shape
    assert gates[chosen].min() >= gates[~chosen].max()
    assert chosen.sum() == chosen.size // 2
