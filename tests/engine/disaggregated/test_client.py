"""Prefill and decode workers under supervision: one that dies or hangs takes no answer with it."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass

import pytest
from slowed_engines import slow_engines
from tiny_checkpoints import write_tiny

from midfill.config import ModelOptions, WarmTierOptions, Workers
from midfill.engine.disaggregated.client import DisaggregatedClient, worker_options
from midfill.engine.process.client import EngineClient
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.errors import EngineDeadError

OPTIONS = ModelOptions(threads=1, kv_memory=16 * 2**20)
STEP_SECONDS = 0.005  # an answer of some hundred tokens goes on for seconds
HANG_SECONDS = 8.0  # after which a worker is taken to hang


@dataclass
class Running:
    """A prefill and a decode worker, and their event loop."""

    loop: asyncio.Runner
    client: DisaggregatedClient

    @property
    def prefill(self) -> EngineClient:
        return self.client.workers[0].engine

    @property
    def decode(self) -> EngineClient:
        return self.client.workers[1].engine

    def run(self, test: Coroutine[None, None, None]) -> None:
        async def limited() -> None:
            await asyncio.wait_for(test, 240)

        self.loop.run(limited())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("disaggregated") / "tiny-llama"
    write_tiny("llama", folder, max_position_embeddings=2048)
    with asyncio.Runner() as loop, slow_engines(STEP_SECONDS):
        client = DisaggregatedClient(folder, OPTIONS, Workers(1, 1), step_timeout=HANG_SECONDS)
        loop.run(client.start())
        yield Running(loop, client)
        loop.run(client.close())


_names = iter(range(10**9))


def ask(tokens: int, max_tokens: int, tenant: str, **fields: object) -> EngineRequest:
    sampling = EngineSamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(
        request_id=f"r{next(_names)}",
        token_ids=[10 + at % 90 for at in range(tokens)],
        sampling=sampling,
        tenant=tenant,
        **fields,  # type: ignore[arg-type]
    )


async def tokens_of(client: DisaggregatedClient, request: EngineRequest) -> list[int]:
    with client.submit(request) as outputs:
        return [token async for output in outputs for token in output.token_ids]


def send(engine: EngineClient, number: signal.Signals) -> None:
    assert engine.process_id is not None
    os.kill(engine.process_id, number)


async def restarted(engine: EngineClient, times: int) -> None:
    async with asyncio.timeout(150):
        while engine.restarts < times or engine.state != "ready":
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("role", "number"),
    [("prefill", signal.SIGKILL), ("decode", signal.SIGKILL), ("decode", signal.SIGSTOP)],
)
def test_an_answer_goes_on_when_a_worker_is_lost(
    running: Running, role: str, number: signal.Signals
) -> None:
    async def test() -> None:
        client = running.client
        lost = running.prefill if role == "prefill" else running.decode
        expected = await tokens_of(client, ask(40, 600, "whole"))
        before, resumed = lost.restarts, client.resumed
        request = ask(1500 if role == "prefill" else 40, 600, f"lost-{number}")
        if role == "prefill":
            send(lost, signal.SIGSTOP)  # lest the first token is there before the worker is lost
        with client.submit(request) as outputs:
            if role == "decode":
                async for output in outputs:
                    tokens = list(output.token_ids)
                    break
                while not running.decode.stats.running:
                    await asyncio.sleep(0.002)
            else:
                tokens = []
            send(lost, number)
            tokens += [token async for output in outputs for token in output.token_ids]
        assert client.resumed == resumed + 1
        if role == "decode":
            assert tokens == expected
        await restarted(lost, before + 1)
        again = await tokens_of(client, ask(len(request.token_ids), 600, "again"))
        assert again == tokens
        assert client.queued_tokens == client.stats.waiting == 0

    running.run(test())


def test_prompts_for_idle_time_are_given_up(running: Running) -> None:
    async def test() -> None:
        before = running.prefill.restarts
        send(running.prefill, signal.SIGSTOP)  # lest it is done before it is lost
        with running.client.submit(ask(1900, 1, "idle", background=True)) as outputs:
            send(running.prefill, signal.SIGKILL)
            assert [output.finish_reason async for output in outputs] == ["cancelled"]
        await restarted(running.prefill, before + 1)

    running.run(test())


def test_without_any_worker_requests_can_be_retried(running: Running) -> None:
    async def test() -> None:
        before = [worker.engine.restarts for worker in running.client.workers]
        with running.client.submit(ask(40, 1500, "none")) as outputs:
            await anext(outputs)
            for worker in running.client.workers:
                send(worker.engine, signal.SIGKILL)
            with pytest.raises(EngineDeadError) as raised:
                async for _ in outputs:
                    pass
        assert raised.value.retry_after
        with pytest.raises(EngineDeadError, match="no worker is ready"):
            running.client.submit(ask(40, 1, "none"))
        assert running.client.state == "restarting"
        for worker, restarts in zip(running.client.workers, before, strict=True):
            await restarted(worker.engine, restarts + 1)
        assert len(await tokens_of(running.client, ask(40, 5, "none"))) == 5

    running.run(test())


def test_a_request_whose_time_is_over_while_it_waits_ends(running: Running) -> None:
    async def test() -> None:
        request = ask(30, 5, "late", deadline=0.0)
        with running.client.submit(request) as outputs:
            assert [output.finish_reason async for output in outputs] == ["expired"]

    running.run(test())


def test_workers_divide_what_the_machine_has() -> None:
    tier = WarmTierOptions(memory=90, disk=60, folder="/kv", scope="keys")
    options = ModelOptions(warm_tier=tier)
    first, second = (worker_options(options, Workers(2, 1), "prefill", at) for at in range(2))
    decode = worker_options(options, Workers(2, 1), "decode", 0)
    assert first.memory_share == decode.memory_share == pytest.approx(1 / 3)
    assert first.threads is not None
    assert first.threads >= 1
    assert (first.warm_tier.memory, first.warm_tier.disk) == (45, 30)
    assert first.warm_tier.folder != second.warm_tier.folder
    assert first.reuse == decode.reuse == "off", "whatever was measured of the model"
    assert decode.warm_tier == WarmTierOptions(scope="keys")  # documents are the prefill workers'
    assert worker_options(options, Workers(1, 3), "prefill", 0).warm_tier == tier
