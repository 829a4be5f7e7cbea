"""What stays after an eviction, kept at fewer bits: one method after the other."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from made_methods import make_method
from msgspec.structs import replace
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.kv.compressed_prefix import CompressedPrefix
from midfill.methods.evict.succession import Succession, in_succession
from midfill.methods.method import Method, methods_in
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import Answer, build_engine, preempting_every, request, same, serve

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
PROMPT = tuple(random.Random(0).choices(range(1, VOCAB), k=300))
KIVI = "kivi:bits=4,residual=16,group=16"
EVICTIONS = {
    "snapkv": "snapkv:budget=100",
    "snapkv, trimmed while it is prefilled": "snapkv:budget=100,cascade=1",
    "cake": "cake:budget=100",
}
each_eviction = pytest.mark.parametrize("eviction", EVICTIONS.values(), ids=EVICTIONS)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuRunner]:
    checkpoint = open_checkpoint(write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama"))
    runner = CpuRunner.load(checkpoint, slots=1200, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


def engine(runner: CpuRunner, specification: str, budget: int = 512) -> Engine:
    method = make_method(specification, runner.config)
    return build_engine(runner, token_budget=budget, method=method)


def held(runner: CpuRunner, specification: str) -> tuple[Answer, list[CompressedPrefix]]:
    """Return an answer, and what stood for its prompt after each step."""
    found: list[CompressedPrefix] = []

    def look(one: Engine) -> None:
        for sequence in one._queues.running:
            if sequence.kv is not None and sequence.kv.prefix is not None:
                found.append(sequence.kv.prefix)

    asked = [request("r", PROMPT, PARAMS)]
    return serve(engine(runner, specification), asked, after_step=look)["r", 0], found


def counts(prefix: CompressedPrefix) -> np.ndarray:
    """Return how many keys each head has, quantised ones included."""
    exact = np.diff(prefix.index.indptr)
    return exact if prefix.index.quantized is None else exact + prefix.index.quantized.counts


@each_eviction
def test_what_the_eviction_keeps_is_what_is_quantised(runner: CpuRunner, eviction: str) -> None:
    _, kept = held(runner, eviction)
    _, both = held(runner, f"{eviction}+{KIVI}")
    assert np.array_equal(counts(kept[0]), counts(both[0]))
    quantized = both[0].index.quantized
    assert quantized is not None
    assert np.array_equal(quantized.counts, (counts(kept[0]) - 16) // 16 * 16)
    assert len(both[0].slots) < 0.45 * len(kept[0].slots)


def test_the_answer_is_quantised_and_nothing_is_dropped_any_more(runner: CpuRunner) -> None:
    _, prefixes = held(runner, f"snapkv:budget=100+{KIVI}")
    last = prefixes[-1].index.quantized
    assert last is not None
    assert (last.counts == 112).all(), "two groups of the answer came to the prompt's five"
    assert prefixes[-1].tokens == len(PROMPT) + 32


def test_names_may_be_in_any_order(runner: CpuRunner) -> None:
    one, other = (held(runner, each)[0] for each in (f"snapkv+{KIVI}", f"{KIVI}+snapkv"))
    assert same(one, other)


def test_an_eviction_that_keeps_all_leaves_the_quantisers_bits(runner: CpuRunner) -> None:
    alone, _ = held(runner, KIVI)
    assert same(held(runner, f"snapkv:budget=1000+{KIVI}")[0], alone)


def test_a_quantiser_that_leaves_all_exact_leaves_the_evictions_bits(runner: CpuRunner) -> None:
    alone, _ = held(runner, "snapkv:budget=100")
    assert same(held(runner, "snapkv:budget=100+kivi:residual=1000")[0], alone)


@each_eviction
@pytest.mark.parametrize("budget", [7, 64])
def test_load_and_preemption_change_no_bit(runner: CpuRunner, eviction: str, budget: int) -> None:
    both = f"{eviction}+{KIVI}"
    alone, _ = held(runner, both)
    others = [
        request(f"o{length}", PROMPT[:length], replace(PARAMS, max_tokens=5), tenant="b")
        for length in (5, 33, 120)
    ]
    loaded = engine(runner, both, budget)
    asked = request("r", PROMPT, PARAMS)
    found = serve(loaded, [*others, asked], after_step=preempting_every(25))
    assert loaded.stats().preemptions > 0
    assert same(found["r", 0], alone)


def test_answers_to_one_prompt_share_its_blocks(runner: CpuRunner) -> None:
    both = f"snapkv:budget=100+{KIVI}"
    alone, _ = held(runner, both)
    asked = request("r", PROMPT, replace(PARAMS, n=2))
    found = serve(engine(runner, both), [asked])
    assert all(same(found["r", index], alone) for index in range(2))


REFUSED = {
    f"h2o:budget=100+{KIVI}": "h2o and kivi can't stand together: h2o drops keys while the answer"
    " is written, too",
    f"streamingllm:budget=100+{KIVI}": "streamingllm and kivi can't stand together: ",
    f"kvmerger+{KIVI}": "kvmerger and kivi can't stand together: kvmerger does more to"
    " keys than dropping them",
    "snapkv:budget=100+zipcache": "snapkv and zipcache can't stand together: zipcache needs all"
    " tokens in all heads",
    "snapkv:budget=100+mikv": "snapkv and mikv can't stand together: ",
    "snapkv:budget=100+gear": "snapkv and gear can't stand together: ",
    "kivi+gear": "kivi and gear can't stand together: ",
    f"snapkv+cake+{KIVI}": "",
}


@pytest.mark.parametrize(("specification", "message"), REFUSED.items(), ids=REFUSED)
def test_others_are_refused_in_one_line(
    runner: CpuRunner, specification: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        engine(runner, specification)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_methods_of_other_kinds_stay_as_they_are() -> None:
    pruning: tuple[str, object] = ("pruning", object())
    assert in_succession([pruning]) == [pruning]
    assert in_succession([]) == []


def test_other_methods_stand_beside_both(runner: CpuRunner) -> None:
    sparse = "flexprefill:chunk=64,dense=64,least=64,gamma=0.4"
    method: Method | None = make_method(f"{sparse}+snapkv+{KIVI}", runner.config)
    names = [name for name, _ in in_succession(methods_in(method))]
    assert names == ["flexprefill", "snapkv+kivi"]
    both, _ = held(runner, f"{sparse}+snapkv:budget=100+{KIVI}")
    assert not same(both, held(runner, f"snapkv:budget=100+{KIVI}")[0])
    assert isinstance(in_succession(methods_in(method))[-1][1], Succession)
