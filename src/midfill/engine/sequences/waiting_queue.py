"""WaitingQueue: the sequences that wait to be admitted, and in which order."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from midfill.engine.scheduling.policies.deficit_round_robin import DeficitRoundRobin, Turn, Turns
from midfill.engine.sequences.sequence import Sequence

_MAX_CHOSEN = 16  # of several tenants; a step admits fewer, or the next one continues
_MAX_CHOSEN_BY_POLICY = 64  # the same where a policy chooses among them


class WaitingQueue:
    """Sequences that have run before come first, then new ones, fairly by tenant.

    Offline ones are shown where no others wait, in order of arrival. Adding, removing and looking
    at the head take the same time however long the queue is.

    Args:
        policy: whose turn it is, where several tenants have new sequences.
    """

    def __init__(self, policy: DeficitRoundRobin) -> None:
        self._policy = policy
        self._resuming: OrderedDict[int, Sequence] = OrderedDict()
        self._new: dict[str, dict[int, Sequence]] = {}
        self._offline: dict[int, Sequence] = {}
        self._turns: Turns = ()
        # Negative deficits of tenants that have nothing queued just now, while others have.
        self._debts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._resuming) + sum(map(len, self._new.values())) + len(self._offline)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all sequences: those of one tenant in their order, tenant by tenant."""
        yield from self._resuming.values()
        for turn in self._turns:
            yield from self._new[turn.tenant].values()
        yield from self._offline.values()

    def append(self, sequence: Sequence) -> None:
        """Add a new sequence behind its tenant's others."""
        if sequence.hints.offline:
            self._offline[sequence.sequence_id] = sequence
            return
        tenant = sequence.tenant
        if tenant not in self._new:
            self._new[tenant] = {}
            # Where nobody else waits, it is this tenant's turn at once.
            deficit = self._debts.pop(tenant, 0) + (0 if self._turns else self._policy.quantum)
            self._turns = (*self._turns, Turn(tenant, deficit))
        self._new[tenant][sequence.sequence_id] = sequence

    def insert(self, sequence: Sequence) -> None:
        """Add a new sequence where it would be among its tenant's, had it been added on arrival."""
        self.append(sequence)
        if sequence.hints.offline:
            self._offline = dict(sorted(self._offline.items()))
        else:
            self._new[sequence.tenant] = dict(sorted(self._new[sequence.tenant].items()))

    def resume(self, sequences: Iterable[Sequence]) -> None:
        """Put sequences that have run before to the head, the first of them first."""
        for sequence in reversed(tuple(sequences)):
            if sequence.hints.offline:
                self.insert(sequence)
                continue
            self._resuming[sequence.sequence_id] = sequence
            self._resuming.move_to_end(sequence.sequence_id, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        for queue in (self._resuming, self._offline):
            if queue.pop(sequence.sequence_id, None) is not None:
                return
        tenant = sequence.tenant
        queued = self._new[tenant]
        del queued[sequence.sequence_id]
        if not queued:
            del self._new[tenant]
            deficit = next(turn.deficit for turn in self._turns if turn.tenant == tenant)
            self._turns = tuple(turn for turn in self._turns if turn.tenant != tenant)
            if deficit < 0:
                self._debts[tenant] = deficit
        if not self._turns:  # nobody is kept waiting any more
            self._debts.clear()

    def charge(self, tenant: str, tokens: int) -> None:
        """Note that tokens of a tenant were computed; they count while others wait."""
        if tenant in self._new:
            if len(self._turns) > 1:
                self._turns = self._policy.charge(self._turns, tenant, tokens)
        elif self._turns:
            self._debts[tenant] = self._debts.get(tenant, 0) - tokens

    def counts(self) -> dict[str, int]:
        """Return how many sequences of each tenant wait."""
        counts = Counter({tenant: len(queued) for tenant, queued in self._new.items()})
        for queue in (self._resuming, self._offline):
            counts.update(sequence.tenant for sequence in queue.values())
        return counts

    def head(self, limit: int, lookahead: int = 0) -> list[Sequence]:
        """Return the sequences to admit next; at least one if there is any.

        Offline ones follow where no others wait, or the first of them alone behind these.

        Args:
            limit: maximum number of sequences.
            lookahead: for a policy that chooses among more than it can admit: up to so many where
                that is more.
        """
        limit = max(limit, lookahead, 1)
        if not self._turns and not self._resuming:
            return list(islice(self._offline.values(), limit))
        return self._online(limit, lookahead) + list(islice(self._offline.values(), 1))

    def _online(self, limit: int, lookahead: int) -> list[Sequence]:
        """Return the head of those that are not offline; see ``head``."""
        chosen = [
            sequence for sequence, _ in zip(self._resuming.values(), range(limit), strict=False)
        ]
        if len(self._turns) == 1:
            (turn,) = self._turns
            self._turns = (turn._replace(deficit=self._policy.quantum),)  # it kept nobody waiting
            queued = self._new[turn.tenant].values()
            return chosen + [
                sequence for sequence, _ in zip(queued, range(limit - len(chosen)), strict=False)
            ]
        self._turns = turns = self._policy.advance(self._turns)
        queues = {tenant: iter(queued.values()) for tenant, queued in self._new.items()}
        most = _MAX_CHOSEN if not lookahead else _MAX_CHOSEN_BY_POLICY
        limit = min(limit, len(chosen) + most)
        while turns and len(chosen) < limit:
            turns = self._policy.advance(turns)
            tenant = turns[0].tenant
            sequence = next(queues[tenant], None)
            if sequence is None:
                turns = turns[1:]
                continue
            chosen.append(sequence)
            turns = self._policy.charge(turns, tenant, sequence.length)
        return chosen
