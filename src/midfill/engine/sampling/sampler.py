"""The sampler: logits to tokens and log probabilities, for rows with different parameters.

The order of the steps: repetition penalty, presence and frequency penalty, logit bias; then the
greedy choice, or temperature, top-k, top-p, min-p, typical-p, each on the renormalised
distribution that the previous step left (the order of Hugging Face's generation). Log
probabilities are those of the model's own distribution, before all of these steps.

One number in [0, 1) decides a row (inversion of the cumulative distribution), and every row is
computed separately, so a row's token does not depend on what else is in the batch.

A row restricted to some tokens is a row over a smaller vocabulary: the logits of these tokens are
gathered after the penalties, and all later steps see nothing else.

Whatever looks at a whole vocabulary is the runner's (``runners.forward.logits``): logits stay where
they were computed. Here are the decisions, over the few values that they need.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from midfill.arrays import Float64Array, Int32Array, Int64Array, RunnerArray
from midfill.engine.request import EngineSamplingParams, TokenLogprobs
from midfill.runners.forward.logits import LogitsOps

# A temperature below this means greedy: dividing by it would leave one token anyway.
_GREEDY_TEMPERATURE = 1e-5

# Without top-k, the filters are tried on so many of the most likely tokens before all are.
_FEW_CANDIDATES = 256

# By how much the most likely token's probability must exceed top-p, against rounding.
_CERTAINTY_MARGIN = 1e-5
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
        token_id: the most likely token until another is drawn. Until ``_choose`` returns, an index
            into ``logits``.
    """

    spec: SampleRow
    logits: RunnerArray
    clean: bool
    token_id: int


def is_greedy(params: EngineSamplingParams) -> bool:
    """Whether the most likely token is taken, whatever the draw."""
    return params.temperature < _GREEDY_TEMPERATURE or params.top_k == 1


def sample(
    ops: LogitsOps, logits: RunnerArray, rows: Sequence[SampleRow]
) -> list[SampledToken | None]:
    """Sample one token for each of ``rows``.

    Args:
        ops: of the runner that computed the logits.
        logits: [outputs, vocab] float32; not changed. Tokens whose value is not finite are
            impossible.
        rows: the tokens to sample.

    Returns:
        One entry per row: the token, or None if the row's logits hold no finite value.
    """
    tokens: list[SampledToken | None] = [None] * len(rows)
    for places in _groups(rows):
        chosen = _sample_group(ops, logits, [rows[place] for place in places])
        for place, token in zip(places, chosen, strict=True):
            tokens[place] = token
    return tokens


def needs_only_argmax(params: EngineSamplingParams) -> bool:
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


def _sample_group(
    ops: LogitsOps, logits: RunnerArray, specs: Sequence[SampleRow]
) -> list[SampledToken | None]:
    """Sample the tokens of rows whose vectors have one length; None as in ``sample``."""
    chosen = _choose(ops, logits, specs)
    alive = [row for row in chosen if row is not None]
    reported = _logprobs(
        ops, logits, [row for row in alive if row.spec.params.logprobs is not None]
    )
    return [
        None if row is None else SampledToken(row.token_id, reported.get(id(row))) for row in chosen
    ]


def _choose(ops: LogitsOps, logits: RunnerArray, specs: Sequence[SampleRow]) -> list[_Row | None]:
    """Sample the tokens of rows whose vectors have one length; None as in ``sample``."""
    vectors = [_restrict(adjust_logits(ops, logits[spec.row], spec), spec) for spec in specs]
    rows = _start_rows(ops, vectors, specs)
    alive = [row for row in rows if row is not None]
    _draw(ops, [row for row in alive if not is_greedy(row.spec.params)])
    for row in alive:
        if row.spec.allowed is not None:
            row.token_id = int(row.spec.allowed[row.token_id])
    return rows


def _restrict(logits: RunnerArray, spec: SampleRow) -> RunnerArray:
    """Return the [n] logits of the allowed tokens; the vector itself if all are allowed."""
    return logits if spec.allowed is None else logits[spec.allowed.astype(np.int64)]


def _is_adjusted(params: EngineSamplingParams) -> bool:
    """Whether penalties or a bias change the logits."""
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.logit_bias
    )


def adjust_logits(ops: LogitsOps, logits: RunnerArray, spec: SampleRow) -> RunnerArray:
    """Return [vocab] logits with penalties, bias and banned tokens; the vector itself if none."""
    params = spec.params
    if not _is_adjusted(params) and spec.banned is None:
        return logits
    logits = ops.copy(logits)
    if params.repetition_penalty != 1.0:
        met = np.zeros(len(logits), dtype=bool)
        met[spec.history] = True
        seen = np.flatnonzero(met)
        old, penalty = logits[seen], params.repetition_penalty
        logits[seen] = old.clip(0.0, None) / penalty + old.clip(None, 0.0) * penalty
    counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    if counts and len(spec.history) > spec.prompt_length:
        times = np.bincount(spec.history[spec.prompt_length :])
        ids = np.flatnonzero(times)
        penalties = params.presence_penalty + params.frequency_penalty * times[ids]
        ops.add(logits, ids, -penalties.astype(np.float64))
    if params.logit_bias:
        biased = np.array(list(params.logit_bias), np.int64)
        ops.add(logits, biased, np.array(list(params.logit_bias.values()), np.float64))
    if spec.banned is not None:
        logits[spec.banned.astype(np.int64)] = -np.inf
    return logits


def _start_rows(
    ops: LogitsOps, vectors: list[RunnerArray], specs: Sequence[SampleRow]
) -> list[_Row | None]:
    """Return each row with its most likely token; None for rows without a finite logit."""
    rows: list[_Row | None] = []
    for logits, spec, (best, value) in zip(vectors, specs, ops.argmax(vectors), strict=True):
        # argmax returns a NaN or an infinity, if it sees all of the logits.
        clean = spec.allowed is None and math.isfinite(value)
        if not clean:
            logits = ops.mask_nonfinite(logits)
            best, value = ops.argmax([logits])[0]
        rows.append(_Row(spec, logits, clean, best) if math.isfinite(value) else None)
    return rows


def _draw(ops: LogitsOps, rows: list[_Row]) -> None:
    """Draw the tokens of rows that are not greedy."""
    by_top_k: dict[int, list[_Row]] = {}
    filtered: list[_Row] = []
    plain: list[_Row] = []
    for row in rows:
        params = row.spec.params
        if _is_certain(ops, row):
            continue
        if 0 < params.top_k < len(row.logits):
            by_top_k.setdefault(params.top_k, []).append(row)
        elif params.top_p < 1.0 or params.min_p > 0.0 or params.typical_p < 1.0:
            filtered.append(row)
        else:
            plain.append(row)
    for top_k, group in by_top_k.items():
        _draw_top_k(ops, group, top_k)
    if plain:
        _draw_unfiltered(ops, plain)
    if filtered:
        _draw_filtered(ops, filtered)


def _is_certain(ops: LogitsOps, row: _Row) -> bool:
    """Whether top-p is sure to leave nothing but the most likely token, whatever the draw.

    At low temperatures this is so for most tokens, and two passes over the logits show it: all
    other tokens are at most as likely as the second most likely.
    """
    params, vocab = row.spec.params, len(row.logits)
    others = min(params.top_k or vocab, vocab) - 1
    if params.top_p >= 1.0 or others < 1:
        return False
    second = ops.second_largest(row.logits, row.token_id)
    if second is None:
        return False
    distance = (float(row.logits[row.token_id]) - second) / params.temperature
    return 1.0 / (1.0 + others * math.exp(-distance)) >= params.top_p + _CERTAINTY_MARGIN


def _draw_unfiltered(ops: LogitsOps, rows: list[_Row]) -> None:
    """Draw from the whole distribution."""
    draws = [row.spec.draw for row in rows]
    ids = ops.draw([row.logits for row in rows], _temperatures(rows), draws)
    for row, token_id in zip(rows, ids, strict=True):
        row.token_id = token_id


def _draw_top_k(ops: LogitsOps, rows: list[_Row], top_k: int) -> None:
    """Draw from the ``top_k`` most likely tokens, filtered."""
    vectors = [row.logits for row in rows]
    ids = ops.top_k(vectors, top_k)
    for row, values, row_ids in zip(rows, ops.gather(vectors, ids), ids, strict=True):
        weights = np.exp((values - values.max()) / row.spec.params.temperature)
        kept = filter_probabilities(weights / weights.sum(), row.spec.params, complete=True)
        assert kept is not None
        row.token_id = sample_inverse(kept, row_ids, row.spec.draw)


def _draw_filtered(ops: LogitsOps, rows: list[_Row]) -> None:
    """Draw for rows with filters but no top-k: try few tokens first, then all where needed."""
    vectors = [row.logits for row in rows]
    normalizers = ops.log_normalizers(vectors, _temperatures(rows))
    few = ops.top_k(vectors, min(_FEW_CANDIDATES, len(vectors[0])))
    values = ops.gather(vectors, few)
    for row, ids, found, normalizer in zip(rows, few, values, normalizers, strict=True):
        params = row.spec.params
        weights = np.exp(found / params.temperature - normalizer)
        kept = filter_probabilities(weights, params, complete=False)
        if kept is None:
            ids = np.arange(len(row.logits))
            every = ops.to_numpy(row.logits) / np.float32(params.temperature)
            weights = np.exp(every - np.float32(normalizer)).astype(np.float64)
            kept = filter_probabilities(weights, params, complete=True)
        assert kept is not None
        row.token_id = sample_inverse(kept, ids, row.spec.draw)


def _temperatures(rows: list[_Row]) -> list[float]:
    return [row.spec.params.temperature for row in rows]


def _logprobs(ops: LogitsOps, logits: RunnerArray, rows: list[_Row]) -> dict[int, TokenLogprobs]:
    """Return log probabilities for rows that request them, by the row's id()."""
    if not rows:
        return {}
    raw = [
        logits[row.spec.row] if row.clean else ops.mask_nonfinite(logits[row.spec.row])
        for row in rows
    ]
    wanted = [row.spec.params.logprobs or 0 for row in rows]
    reports = token_logprobs(ops, raw, [row.token_id for row in rows], wanted)
    return {id(row): report for row, report in zip(rows, reports, strict=True)}


def filter_probabilities(
    weights: Float64Array, params: EngineSamplingParams, complete: bool
) -> Float64Array | None:
    """Apply top-p, min-p and typical-p.

    Args:
        weights: [n] float64, probabilities of the n most likely tokens, in any order.
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
    ops: LogitsOps,
    vectors: Sequence[RunnerArray],
    token_ids: Sequence[int],
    wanted: Sequence[int],
) -> list[TokenLogprobs]:
    """Return the log probability of one token per vector, and those of the most likely tokens.

    Args:
        ops: of the runner that computed the logits.
        vectors: [vocab] float32 each, without NaN and +infinity.
        token_ids: the token of each.
        wanted: how many of the most likely tokens to report for each.
    """
    normalizers = ops.log_normalizers(vectors, [1.0] * len(vectors))[:, None]
    own = ops.gather(vectors, np.array(token_ids, np.int64)[:, None]) - normalizers
    ids = ops.top_k(vectors, min(max(*wanted, 1), len(vectors[0])))
    logprobs = ops.gather(vectors, ids) - normalizers
    reports = []
    for logprob, count, row_ids, values in zip(own, wanted, ids, logprobs, strict=True):
        best = (-values).argsort(kind="stable")[:count]
        top = [
            (int(row_ids[place]), float(values[place]))
            for place in best
            if math.isfinite(values[place])
        ]
        reports.append(TokenLogprobs(float(logprob[0]), top))
    return reports


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
