"""Log probabilities of chosen tokens, and of the likeliest ones, from the model's own logits."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from midfill.arrays import Float64Array, Int64Array
from midfill.engine.request import TokenLogprobs
from midfill.engine.sampling.filters import FOLDS, top_ids

MAX_ROWS_AT_ONCE = 8
"""Rows of logits that are processed together. Each takes up to 1 MB meanwhile, for a vocabulary of
50,000; many at once also take longer, since their copies leave the caches."""


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], wanted: Sequence[int]
) -> list[TokenLogprobs]:
    """Return the log probability of one token per row, and those of the likeliest tokens.

    Args:
        logits: [rows, vocab] float32, without NaN and +infinity.
        token_ids: the token of each row.
        wanted: how many of the likeliest tokens to report for each row.
    """
    logprobs = logits.log_softmax(-1)
    chosen = torch.tensor([[token_id] for token_id in token_ids], device=logits.device)
    own = logprobs.gather(-1, chosen)[:, 0].tolist()
    ids = likeliest(logits, min(max(*wanted, 1), logits.shape[-1]))
    reports = []
    for logprob, count, row_ids, values in zip(
        own, wanted, ids, gather(logprobs, ids), strict=True
    ):
        best = (-values).argsort(kind="stable")[:count]
        top = [
            (int(row_ids[place]), float(values[place]))
            for place in best
            if math.isfinite(values[place])
        ]
        reports.append(TokenLogprobs(logprob, top))
    return reports


def likeliest(logits: torch.Tensor, count: int) -> Int64Array:
    """Return the [rows, count] ids of the largest values per row of [rows, vocab], ascending."""
    if logits.device.type == "cpu" and count <= logits.shape[-1] // FOLDS:
        return np.stack([top_ids(row, count) for row in logits.numpy()])
    return logits.topk(count).indices.sort().values.cpu().numpy()


def gather(source: torch.Tensor, ids: Int64Array) -> Float64Array:
    """Return the [rows, count] values of [rows, vocab] ``source`` at [rows, count] ids."""
    return source.gather(-1, torch.from_numpy(ids).to(source.device)).double().cpu().numpy()


def mask_nonfinite(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits with -infinity for values that are not finite."""
    return torch.where(torch.isfinite(logits), logits, -torch.inf)
