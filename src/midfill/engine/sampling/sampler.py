"""The sampler: from logits to tokens, for rows with different parameters.

The order of the steps: repetition penalty, presence and frequency penalty, logit bias; then the
greedy choice, or temperature, top-k, top-p, min-p, typical-p, each on the renormalised
distribution that the previous step left (the order of Hugging Face's generation). Log
probabilities are those of the model's own distribution, before all of these steps.

One number in [0, 1) decides a row (inversion of the cumulative distribution), and every row is
computed separately, so a row's token does not depend on what else is in the batch.

A row restricted to some tokens is a row over a smaller vocabulary: the logits of these tokens are
gathered after the penalties, and all later steps see nothing else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from midfill.arrays import Int32Array
from midfill.engine.request import EngineSamplingParams, TokenLogprobs
from midfill.engine.sampling.filters import filter_probabilities, sample_inverse
from midfill.engine.sampling.logprobs import (
    MAX_ROWS_AT_ONCE,
    gather,
    likeliest,
    mask_nonfinite,
    token_logprobs,
)
from midfill.runners.torch.threads import one_thread

# A temperature below this means greedy: dividing by it would leave one token anyway.
_GREEDY_TEMPERATURE = 1e-5
# Without top-k, the filters are tried on so many of the likeliest tokens before all are.
_FEW_CANDIDATES = 256
# By how much the likeliest token's probability must exceed top-p, against rounding.
_CERTAINTY_MARGIN = 1e-5


class SampleRow(NamedTuple):
    """One token to sample.

    Attributes:
        row: row of the logits; several SampleRows may use the same.
        params: how to sample.
        history: [n] int32, the tokens so far.
        prompt_length: how many of them belong to the prompt.
        draw: uniformly random in [0, 1); greedy rows ignore it.
        allowed: [n] int32, ascending, ids of the tokens to choose among; None allows all.
        barred: [n] int32, ids of tokens that are impossible; None bars none.
    """

    row: int
    params: EngineSamplingParams
    history: Int32Array
    prompt_length: int
    draw: float
    allowed: Int32Array | None = None
    barred: Int32Array | None = None


class SampledToken(NamedTuple):
    """A sampled token.

    Attributes:
        token_id: its id.
        logprobs: log probabilities; None if the row's parameters request none.
    """

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass
class _Row:
    """The state of a row that is being sampled.

    Attributes:
        spec: the request.
        logits: [vocab], or [n] for n allowed tokens; after penalties.
        clean: whether the model's logits are known to be free of NaN and +infinity.
        token_id: the likeliest token until another is drawn. Until ``_choose`` returns, an index
            into ``logits``.
    """

    spec: SampleRow
    logits: torch.Tensor
    clean: bool
    token_id: int


def is_greedy(params: EngineSamplingParams) -> bool:
    """Whether the likeliest token is taken, whatever the draw."""
    return params.temperature < _GREEDY_TEMPERATURE or params.top_k == 1


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | None]:
    """Sample one token for each of ``rows``.

    Args:
        logits: [outputs, vocab] float32, on any device; not changed. Tokens whose value is not
            finite are impossible.
        rows: the tokens to sample.

    Returns:
        One entry per row: the token, or None if the row's logits hold no finite value.
    """
    tokens: list[SampledToken | None] = [None] * len(rows)
    with one_thread():
        for places in _groups(rows):
            chosen = _sample_group(logits, [rows[place] for place in places])
            for place, token in zip(places, chosen, strict=True):
                tokens[place] = token
    return tokens


def takes_likeliest(params: EngineSamplingParams) -> bool:
    """Whether a row needs the token of its largest logit and nothing else.

    That is so for nearly all completions. Runners find this token in the forward pass, so such
    rows don't come here unless they are restricted, or one of their logits isn't finite.
    """
    return is_greedy(params) and params.logprobs is None and not _is_adjusted(params)


def _groups(rows: Sequence[SampleRow]) -> list[list[int]]:
    """Return the rows to process together: some without restrictions; each other one alone."""
    whole = [place for place, spec in enumerate(rows) if spec.allowed is None]
    return [
        *(whole[at : at + MAX_ROWS_AT_ONCE] for at in range(0, len(whole), MAX_ROWS_AT_ONCE)),
        *([place] for place, spec in enumerate(rows) if spec.allowed is not None),
    ]


def _sample_group(logits: torch.Tensor, specs: Sequence[SampleRow]) -> list[SampledToken | None]:
    """Sample the tokens of rows whose vectors have one length; None as in ``sample``."""
    chosen = _choose(logits, specs)
    alive = [row for row in chosen if row is not None]
    reported = _logprobs(logits, [row for row in alive if row.spec.params.logprobs is not None])
    return [
        None if row is None else SampledToken(row.token_id, reported.get(id(row))) for row in chosen
    ]


def _choose(logits: torch.Tensor, specs: Sequence[SampleRow]) -> list[_Row | None]:
    """Sample the tokens of rows whose vectors have one length; None as in ``sample``."""
    vectors = [_restrict(adjust_logits(logits[spec.row], spec), spec) for spec in specs]
    rows = _start_rows(vectors, specs)
    alive = [row for row in rows if row is not None]
    _draw([row for row in alive if not is_greedy(row.spec.params)])
    for row in alive:
        if row.spec.allowed is not None:
            row.token_id = int(row.spec.allowed[row.token_id])
    return rows


def _restrict(logits: torch.Tensor, spec: SampleRow) -> torch.Tensor:
    """Return the [n] logits of the allowed tokens; the tensor itself if all are allowed."""
    if spec.allowed is None:
        return logits
    return logits[torch.from_numpy(spec.allowed).to(logits.device)]


def _is_adjusted(params: EngineSamplingParams) -> bool:
    """Whether penalties or a bias change the logits."""
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.logit_bias
    )


def adjust_logits(logits: torch.Tensor, spec: SampleRow) -> torch.Tensor:
    """Return [vocab] logits with penalties, bias and barred tokens; the tensor itself if none."""
    params = spec.params
    if not _is_adjusted(params) and spec.barred is None:
        return logits
    logits = logits.clone()
    if params.repetition_penalty != 1.0:
        met = np.zeros(len(logits), dtype=bool)
        met[spec.history] = True
        seen = torch.from_numpy(np.flatnonzero(met)).to(logits.device)
        old = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(old > 0, old / penalty, old * penalty)
    counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    if counts and len(spec.history) > spec.prompt_length:
        times = np.bincount(spec.history[spec.prompt_length :])
        ids = np.flatnonzero(times)
        penalties = params.presence_penalty + params.frequency_penalty * times[ids]
        logits[torch.from_numpy(ids).to(logits.device)] -= torch.from_numpy(penalties).to(logits)
    if params.logit_bias:
        biased = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[biased] += torch.tensor(list(params.logit_bias.values())).to(logits)
    if spec.barred is not None:
        logits[torch.from_numpy(spec.barred).to(logits.device)] = -torch.inf
    return logits


def _start_rows(vectors: list[torch.Tensor], specs: Sequence[SampleRow]) -> list[_Row | None]:
    """Return each row with its likeliest token; None for rows without a finite logit."""
    rows: list[_Row | None] = []
    for logits, spec, (peak, value) in zip(vectors, specs, _argmax(vectors), strict=True):
        # argmax returns a NaN or an infinity, if it sees all of the logits.
        clean = spec.allowed is None and math.isfinite(value)
        if not clean:
            logits = mask_nonfinite(logits)
            peak, value = _argmax([logits])[0]
        rows.append(_Row(spec, logits, clean, peak) if math.isfinite(value) else None)
    return rows


def _argmax(vectors: list[torch.Tensor]) -> list[tuple[int, float]]:
    """Return (index, value) of the largest value of each vector."""
    if not vectors:
        return []
    if vectors[0].device.type == "cpu":
        # numpy's argmax is a dozen times faster than torch's on the CPU.
        arrays = [vector.numpy() for vector in vectors]
        peaks = [int(array.argmax()) for array in arrays]
        return [(peak, float(array[peak])) for array, peak in zip(arrays, peaks, strict=True)]
    stacked = torch.stack(vectors)
    ids = stacked.argmax(-1)
    values = stacked.gather(-1, ids[:, None])[:, 0]
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def _draw(rows: list[_Row]) -> None:
    """Draw the tokens of rows that are not greedy."""
    by_top_k: dict[int, list[_Row]] = {}
    filtered: list[_Row] = []
    plain: list[_Row] = []
    for row in rows:
        params = row.spec.params
        if _is_certain(row):
            continue
        if 0 < params.top_k < len(row.logits):
            by_top_k.setdefault(params.top_k, []).append(row)
        elif params.top_p < 1.0 or params.min_p > 0.0 or params.typical_p < 1.0:
            filtered.append(row)
        else:
            plain.append(row)
    for top_k, group in by_top_k.items():
        _draw_top_k(group, top_k)
    if plain:
        _draw_unfiltered(plain)
    if filtered:
        _draw_filtered(filtered)


def _is_certain(row: _Row) -> bool:
    """Whether top-p is sure to leave nothing but the likeliest token, whatever the draw.

    At low temperatures this is so for most tokens, and two passes over the logits show it: all
    other tokens are at most as likely as the second likeliest.
    """
    params = row.spec.params
    if params.top_p >= 1.0 or row.logits.device.type != "cpu":
        return False
    values, peak = row.logits.numpy(), row.token_id
    others = min(params.top_k or len(values), len(values)) - 1
    if others < 1:
        return False
    second = max(values[:peak].max(initial=-np.inf), values[peak + 1 :].max(initial=-np.inf))
    distance = (float(values[peak]) - float(second)) / params.temperature
    return 1.0 / (1.0 + others * math.exp(-distance)) >= params.top_p + _CERTAINTY_MARGIN


def _stack(rows: list[_Row]) -> torch.Tensor:
    return torch.stack([row.logits for row in rows])


def _probabilities(logits: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
    """Return [rows, vocab] float32 probabilities at each row's temperature."""
    temperatures = torch.tensor([[row.spec.params.temperature] for row in rows]).to(logits)
    return (logits / temperatures).softmax(-1)


def _draw_unfiltered(rows: list[_Row]) -> None:
    """Draw from the whole distribution."""
    cumulative = _probabilities(_stack(rows), rows).cumsum(-1, dtype=torch.float64)
    draws = torch.tensor([[row.spec.draw] for row in rows], dtype=torch.float64)
    targets = draws.to(cumulative) * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, targets, right=True)
    for row, token_id in zip(rows, ids[:, 0].tolist(), strict=True):
        row.token_id = token_id


def _draw_top_k(rows: list[_Row], top_k: int) -> None:
    """Draw from the ``top_k`` likeliest tokens, filtered."""
    logits = _stack(rows)
    ids = likeliest(logits, top_k)
    for row, values, row_ids in zip(rows, gather(logits, ids), ids, strict=True):
        weights = np.exp((values - values.max()) / row.spec.params.temperature)
        kept = filter_probabilities(weights / weights.sum(), row.spec.params, complete=True)
        assert kept is not None
        row.token_id = sample_inverse(kept, row_ids, row.spec.draw)


def _draw_filtered(rows: list[_Row]) -> None:
    """Draw for rows with filters but no top-k: try few tokens first, then all where needed."""
    logits = _stack(rows)
    probabilities = _probabilities(logits, rows)
    few = likeliest(logits, min(_FEW_CANDIDATES, logits.shape[-1]))
    for index, weights in enumerate(gather(probabilities, few)):
        row, ids = rows[index], few[index]
        kept = filter_probabilities(weights, row.spec.params, complete=False)
        if kept is None:
            ids = np.arange(logits.shape[-1])
            weights = probabilities[index].double().cpu().numpy()
            kept = filter_probabilities(weights, row.spec.params, complete=True)
        assert kept is not None
        row.token_id = sample_inverse(kept, ids, row.spec.draw)


def _logprobs(logits: torch.Tensor, rows: list[_Row]) -> dict[int, TokenLogprobs]:
    """Return log probabilities for rows that request them, by the row's id()."""
    if not rows:
        return {}
    raw = torch.stack(
        [
            logits[row.spec.row] if row.clean else mask_nonfinite(logits[row.spec.row])
            for row in rows
        ]
    )
    wanted = [row.spec.params.logprobs or 0 for row in rows]
    reports = token_logprobs(raw, [row.token_id for row in rows], wanted)
    return {id(row): report for row, report in zip(rows, reports, strict=True)}
