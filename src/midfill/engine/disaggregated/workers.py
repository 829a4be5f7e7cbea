"""Prefill and decode workers: what each may hold, and what it does next.

Source: DistServe (Zhong et al., OSDI 2024, arXiv 2401.09670), sections 4.3 and 5. Both schedulers
are first come, first served, and pure: the simulator and the real workers call the same functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from midfill.engine.disaggregated.latency import DecodeLatency, PrefillLatency
from midfill.errors import MidfillError

WAITING_SHARE = 0.05
"""Of a decode worker's pool: while prompts that wait for their first step hold less, it pulls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A worker's KV memory.

    Attributes:
        pages: how many.
        page_tokens: tokens of a page.
    """

    pages: int
    page_tokens: int = 16

    def __post_init__(self) -> None:
        if self.pages < 1 or self.page_tokens < 1:
            raise MidfillError("a worker needs at least one page of KV, and a page one token")

    def pages_of(self, tokens: int) -> int:
        """Return the pages that so many tokens need."""
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """What a worker may do that computes prompts and their first tokens.

    Attributes:
        pool: also holds prompts that are computed and not yet pulled: it is the buffer.
        max_batch: prompts.
        max_batch_tokens: tokens of a batch.
        saturating_tokens: tokens of a prompt that keep a device busy: from there on prompts run
            alone, shorter ones together up to this number (the paper's L_m).
        whole_batches: whether a batch starts when the last one has ended, as in the paper;
            otherwise the worker has a scheduler of its own, and takes prompts as it has room.
    """

    pool: Pool
    max_batch: int = 32
    max_batch_tokens: int = 8192
    saturating_tokens: int = 512
    whole_batches: bool = True

    def admits(self, prompt: int) -> bool:
        """Whether a prompt of so many tokens can ever run."""
        return prompt <= self.max_batch_tokens and self.pool.pages_of(prompt) <= self.pool.pages


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWorker(PrefillLimits):
    """The same, with how long it takes.

    Attributes:
        latency: of a batch on all of its devices, if its layers are not in stages.
        stages: of its pipeline.
        stage_seconds: what each stage adds, if there are several.
        devices: how many it occupies.
    """

    latency: PrefillLatency
    stages: int = 1
    stage_seconds: float = 0.001
    devices: int = 1

    def seconds_per_stage(self, prompts: Sequence[int]) -> float:
        """Return how long a batch of prompts of these lengths occupies one stage."""
        whole = self.latency.seconds(prompts)
        return whole / self.stages + self.stage_seconds if self.stages > 1 else whole


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """What a worker may do that computes all tokens but the first.

    Attributes:
        pool: its KV memory.
        max_batch: sequences of a step.
        max_batch_tokens: tokens of their contexts.
    """

    pool: Pool
    max_batch: int = 256
    max_batch_tokens: int = 1_000_000

    def admits(self, tokens: int) -> bool:
        """Whether a prompt and its answer of so many tokens together can ever be decoded."""
        return self.pool.pages_of(tokens) <= self.pool.pages and tokens <= self.max_batch_tokens

    def pulled_pages(self, prompt: int) -> int:
        """Return the pages that a prompt holds once it is pulled: enough for its first step."""
        return self.pool.pages_of(prompt + 2)

    def pulls(self, prompt: int, waiting_pages: int, free_pages: int) -> bool:
        """Whether it pulls the next prompt's KV now.

        Args:
            prompt: tokens of that prompt.
            waiting_pages: held by prompts that have been pulled and not yet decoded.
            free_pages: of the pool.
        """
        few_wait = waiting_pages < WAITING_SHARE * self.pool.pages
        return few_wait and self.pulled_pages(prompt) <= free_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorker(DecodeLimits):
    """The same, with how long it takes.

    Attributes:
        latency: of a step on all of its devices, if its layers are not in stages.
        stages: of its pipeline; it has as many batches, which take turns.
        devices: how many it occupies.
    """

    latency: DecodeLatency
    stages: int = 1
    devices: int = 1

    def seconds_per_stage(self, sequences: int, context_tokens: int) -> float:
        """Return how long a step occupies one stage."""
        return self.latency.seconds(sequences, context_tokens) / self.stages


def prefill_batch(worker: PrefillLimits, prompts: Sequence[int], held_pages: int) -> int:
    """Return how many prompts from a queue's head form the next batch.

    Args:
        worker: which computes them.
        prompts: tokens of the queued prompts, in the order of their arrival.
        held_pages: of prompts in flight, and of those that are computed and not yet pulled.
    """
    tokens = pages = 0
    for number, prompt in enumerate(prompts):
        tokens += prompt
        pages += worker.pool.pages_of(prompt)
        is_over = (
            number >= worker.max_batch
            or tokens > worker.max_batch_tokens
            or held_pages + pages > worker.pool.pages
            or (number > 0 and tokens > worker.saturating_tokens)
        )
        if is_over:
            return number
    return len(prompts)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The next step of one of a decode worker's batches, as numbers of sequences.

    Attributes:
        swapped_out: from the batch's end, to host memory.
        swapped_in: from the head of those in host memory.
        admitted: from the head of those that were pulled.
    """

    swapped_out: int
    swapped_in: int
    admitted: int


def plan_decode_step(
    worker: DecodeLimits,
    batch: Sequence[int],
    other_pages: int,
    swapped: Sequence[int],
    waiting: Sequence[int],
    pulled_pages: int,
) -> DecodeStep:
    """Plan a step.

    Args:
        worker: which runs it.
        batch: tokens of the contexts of the batch whose turn it is.
        other_pages: held by the worker's other batches, one more token for each included.
        swapped: tokens of the contexts in host memory, first those that come back first.
        waiting: tokens of the prompts that were pulled.
        pulled_pages: held by these, and by prompts on their way (``DecodeWorker.pulled_pages``).
    """
    pool = worker.pool
    needed = [pool.pages_of(tokens + 1) for tokens in batch]
    kept = len(batch)
    while kept and sum(needed[:kept]) + other_pages + pulled_pages > pool.pages:
        kept -= 1
    if kept < len(batch):
        return DecodeStep(len(batch) - kept, 0, 0)
    pages = sum(needed) + other_pages + pulled_pages
    count, context_tokens = len(batch), sum(batch)

    def fits(tokens: int, further_pages: int) -> bool:
        return (
            count < worker.max_batch
            and context_tokens + tokens <= worker.max_batch_tokens
            and pages + further_pages <= pool.pages
        )

    swapped_in = admitted = 0
    for tokens in swapped:
        if not fits(tokens, further := pool.pages_of(tokens + 1)):
            break
        count, context_tokens, pages = count + 1, context_tokens + tokens, pages + further
        swapped_in += 1
    # Those in host memory come first, unless nothing would run before something else has.
    if swapped_in == len(swapped) or not (count or other_pages):
        for prompt in waiting:
            if not fits(prompt + 1, 0):
                break
            count, context_tokens = count + 1, context_tokens + prompt + 1
            admitted += 1
    return DecodeStep(0, swapped_in, admitted)
