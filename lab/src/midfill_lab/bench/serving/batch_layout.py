"""What a step computes where its rows don't simply follow one another, as in this engine.

ragged   each row once: what midfill's kernels run
padded   the usual batch of tensor libraries, [requests, longest], whose shorter prompts are padded
packed   Prepacking: several prompts share a row of tokens. Source: Zhao et al., "Prepacking: A
         Simple Method for Fast Prefilling and Increased Throughput in Large Language Models", 2024,
         arXiv 2404.09529

In the latter two, attention is dense: every row meets every key of its row of the batch, and a mask
drops what it may not see. Answers are a padded batch of one token each in both.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from midfill.runners.forward.batch import ForwardBatch
from midfill_lab.bench.serving.step_costs import StepWork

LayoutName = Literal["ragged", "padded", "packed"]


def pack_prompts(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the prompts of each row, by their places: best-fit decreasing.

    Args:
        lengths: tokens of each prompt, at least 1.
        capacity: tokens of a row.

    Raises:
        ValueError: a prompt is empty, or longer than a row.
    """
    if any(not 1 <= length <= capacity for length in lengths):
        raise ValueError(f"prompts have from 1 to {capacity} tokens")
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for prompt in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        fitting = bisect_left(free, (lengths[prompt], 0))
        left, row = free.pop(fitting) if fitting < len(free) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(prompt)
        insort(free, (left - lengths[prompt], row))
    return rows


def padded_work(batch: ForwardBatch) -> StepWork:
    """Return what a step computes where all requests' rows and keys are padded to the longest."""
    queries, keys = _shapes(batch)
    return _padded(queries, keys, len(batch.logit_rows))


def packed_work(batch: ForwardBatch) -> StepWork:
    """Return what a step computes where prompts share rows as long as the longest of them.

    Prompts with a cached prefix have its keys in their row, too.
    """
    queries, keys = _shapes(batch)
    answers = [place for place, rows in enumerate(queries) if rows == 1]
    prompts = [place for place, rows in enumerate(queries) if rows > 1]
    decoded = _padded([1 for _ in answers], [keys[place] for place in answers], 0)
    if not prompts:
        return decoded._replace(outputs=len(batch.logit_rows))
    lengths = [queries[place] for place in prompts]
    rows = pack_prompts(lengths, max(lengths))
    width = max(sum(lengths[prompt] for prompt in row) for row in rows)
    seen = max(sum(keys[prompts[prompt]] for prompt in row) for row in rows)
    return StepWork(
        rows=len(rows) * width + decoded.rows,
        outputs=len(batch.logit_rows),
        requests=len(rows) + decoded.requests,
        keys_read=len(rows) * seen + decoded.keys_read,
        key_pairs=len(rows) * width * seen + decoded.key_pairs,
    )


LAYOUTS: dict[LayoutName, Callable[[ForwardBatch], StepWork]] = {
    "ragged": StepWork.of,
    "padded": padded_work,
    "packed": packed_work,
}


def _shapes(batch: ForwardBatch) -> tuple[list[int], list[int]]:
    """Return how many rows each request has, and how many keys."""
    return np.diff(batch.query_indptr).tolist(), np.diff(batch.kv_indptr).tolist()


def _padded(queries: Sequence[int], keys: Sequence[int], outputs: int) -> StepWork:
    count, longest, seen = len(queries), max(queries, default=0), max(keys, default=0)
    return StepWork(
        rows=count * longest,
        outputs=outputs,
        requests=count,
        keys_read=count * seen,
        key_pairs=count * longest * seen,
    )
