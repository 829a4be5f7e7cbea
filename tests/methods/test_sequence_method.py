"""Several methods on one request, bit by bit against the parts alone, and which can't be
together."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_methods import make_method
from tiny_checkpoints import VOCAB, write_tiny, write_variant

from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.methods.method import CombinedMethod
from midfill.methods.registry import resolve_method
from midfill.methods.resolver import AllowedMethods
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import Answer, build_engine, preempting_every, request, same, serve, torch_runner

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
SPARSE = "flexprefill:chunk=64,dense=64,least=64,gamma=0.4"
APART = "ape:temperature=0.7,scale=0.8"
EVICT, KEEP_ALL = "snapkv:budget=48", "snapkv:budget=1000"
PAIRS = {"sparse prefill": f"{SPARSE}+{EVICT}", "files apart": f"{APART}+{EVICT}"}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuRunner]:
    checkpoint = open_checkpoint(write_variant("llama", tmp_path_factory.mktemp("t") / "llama"))
    runner = CpuRunner.load(checkpoint, slots=1600, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, VOCAB), k=length)


FILES, BOUNDS = [3], [1]
for seed, length in enumerate((70, 45, 90)):
    FILES += [*text(length, seed), 3]
    BOUNDS.append(len(FILES))
PROMPT = [*FILES, *text(60, 9)]


def engine(runner: CpuRunner, specification: str, budget: int = 512) -> Engine:
    method = make_method(specification, runner.config)
    return build_engine(runner, token_budget=budget, method=method)


def ask(engine: Engine) -> Answer:
    asked = request("r", PROMPT, PARAMS, contexts=tuple(BOUNDS))
    return serve(engine, [asked])["r", 0]


@pytest.mark.parametrize("first", [SPARSE, APART])
def test_an_eviction_that_keeps_all_changes_no_bit_of_the_other(
    runner: CpuRunner, first: str
) -> None:
    alone = ask(engine(runner, first))
    assert same(ask(engine(runner, f"{first}+{KEEP_ALL}")), alone)
    assert not same(alone, ask(build_engine(runner)))


@pytest.mark.parametrize(
    "neutral", ["flexprefill:chunk=64,dense=2000", "ape:temperature=1,scale=1"]
)
def test_a_first_method_that_changes_nothing_leaves_the_evictions_bits(
    runner: CpuRunner, neutral: str
) -> None:
    asked = request("r", PROMPT, PARAMS)
    alone = serve(engine(runner, EVICT), [asked])["r", 0]
    assert same(serve(engine(runner, f"{neutral}+{EVICT}"), [asked])["r", 0], alone)


@pytest.mark.parametrize("first", [SPARSE, APART])
def test_the_prompt_is_the_firsts_and_what_follows_is_both(runner: CpuRunner, first: str) -> None:
    alone, both = ask(engine(runner, first)), ask(engine(runner, f"{first}+{EVICT}"))
    assert both.logprobs[0] == alone.logprobs[0]
    assert both.logprobs[1:] != alone.logprobs[1:]
    evicted = serve(engine(runner, EVICT), [request("r", PROMPT, PARAMS)])["r", 0]
    assert both.logprobs != evicted.logprobs


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("budget", [7, 64])
def test_load_and_preemption_change_no_bit(runner: CpuRunner, pair: str, budget: int) -> None:
    alone = ask(engine(runner, pair))
    loaded = engine(runner, pair, budget)
    others = [request(f"o{length}", text(length, length), PARAMS) for length in (5, 33, 120)]
    asked = request("r", PROMPT, PARAMS, contexts=tuple(BOUNDS))
    found = serve(loaded, [*others, asked], after_step=preempting_every(9))
    assert loaded.stats().preemptions > 0
    assert same(found["r", 0], alone)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_both_free_memory_of_the_prompt(runner: CpuRunner, pair: str) -> None:
    held = []

    def watch(one: Engine) -> None:
        for sequence in one._queues.running:
            if sequence.decoding and sequence.kv is not None:
                held.append(sequence.kv.owned)

    serve(
        engine(runner, pair),
        [request("r", PROMPT, PARAMS, contexts=tuple(BOUNDS))],
        after_step=watch,
    )
    assert max(held[:2]) <= 49


CONFLICTS = {
    f"{EVICT}+h2o:budget=48": "snapkv and h2o can't stand together: ",
    f"lazyllm+{EVICT}": "lazyllm and snapkv can't stand together: snapkv relies on serving that"
    " runs every token through every layer, and lazyllm changes that",
    f"{SPARSE}+ape": "ape and flexprefill can't stand together: ",
    f"lazyllm+{SPARSE}": "lazyllm and flexprefill can't stand together: ",
    "cacheblend+ape": "ape and cacheblend can't stand together: ",
    f"{SPARSE}+minference:chunk=64,dense=64": "flexprefill and minference can't stand together: ",
}


@pytest.mark.parametrize(("specification", "message"), CONFLICTS.items(), ids=CONFLICTS)
def test_methods_that_cannot_stand_together_are_named_when_the_engine_starts(
    runner: CpuRunner, specification: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        engine(runner, specification)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_methods_that_act_on_long_prompts_alone_are_refused_at_the_start_as_well(
    tmp_path: Path,
) -> None:
    folder = write_tiny("llama", tmp_path / "long", max_position_embeddings=4096)
    runner = torch_runner(open_checkpoint(folder), slots=8)
    both = make_method("flexprefill+lazyllm", runner.config)  # every prompt up to 1,024 is dense
    with pytest.raises(InvalidRequestError, match="can't stand together"):
        build_engine(runner, method=both)


def test_a_request_that_names_them_is_refused_and_nothing_else_is_disturbed(
    runner: CpuRunner,
) -> None:
    both = make_method(f"lazyllm+{EVICT}", runner.config)
    one = build_engine(runner, methods={"both": both})
    one.add(request("fine", PROMPT, PARAMS))
    with pytest.raises(InvalidRequestError, match="can't stand together"):
        one.add(request("r", PROMPT, PARAMS, method="both"))
    assert len(serve(one)["fine", 0].tokens) == PARAMS.max_tokens


def test_a_specification_may_name_several() -> None:
    found = resolve_method("snapkv:budget=99+ape:scale=1e-1")
    assert isinstance(found, CombinedMethod)
    assert [name for name, _ in found.methods] == ["snapkv", "ape"]
    with pytest.raises(InvalidRequestError, match="no method 'snap'; did you mean 'snapkv'"):
        resolve_method("ape+snap")


def test_each_of_several_has_to_be_allowed() -> None:
    allowed = AllowedMethods(names=("snapkv",))
    allowed.check("snapkv")
    with pytest.raises(InvalidRequestError, match="may not use 'ape'"):
        allowed.check("snapkv+ape")
    AllowedMethods(names=("snapkv", "ape")).check("snapkv+ape")
