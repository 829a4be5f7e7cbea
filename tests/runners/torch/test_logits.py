"""Sampling from torch's tensors: the same tokens as from NumPy's arrays, with few copies."""

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from midfill.engine.request import EngineSamplingParams
from midfill.engine.sampling.sampler import MAX_ROWS_AT_ONCE, SampleRow, sample
from midfill.runners.cpu.logits import NUMPY_LOGITS
from midfill.runners.forward.logits import argmax_tokens
from midfill.runners.torch.logits import TorchLogits

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
KINDS: list[dict[str, object]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.2, "top_p": 0.9},
    {"top_k": 40},
    {"top_p": 0.95},
    {"min_p": 0.02, "temperature": 1.7},
    {"typical_p": 0.5},
    {"logit_bias": {3: 9.0, 5: -2.0}},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.1},
]


def random_logits(rows: int, vocab: int = 3000) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, vocab), np.float32) * np.float32(3.0)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_and_log_probabilities_are_those_of_numpy(device: str) -> None:
    logits = random_logits(6)
    logits[4, [0, 9]] = np.nan, np.inf
    logits[5] = -np.inf
    history = np.array([1, 2, 7, 7], np.int32)
    some = np.arange(0, 3000, 7, dtype=np.int32)
    rows = [
        SampleRow(
            n % 6, EngineSamplingParams(logprobs=2, **KINDS[n % 9]), history, 2, (n + 0.5) / 54
        )
        for n in range(54)
    ]
    rows += [one._replace(allowed=some) for one in rows] + [
        one._replace(banned=some) for one in rows
    ]
    expected = sample(NUMPY_LOGITS, logits, rows)
    found = sample(TorchLogits(), torch.from_numpy(logits).to(device), rows)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is None or other is None:
            continue
        assert one.token_id == other.token_id
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-5)
        assert [token for token, _ in one.logprobs.top] == [t for t, _ in other.logprobs.top]


def test_few_rows_have_copies_of_their_logits_at_a_time() -> None:
    logits = torch.from_numpy(random_logits(1)).repeat(100, 1)

    class Largest(TorchFunctionMode):
        elements = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.numel())
            return result

    for fields in ({}, {"top_k": 40}, {"top_p": 0.9}, {"logprobs": 2}):
        params = EngineSamplingParams(**fields)
        history = np.zeros(0, np.int32)
        with Largest() as largest:
            sample(
                TorchLogits(), logits, [SampleRow(at, params, history, 0, 0.5) for at in range(100)]
            )
        assert largest.elements == MAX_ROWS_AT_ONCE * 3000


def test_the_most_likely_of_no_rows_are_none() -> None:
    assert argmax_tokens(TorchLogits(), torch.empty(0, 8)) == []
