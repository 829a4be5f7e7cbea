"""The sampler: from logits to tokens, for rows with different parameters.

The order of the steps: repetition penalty, presence and frequency penalty, logit bias; then
greedy choice, or temperature, top-k, top-p, min-p, typical-p, each on the distribution that the
ones before left, renormalised (the order of Hugging Face's generation). Log probabilities are
those of the model's own distribution, before all of that.

One number in [0, 1) decides a row (inversion of the cumulative distribution), and every row is
worked out on its own, so a row's token does not depend on what else is in the batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from midfill.engine.batch import Int32Array
from midfill.engine.request import SamplingParams, TokenLogprobs

# Below this a temperature means greedy: dividing by it would leave one token anyway.
_GREEDY_TEMPERATURE = 1e-5
# Where no top-k bounds the candidates, so many of the likeliest are tried before more are sorted.
_FIRST_CANDIDATES = 256
_CANDIDATE_GROWTH = 16

_Float64Array = npt.NDArray[np.float64]


class SampleRow(NamedTuple):
    """One token to choose.

    Attributes:
        row: of the logits; several SampleRows may name the same.
        params: how to choose.
        history: [n] int32, the tokens so far.
        prompt_length: how many of them are the prompt's.
        draw: a number in [0, 1), uniformly random; greedy rows ignore it.
    """

    row: int
    params: SamplingParams
    history: Int32Array
    prompt_length: int
    draw: float


class SampledToken(NamedTuple):
    """A choice, with its log probabilities when the row asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass
class _Row:
    """A row on its way: [vocab] logits after penalties, and the token, the likeliest at first."""

    spec: SampleRow
    logits: torch.Tensor
    token_id: int


def is_greedy(params: SamplingParams) -> bool:
    """Whether the likeliest token is taken, whatever the draw."""
    return params.temperature < _GREEDY_TEMPERATURE or params.top_k == 1


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | None]:
    """Choose one token for each of ``rows``.

    Args:
        logits: [outputs, vocab] float32, on any device; not changed. Values that are not finite
            count as impossible tokens.
        rows: what to choose.

    Returns:
        One entry a row: the token, or None where the row's logits hold no finite value.
    """
    working = _find_peaks([_adjusted(logits[spec.row], spec) for spec in rows], rows)
    alive = [row for row in working if row is not None]
    _draw([row for row in alive if not is_greedy(row.spec.params)])
    reported = _logprobs(logits, [row for row in alive if row.spec.params.logprobs is not None])
    return [
        None if row is None else SampledToken(row.token_id, reported.get(id(row)))
        for row in working
    ]


def _adjusted(logits: torch.Tensor, spec: SampleRow) -> torch.Tensor:
    """[vocab] logits with penalties and bias; the tensor itself where there are none."""
    params = spec.params
    repeats = params.repetition_penalty != 1.0
    counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    if not (repeats or counts or params.logit_bias):
        return logits
    logits = logits.clone()
    if repeats:
        seen = torch.from_numpy(np.unique(spec.history)).to(logits.device)
        old = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if counts and len(spec.history) > spec.prompt_length:
        ids, times = np.unique(spec.history[spec.prompt_length :], return_counts=True)
        penalties = params.presence_penalty + params.frequency_penalty * times
        logits[torch.from_numpy(ids).to(logits.device)] -= torch.from_numpy(penalties).to(logits)
    if params.logit_bias:
        biased = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[biased] += torch.tensor(list(params.logit_bias.values())).to(logits)
    return logits


def _find_peaks(vectors: list[torch.Tensor], specs: Sequence[SampleRow]) -> list[_Row | None]:
    """Start each row at its likeliest token; None for rows without a finite logit."""
    rows: list[_Row | None] = []
    for logits, spec, (peak, value) in zip(vectors, specs, _argmax(vectors), strict=True):
        if not math.isfinite(value):
            # argmax stops at a NaN or an infinity; without them there may still be something.
            logits = _finite(logits)
            peak, value = _argmax([logits])[0]
        rows.append(_Row(spec, logits, peak) if math.isfinite(value) else None)
    return rows


def _argmax(vectors: list[torch.Tensor]) -> list[tuple[int, float]]:
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


def _finite(logits: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(logits), logits, -torch.inf)


def _draw(rows: list[_Row]) -> None:
    """Choose the tokens of rows that are not greedy."""
    by_top_k: dict[int, list[_Row]] = {}
    filtered: list[_Row] = []
    plain: list[_Row] = []
    for row in rows:
        params = row.spec.params
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


def _probabilities(rows: list[_Row]) -> torch.Tensor:
    """[rows, vocab] float32 at each row's temperature."""
    logits = torch.stack([row.logits for row in rows])
    temperatures = torch.tensor([[row.spec.params.temperature] for row in rows]).to(logits)
    return (logits / temperatures).softmax(-1)


def _draw_unfiltered(rows: list[_Row]) -> None:
    cumulative = _probabilities(rows).double().cumsum(-1)
    draws = torch.tensor([[row.spec.draw] for row in rows], dtype=torch.float64)
    targets = draws.to(cumulative) * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, targets, right=True)
    for row, token_id in zip(rows, ids[:, 0].tolist(), strict=True):
        row.token_id = token_id


def _draw_top_k(rows: list[_Row], top_k: int) -> None:
    values, ids = torch.stack([row.logits for row in rows]).topk(top_k)
    tokens = ids.cpu().numpy()
    for row, logits, row_ids in zip(rows, values.double().cpu().numpy(), tokens, strict=True):
        weights = np.exp((logits - logits[0]) / row.spec.params.temperature)
        kept = _filter(weights / weights.sum(), row.spec.params, complete=True)
        assert kept is not None
        row.token_id = _invert(kept, row_ids, row.spec.draw)


def _draw_filtered(rows: list[_Row]) -> None:
    """Rows with filters but no top-k: sort no more of the vocabulary than the filters can keep."""
    probabilities = _probabilities(rows)
    vocab = probabilities.shape[-1]
    open_rows = list(range(len(rows)))
    candidates = _FIRST_CANDIDATES
    while open_rows:
        complete = candidates >= vocab
        selected = probabilities[open_rows]
        top = selected.sort(-1, True) if complete else selected.topk(candidates)
        tokens = top.indices.cpu().numpy()
        unsettled: list[int] = []
        weights = top.values.double().cpu().numpy()
        for index, row_weights, row_ids in zip(open_rows, weights, tokens, strict=True):
            row = rows[index]
            kept = _filter(row_weights, row.spec.params, complete)
            if kept is None:
                unsettled.append(index)
            else:
                row.token_id = _invert(kept, row_ids, row.spec.draw)
        open_rows = unsettled
        candidates *= _CANDIDATE_GROWTH


def _filter(weights: _Float64Array, params: SamplingParams, complete: bool) -> _Float64Array | None:
    """Apply top-p, min-p and typical-p to the likeliest candidates.

    Args:
        weights: [n] float64 probabilities, in descending order.
        params: the filters.
        complete: whether these are all there are.

    Returns:
        The weights with the dropped ones at zero, cut after the last that min-p and top-p keep;
        None where candidates beyond these might be kept too.
    """
    keep = max(int(np.count_nonzero(weights)), 1)
    settled = complete or keep < len(weights)
    if params.top_p < 1.0:
        cumulative = weights.cumsum()
        settled = settled or bool(cumulative[-1] >= params.top_p)
        keep = min(keep, int(cumulative.searchsorted(params.top_p)) + 1)
    if params.min_p > 0.0:
        likely = int(np.count_nonzero(weights >= params.min_p * weights[0]))
        settled = settled or likely < len(weights)
        keep = min(keep, likely)
    if not settled:
        return None
    weights = weights[:keep]
    return _typical(weights, params.typical_p) if params.typical_p < 1.0 else weights


def _typical(weights: _Float64Array, mass: float) -> _Float64Array:
    """Locally typical sampling (Meister et al., "Locally Typical Sampling", TACL 2023).

    Keeps the smallest set of tokens whose surprise is closest to the entropy and whose
    probabilities add up to ``mass``; zeroes the others.
    """
    probabilities = weights / weights.sum()
    surprise = -np.log(probabilities)
    entropy = float(probabilities @ surprise)
    order = np.abs(surprise - entropy).argsort(kind="stable")
    last = int(probabilities[order].cumsum().searchsorted(mass)) + 1
    typical = np.zeros_like(weights)
    typical[order[:last]] = weights[order[:last]]
    return typical


def _invert(weights: _Float64Array, ids: npt.NDArray[np.int64], draw: float) -> int:
    """The token where the cumulative distribution passes ``draw``, tokens taken in order of id.

    In order of probability, two nearly equal tokens could change places over a rounding error in
    the logits, and the draw would land on the other one. In float64 a draw below 1 times the total
    stays below the total, so there always is such a token.
    """
    order = ids[: len(weights)].argsort()
    cumulative = weights[order].cumsum()
    return int(ids[order[cumulative.searchsorted(draw * cumulative[-1], side="right")]])


def _logprobs(logits: torch.Tensor, rows: list[_Row]) -> dict[int, TokenLogprobs]:
    """Log probabilities for rows that ask for them, by the row's id()."""
    if not rows:
        return {}
    raw = _finite(logits[[row.spec.row for row in rows]]).log_softmax(-1)
    chosen = torch.tensor([[row.token_id] for row in rows], device=raw.device)
    own = raw.gather(-1, chosen)[:, 0].tolist()
    wanted = [min(row.spec.params.logprobs or 0, raw.shape[-1]) for row in rows]
    top = raw.topk(max(wanted))
    reported = {}
    for row, logprob, count, values, ids in zip(
        rows, own, wanted, top.values.tolist(), top.indices.tolist(), strict=True
    ):
        pairs = zip(ids[:count], values[:count], strict=True)
        likeliest = [(token_id, value) for token_id, value in pairs if math.isfinite(value)]
        reported[id(row)] = TokenLogprobs(logprob, likeliest)
    return reported
