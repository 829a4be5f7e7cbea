"""The warm tier behind an engine: what is evicted or lost is loaded, to the same bits."""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import toy_engine
from made_methods import small_method
from tiny_checkpoints import VOCAB, write_variant
from toy_runner import ToyRunner

from midfill.engine.engine import Engine
from midfill.engine.kv_transfer.transfers import layout_name
from midfill.engine.kv_transfer.warm_cache import CHUNK_TOKENS
from midfill.engine.request import EngineOutput, EngineSamplingParams, TierStats
from midfill.kv.blob import KvIdentity
from midfill.kv.tiers.folders import ChunkFolder
from midfill.kv.tiers.warm_tier import WarmTier
from midfill.methods.codecs import open_codec
from midfill.methods.registry import methods_of
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from serving import Answer, background, build_engine, request, same, serve

PROMPT = toy_engine.prompt(150)
STORED = 2 * CHUNK_TOKENS
LARGE = 100 * 2**20

OpenTier = Callable[[Runner], WarmTier]


@pytest.fixture(autouse=True)
def computing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy computes faster than anything can be loaded, so it isn't measured."""
    monkeypatch.setattr("midfill.engine.kv_transfer.warm_cache._MIN_PREFILL_ROWS", 10_000)


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[OpenTier]:
    """Opens the tier of one folder again and again, as processes that follow each other do."""
    opened: list[WarmTier] = []

    def close() -> None:
        while opened:
            tier = opened.pop()
            tier.close()
            tier.folders["disk"].close()

    def open_again(runner: Runner) -> WarmTier:
        close()
        folder = ChunkFolder(tmp_path / "kv", LARGE, durable=False)
        identity = KvIdentity("", layout_name(runner))
        opened.append(WarmTier(identity, memory=None, disk=folder))
        return opened[0]

    yield open_again
    close()


def build(open_tier: OpenTier, slots: int = 512) -> Engine:
    runner = ToyRunner(slots)
    return build_engine(runner, (), warm_tier=open_tier(runner))


def ask(engine: Engine, prompt: list[int], tenant: str = "") -> Answer:
    """Serve a request, and wait until all is written that it left."""
    answer = serve(engine, [request("a", prompt, tenant=tenant)])["a", 0]
    engine.kv_traffic.flush(60)
    return answer


def tier_stats(engine: Engine) -> TierStats:
    stats = engine.stats().warm_tier
    assert stats is not None
    return stats


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kv").glob("*.kv"))


def test_the_next_engine_loads_what_the_last_one_computed(open_tier: OpenTier) -> None:
    cold = ask(build(open_tier), PROMPT)
    assert cold.cached_tokens == 0
    assert cold.tokens == toy_engine.truth(PROMPT)
    again = build(open_tier)
    warm = ask(again, PROMPT)
    assert warm.cached_tokens == STORED
    assert warm.tokens == cold.tokens
    assert tier_stats(again).loaded_tokens == STORED
    assert tier_stats(again).loaded_chunks == {"disk": 2}


def test_an_engine_that_ends_during_a_write_leaves_nothing_unfinished(
    open_tier: OpenTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, closed = threading.Event(), threading.Event()

    def write_slowly(*_: object) -> None:
        writing.set()
        closed.wait(60)

    monkeypatch.setattr("midfill.kv.tiers.folders._write_all", write_slowly)
    engine = build(open_tier)
    serve(engine, [request("a", PROMPT)])
    engine.step()
    assert writing.wait(60)
    engine.kv_traffic.close(0)
    assert {one.name for one in (tmp_path / "kv").iterdir()} <= {"lock"}
    closed.set()


def test_evicted_kv_comes_back(open_tier: OpenTier) -> None:
    engine = build(open_tier, slots=200)
    ask(engine, PROMPT)
    ask(engine, toy_engine.prompt(170, seed=1))
    assert engine.stats().evicted_tokens > 0
    back = ask(engine, PROMPT)
    assert back.cached_tokens >= STORED
    assert back.tokens == toy_engine.truth(PROMPT)


def test_an_answer_is_stored_with_its_prompt(open_tier: OpenTier) -> None:
    prompt = PROMPT[:120]
    answer = ask(build(open_tier), prompt)
    warm = ask(build(open_tier), [*prompt, *answer.tokens, 1])
    assert warm.cached_tokens == STORED, "the second chunk ends in the answer"


def test_texts_that_begin_alike_share_their_chunks(open_tier: OpenTier, tmp_path: Path) -> None:
    engine = build(open_tier)
    ask(engine, PROMPT)
    ask(engine, [*PROMPT[:100], *toy_engine.prompt(50, seed=2)])
    assert len(files(tmp_path)) == 3


def test_texts_of_many_requests_are_stored_in_any_order(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    engine = build(open_tier, slots=2000)
    prompts = [toy_engine.prompt(70 + number, seed=number) for number in range(8)]
    serve(engine, [request(f"{number}", prompt) for number, prompt in enumerate(prompts)])
    engine.kv_traffic.flush(60)
    assert len(files(tmp_path)) == 8
    assert tier_stats(engine).dropped_chunks == 0
    again = build(open_tier, slots=2000)
    assert [ask(again, prompt).cached_tokens for prompt in prompts] == [CHUNK_TOKENS] * 8


@pytest.mark.parametrize(("after", "stored"), [(0.0, 2), (3600.0, 0)])
def test_the_steps_after_a_prompt_are_left_alone_for_a_while(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch, after: float, stored: int
) -> None:
    monkeypatch.setattr("midfill.engine.kv_transfer.warm_cache._BUSY_SECONDS", after)
    monkeypatch.setattr("midfill.engine.kv_transfer.warm_cache._BUSY_SHARE", 100.0)
    engine = build(open_tier)
    engine.add(request("a", PROMPT))
    outputs: list[EngineOutput] = []
    while not any(output.finish_reason for output in outputs):
        outputs += engine.step()
    assert tier_stats(engine).stored_tokens == stored * CHUNK_TOKENS
    while engine.has_work():
        engine.step()
    assert tier_stats(engine).stored_tokens == STORED


def test_tenants_never_share(open_tier: OpenTier) -> None:
    ask(build(open_tier), PROMPT, tenant="alice")
    again = build(open_tier)
    assert ask(again, PROMPT, tenant="bob").cached_tokens == 0
    assert tier_stats(again).loaded_tokens == 0
    assert ask(again, PROMPT, tenant="alice").cached_tokens == STORED


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "exchanged", "gone"])
def test_a_damaged_file_is_never_used(open_tier: OpenTier, tmp_path: Path, damage: str) -> None:
    engine = build(open_tier)
    ask(engine, PROMPT)
    ask(engine, toy_engine.prompt(70, seed=5))
    for file in (before := files(tmp_path)):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        match damage:
            case "truncated":
                file.write_bytes(file.read_bytes()[:-1])
            case "flipped":
                file.write_bytes(content)
            case "emptied":
                file.write_bytes(b"")
            case "gone":
                file.unlink()
    if damage == "exchanged":
        contents = [file.read_bytes() for file in before]
        for file, content in zip(before, [*contents[1:], contents[0]], strict=True):
            file.write_bytes(content)
    again = build(open_tier) if damage != "gone" else engine
    if damage == "gone":
        ask(again, toy_engine.prompt(190, seed=7))
        ask(again, toy_engine.prompt(190, seed=8))
        ask(again, toy_engine.prompt(190, seed=9))
    answer = ask(again, PROMPT)
    assert answer.cached_tokens == 0
    assert answer.tokens == toy_engine.truth(PROMPT)
    if damage in ("truncated", "flipped", "exchanged"):
        assert tier_stats(again).rejected_chunks == 1
    ask(build(open_tier), PROMPT)  # finds the second file, which nobody has looked at
    assert ask(build(open_tier), PROMPT).cached_tokens == STORED, "both were stored again"


def test_kv_of_another_model_is_never_used(open_tier: OpenTier, tmp_path: Path) -> None:
    ask(build(open_tier), PROMPT)
    runner = ToyRunner(512, layers=3)
    other = build_engine(runner, (), warm_tier=open_tier(runner))
    assert ask(other, PROMPT).cached_tokens == 0


def test_a_full_disk_costs_time_only(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    engine = build(open_tier)
    monkeypatch.setattr(ChunkFolder, "store", fail)
    assert ask(engine, PROMPT).tokens == toy_engine.truth(PROMPT)
    ask(engine, toy_engine.prompt(100, seed=3))
    assert tier_stats(engine).failed_writes >= 3
    assert [one.message for one in caplog.records if "No space left" in one.message] == [
        caplog.records[0].message
    ], "said once"


def test_loading_that_takes_too_long_is_given_up(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(build(open_tier), PROMPT)
    engine = build(open_tier)
    monkeypatch.setattr("midfill.kv.tiers.load_policy._MIN_PATIENCE", 0.0)
    monkeypatch.setattr("midfill.kv.tiers.load_policy._PATIENCE", 0.0)
    answer = ask(engine, PROMPT)
    assert answer.tokens == toy_engine.truth(PROMPT)
    assert answer.cached_tokens in (0, CHUNK_TOKENS, STORED)


def test_a_request_that_loads_can_be_cancelled(open_tier: OpenTier) -> None:
    ask(build(open_tier), PROMPT)
    engine = build(open_tier)
    engine.add(request("a", PROMPT))
    assert engine.stats().loading == 1
    engine.cancel("a")
    answers = serve(engine)
    assert answers["a", 0].finish_reason == "cancelled"
    assert engine.stats().loading == 0


def test_what_costs_more_to_load_is_computed(open_tier: OpenTier) -> None:
    tier_engine = build(open_tier)
    ask(tier_engine, PROMPT)
    runner = ToyRunner(512)
    tier = open_tier(runner)
    tier.rates["disk"].record(1, 100)
    engine = build_engine(runner, (), warm_tier=tier)
    assert ask(engine, PROMPT).cached_tokens == 0
    assert tier.counts.loaded_chunks["disk"] == 0


def test_nobody_waits_behind_a_disk_that_hangs(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(build(open_tier), PROMPT)
    runner = ToyRunner(512)
    tier = open_tier(runner)
    hung, load = threading.Event(), ChunkFolder.load

    def hang(folder: ChunkFolder, key: bytes) -> bytes | None:
        hung.wait(60)
        return load(folder, key)

    monkeypatch.setattr(ChunkFolder, "load", hang)
    monkeypatch.setattr("midfill.kv.tiers.load_policy._PATIENCE", 0.0)
    engine = build_engine(runner, (), warm_tier=tier)
    answer = serve(engine, [request("first", PROMPT)])["first", 0]
    assert answer.cached_tokens == 0
    engine.add(request("second", PROMPT, tenant="other"))
    engine.add(request("third", [PROMPT[0] ^ 1, *PROMPT]))
    assert tier.is_stalled
    assert engine.stats().loading == 0
    hung.set()
    serve(engine)


@pytest.mark.parametrize("kv_cache_dtype", ["f32", "f16", "i8", "i4"])
def test_loaded_kv_has_the_bits_of_computed_kv(
    open_tier: OpenTier, tmp_path_factory: pytest.TempPathFactory, kv_cache_dtype: str
) -> None:
    folder = write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama")
    checkpoint = open_checkpoint(folder)
    prompt = random.Random(3).choices(range(1, VOCAB), k=300)
    sampling = EngineSamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)

    def answer() -> Answer:
        runner = CpuRunner.load(
            checkpoint, slots=512, threads=1, weights="f32", kv_cache_dtype=kv_cache_dtype
        )
        engine = build_engine(runner, (), warm_tier=open_tier(runner))
        answer = serve(engine, [request("a", prompt, sampling)])["a", 0]
        engine.kv_traffic.flush(60)
        return answer

    cold, warm = answer(), answer()
    assert warm.cached_tokens == 4 * CHUNK_TOKENS
    assert warm.tokens == cold.tokens
    assert warm.logprobs == cold.logprobs


@pytest.mark.parametrize("name", methods_of("quantize"))
def test_of_a_prompt_that_is_quantised_the_exact_kv_is_stored_and_nothing_else(
    open_tier: OpenTier, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """Blocks are their answer's own: whoever loads the prompt next quantises it alike, or not."""
    checkpoint = open_checkpoint(write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama"))
    prompt = random.Random(3).choices(range(1, VOCAB), k=300)
    sampling = EngineSamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)

    def answer(method: str, tier: bool = True) -> Answer:
        runner = CpuRunner.load(
            checkpoint, slots=512, threads=1, weights="f32", kv_cache_dtype="f32"
        )
        methods = {"": None, name: small_method(name, runner.config)}
        opened = open_tier(runner) if tier else None
        engine = build_engine(runner, (), methods=methods, warm_tier=opened)
        found = serve(engine, [request("a", prompt, sampling, method=method)])["a", 0]
        if tier:
            engine.kv_traffic.flush(60)
        runner.close()
        return found

    cold = {method: answer(method, tier=False) for method in ("", name)}
    answer(name)
    assert len(files(tmp_path)) == len(prompt) // CHUNK_TOKENS, "of 340 tokens, an answer included"
    for method, expected in cold.items():
        found = answer(method)
        assert found.cached_tokens >= (4 * CHUNK_TOKENS if not method else 0)
        assert same(found, expected)


# KV that a codec has changed.


@dataclass
class Coded:
    """Engines of one model, one after the other, over a tier that CacheGen writes."""

    make_runner: Callable[[], Runner]
    open: Callable[[Runner], WarmTier]

    def engine(self) -> Engine:
        runner = self.make_runner()
        return build_engine(runner, (), warm_tier=self.open(runner))


@pytest.fixture
def coded(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coded]:
    checkpoint = open_checkpoint(write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama"))
    opened: list[WarmTier] = []

    def close() -> None:
        while opened:
            tier = opened.pop()
            tier.close()
            tier.folders["disk"].close()

    def open_again(runner: Runner) -> WarmTier:
        close()
        codec = open_codec("cachegen:shallow=64,deep=64", runner, checkpoint.tokenizer, lambda: "m")
        assert codec is not None
        folder = ChunkFolder(tmp_path / "kv", LARGE, durable=False)
        identity = KvIdentity("", layout_name(runner), codec.name)
        opened.append(WarmTier(identity, memory=None, disk=folder, codec=codec))
        return opened[0]

    yield Coded(lambda: CpuRunner.load(checkpoint, slots=512, threads=1, weights="f32"), open_again)
    close()


CODED_PROMPT = random.Random(3).choices(range(1, VOCAB), k=300)


def test_coded_kv_is_smaller_and_told_apart_from_exact_kv(coded: Coded, tmp_path: Path) -> None:
    engine = coded.engine()
    cold = serve(engine, [request("cold", CODED_PROMPT)])["cold", 0]
    engine.kv_traffic.flush(60)
    assert len(files(tmp_path)) == 4
    raw = 64 * 3 * 2 * 32 * 2 * 4
    assert all(file.stat().st_size < raw / 3 for file in files(tmp_path))

    engine = coded.engine()
    engine.add(request("warm", CODED_PROMPT))
    outputs = [output for _ in range(200) for output in engine.step()]
    assert outputs[0].reused_tokens == 4 * CHUNK_TOKENS
    assert outputs[0].cached_tokens == 0
    assert tier_stats(engine).loaded_tokens == 4 * CHUNK_TOKENS

    # Nobody who expects exact KV finds it: a background prompt computes all of it.
    serve(engine, [background("exact", CODED_PROMPT)])
    assert engine.stats().background_tokens == 300
    answer = serve(engine, [request("again", CODED_PROMPT)])["again", 0]
    assert answer.cached_tokens == 299
    assert answer.tokens == cold.tokens


def test_the_next_keystroke_goes_on_after_coded_kv(coded: Coded) -> None:
    engine = coded.engine()
    serve(engine, [request("cold", CODED_PROMPT)])
    engine.kv_traffic.flush(60)
    engine = coded.engine()
    serve(engine, [request("warm", CODED_PROMPT)])
    loaded = tier_stats(engine).loaded_tokens
    engine.add(request("next", [*CODED_PROMPT, 5, 6]))
    assert engine.stats().loading == 0
    (first, *_) = [output for _ in range(50) for output in engine.step()]
    assert first.reused_tokens >= 299
    assert tier_stats(engine).loaded_tokens == loaded
    assert tier_stats(engine).stored_tokens == 0, "only exact KV is stored"


def test_methods_that_expect_kv_as_computed_get_no_coded_kv(coded: Coded) -> None:
    engine = coded.engine()
    serve(engine, [request("cold", CODED_PROMPT)])
    engine.kv_traffic.flush(60)
    engine = coded.engine()
    scored = EngineSamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    serve(engine, [request("scored", CODED_PROMPT, scored)])
    assert tier_stats(engine).loaded_tokens == 0
