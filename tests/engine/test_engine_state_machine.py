"""The engine under any order of arrivals, cancellations, preemptions and steps, in a pool that is
too small, with and without speculation, prefilled in chunks or by layers. Each request has its KV
compressed in its own way, or not, or attends to a part of its prompt only. Cached KV may go to a
warm tier and come back, files of which are damaged meanwhile.

Every answer must be what the model alone would generate, or the beginning of it if it was
cancelled or its method failed, and after every operation each slot has exactly one owner.
"""

from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from toy_method import FailsAfter, HalfTheKeys, KeepLoudest, RoundOlder
from toy_runner import ToyRunner

from midfill.engine.kv_transfer import warm_cache
from midfill.engine.kv_transfer.transfers import layout_name
from midfill.engine.request import EngineSamplingParams, RequestHints
from midfill.kv.blob import KvIdentity
from midfill.kv.tiers.folders import ChunkFolder
from midfill.kv.tiers.warm_tier import WarmTier
from midfill.methods.evict.streaming_heads import HeadSplit, StreamingRule
from midfill.methods.evict.succession import Succession
from midfill.methods.rows.lazyllm import LazyLLM
from serving import (
    Answer,
    FixedCost,
    background,
    build_engine,
    check_idle,
    greedy_alone,
    request,
    serve,
)

MAX_TOKENS = 10
DOCUMENT = (3, 17, 5, 5, 30, 8, 21, 0, 13, 2, 39, 11, 25, 7, 6, 19, 33, 1, 28, 4) * 2
PROMPTS = st.builds(
    lambda shared, tail: (*DOCUMENT[:shared], *tail),
    st.integers(0, len(DOCUMENT)),
    st.lists(st.integers(0, 2), min_size=1, max_size=2),
)


# Answers that repeat themselves, so that drafts are often right.
POSITIONS = 0.2


FAILING, PRUNING = "failing", "rows dropped"
METHODS = {
    "none": None,
    "once": KeepLoudest(3),
    "again": KeepLoudest(2, interval=3),
    "in blocks": KeepLoudest(1000, interval=1, block_rows=8),
    "with means": HeadSplit(StreamingRule(1, 6, interval=2, mean=True), (True, False)),
    "in fewer bits": RoundOlder(3, interval=2),
    "once, then in fewer bits": Succession(KeepLoudest(3), RoundOlder(2, interval=3)),
    "half the keys": HalfTheKeys(),
    PRUNING: LazyLLM("0", "0.5"),
    FAILING: FailsAfter(2, interval=3),
}


@cache
def truth(prompt: tuple[int, ...], method: str) -> list[int]:
    runner = ToyRunner(200, positions=POSITIONS)
    if METHODS[method] is None:
        return greedy_alone(runner, list(prompt), MAX_TOKENS)
    engine = build_engine(runner, max_running=1, method=METHODS[method])
    params = EngineSamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    return serve(engine, [request("alone", prompt, params)])["alone", 0].tokens


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(54, 120),
        budget=st.sampled_from([1, 5, 16, 64]),
        row_cost=st.sampled_from([None, 0.0, 0.01, 0.2]),
        by_layers=st.booleans(),
        has_tier=st.booleans(),
    )
    def start(
        self, slots: int, budget: int, row_cost: float | None, by_layers: bool, has_tier: bool
    ) -> None:
        self.ended = ExitStack()
        tier = self.open_tier() if has_tier else None
        self.engine = build_engine(
            ToyRunner(slots, positions=POSITIONS),
            token_budget=budget,
            max_running=5,
            background_chunk=7,
            max_background=3,
            step_cost=None if row_cost is None else FixedCost(row_cost),
            methods=METHODS,
            by_layers=by_layers,
            warm_tier=tier,
        )
        self.prompts: dict[str, tuple[tuple[int, ...], int, str]] = {}
        self.answers: dict[tuple[str, int], Answer] = {}

    def open_tier(self) -> WarmTier:
        """A tier of small chunks, which are always loaded: the toy computes too fast to tell."""
        for name, value in (("CHUNK_TOKENS", 4), ("_MIN_PREFILL_ROWS", 10_000)):
            self.ended.enter_context(patch.object(warm_cache, name, value))
        self.folder = Path(self.ended.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
        chunks = ChunkFolder(self.folder / "kv", 40_000, durable=False)
        identity = KvIdentity("", layout_name(ToyRunner(1)))
        tier = WarmTier(identity, memory=None, disk=chunks)
        self.ended.callback(tier.close)
        return tier

    @rule()
    def evict_all(self) -> None:
        pool = self.engine._queues.pool
        pool.slots.free(pool.cache.evict(pool.slots.total))

    @precondition(lambda self: hasattr(self, "folder"))
    @rule(which=st.integers(0, 20), at=st.integers(0, 2000))
    def damage(self, which: int, at: int) -> None:
        files = sorted((self.folder / "kv").glob("*.kv"))
        if which < len(files):
            with suppress(FileNotFoundError):  # removed to make room
                content = bytearray(files[which].read_bytes())
                content[at % len(content)] ^= 1
                files[which].write_bytes(content)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, MAX_TOKENS),
        n=st.sampled_from([1, 1, 1, 2, 7]),
        tenant=st.sampled_from(["", "", "other"]),
        method=st.sampled_from(list(METHODS)),
        offline=st.booleans(),
    )
    def add(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        n: int,
        tenant: str,
        method: str,
        offline: bool,
    ) -> None:
        name = f"r{len(self.prompts)}"
        n = 1 if method == PRUNING else n
        self.prompts[name] = prompt, max_tokens, method
        for index in range(n):
            self.answers[name, index] = Answer()
        params = EngineSamplingParams(temperature=0.0, max_tokens=max_tokens, n=n)
        hints = RequestHints(offline=offline)
        self.engine.add(request(name, prompt, params, tenant, method=method, hints=hints))

    @rule(prompt=PROMPTS, tenant=st.sampled_from(["", "other"]))
    def add_background(self, prompt: tuple[int, ...], tenant: str) -> None:
        name = f"r{len(self.prompts)}"
        self.prompts[name] = prompt, 0, "none"
        self.answers[name, 0] = Answer()
        self.engine.add(background(name, prompt, tenant))

    @rule(which=st.integers(0, 40), index=st.sampled_from([None, None, 0, 1, 4]))
    def cancel(self, which: int, index: int | None) -> None:
        self.engine.cancel(f"r{which}", index)

    @rule(which=st.integers(0, 4))
    def preempt(self, which: int) -> None:
        running = self.engine._queues.running
        if which < len(running):
            self.engine._execution.preempt(running[which])

    @rule(looks=st.lists(st.booleans(), max_size=5))
    def interrupt(self, looks: list[bool]) -> None:
        """Steps of offline requests are given up where one of the next looks says so."""
        self.engine.interrupted = lambda: bool(looks) and looks.pop()

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.engine.step():
                self.answers[output.request_id, output.index].add(output)

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        if not hasattr(self, "engine"):
            return
        pool = self.engine._queues.pool
        held = [one.kv for one in self.engine._queues.running if one.kv is not None]
        owned = [slot for kv in held for slot in kv.slots[kv.shared :].tolist()]
        prefixes = {id(kv.prefix): kv.prefix for kv in held if kv.prefix is not None}
        owned += [slot for prefix in prefixes.values() for slot in prefix.slots.tolist()]
        assert len(set(owned)) == len(owned)
        assert pool.slots.free_slots + pool.cache.cached_tokens + len(owned) == pool.slots.total

    @invariant()
    def running_sequences_hold_what_they_need_and_no_more(self) -> None:
        if not hasattr(self, "engine"):
            return
        for sequence in self.engine._queues.running:
            assert sequence.kv is not None
            reserved = sequence.kv.first + sequence.kv.reserved
            if sequence.decoding:
                assert reserved == sequence.computed == sequence.length - 1
            else:
                assert reserved == sequence.length > sequence.computed
        for sequence in (*self.engine._queues.waiting, *self.engine._queues.background):
            assert sequence.kv is None

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        with self.ended:
            self.finish()

    def finish(self) -> None:
        while self.engine.has_work():
            self.step(1)
        check_idle(self.engine)
        tier = self.engine.stats().warm_tier
        event(f"warm tier: {'none' if tier is None else f'loads {tier.loaded_tokens > 0}'}")
        for (name, _), answer in self.answers.items():
            prompt, max_tokens, method = self.prompts[name]
            expected = truth(prompt, method)[:max_tokens]
            if answer.finish_reason == "cancelled":
                assert answer.tokens == expected[: len(answer.tokens)]
                continue
            failed = method == FAILING and len(expected) < max_tokens
            ended = "error" if failed else "length" if max_tokens else "stop"
            assert answer.finish_reason == ended
            assert answer.tokens == expected


EngineMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase
