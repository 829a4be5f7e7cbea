"""Prefill and decode workers in processes of their own, behind one front: DistServe's protocol."""

import asyncio
import random
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from midfill.config import ModelOptions
from midfill.engine.disaggregated.engine import DisaggregatedEngine
from midfill.engine.disaggregated.workers import DecodeLimits, Pool, PrefillLimits
from midfill.engine.process.client import EngineClient
from midfill.engine.process.outputs import OutputStream
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.errors import InvalidRequestError, KvTransferError

OPTIONS = ModelOptions(threads=1, kv_memory=4 * 2**20)
PREFILL = PrefillLimits(pool=Pool(pages=2000, page_tokens=1), saturating_tokens=64)
DECODE = DecodeLimits(pool=Pool(pages=2000, page_tokens=1))


@dataclass
class Watched:
    """A worker's engine, and what it was asked for."""

    client: EngineClient
    asked: list[str] = field(default_factory=list)
    exported: list[int] = field(default_factory=list)  # tokens
    fails: bool = False

    @property
    def state(self) -> str:
        return self.client.state

    @property
    def retry_after(self) -> int:
        return self.client.retry_after

    def submit(self, *requests: EngineRequest) -> OutputStream:
        self.asked += ["submit"] * len(requests)
        return self.client.submit(*requests)

    async def cached_tokens(self, tenant: str, token_ids: Sequence[int]) -> int:
        return await self.client.cached_tokens(tenant, token_ids)

    async def export_kv(self, tenant: str, token_ids: Sequence[int], start: int = 0) -> bytes:
        self.asked.append("export")
        self.exported.append(len(token_ids) - start)
        if self.fails:
            raise KvTransferError("none of these tokens is cached")
        return await self.client.export_kv(tenant, token_ids, start)

    async def import_kv(self, tenant: str, blob: bytes, before: Sequence[int] = ()) -> int:
        self.asked.append("import")
        return await self.client.import_kv(tenant, blob, before)


@dataclass
class Workers:
    """Two engines that are ready, and their event loop."""

    loop: asyncio.Runner
    clients: tuple[EngineClient, EngineClient]

    def together(
        self, prefill: PrefillLimits = PREFILL, decode: DecodeLimits = DECODE
    ) -> tuple[DisaggregatedEngine, Watched, Watched]:
        first, second = map(Watched, self.clients)
        return DisaggregatedEngine([(first, prefill)], [(second, decode)]), first, second

    def run(self, test: Coroutine[None, None, None]) -> None:
        async def limited() -> None:
            await asyncio.wait_for(test, 120)

        self.loop.run(limited())


@pytest.fixture(scope="module")
def workers(tiny_folder: Path) -> Iterator[Workers]:
    with asyncio.Runner() as loop:
        first, second = (EngineClient(tiny_folder, OPTIONS) for _ in range(2))
        for client in (first, second):
            loop.run(client.start())
        yield Workers(loop, (first, second))
        for client in (first, second):
            loop.run(client.close())


_names = iter(range(10**9))


def ask(
    prompt: Sequence[int], *, tenant: str, max_tokens: int = 8, **sampling: object
) -> EngineRequest:
    fields = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **sampling}
    return EngineRequest(
        request_id=f"r{next(_names)}",
        token_ids=list(prompt),
        sampling=EngineSamplingParams(**fields),  # type: ignore[arg-type]
        tenant=tenant,
    )


async def tokens_of(stream: OutputStream) -> list[int]:
    with stream:
        return [token async for output in stream for token in output.token_ids]


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(10, 300), k=rng.randrange(3, 120)) for _ in range(count)]


def test_answers_are_those_of_one_engine(workers: Workers) -> None:
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "seed": 9, "presence_penalty": 1.0},
        {"repetition_penalty": 1.5},
    ]

    async def test() -> None:
        engine, _, decode = workers.together()
        fields = [(prompt, kinds[at % 4]) for at, prompt in enumerate(prompts(50, seed=1))]
        alone = workers.clients[0]
        whole = [
            await tokens_of(alone.submit(ask(prompt, tenant="alone", **kind)))
            for prompt, kind in fields
        ]
        streams = [engine.submit(ask(prompt, tenant="pair", **kind)) for prompt, kind in fields]
        assert await asyncio.gather(*map(tokens_of, streams)) == whole
        assert decode.asked.count("import") == 50
        assert engine.held_tokens == 0

    workers.run(test())


def test_the_first_token_is_sent_before_the_kv_moves_and_the_rest_after_all_of_it(
    workers: Workers,
) -> None:
    async def test() -> None:
        engine, prefill, decode = workers.together()
        prompt = list(range(20, 120))
        with engine.submit(ask(prompt, tenant="order")) as stream:
            first = await anext(stream)
            assert len(first.token_ids) == 1
            assert "import" not in decode.asked
            computed = workers.clients[1].stats.computed_tokens
            await anext(stream)
            assert prefill.asked == ["submit", "export"]
            assert decode.asked == ["import", "submit"]
            assert [output async for output in stream][-1].finish_reason == "length"
            # Nothing of the prompt was computed again.
            assert workers.clients[1].stats.computed_tokens - computed < len(prompt)

    workers.run(test())


def test_of_a_document_only_what_is_new_moves(workers: Workers) -> None:
    async def test() -> None:
        engine, prefill, _ = workers.together()
        prompt = [10 + at % 90 for at in range(300)]
        await tokens_of(engine.submit(ask(prompt, tenant="typing")))
        typed = [*prompt, 7, 8, 9]
        computed = workers.clients[1].stats.computed_tokens
        answer = await tokens_of(engine.submit(ask(typed, tenant="typing")))
        assert prefill.exported == [300, 3]
        assert workers.clients[1].stats.computed_tokens - computed < 100
        assert answer == await tokens_of(workers.clients[0].submit(ask(typed, tenant="alone")))
        # The same prompt again: there is nothing to move.
        assert await tokens_of(engine.submit(ask(typed, tenant="typing"))) == answer
        assert prefill.exported == [300, 3]

    workers.run(test())


def test_an_answer_of_one_token_never_moves(workers: Workers) -> None:
    async def test() -> None:
        engine, prefill, decode = workers.together()
        assert len(await tokens_of(engine.submit(ask([5] * 9, tenant="one", max_tokens=1)))) == 1
        assert prefill.asked == ["submit"]
        assert decode.asked == []

    workers.run(test())


def test_kv_that_cannot_be_moved_is_computed_again(workers: Workers) -> None:
    async def test() -> None:
        engine, prefill, _ = workers.together()
        prefill.fails = True
        prompt = list(range(30, 90))
        whole = await tokens_of(workers.clients[0].submit(ask(prompt, tenant="alone")))
        assert await tokens_of(engine.submit(ask(prompt, tenant="unmoved"))) == whole

    workers.run(test())


def test_several_answers_to_a_prompt_stay_where_it_was_computed(workers: Workers) -> None:
    async def test() -> None:
        engine, prefill, decode = workers.together()
        assert len(await tokens_of(engine.submit(ask([7] * 20, tenant="n", n=2)))) == 16
        assert prefill.asked == ["submit"]
        assert decode.asked == []

    workers.run(test())


def test_prompts_wait_where_they_were_computed_until_there_is_room(workers: Workers) -> None:
    async def test() -> None:
        prefill = PrefillLimits(pool=Pool(pages=120, page_tokens=1), saturating_tokens=1)
        decode = DecodeLimits(pool=Pool(pages=70, page_tokens=1))
        engine, _, _ = workers.together(prefill, decode)
        most = 0
        asked = [ask(range(100 + at, 150 + at), tenant="room", max_tokens=20) for at in range(8)]

        async def serve(stream: OutputStream) -> int:
            nonlocal most
            count = 0
            with stream:
                async for output in stream:
                    most = max(most, engine.held_tokens)
                    count += len(output.token_ids)
            return count

        assert await asyncio.gather(*(serve(engine.submit(one)) for one in asked)) == [20] * 8
        assert 50 < most <= 120
        assert engine.held_tokens == 0

    workers.run(test())


@pytest.mark.parametrize("seed", range(2))
def test_requests_that_are_abandoned_at_any_time_leave_nothing(workers: Workers, seed: int) -> None:
    async def test() -> None:
        engine, _, _ = workers.together(
            PrefillLimits(pool=Pool(pages=300, page_tokens=1), saturating_tokens=64),
            DecodeLimits(pool=Pool(pages=250, page_tokens=1)),
        )
        rng = random.Random(seed)

        async def serve(prompt: list[int]) -> None:
            stream = engine.submit(ask(prompt, tenant=f"gone{seed}"))
            wanted = rng.choice([0, 0, 1, 2, 5, 99])
            with stream:
                await asyncio.sleep(rng.random() * 0.05)
                while wanted:
                    wanted -= 1
                    if await anext(stream, None) is None:
                        return

        await asyncio.gather(*map(serve, prompts(60, seed)))
        async with asyncio.timeout(60):
            while engine.unfinished:
                await asyncio.sleep(0.01)
        assert engine.held_tokens == 0
        # A request at the end finds everything free.
        assert len(await tokens_of(engine.submit(ask([3] * 100, tenant="last")))) == 8
        for client in workers.clients:
            await tokens_of(client.submit(ask([9], tenant="last", max_tokens=1)))
            async with asyncio.timeout(60):
                while client.stats.running or client.stats.waiting:
                    await asyncio.sleep(0.01)

    workers.run(test())


def test_a_prompt_that_fits_no_worker_is_refused_at_once(workers: Workers) -> None:
    async def test() -> None:
        small = DecodeLimits(pool=Pool(pages=50, page_tokens=1))
        engine, prefill, _ = workers.together(decode=small)
        with pytest.raises(InvalidRequestError, match="60 tokens, which is too long"):
            engine.submit(ask(range(60), tenant="long"))
        assert prefill.asked == []

    workers.run(test())


def test_without_workers_of_a_kind_there_is_no_engine(workers: Workers) -> None:
    with pytest.raises(InvalidRequestError, match="no decode worker"):
        DisaggregatedEngine([(workers.clients[0], PREFILL)], [])
