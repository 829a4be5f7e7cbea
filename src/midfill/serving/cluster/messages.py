"""What a replica reports: messages about requests, as msgpack, and every two seconds its numbers.

The numbers are plain values, which Serve passes on.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from midfill.engine.messages import Failed
from midfill.engine.request import EngineOutput, EngineStats, TenantStats


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The first message: this replica has the request."""

    replica: str


class Output(msgspec.Struct, frozen=True, tag=True):
    """New tokens."""

    output: EngineOutput


FromReplica = Accepted | Output | Failed


class KvHint(msgspec.Struct, frozen=True):
    """To a replica, with a request: where its KV is, as far as the server knows.

    Attributes:
        held: how many of its prompt's first tokens a replica has computed, by its name.
        prefill_rate: tokens of prompts that a replica computes per second; None before any was
            measured.
    """

    held: dict[str, int] = {}
    prefill_rate: float | None = None


class KvMoveCounts(msgspec.Struct, kw_only=True):
    """What a replica fetched from others since it started.

    Attributes:
        moved: prompts whose KV came.
        moved_tokens: tokens that it was of.
        late: prompts whose KV didn't come in time.
        failed: prompts whose KV was not there any more, or was refused.
        declined: prompts that were cheaper to compute.
    """

    moved: int = 0
    moved_tokens: int = 0
    late: int = 0
    failed: int = 0
    declined: int = 0


class ReplicaNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """One replica.

    Attributes:
        state: of its engine, see ``EngineClient``.
        documents: how many documents it has had requests of.
        queued_tokens: prompt tokens of requests without any output yet.
        restarts: how often its engine was restarted.
        process_id: of its own process.
        stats: its engine's numbers.
        tenants: the same by tenant.
        moves: what it fetched from other replicas.
    """

    state: str = "starting"
    documents: int = 0
    queued_tokens: int = 0
    restarts: int = 0
    process_id: int = 0
    stats: EngineStats = EngineStats()
    tenants: dict[str, TenantStats] = {}
    moves: KvMoveCounts = msgspec.field(default_factory=KvMoveCounts)

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that was found in the cache."""
        return self.stats.cached_tokens / max(1, self.stats.prompt_tokens)

    def plain(self) -> dict[str, Any]:
        """Return them as what JSON can hold."""
        return dict(msgspec.to_builtins(self))


def read_numbers(values: Mapping[str, Any]) -> ReplicaNumbers:
    """Return a replica's numbers; all are 0 before it has reported any."""
    return msgspec.convert(values, ReplicaNumbers) if values else ReplicaNumbers()


def total_moves(replicas: Iterable[ReplicaNumbers]) -> KvMoveCounts:
    """Return sums over replicas."""
    total = KvMoveCounts()
    for each in replicas:
        for name in total.__struct_fields__:
            setattr(total, name, getattr(total, name) + getattr(each.moves, name))
    return total
