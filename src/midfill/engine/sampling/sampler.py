"""The sampler: logits to tokens and log probabilities, for rows with different parameters.

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
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from midfill.arrays import Float32Array, Float64Array, Int32Array, Int64Array
from midfill.engine.request import EngineSamplingParams, TokenLogprobs
from midfill.runners.forward.likeliest import argmax
from midfill.runners.torch.threads import one_thread

# A temperature below this means greedy: dividing by it would leave one token anyway.
_GREEDY_TEMPERATURE = 1e-5

# Without top-k, the filters are tried on so many of the likeliest tokens before all are.
_FEW_CANDIDATES = 256

# By how much the likeliest token's probability must exceed top-p, against rounding.
_CERTAINTY_MARGIN = 1e-5
FOLDS = 64
"""``top_ids`` pays for rows that are at least this many times as long as the number of ids."""

_BINS = 1024  # for sorting; see _smallest_set
MAX_ROWS_AT_ONCE = 8
"""Rows of logits that are processed together. Each takes up to 1 MB meanwhile, for a vocabulary of
50,000; many at once also take longer, since their copies leave the caches."""


class SampleRow(NamedTuple):
    """One token to sample.

    Attributes:
        row: row of the logits; several SampleRows may use the same.
        params: how to sample.
        history: [n] int32, the tokens so far.
        prompt_length: how many of them belong to the prompt.
        draw: uniformly random in [0, 1); greedy rows ignore it.
        allowed: [n] int32, ascending, ids of the tokens to choose among; None allows all.
        banned: [n] int32, ids of tokens that are impossible; None bans none.
    """

    row: int
    params: EngineSamplingParams
    history: Int32Array
    prompt_length: int
    draw: float
    allowed: Int32Array | None = None
    banned: Int32Array | None = None


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
    """Return [vocab] logits with penalties, bias and banned tokens; the tensor itself if none."""
    params = spec.params
    if not _is_adjusted(params) and spec.banned is None:
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
    if spec.banned is not None:
        logits[torch.from_numpy(spec.banned).to(logits.device)] = -torch.inf
    return logits


def _start_rows(vectors: list[torch.Tensor], specs: Sequence[SampleRow]) -> list[_Row | None]:
    """Return each row with its likeliest token; None for rows without a finite logit."""
    rows: list[_Row | None] = []
    for logits, spec, (best, value) in zip(vectors, specs, argmax(vectors), strict=True):
        # argmax returns a NaN or an infinity, if it sees all of the logits.
        clean = spec.allowed is None and math.isfinite(value)
        if not clean:
            logits = mask_nonfinite(logits)
            best, value = argmax([logits])[0]
        rows.append(_Row(spec, logits, clean, best) if math.isfinite(value) else None)
    return rows


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
    values, best = row.logits.numpy(), row.token_id
    others = min(params.top_k or len(values), len(values)) - 1
    if others < 1:
        return False
    second = max(values[:best].max(initial=-np.inf), values[best + 1 :].max(initial=-np.inf))
    distance = (float(values[best]) - float(second)) / params.temperature
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


def top_ids(row: Float32Array, count: int) -> Int64Array:
    """Return the indices of the ``count`` largest values, ascending; much faster than torch.topk.

    The row is folded into columns of FOLDS values. The ``count``-th largest of the columns' maxima
    can't exceed the ``count``-th largest value, so smaller values need no further look.

    Args:
        row: [n] float32, n at least ``count * FOLDS``.
        count: number of indices.
    """
    columns = len(row) // FOLDS
    maxima = row[: columns * FOLDS].reshape(FOLDS, columns).max(0)
    threshold = np.partition(maxima, columns - count)[columns - count]
    candidates = np.flatnonzero(row >= threshold)
    if len(candidates) > count:
        order = np.argpartition(row[candidates], len(candidates) - count)
        candidates = np.sort(candidates[order[len(candidates) - count :]])
    return candidates


def filter_probabilities(
    weights: Float64Array, params: EngineSamplingParams, complete: bool
) -> Float64Array | None:
    """Apply top-p, min-p and typical-p.

    Args:
        weights: [n] float64, probabilities of the n likeliest tokens, in any order.
        params: the filters' parameters.
        complete: whether no other tokens are possible.

    Returns:
        [n] float64, zero for dropped tokens; None if tokens beyond these n may have to be kept.
    """
    lowest, highest = weights.min(), weights.max()
    settled = complete or lowest == 0.0
    if params.top_p < 1.0:
        settled = settled or weights.sum() >= params.top_p
        # The logarithm spreads the weights evenly over the bins. Only 0 is below the floor.
        surprise = -np.log(np.maximum(weights, 1e-46))
        weights = _smallest_set(surprise, weights, params.top_p)
    if params.min_p > 0.0:
        settled = settled or lowest < params.min_p * highest
        weights = np.where(weights >= params.min_p * highest, weights, 0.0)
    if not settled:
        return None
    return _typical(weights, params.typical_p) if params.typical_p < 1.0 else weights


def _typical(weights: Float64Array, mass: float) -> Float64Array:
    """Apply locally typical sampling (Meister et al., "Locally Typical Sampling", TACL 2023).

    Return the weights of the smallest set of tokens whose surprise is closest to the entropy and
    whose probabilities add up to ``mass``, and zero for the others.
    """
    possible = np.flatnonzero(weights)
    probabilities = weights[possible] / weights.sum()
    surprise = -np.log(probabilities)
    entropy = probabilities @ surprise
    typical = np.zeros_like(weights)
    typical[possible] = _smallest_set(np.abs(surprise - entropy), probabilities, mass)
    return typical


def _smallest_set(keys: Float64Array, weights: Float64Array, mass: float) -> Float64Array:
    """Keep weights in ascending order of their keys until they add up to ``mass``; zero the rest.

    Large arrays are distributed over bins, and only the bin in which the mass is reached is sorted.
    """
    lowest, highest = keys.min(), keys.max()
    bins = 1 if len(keys) <= _BINS or lowest == highest else _BINS
    place = ((keys - lowest) * ((bins - 1) / max(highest - lowest, 1e-300))).astype(np.int64)
    filled = np.bincount(place, weights, minlength=bins).cumsum()
    border = min(int(filled.searchsorted(mass)), bins - 1)
    inside = float(filled[border - 1]) if border else 0.0
    kept = np.where(place < border, weights, 0.0)
    undecided = np.flatnonzero(place == border)
    undecided = undecided[keys[undecided].argsort(kind="stable")]
    count = int(weights[undecided].cumsum().searchsorted(mass - inside)) + 1
    kept[undecided[:count]] = weights[undecided[:count]]
    return kept


def sample_inverse(weights: Float64Array, ids: Int64Array, draw: float) -> int:
    """Return the token at which the cumulative distribution, in order of id, exceeds ``draw``.

    In order of probability, a rounding error in the logits could swap two nearly equal tokens, and
    the draw would select the other one. In float64 a draw below 1 times the total stays below the
    total, so there always is such a token.

    Args:
        weights: [n] float64, not normalised.
        ids: [n] token ids, ascending.
        draw: in [0, 1).
    """
    cumulative = weights.cumsum()
    return int(ids[cumulative.searchsorted(draw * cumulative[-1], side="right")])


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


class RandomStream:
    """Random numbers that follow from a seed, the answer's index and how many were drawn before.

    Args:
        seed: of the request; None takes one that nobody can know.
        index: of the answer.
    """

    __slots__ = ("_generator", "_index", "_seed")

    def __init__(self, seed: int | None, index: int = 0) -> None:
        self._seed = secrets.randbits(64) if seed is None else seed
        self._index = index
        self._generator: np.random.Generator | None = None

    def of_answer(self, index: int) -> "RandomStream":
        """Return the stream of another answer to the same request, from its beginning."""
        return RandomStream(self._seed, index)

    def draw(self) -> float:
        """Draw the next number in [0, 1)."""
        if self._generator is None:
            key = np.array([self._seed % 2**64, self._index], dtype=np.uint64)
            self._generator = np.random.Generator(np.random.Philox(key=key))
        return self._generator.random()
