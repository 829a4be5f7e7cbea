"""ModelHost: loads a server's models when requests name them, and unloads those unused longest."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass

from starlette.types import ASGIApp

from midfill.errors import MidfillError, StoppingError
from midfill.serving.server.metrics import MetricsOfModels
from midfill.serving.server.metrics_history import MetricsHistory
from midfill.serving.server.models.memory import LoadedModel, models_to_unload
from midfill.serving.server.responses import ApiError
from midfill.serving.server.service import ListedModel, ModelService
from midfill.system.machine import format_size

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A model that a server can load.

    Attributes:
        name: what clients call it.
        bytes: what it takes in memory, as far as is known before it is loaded.
        pinned: whether it stays in memory.
    """

    name: str
    bytes: int
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class RunningModel:
    """A model in memory.

    Attributes:
        app: answers its requests.
        service: the model's.
        bytes: what it takes.
    """

    app: ASGIApp
    service: ModelService
    bytes: int


OpenModel = Callable[[str], AbstractAsyncContextManager[RunningModel]]
"""Loads the model of a name; it is unloaded at the block's end."""


class _Place:
    """A model, and what runs it while it is in memory."""

    def __init__(self, model: HostedModel) -> None:
        self.model = model
        self.bytes = model.bytes
        self.created = int(time.time())
        self.running: RunningModel | None = None
        self.stack = AsyncExitStack()
        self.users = 0
        self.unused = asyncio.Event()
        self.last_used = -math.inf
        self.loading: asyncio.Task[None] | None = None
        self.waiting: list[asyncio.Future[RunningModel]] = []

    def let_in(self, running: RunningModel) -> None:
        """Let in all who wait for it at once: otherwise another could take its place first."""
        self.running = running
        for waiter in self._take_waiting():
            self.users += 1
            waiter.set_result(running)

    def refuse(self, error: BaseException) -> None:
        """Tell all who wait for it that it can't be loaded."""
        for waiter in self._take_waiting():
            waiter.set_exception(error)

    def _take_waiting(self) -> list["asyncio.Future[RunningModel]"]:
        waiting, self.waiting = self.waiting, []
        return [waiter for waiter in waiting if not waiter.done()]  # others have gone


class ModelHost:
    """The models of one server, some of them in memory.

    A model is loaded when the first request names it, and stays until another one needs its memory.
    Its requests in progress are answered first; those that arrive meanwhile wait for their turn.

    Attributes:
        memory: bytes that the models in memory may take together.
        metrics: of the models in memory together.
        history: what they were in the last half hour.
    """

    def __init__(
        self,
        models: Sequence[HostedModel],
        open_model: OpenModel,
        memory: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create it; nothing is loaded yet.

        Args:
            models: with different names; requests that name none are the first one's.
            open_model: loads one.
            memory: see the attributes.
            clock: tells which was unused longest.

        Raises:
            MidfillError: the pinned models don't fit, or another one beside them never will.
        """
        self._places = {model.name: _Place(model) for model in models}
        self._open = open_model
        self.memory = memory
        self._clock = clock
        self._turn = asyncio.Lock()
        self._stopping = False
        self._default = models[0].name
        self.metrics = MetricsOfModels(lambda: [each.metrics for each in self._services()])
        self.history = MetricsHistory(self.metrics.sums)
        self._check_memory()

    @property
    def names(self) -> tuple[str, ...]:
        """The models' names, that of the default first."""
        return tuple(self._places)

    @property
    def running(self) -> RunningModel | None:
        """A model in memory, the default if it is; None while none is."""
        default = self._places[self._default].running
        others = (place.running for place in self._places.values())
        return default or next((each for each in others if each is not None), None)

    @property
    def is_loading(self) -> bool:
        """Whether one is being loaded, or waits for its turn."""
        return any(place.loading is not None for place in self._places.values())

    def listed(self) -> list[ListedModel]:
        """Return all models as clients may list them."""
        return [
            ListedModel(
                name,
                place.created,
                place.bytes,
                None if place.running is None else place.running.service,
            )
            for name, place in self._places.items()
        ]

    async def start(self) -> None:
        """Load the default and the pinned models.

        Raises:
            MidfillError: one can't be loaded.
        """
        for name, place in self._places.items():
            if name == self._default or place.model.pinned:
                async with self.use(name):
                    pass

    @contextlib.asynccontextmanager
    async def use(self, name: str | None = None) -> AsyncIterator[RunningModel]:
        """Load a model, if it isn't in memory, and keep it there for the ``with`` block.

        Args:
            name: one of ``names``; None is the default.

        Raises:
            ApiError: 503, there is no memory for it beside the pinned models.
            MidfillError: it can't be loaded, or the server is stopping.
        """
        place = self._places[name or self._default]
        running = place.running
        if running is None:
            running = await self._loaded(place)
        else:
            place.users += 1
        try:
            yield running
        finally:
            self._release(place)

    def stop(self) -> None:
        """End all requests in progress, and refuse new ones, with an error that says so."""
        self._stopping = True
        for service in self._services():
            service.stop()

    async def close(self) -> None:
        """Unload all models."""
        self._stopping = True
        loading = [place.loading for place in self._places.values() if place.loading is not None]
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        for place in self._places.values():
            place.running = None
            await place.stack.aclose()

    async def _loaded(self, place: _Place) -> RunningModel:
        """Wait until a model is in memory; its user must be released."""
        waiter: asyncio.Future[RunningModel] = asyncio.get_running_loop().create_future()
        place.waiting.append(waiter)
        if place.loading is None:
            # A task of its own: a client that goes doesn't stop what others wait for.
            place.loading = asyncio.create_task(self._load(place), name="load a model")
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(place)  # it was let in at this very moment
            raise

    def _release(self, place: _Place) -> None:
        place.users -= 1
        place.last_used = self._clock()
        if not place.users:
            place.unused.set()

    async def _load(self, place: _Place) -> None:
        """Load a model for all who wait for it."""
        try:
            async with self._turn:
                running = await self._bring_in(place)
                place.loading = None
                place.let_in(running)
        except Exception as error:
            place.loading = None
            place.refuse(error)
        except asyncio.CancelledError:
            place.refuse(_stopping())
            raise

    async def _bring_in(self, place: _Place) -> RunningModel:
        if self._stopping:
            raise _stopping()
        for name in self._to_unload(place):
            await self._unload(self._places[name])
        started, stack = time.perf_counter(), AsyncExitStack()
        try:
            running = await stack.enter_async_context(self._open(place.model.name))
        except BaseException:
            await stack.aclose()
            raise
        place.stack, place.bytes, place.last_used = stack, running.bytes, self._clock()
        _log.info(
            "loaded %s in %.1f s: %s of memory",
            place.model.name, time.perf_counter() - started, format_size(place.bytes),
        )  # fmt: skip
        return running

    async def _unload(self, place: _Place) -> None:
        """Unload a model once its requests in progress are answered."""
        place.running = None  # new ones wait
        while place.users:
            place.unused.clear()
            await place.unused.wait()
        await place.stack.aclose()
        _log.info("unloaded %s", place.model.name)

    def _to_unload(self, place: _Place) -> tuple[str, ...]:
        loaded = [
            LoadedModel(
                name,
                each.bytes,
                math.inf if each.users else each.last_used,
                each.model.pinned,
            )
            for name, each in self._places.items()
            if each.running is not None
        ]
        chosen = models_to_unload(loaded, place.bytes, self.memory)
        if chosen is None:
            pinned = sum(each.bytes for each in loaded if each.pinned)
            raise ApiError(
                503,
                f"{place.model.name} takes about {format_size(place.bytes)} of memory; beside the"
                f" pinned models, --model-memory {format_size(self.memory)} leaves"
                f" {format_size(max(0, self.memory - pinned))}",
                code="insufficient_memory",
            )
        return chosen

    def _check_memory(self) -> None:
        pinned = sum(place.bytes for place in self._places.values() if place.model.pinned)
        for name, place in self._places.items():
            needed = pinned + (0 if place.model.pinned else place.bytes)
            if needed > self.memory:
                beside = "" if not pinned or place.model.pinned else f"{name} and "
                what = f"{beside}the pinned models" if pinned else name
                verb = "take" if pinned else "takes"
                raise MidfillError(
                    f"{what} {verb} about {format_size(needed)} of memory, more than the"
                    f" {format_size(self.memory)} of --model-memory; pin fewer, give more, or less"
                    " with --kv-memory"
                )

    def _services(self) -> list[ModelService]:
        places = self._places.values()
        return [place.running.service for place in places if place.running is not None]


def _stopping() -> StoppingError:
    return StoppingError("the server is stopping; try again in a moment", retry_after=1)
