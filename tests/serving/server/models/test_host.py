"""ModelHost: models are loaded once, give way when they are idle, and never amid an answer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import pytest

from midfill.errors import MidfillError
from midfill.serving.server.metrics import Metrics
from midfill.serving.server.models.host import HostedModel, ModelHost, RunningModel
from midfill.serving.server.responses import ApiError
from midfill.serving.server.service import ModelService


class Service:
    """As much of a model's service as a host asks for."""

    def __init__(self, name: str) -> None:
        self.metrics = cast("Metrics", None)
        self.name, self.stopped = name, False

    def stop(self) -> None:
        self.stopped = True


class Loads:
    """Loads models that do nothing, and notes what happens."""

    def __init__(self, bytes: int = 10, failing: Sequence[str] = ()) -> None:
        self.events: list[str] = []
        self.services: dict[str, Service] = {}
        self.failing = set(failing)
        self.gate = asyncio.Event()
        self.gate.set()
        self._bytes = bytes

    @contextlib.asynccontextmanager
    async def open(self, name: str) -> AsyncIterator[RunningModel]:
        await self.gate.wait()
        if name in self.failing:
            raise MidfillError(f"{name} is broken")
        self.events.append(f"load {name}")
        service = self.services[name] = Service(name)
        try:
            yield RunningModel(cast("Any", None), cast("ModelService", service), self._bytes)
        finally:
            self.events.append(f"unload {name}")


def run(
    test: Callable[[ModelHost, Loads], Awaitable[None]],
    *,
    memory: int = 20,
    pinned: Sequence[str] = (),
    failing: Sequence[str] = (),
) -> Loads:
    """Run a test on a host of the models a, b and c, each of 10 bytes."""

    async def running() -> Loads:
        loads = Loads(failing=failing)
        models = [HostedModel(name, 10, name in pinned) for name in "abc"]
        host = ModelHost(models, loads.open, memory)
        try:
            await host.start()
            await asyncio.wait_for(test(host, loads), 10)
        finally:
            await host.close()
        return loads

    return asyncio.run(running())


async def use(host: ModelHost, *names: str) -> None:
    for name in names:
        async with host.use(name):
            pass


def test_the_first_model_and_the_pinned_ones_are_loaded_at_the_start() -> None:
    async def test(host: ModelHost, loads: Loads) -> None:
        assert loads.events == ["load a", "load c"]
        assert [model.service is not None for model in host.listed()] == [True, False, True]

    assert run(test, pinned=["c"]).events[2:] == ["unload a", "unload c"]


def test_the_model_unused_longest_gives_way() -> None:
    async def test(host: ModelHost, loads: Loads) -> None:
        await use(host, "b", "a", "c")
        assert loads.events == ["load a", "load b", "unload b", "load c"]

    run(test)


def test_a_pinned_model_stays() -> None:
    async def test(host: ModelHost, loads: Loads) -> None:
        await use(host, "b", "c", "b")
        assert [event for event in loads.events if event.endswith(" a")] == ["load a"]

    run(test, pinned=["a"])


def test_requests_that_come_while_a_model_loads_share_the_loading() -> None:
    async def test(host: ModelHost, loads: Loads) -> None:
        await asyncio.gather(*(use(host, "b") for _ in range(5)))
        assert loads.events == ["load a", "load b"]

    run(test)


def test_a_client_that_goes_does_not_stop_what_others_wait_for() -> None:
    async def test(host: ModelHost, loads: Loads) -> None:
        loads.gate.clear()
        first, second = (asyncio.create_task(use(host, "b")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        assert host.is_loading
        loads.gate.set()
        await second
        assert loads.events == ["load a", "load b"]

    run(test)


def test_a_model_is_unloaded_once_its_answers_are_complete_and_new_ones_wait() -> None:
    async def test(host: ModelHost, loads: Loads) -> None:
        async with host.use("a"):
            other = asyncio.create_task(use(host, "b"))
            await asyncio.sleep(0.01)
            late = asyncio.create_task(use(host, "a"))
            await asyncio.sleep(0.01)
            assert loads.events == ["load a"]
        await asyncio.gather(other, late)
        assert loads.events == ["load a", "unload a", "load b", "unload b", "load a"]

    run(test, memory=10)


def test_a_model_that_cannot_be_loaded_fails_its_request_alone() -> None:
    async def test(host: ModelHost, loads: Loads) -> None:
        with pytest.raises(MidfillError, match="b is broken"):
            await use(host, "b")
        assert not host.is_loading
        await use(host, "a")
        loads.failing.clear()
        await use(host, "b")

    run(test, failing=["b"])


def test_what_turns_out_larger_than_expected_is_refused_beside_pinned_models() -> None:
    async def test() -> None:
        loads = Loads(bytes=15)
        models = [HostedModel("a", 10, pinned=True), HostedModel("b", 10)]
        host = ModelHost(models, loads.open, memory=20)
        await host.start()
        with pytest.raises(ApiError, match=r"b takes about 10 bytes.* leaves 5 bytes") as refused:
            await use(host, "b")
        assert (refused.value.status, refused.value.code) == (503, "insufficient_memory")
        await host.close()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("memory", "pinned", "message"),
    [
        (9, [], "a takes about 10 bytes"),
        (15, ["a"], "b and the pinned models take about 20 bytes"),
        (15, ["a", "b"], "the pinned models take about 20 bytes"),
    ],
)
def test_models_that_never_fit_are_refused_at_the_start(
    memory: int, pinned: list[str], message: str
) -> None:
    models = [HostedModel(name, 10, name in pinned) for name in "ab"]
    with pytest.raises(MidfillError, match=message):
        ModelHost(models, Loads().open, memory)


def test_a_server_that_stops_ends_answers_and_loads_nothing_more() -> None:
    async def test(host: ModelHost, loads: Loads) -> None:
        host.stop()
        assert loads.services["a"].stopped
        with pytest.raises(MidfillError, match="stopping"):
            await use(host, "b")

    run(test)
