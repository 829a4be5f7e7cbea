"""Documents that go to another replica, whose KV follows them: two real engines."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from midfill.config import ModelOptions
from midfill.engine.process.client import EngineClient
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.errors import KvTransferError
from midfill.serving.cluster.kv_moves import Holdings, KvMoves
from midfill.serving.cluster.messages import (
    Accepted,
    FromReplica,
    KvHint,
    KvMoveCounts,
    Output,
    ReplicaNumbers,
)
from midfill.serving.cluster.remote_engine import RemoteEngine

OPTIONS = ModelOptions(threads=1, kv_memory=4 * 2**20)
SLOW = 3600.0


@dataclass
class Replicas:
    """Two engines in processes of their own, without Ray between them.

    Attributes:
        turn: which one gets the next request.
        delay: seconds that an export takes in addition.
        damage: bytes that an export loses at its end.
        exports: how many were asked for.
        starts: the first token of each.
    """

    engines: dict[str, EngineClient]
    moves: dict[str, KvMoves] = field(default_factory=dict)
    turn: str = "a"
    delay: float = 0.0
    damage: int = 0
    exports: int = 0
    starts: list[int] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)

    def reset(self) -> None:
        self.delay, self.damage, self.exports, self.gone = 0.0, 0, 0, set()
        self.starts = []
        info = self.engines["a"].info
        assert info is not None
        self.moves = {
            name: KvMoves(name, engine, self, info.kv_bytes / info.slots)
            for name, engine in self.engines.items()
        }

    async def export_kv(
        self, replica: str, tenant: str, token_ids: Sequence[int], start: int
    ) -> bytes:
        self.exports += 1
        self.starts.append(start)
        await asyncio.sleep(self.delay)
        if replica in self.gone:
            raise KvTransferError("the replica was lost")
        blob = await self.engines[replica].export_kv(tenant, token_ids, start)
        return blob[: len(blob) - self.damage]

    async def ask(
        self, request: EngineRequest, document: str, avoid: list[str], hint: KvHint
    ) -> AsyncGenerator[FromReplica, None]:
        name = self.turn
        yield Accepted(name)
        await self.moves[name].fetch(request, document, hint)
        with self.engines[name].submit(request) as outputs:
            async for each in outputs:
                yield Output(each)

    def numbers(self) -> Mapping[str, ReplicaNumbers]:
        return {
            name: ReplicaNumbers(stats=engine.stats, moves=self.moves[name].counts)
            for name, engine in self.engines.items()
        }


@dataclass
class Pair:
    """The replicas and their event loop."""

    replicas: Replicas
    loop: asyncio.Runner

    def run(self, test: Coroutine[None, None, None]) -> None:
        self.loop.run(test)


@pytest.fixture(scope="module")
def engines(tiny_folder: Path) -> Iterator[Pair]:
    with asyncio.Runner() as loop:
        clients = {name: EngineClient(tiny_folder, OPTIONS) for name in ("a", "b")}
        for client in clients.values():
            loop.run(client.start())
        yield Pair(Replicas(clients), loop)
        for client in clients.values():
            loop.run(client.close())


@pytest.fixture
def pair(engines: Pair) -> Pair:
    engines.replicas.reset()
    return engines


def prompt(name: int, count: int = 300) -> list[int]:
    """Return a prompt; those of different names share nothing."""
    return [name, *(5 + (name * each) % 200 for each in range(1, count))]


def request(tokens: list[int], tenant: str = "", *, background: bool = False) -> EngineRequest:
    sampling = EngineSamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    return EngineRequest(
        request_id=f"{tenant} {tokens[0]} {len(tokens)} {background}", token_ids=tokens,
        sampling=sampling, tenant=tenant, document="d", background=background,
    )  # fmt: skip


@dataclass
class Answer:
    tokens: list[int]
    cached: int


async def ask(engine: RemoteEngine, one: EngineRequest) -> Answer:
    tokens, cached = list[int](), 0
    with engine.submit(one) as stream:
        async for output in stream:
            tokens += output.token_ids
            cached = max(cached, output.cached_tokens)
    return Answer(tokens, cached)


def remote(replicas: Replicas, *, moving: bool = True, pace: float = 1.0) -> RemoteEngine:
    """Return the replicas as an engine; ``pace`` is what it believes that a token takes to compute.

    The tiny model computes so fast that otherwise its machine would decide whether KV moves.
    """
    info = replicas.engines["a"].info
    assert info is not None
    engine = RemoteEngine(replicas, info, Holdings() if moving else None)
    engine._prefill.record(1, pace)
    return engine


def test_a_document_that_moves_is_not_computed_again(pair: Pair) -> None:
    async def test() -> None:
        replicas, tokens = pair.replicas, prompt(7)
        engine = remote(replicas)
        replicas.turn = "a"
        first = await ask(engine, request(tokens))
        replicas.turn = "b"
        moved = await ask(engine, request([*tokens, 9]))
        assert (first.cached, moved.cached) == (0, len(tokens))
        assert engine.moves == KvMoveCounts(moved=1, moved_tokens=len(tokens))

        # The same bits as where it was computed, and as without moving.
        replicas.turn = "a"
        here = await ask(remote(replicas, moving=False), request([*tokens, 9]))
        assert moved.tokens == here.tokens
        replicas.turn = "b"
        computed = await ask(remote(replicas, moving=False), request([*tokens, 9], "somebody"))
        assert (computed.tokens, computed.cached) == (moved.tokens, 0)

    pair.run(test())


def test_only_what_is_missing_moves(pair: Pair) -> None:
    async def test() -> None:
        replicas, tokens = pair.replicas, prompt(43)
        engine = remote(replicas)
        replicas.turn = "b"
        await ask(remote(replicas, moving=False), request(tokens[:200]))
        there = await replicas.engines["b"].cached_tokens("", tokens)
        assert there >= 200
        replicas.turn = "a"
        first = await ask(engine, request(tokens))
        replicas.turn = "b"
        moved = await ask(engine, request(tokens))
        assert (moved.tokens, moved.cached) == (first.tokens, len(tokens) - 1)
        assert replicas.starts == [there]
        assert engine.moves == KvMoveCounts(moved=1, moved_tokens=len(tokens) - there)

    pair.run(test())


def test_what_was_evicted_meanwhile_moves_too(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        replicas, tokens = pair.replicas, prompt(47)
        engine = remote(replicas)
        replicas.turn = "a"
        await ask(engine, request(tokens))

        async def long_ago(tenant: str, token_ids: Sequence[int]) -> int:
            return 150

        monkeypatch.setattr(replicas.engines["b"], "cached_tokens", long_ago)
        replicas.turn = "b"
        assert (await ask(engine, request(tokens))).cached == len(tokens) - 1
        assert replicas.starts == [150, 0]
        assert engine.moves == KvMoveCounts(moved=1, moved_tokens=len(tokens))

    pair.run(test())


def test_a_document_that_stays_asks_nobody(pair: Pair) -> None:
    async def test() -> None:
        replicas, tokens = pair.replicas, prompt(11)
        engine = remote(replicas)
        for count in range(3):
            await ask(engine, request([*tokens, *range(20, 20 + count)]))
        assert replicas.exports == 0

    pair.run(test())


def test_what_was_computed_in_idle_time_moves_too(pair: Pair) -> None:
    async def test() -> None:
        replicas, tokens = pair.replicas, prompt(13)
        engine = remote(replicas)
        replicas.turn = "a"
        await ask(engine, request(tokens, background=True))
        replicas.turn = "b"
        assert (await ask(engine, request(tokens))).cached == len(tokens) - 1

    pair.run(test())


def test_tenants_share_no_kv(pair: Pair) -> None:
    async def test() -> None:
        replicas, tokens = pair.replicas, prompt(17)
        engine = remote(replicas)
        replicas.turn = "a"
        await ask(engine, request(tokens, "alice"))
        replicas.turn = "b"
        assert (await ask(engine, request(tokens, "bob"))).cached == 0
        assert replicas.exports == 0

    pair.run(test())


@pytest.mark.parametrize("trouble", ["gone", "damaged", "evicted"])
def test_without_usable_kv_the_prompt_is_computed(pair: Pair, trouble: str) -> None:
    async def test() -> None:
        replicas, tokens = (
            pair.replicas,
            prompt({"gone": 19, "damaged": 23, "evicted": 29}[trouble]),
        )
        engine = remote(replicas)
        replicas.turn = "a"
        expected = await ask(remote(replicas, moving=False), request(tokens, "somebody"))
        if trouble == "evicted":  # it was never there
            engine._holdings.record("0::d", "a", tokens)  # type: ignore[union-attr]
        else:
            await ask(engine, request(tokens))
        replicas.gone = {"a"} if trouble == "gone" else set()
        replicas.damage = int(trouble == "damaged")
        replicas.turn = "b"
        answer = await ask(engine, request(tokens))
        assert (answer.tokens, answer.cached) == (expected.tokens, 0)
        assert replicas.exports == 1
        assert engine.moves == KvMoveCounts(failed=1)

    pair.run(test())


def test_a_slow_replica_is_not_waited_for(pair: Pair) -> None:
    async def test() -> None:
        replicas, tokens = pair.replicas, prompt(31)
        engine = remote(replicas, pace=0.001)
        replicas.turn = "a"
        first = await ask(engine, request(tokens))
        replicas.turn, replicas.delay = "b", SLOW
        answer = await ask(engine, request(tokens))
        assert (answer.tokens, answer.cached) == (first.tokens, 0)
        assert engine.moves == KvMoveCounts(late=1)

        # It is known to be slow now, so the next document is computed at once.
        other = prompt(37)
        replicas.turn = "a"
        await ask(engine, request(other))
        replicas.turn = "b"
        assert (await ask(engine, request(other))).cached == 0
        assert engine.moves == KvMoveCounts(late=1, declined=1)
        assert replicas.exports == 1

    pair.run(test())


def test_somebody_who_types_on_does_not_begin_again(pair: Pair) -> None:
    async def test() -> None:
        replicas, tokens = pair.replicas, prompt(41)
        engine = remote(replicas)
        replicas.turn = "a"
        await ask(engine, request(tokens))
        replicas.turn, replicas.delay = "b", 0.05
        hint = KvHint({"a": len(tokens)}, prefill_rate=1.0)
        moves = replicas.moves["b"]
        given_up = asyncio.create_task(moves.fetch(request(tokens), "d", hint))
        await asyncio.sleep(0)
        given_up.cancel()
        await moves.fetch(request([*tokens, 9]), "d", hint)
        assert replicas.exports == 1
        assert moves.counts.moved == 1
        assert moves._moves == {}

    pair.run(test())


BOTH = ("a", "b")


def test_a_replica_holds_what_two_prompts_begin_with_alike() -> None:
    holdings = Holdings()
    holdings.record("d", "a", [1, 2, 3, 4])
    holdings.record("d", "b", [1, 9])
    assert holdings.held("d", [1, 2, 3, 7, 7], BOTH) == {"a": 3, "b": 1}
    assert holdings.held("other", [1, 2, 3], BOTH) == {}


def test_a_prompt_computed_in_idle_time_does_not_hide_the_last_one() -> None:
    holdings = Holdings()
    holdings.record("d", "a", [1, 2, 3, 4])
    holdings.record("d", "a", [1, 8])
    assert holdings.held("d", [1, 2, 3], BOTH) == {"a": 3}
    assert holdings.held("d", [1, 8, 9], BOTH) == {"a": 2}
    holdings.record("d", "a", [5])
    assert holdings.held("d", [1, 2, 3], BOTH) == {"a": 1}  # the oldest is forgotten


def test_replicas_that_have_gone_are_forgotten() -> None:
    holdings = Holdings()
    holdings.record("d", "a", [1, 2])
    holdings.record("d", "b", [1, 2])
    assert holdings.held("d", [1, 2], ["b"]) == {"b": 2}
    assert holdings.held("d", [1, 2], BOTH) == {"b": 2}
    holdings.forget("d", "b")
    assert holdings.held("d", [1, 2], BOTH) == {}


def test_documents_at_rest_are_forgotten_first() -> None:
    holdings = Holdings(max_tokens=5)
    for name in ("first", "second"):
        holdings.record(name, "a", [1, 2])
    holdings.record("first", "a", [1, 2])  # six tokens
    assert holdings.held("second", [1, 2], BOTH) == {}
    assert holdings.held("first", [1, 2], BOTH) == {"a": 2}
    holdings.record("long", "a", [1] * 9)
    assert holdings.held("long", [1], BOTH) == {}
