"""A whole server under any order of requests, disconnections, kills, pauses and evictions.

What must hold, whatever happens: every request ends. It ends with the answer that an undisturbed
server gives, character by character; or with an error that says to try again, and what had been
sent of the answer until then is the beginning of it. When all have ended, nothing is held: every
slot is free or evictable, and nothing is queued or counts as running.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import aiohttp
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from running_server import RunningServer, start
from tiny_checkpoints import write_tiny

from benchmarks.reliability.asking import Outcome, ask

T = TypeVar("T")

TEXTS = (
    "def area(w, h):\n    return",
    "a b c d " * 30,
    "for x in range(10):\n",
    "import os\n" * 20,
)
MAX_TOKENS = 40
SECONDS = 180


class Loop:
    """An event loop in a thread of its own, for requests that go on while the test does."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass
class Asked:
    """A request in progress: what it should answer, if that is known, and what becomes of it."""

    expected: str | None
    outcome: "Future[Outcome]"


@dataclass
class Served:
    """The server, who asks it, and what it answers when nothing disturbs it."""

    server: RunningServer
    loop: Loop
    session: aiohttp.ClientSession
    truth: list[str]

    def ask(self, text: str, *, streamed: bool) -> "Future[Outcome]":
        body = {
            "prompt": text,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": streamed,
        }
        return self.loop.start(ask(self.session, self.server.url, body, SECONDS))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_tiny("llama", Path(tmp_path_factory.mktemp("states")) / "tiny-llama")
    loop = Loop()

    async def new_session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))

    # A pool of few answers' size: they are preempted, and what is cached is evicted.
    with start(folder, "--kv-memory", "1MB") as server:
        session = loop.start(new_session()).result()
        undisturbed = Served(server, loop, session, [])
        for text in TEXTS:
            outcome = undisturbed.ask(text, streamed=False).result(SECONDS)
            assert outcome.kind == "complete"
            undisturbed.truth.append(outcome.text)
        yield undisturbed
        loop.start(session.close()).result()
    loop.close()


class ServerMachine(RuleBasedStateMachine):
    served: ClassVar[Served]

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Asked] = []

    @rule(place=st.integers(0, len(TEXTS) - 1), streamed=st.booleans())
    def submit(self, place: int, streamed: bool) -> None:
        outcome = self.served.ask(TEXTS[place], streamed=streamed)
        self.asked.append(Asked(self.served.truth[place], outcome))

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 40))
    def disconnect(self, which: int) -> None:
        self.asked.pop(which % len(self.asked)).outcome.cancel()

    @rule(seed=st.integers(0, 9))
    def evict(self, seed: int) -> None:
        """Ask for texts that fill the pool, and don't wait."""
        for number in range(3):
            text = f"{seed} {number} " * 40
            self.asked.append(Asked(None, self.served.ask(text, streamed=True)))

    @rule(number=st.sampled_from([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT]))
    def kill(self, number: signal.Signals) -> None:
        """End the engine, and wait until the server has noticed."""
        server = self.served.server
        server.wait_for(self.is_ready, SECONDS)
        restarts = server.metric("engine_restarts_total")
        os.kill(server.engine_process(), number)
        server.wait_for(lambda: server.metric("engine_restarts_total") > restarts, SECONDS)

    @rule()
    def pause(self) -> None:
        server = self.served.server
        server.wait_for(self.is_ready, SECONDS)
        engine = server.engine_process()
        os.kill(engine, signal.SIGSTOP)
        assert server.get("/livez").status_code == 200
        os.kill(engine, signal.SIGCONT)

    def is_ready(self) -> bool:
        return self.served.server.get("/health").status_code == 200

    @rule()
    def settle(self) -> None:
        """Wait until all requests have ended, and check that nothing is left of them."""
        for one in self.asked:
            outcome = one.outcome.result(SECONDS)
            assert outcome.kind in ("complete", "retry"), outcome
            if one.expected is not None:
                is_whole = outcome.kind == "complete"
                assert outcome.text == (
                    one.expected if is_whole else one.expected[: len(outcome.text)]
                )
        self.asked.clear()
        server = self.served.server
        server.wait_for(self.is_ready, SECONDS)
        server.wait_for(self.holds_nothing, SECONDS)

    def holds_nothing(self) -> bool:
        """Whether every slot is free or evictable, and nothing is queued or in progress."""
        server = self.served.server
        held = server.metric("kv_slots") - server.metric("kv_slots_free")
        names = ("running", "waiting", "background")
        busy = sum(server.metric(f"num_requests_{name}") for name in names)
        busy += server.metric("queued_tokens") + server.metric("undelivered_outputs")
        return busy == 0 and held == server.metric("kv_slots_cached")

    def teardown(self) -> None:
        self.settle()
        place = len(TEXTS) - 1
        outcome = self.served.ask(TEXTS[place], streamed=True).result(SECONDS)
        assert (outcome.kind, outcome.text) == ("complete", self.served.truth[place])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_happens_every_request_ends_as_it_should(served: Served) -> None:
    ServerMachine.served = served
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        ServerMachine,
        settings=settings(
            max_examples=5,
            stateful_step_count=14,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
