"""Prefill and decode workers: what each may hold, and what it does next.

Source: DistServe (Zhong et al., OSDI 2024, arXiv 2401.09670), sections 4.3 and 5. Both are first
come, first served, and pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
