"""KvMoves: a document's KV follows it to another replica, where that is cheaper than computing it.

The server in front says which replicas have computed how much of a prompt (``messages.KvHint``).
The replica that gets the request fetches what it lacks from the one with most of it, if the warm
tier's policy finds that this takes less time than computing (``kv.tiers.load_policy``), and waits
for it at most twice as long as computing would take. Whatever goes wrong, the prompt is computed.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from midfill.arrays import Int32Array
from midfill.engine.process.client import EngineClient
from midfill.engine.request import EngineRequest
from midfill.errors import MidfillError
from midfill.kv.tiers.load_policy import MeasuredRate, chunks_to_load, patience
from midfill.serving.cluster.messages import KvHint, KvMoveCounts

if TYPE_CHECKING:  # imports Ray
    from midfill.serving.cluster.serve_handles import ServePeers

_log = logging.getLogger(__name__)

_OVERHEAD_SECONDS = 0.01  # of a call to another replica
_UNKNOWN_SECONDS = 1 / 64  # to compute a token, before the first measurement
_FORGET_SECONDS = 60.0  # after which a bandwidth is measured anew: one that was bad may be good

_PROMPTS = 2  # of a document at a replica: the last one asked, and one computed in idle time
_MAX_TOKENS = 16_000_000  # remembered, 64 MB


class KvMoves:
    """Fetches KV for one replica.

    Args:
        name: the replica's.
        engine: its engine.
        peers: the other replicas.
        token_bytes: of a token's KV.

    Attributes:
        counts: what became of it.
    """

    def __init__(
        self, name: str, engine: EngineClient, peers: "ServePeers", token_bytes: float
    ) -> None:
        self.counts = KvMoveCounts()
        self._name = name
        self._engine = engine
        self._peers = peers
        self._token_bytes = token_bytes
        self._rate = MeasuredRate()
        self._measured = 0.0
        self._moves: dict[str, asyncio.Task[None]] = {}

    async def fetch(self, request: EngineRequest, document: str, hint: KvHint) -> None:
        """Have a prompt's KV in the cache if it is cheaper to fetch than to compute.

        Requests of one document that come meanwhile share the fetch, which goes on if the one that
        began it is cancelled: somebody who types cancels a request every few hundred milliseconds.

        Args:
            request: has not been submitted yet.
            document: what it was routed by.
            hint: where its KV is.
        """
        others = {name: held for name, held in hint.held.items() if name != self._name}
        if not others:
            return
        source = max(others, key=lambda name: (others[name], name))
        gained = others[source] - hint.held.get(self._name, 0)
        if gained <= 0:
            return
        seconds = self._seconds(gained, hint.prefill_rate)
        if not seconds:
            self.counts.declined += 1
            return
        if request.deadline is not None:
            seconds = min(seconds, request.deadline - time.monotonic())
        move = self._moves.get(document)
        if move is None:
            move = asyncio.create_task(
                self._move(source, request, others[source], seconds), name="moving KV"
            )
            self._moves[document] = move
            move.add_done_callback(lambda _: self._moves.pop(document))
        await asyncio.wait({move}, timeout=seconds)

    def _seconds(self, gained: int, prefill_rate: float | None) -> float:
        """Return how long to wait for KV; 0 if computing it is cheaper.

        Args:
            gained: tokens whose KV is sent, and that need not be computed then.
            prefill_rate: tokens computed per second, as far as it is known.
        """
        if time.monotonic() - self._measured > _FORGET_SECONDS:
            self._rate = MeasuredRate()
        compute = gained * (1 / prefill_rate if prefill_rate else _UNKNOWN_SECONDS)
        load = self._rate.seconds(gained * self._token_bytes) or 0.0
        return patience(compute) if chunks_to_load([load], [compute], _OVERHEAD_SECONDS) else 0.0

    async def _move(self, source: str, request: EngineRequest, held: int, seconds: float) -> None:
        """Copy a prompt's missing KV from another replica; count what becomes of it.

        Args:
            source: the other replica.
            request: whose prompt it is.
            held: how many of its tokens are probably there.
            seconds: that it may take.
        """
        started = time.monotonic()
        size = held * self._token_bytes
        try:
            async with asyncio.timeout(seconds):
                start = await self._engine.cached_tokens(request.tenant, request.token_ids)
                if start >= held:
                    return
                size = (held - start) * self._token_bytes  # unless it comes, and tells
                size, moved = await self._fetch_after(start, source, request)
                if moved < 0:  # what was here has been evicted meanwhile
                    size, moved = await self._fetch_after(0, source, request)
        except TimeoutError:
            self.counts.late += 1
        except MidfillError as error:
            self.counts.failed += 1
            _log.info("KV of replica %s is computed here: %s", source, error)
            return
        except Exception:
            self.counts.failed += 1
            _log.exception("KV of replica %s can't be fetched", source)
            return
        else:
            self.counts.moved += 1
            self.counts.moved_tokens += moved
        self._measured = time.monotonic()
        self._rate.record(size, self._measured - started)

    async def _fetch_after(
        self, start: int, source: str, request: EngineRequest
    ) -> tuple[int, int]:
        """Copy the KV of a prompt's tokens after the first ``start``.

        Returns:
            Bytes that were sent, and how many more tokens than these are cached now.

        Raises:
            MidfillError: it isn't there, or can't be used.
        """
        tenant, tokens = request.tenant, request.token_ids
        blob = await self._peers.export_kv(source, tenant, tokens, start)
        return len(blob), await self._engine.import_kv(tenant, blob, tokens[:start]) - start


class Holdings:
    """The last prompts of each document at each replica; documents at rest are forgotten first.

    Args:
        max_tokens: how many tokens of prompts are remembered.
    """

    def __init__(self, max_tokens: int = _MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._prompts: OrderedDict[str, dict[str, deque[Int32Array]]] = OrderedDict()

    def record(self, document: str, replica: str, token_ids: Sequence[int]) -> None:
        """Remember that a replica has computed a prompt of a document."""
        prompts = self._prompts.setdefault(document, {}).setdefault(replica, deque())
        self._prompts.move_to_end(document)
        prompts.append(np.array(token_ids, np.int32))
        self._tokens += len(token_ids)
        if len(prompts) > _PROMPTS:
            self._tokens -= len(prompts.popleft())
        while self._tokens > self._max_tokens:
            _, forgotten = self._prompts.popitem(last=False)
            self._tokens -= sum(len(prompt) for group in forgotten.values() for prompt in group)

    def forget(self, document: str, replica: str) -> None:
        """Forget what a replica has computed of a document."""
        forgotten = self._prompts.get(document, {}).pop(replica, ())
        self._tokens -= sum(map(len, forgotten))

    def held(
        self, document: str, token_ids: Sequence[int], replicas: Collection[str]
    ) -> dict[str, int]:
        """Return how many of a prompt's first tokens replicas have computed, by their names.

        Args:
            document: which it belongs to.
            token_ids: the prompt.
            replicas: those that are there; what others have computed is forgotten.
        """
        known = self._prompts.get(document)
        if known is None:
            return {}
        for name in [name for name in known if name not in replicas]:
            self.forget(document, name)
        tokens = np.array(token_ids, np.int32)
        return {
            name: max(_shared(prompt, tokens) for prompt in group) for name, group in known.items()
        }


def _shared(first: Int32Array, other: Int32Array) -> int:
    """Return how many tokens two prompts begin with alike."""
    span = min(len(first), len(other))
    differs = np.flatnonzero(first[:span] != other[:span])
    return int(differs[0]) if len(differs) else span
