"""UNComp's part on hidden rows: groups of layers by entropy, and how many tokens each keeps."""

import numpy as np
import pytest

from midfill.errors import InvalidRequestError
from midfill.methods.registry import resolve_method
from midfill.methods.rows.uncomp_stage import LayerGroups, UNCompStage, group_starts
from midfill.models.config import ModelConfig

CONFIG = ModelConfig("toy", 10, 64, 6, 2, 16, 64, 100, 512)


def groups(least: float = 100, starts: tuple[int, ...] = (0, 3, 6, 8)) -> LayerGroups:
    return LayerGroups(UNCompStage(least=least, window=4), starts)


def test_a_group_begins_where_the_entropy_drops_by_more_than_a_share() -> None:
    entropy = np.array([1.0, 0.99, 0.98, 0.9, 1.2, 1.19, 1.1])
    assert group_starts(entropy, 0.05) == [0, 3, 6]
    assert group_starts(entropy, 0.2) == [0]


def test_groups_keep_steps_from_all_tokens_to_the_least() -> None:
    found = groups()
    assert found.pruning_layers(CONFIG) == (2, 5, 7)
    # 1000 tokens, 900 of them in 3 steps of 300.
    assert [found.tokens(group, 1000) for group in range(4)] == [1000, 700, 400, 100]
    # What the division leaves over goes with the first step.
    assert [found.tokens(group, 1001) for group in range(4)] == [1000, 700, 400, 100]
    assert [groups(0.25).tokens(group, 40) for group in range(4)] == [40, 30, 20, 10]


def test_prompts_below_the_least_keep_everything() -> None:
    assert [groups().tokens(group, 90) for group in range(4)] == [90] * 4
    scores = np.random.default_rng(0).random(90).astype(np.float32)
    assert groups().select(0, scores, 90).tolist() == list(range(90))


def test_the_window_stays_whatever_its_scores() -> None:
    scores = np.array([5, 1, 4, 3, 2, 9, 0, 0, 0, 0], np.float32)
    method = LayerGroups(UNCompStage(least=0.6, window=4), (0, 5))
    assert method.select(0, scores, 10).tolist() == [0, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_tokens_than_the_window_stay(rows: int) -> None:
    assert groups(0.1).select(2, np.ones(rows, np.float32), rows).tolist() == list(range(rows))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("least=0", "least must be above 0"),
        ("drop=1", "drop must be above 0 and below 1"),
        ("window=0", "window must be at least 1"),
    ],
)
def test_bad_values_are_named(options: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        resolve_method(f"uncomp-stage:{options}")
