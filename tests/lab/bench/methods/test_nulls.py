"""Nulls: each spends its method's budget to the cell, the same way whatever else runs."""

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest
from fake_keys import CONFIG, KV_HEADS, LAYERS, fake_keys, fake_queries
from made_methods import made_up_calibrations, make_method
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.request import EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.methods import calibration_store
from midfill.methods.evict.compresskv import RetrievalVotes
from midfill.methods.evict.kvmerger import KVMerger
from midfill.methods.evict.method import CompressionMethod, RecallingMethod
from midfill.methods.evict.razorattention import retrieval_heads
from midfill.methods.evict.selection import Selection
from midfill.methods.evict.streaming_heads import HeadSplit
from midfill.methods.evict.uncomp import GroupedHeads
from midfill.methods.method import Method
from midfill.methods.registry import methods_of
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import ModelConfig
from midfill.runners.cpu.runner import CpuRunner
from midfill_lab.bench.methods.nulls import NULLS, make_null, null_titles, share_observations
from midfill_lab.bench.methods.session import MethodSession
from midfill_lab.bench.methods.spending import DrawnMethod, cells_per_head
from serving import build_engine, preempting_every, request, same, serve

DIGEST = "5" * 16
SPECIFICATIONS = {
    "streamingllm": "streamingllm:budget=48",
    "lacache": "lacache:budget=48",
    "kvmerger": "kvmerger:budget=48",
    "snapkv": "snapkv:budget=24,window=8",
    "cake": "cake:budget=24,window=8",
    "compresskv": "compresskv:budget=24,least=10,heads=2",
    "uncomp": "uncomp:budget=24",
    "razorattention": "razorattention:sinks=4,recent=32,share=0,induction=0.3",
    "duoattention": "duoattention:sinks=4,recent=32",
    "minicache": "minicache:first=1",
}
ALL = [(name, title) for name in SPECIFICATIONS for title in NULLS[name]]
each_null = pytest.mark.parametrize(("name", "title"), ALL)


def served(config: ModelConfig) -> ServedModel:
    digest = f"{config.layers:04}{config.kv_heads:04}" + DIGEST
    for calibration in made_up_calibrations(digest, config):
        calibration_store.store(calibration)
    return ServedModel(config=config, digest=digest)


def null(name: str, title: str, config: ModelConfig = CONFIG) -> CompressionMethod:
    return make_null(SPECIFICATIONS[name], title, served(config))


def select(method: CompressionMethod, prompt: int = 0, tokens: int = 120) -> Selection:
    keys, _ = fake_keys(tokens)
    compressor = method.start(CONFIG)
    if isinstance(method, RecallingMethod):
        _, compressor = method.recall(np.full(tokens, prompt, np.int32), "")
    queries = fake_queries(32)[:, 32 - min(method.observed_rows, 32) :]
    found = compressor.select(keys, queries)
    assert found is not None
    found.check(keys.counts)
    return found


def test_every_method_that_decides_at_the_prompts_end_has_nulls() -> None:
    assert set(SPECIFICATIONS) == set(methods_of("evict")) - {"h2o"}
    assert set(NULLS) == set(SPECIFICATIONS) | set(methods_of("quantize")) | set(
        methods_of("decode")
    )
    assert null_titles("h2o:budget=64") == ()
    assert set(null_titles("cake:window=16")) == {
        "at random", "evenly", "plain score", "reversed score", "equal layers",
    }  # fmt: skip


@each_null
def test_a_null_keeps_as_many_cells_as_its_method(name: str, title: str) -> None:
    own = make_method(SPECIFICATIONS[name], CONFIG)
    assert isinstance(own, CompressionMethod)
    expected = cells_per_head(select(own))
    found = cells_per_head(select(null(name, title)))
    if title == "no mean key":
        streaming = expected < 120
        assert (expected - found).tolist() == streaming.astype(int).tolist()
        return
    assert found.sum() == expected.sum()
    if title in ("at random", "evenly", "plain score", "equal layers", "equal groups"):
        assert np.ptp(found) <= 1
    if title == "reversed score" and name != "kvmerger":
        assert found.tolist() == expected.tolist()


@each_null
def test_a_null_keeps_something_else_and_what_is_drawn_is_the_prompts(
    name: str, title: str
) -> None:
    own = make_method(SPECIFICATIONS[name], CONFIG)
    assert isinstance(own, CompressionMethod)
    method = null(name, title)
    found = select(method)
    if title in ("plain average", "upper layer alone"):
        added, expected = found.added, select(own).added
        assert added is not None
        assert expected is not None
        assert not np.isclose(added.keys, expected.keys, atol=0.05).all(axis=1).any()
    elif title not in ("no mean key", "plain mean"):
        assert found.kept.tolist() != select(own).kept.tolist()
    drawn = {tuple(select(method, prompt).kept.tolist()) for prompt in range(6)}
    assert (len(drawn) > 1) == ("random" in title)
    assert select(method).kept.tolist() == found.kept.tolist()


def test_the_plain_score_is_snapkv_with_the_methods_window_and_kernel() -> None:
    for name, kernel in (("cake", 5), ("compresskv", 5), ("uncomp", 7)):
        plain = make_method(f"snapkv:budget=24,window=8,kernel={kernel}", CONFIG)
        assert isinstance(plain, CompressionMethod)
        found, expected = select(null(name, "plain score")), select(plain)
        assert found.kept.tolist() == expected.kept.tolist()
        assert found.indptr.tolist() == expected.indptr.tolist()


def test_heads_that_vote_are_all_or_other_ones() -> None:
    config = served(CONFIG).config
    all_vote = null("compresskv", "all heads vote")
    assert isinstance(all_vote, RetrievalVotes)
    assert all_vote.heads == (tuple(range(config.query_heads)),) * LAYERS
    drawn = null("compresskv", "random heads vote")
    assert isinstance(drawn, DrawnMethod)
    votes = drawn.draw(np.random.default_rng(0))
    assert isinstance(votes, RetrievalVotes)
    assert [len(set(heads)) for heads in votes.heads] == [2] * LAYERS


def test_heads_and_groups_are_reversed_or_drawn_and_equally_many() -> None:
    for name in ("duoattention", "razorattention"):
        own = make_method(SPECIFICATIONS[name], CONFIG)
        least, drawn = null(name, "reversed heads"), null(name, "random heads")
        assert isinstance(own, HeadSplit)
        assert isinstance(least, HeadSplit)
        assert isinstance(drawn, DrawnMethod)
        other = drawn.draw(np.random.default_rng(0))
        assert isinstance(other, HeadSplit)
        assert sum(own.retrieval) == sum(least.retrieval) == sum(other.retrieval)
        assert own.retrieval != other.retrieval != least.retrieval
        if name == "razorattention":
            tables = made_up_calibrations("", CONFIG)[1].tables
            share = 1 - sum(least.retrieval) / len(least.retrieval)
            best = retrieval_heads(tables, CONFIG, share, 0.0)
            assert (~best).tolist() == list(least.retrieval)
    groups = null("uncomp", "reversed groups")
    own = make_method(SPECIFICATIONS["uncomp"], CONFIG)
    assert isinstance(groups, GroupedHeads)
    assert isinstance(own, GroupedHeads)
    for found in (groups, own):
        high = np.array(found.high).reshape(LAYERS, KV_HEADS)
        assert (high.sum(axis=1) == (KV_HEADS + 1) // 2).all()
    assert groups.high != own.high


def test_fixed_windows_are_of_one_length_but_for_a_factor_of_two() -> None:
    specification = "kvmerger:budget=37,recent=0,heavy=0"
    windows = make_null(specification, "fixed windows", served(CONFIG))
    plain = make_null(specification, "plain mean", served(CONFIG))
    sizes, others = (set(set_sizes(select(one, tokens=128))) for one in (windows, plain))
    assert sizes == {2, 4}
    assert max(others) > 2 * min(others)


def set_sizes(selection: Selection) -> list[int]:
    """Of how many tokens the entries of all heads are."""
    assert selection.added is not None
    assert selection.added.terms is not None
    merged = np.exp(selection.added.terms.score_bias).round().astype(int)
    return [*[1] * len(selection.kept), *merged.tolist()]


def test_the_least_similar_neighbours_merge_first_or_the_same_sets_by_their_mean() -> None:
    method, least = KVMerger(budget=48), null("kvmerger", "reversed score")
    assert isinstance(least, KVMerger)
    keys = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    assert least.similarity(keys).tolist() == (-method.similarity(keys)).tolist()
    one, mean = select(method), select(null("kvmerger", "plain mean"))
    assert one.kept.tolist() == mean.kept.tolist()
    assert one.added is not None
    assert mean.added is not None
    assert one.added.indptr.tolist() == mean.added.indptr.tolist()
    assert not np.allclose(one.added.keys, mean.added.keys)


def test_a_method_that_keeps_to_no_budget_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"kvmerger: .* epsilon is left out"):
        make_null("kvmerger:epsilon=0.75", "accumulated score", served(CONFIG))


def test_a_method_that_trims_meanwhile_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"cake: .* leave out cascade=1"):
        make_null("cake:cascade=1", "evenly", served(CONFIG))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuRunner]:
    folder = write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama")
    runner = CpuRunner.load(
        open_checkpoint(folder), slots=400, threads=1, weights="f32", kv_cache_dtype="f32"
    )
    yield runner
    runner.close()


@pytest.mark.parametrize(
    ("name", "title"),
    [("cake", "at random"), ("compresskv", "random heads vote"), ("uncomp", "random groups"),
     ("razorattention", "random heads"), ("duoattention", "plain score")],
)  # fmt: skip
def test_load_and_preemption_change_no_bit(runner: CpuRunner, name: str, title: str) -> None:
    sampling = EngineSamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
    method = null(name, title, runner.config)
    prompts = [
        tuple(random.Random(length).choices(range(1, VOCAB), k=length)) for length in (70, 90, 110)
    ]
    asked = [request(f"{at}", tokens, sampling) for at, tokens in enumerate(prompts)]
    alone = [serve(build_engine(runner, method=method), [one])[one.request_id, 0] for one in asked]
    dense = serve(build_engine(runner), asked[:1])["0", 0]
    assert not same(alone[0], dense)
    together = serve(build_engine(runner, token_budget=17, method=method), asked)
    preempted = build_engine(runner, method=method)
    again = serve(preempted, asked, after_step=preempting_every(7))
    assert preempted.stats().preemptions > 0
    for at, expected in enumerate(alone):
        assert same(together[f"{at}", 0], expected)
        assert same(again[f"{at}", 0], expected)


@pytest.mark.parametrize("specification", ["mikv:ratio=0.3,low=4", "zipcache:high=8,low=4"])
def test_nulls_that_look_at_the_same_rows_observe_a_prompt_once(
    runner: CpuRunner, specification: str
) -> None:
    def nulls() -> dict[str, CompressionMethod]:
        served = ServedModel(runner.config)
        titles = null_titles(specification)
        return {title: make_null(specification, title, served) for title in titles}

    sampling = EngineSamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    tokens = tuple(random.Random(0).choices(range(1, VOCAB), k=150))
    asked = {title: request("r", tokens, sampling, method=title) for title in nulls()}
    alone = {
        title: serve(build_engine(runner, methods=nulls()), [one])["r", 0]
        for title, one in asked.items()
    }
    together = nulls()
    share_observations(together.values())
    engine = build_engine(runner, methods=together)
    found = {title: serve(engine, [one])["r", 0] for title, one in asked.items()}
    assert all(same(found[title], expected) for title, expected in alone.items())
    observed = {title for title, answer in found.items() if answer.cached_tokens < 128}
    apart = {"accumulated score"} if "zipcache" in specification else {"eviction"}
    assert observed == {next(iter(asked))} | apart


def test_the_engine_holds_as_many_slots_under_a_null_as_under_its_method(
    tiny_model: str,
) -> None:
    extra: dict[str, Method] = {}
    session = MethodSession(tiny_model, threads=1, extra=extra)
    tokens = random.Random(0).choices(range(1, 300), k=300)
    try:
        for calibration in made_up_calibrations(
            session.served_model.digest, session.served_model.config
        ):
            calibration_store.store(calibration)
        for name, specification in SPECIFICATIONS.items():
            held = session.hold(tokens, specification, 2, cold=False).after_prefill
            assert held < len(tokens)
            for title in null_titles(specification):
                null_name = f"{specification} {title}"
                extra[null_name] = make_null(specification, title, session.served_model)
                found = session.hold(tokens, null_name, 2, cold=False).after_prefill
                assert found == held or (title == "no mean key" and held - 1 <= found <= held), name
    finally:
        session.close()


def test_a_null_leaves_its_methods_settings_alone() -> None:
    method = null("razorattention", "no mean key")
    assert isinstance(method, HeadSplit)
    own = make_method(SPECIFICATIONS["razorattention"], CONFIG)
    assert isinstance(own, HeadSplit)
    assert dataclasses.replace(own.rule, mean=False) == method.rule
