"""The model that is trained computes what transformers computes, row by row and packed."""

from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_checkpoints import VARIANTS, VOCAB, reference_model, write_variant

from midfill.errors import MidfillError
from midfill.lab.training.base_model import load_base_model
from midfill.models.checkpoints.opening import open_checkpoint

LENGTHS = (50, 1, 30, 70)  # longer than every sliding window, and a single token


@pytest.fixture(scope="module", params=sorted(VARIANTS.keys() - {"gemma3"}))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant(request.param, tmp_path_factory.mktemp("base") / request.param)


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    ids = np.random.default_rng(seed).integers(0, VOCAB, length)
    return torch.from_numpy(ids)[None]


def logits_of(model: torch.nn.Module, ids: torch.Tensor, starts: list[int]) -> torch.Tensor:
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(starts)])
    with torch.inference_mode():
        logits: torch.Tensor = model(
            input_ids=ids, position_ids=positions[None], cu_seq_lens_q=starts, use_cache=False
        ).logits
    return logits


def test_logits_of_a_row_are_those_of_transformers(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    ids = tokens(max(LENGTHS))
    model = load_base_model(checkpoint, torch.float32)
    with torch.inference_mode():
        expected = reference_model(folder, checkpoint.config.context)(ids, use_cache=False).logits
    torch.testing.assert_close(
        logits_of(model, ids, [0, max(LENGTHS)]), expected, atol=1e-5, rtol=1e-5
    )


def test_examples_of_a_packed_row_do_not_attend_to_each_other(folder: Path) -> None:
    model = load_base_model(open_checkpoint(folder), torch.float32)
    parts = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    starts = [0, *accumulate(LENGTHS)]
    packed = logits_of(model, torch.cat(parts, dim=1), starts)
    for (start, stop), part in zip(pairwise(starts), parts, strict=True):
        alone = logits_of(model, part, [0, stop - start])
        torch.testing.assert_close(packed[:, start:stop], alone, atol=1e-5, rtol=1e-5)


def test_families_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("gemma3", tmp_path))
    with pytest.raises(MidfillError, match="family gemma3 can't be trained here yet"):
        load_base_model(checkpoint, torch.float32)
