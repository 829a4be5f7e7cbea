"""One of two replicas is killed while it answers: what is wrong, what fails, how long it takes."""

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from benchmarks.replicas.load import Ask, Asks
from benchmarks.replicas.running import BenchCluster
from midfill.errors import MidfillError
from midfill.lab.bench.clients import HttpClient

_KILLED_AFTER = 0.25  # of the requests
_RECOVERY_SECONDS = 300.0
_TICK_SECONDS = 0.5


class Failover(msgspec.Struct, frozen=True, kw_only=True):
    """What happened.

    Attributes:
        requests: how many were sent, one user's after the other's answer.
        wrong: answers other than one replica gives.
        failed: requests that ended with an error.
        resumed: requests that another replica continued.
        output_tokens: of each answer.
        longest_before, longest_after: seconds of the longest request that ended before the kill,
            and of the longest one after it.
        answered_seconds: from the kill until a request that had begun before it was answered by
            the other replica, the last of them.
        restored_seconds: from the kill until two replicas ran again.
    """

    requests: int
    wrong: int
    failed: int
    resumed: int
    output_tokens: int
    longest_before: float
    longest_after: float
    answered_seconds: float
    restored_seconds: float

    def sentence(self) -> str:
        """Return it in words."""
        return (
            f"One of two replicas killed under the editing mix, with answers of"
            f" {self.output_tokens} tokens: of {self.requests} requests {self.wrong} were answered"
            f" otherwise, {self.failed} failed, {self.resumed} were continued by the other replica;"
            f" requests in progress were answered within"
            f" {self.answered_seconds:.1f} s of the kill (the longest request took"
            f" {self.longest_before:.1f} s before it and {self.longest_after:.1f} s after it),"
            f" and two replicas ran again after {self.restored_seconds:.0f} s."
        )


class _Sent(msgspec.Struct, frozen=True):
    """A request: its answer, None if it failed; when it began and ended."""

    text: str | None
    began: float
    ended: float


def lose_a_replica(
    cluster: BenchCluster, url: str, load: Asks, expected: Sequence[Sequence[str]]
) -> Failover:
    """Send a load, and kill a replica on the way.

    Args:
        cluster: two replicas on this machine.
        url: theirs.
        load: what to send.
        expected: the answers, by user and request.
    """
    before = cluster.status()
    victim = max(before["replicas"], key=lambda name: int(before["replicas"][name]["documents"]))
    process = int(before["replicas"][victim]["process_id"])
    killed, sent = asyncio.run(_send_and_kill(url, load, process))
    restored = _wait_until_restored(cluster, victim, killed)
    every = [one for user in sent for one in user]
    texts = [text for user in expected for text in user]
    met = [one for one in every if one.began <= killed <= one.ended]
    return Failover(
        requests=len(every),
        wrong=sum(
            one.text is not None and one.text != text
            for one, text in zip(every, texts, strict=True)
        ),
        failed=sum(one.text is None for one in every),
        resumed=int(cluster.status()["resumed"]) - int(before["resumed"]),
        output_tokens=int(load[0][0].body["max_tokens"]),
        longest_before=_longest([one for one in every if one.ended < killed]),
        longest_after=_longest([one for one in every if one.ended >= killed]),
        answered_seconds=max((one.ended - killed for one in met), default=0.0),
        restored_seconds=restored,
    )


async def _send_and_kill(url: str, load: Asks, process: int) -> tuple[float, list[list[_Sent]]]:
    """Send all requests, and kill a process after some; return when, and what was sent."""
    total = sum(map(len, load))
    done = 0
    kill = asyncio.Event()

    async with HttpClient(f"{url}/v1") as client:
        model = await client.model()

        async def send(body: Mapping[str, Any]) -> _Sent:
            nonlocal done
            began = time.perf_counter()
            try:
                text = (await client.complete({**body, "model": model})).text
            except MidfillError:
                text = None
            done += 1
            if done >= _KILLED_AFTER * total:
                kill.set()
            return _Sent(text, began, time.perf_counter())

        async def user(asks: Sequence[Ask]) -> list[_Sent]:
            return [await send(each.body) for each in asks]

        users = [asyncio.create_task(user(asks)) for asks in load]
        await kill.wait()
        os.kill(process, signal.SIGKILL)
        killed = time.perf_counter()
        return killed, [await each for each in users]


def _wait_until_restored(cluster: BenchCluster, victim: str, killed: float) -> float:
    """Return how many seconds after the kill there were two replicas again.

    Raises:
        MidfillError: there never were.
    """
    while time.perf_counter() - killed < _RECOVERY_SECONDS:
        present = cluster.status()["replicas"]
        if victim not in present and len(present) == 2:
            return time.perf_counter() - killed
        time.sleep(_TICK_SECONDS)
    raise MidfillError(f"no second replica has come back in {_RECOVERY_SECONDS:g} s")


def _longest(sent: Sequence[_Sent]) -> float:
    return max((one.ended - one.began for one in sent), default=0.0)
