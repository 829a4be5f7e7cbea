"""LazyLLM: what it keeps, and the options that it takes."""

import numpy as np
import pytest

from midfill.errors import InvalidRequestError
from midfill.methods.registry import resolve_method
from midfill.methods.rows.lazyllm import LazyLLM
from midfill.methods.served_model import ServedModel
from midfill.models.config import ModelConfig


def config(**fields: object) -> ModelConfig:
    shape = {"layers": 30, "hidden": 64, "query_heads": 6, "kv_heads": 2, "head_dim": 16}
    rest = {"family": "toy", "ffn": 64, "vocab": 100, "context": 512}
    return ModelConfig(**(shape | rest | fields))  # type: ignore[arg-type]


def test_the_largest_scores_stay_in_order_and_shares_round_up() -> None:
    scores = np.array([0.1, 0.4, 0.0, 0.2, 0.3], np.float32)
    assert LazyLLM(keep="0.5").select(0, scores, 5).tolist() == [1, 3, 4]
    assert LazyLLM(keep="0").select(0, scores, 5).tolist() == []
    assert LazyLLM(keep="1").select(0, scores, 5).tolist() == [0, 1, 2, 3, 4]


def test_of_equal_scores_the_earlier_tokens_counts() -> None:
    assert LazyLLM(keep="0.5").select(1, np.ones(4, np.float32), 4).tolist() == [0, 1]


def test_each_layer_may_keep_another_share() -> None:
    method = LazyLLM("9/15/21", "0.75/0.5/0.25")
    kept = [len(method.select(place, np.arange(8, dtype=np.float32), 8)) for place in range(3)]
    assert kept == [6, 4, 2]


def test_layers_are_numbers_or_shares_of_the_depth() -> None:
    assert LazyLLM().pruning_layers(config()) == (9, 15, 21)
    assert LazyLLM("4/0.5/29").pruning_layers(config()) == (4, 15, 29)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("after=x", "after takes numbers separated by slashes, not 'x'"),
        ("after=-1", "after takes numbers of layers"),
        ("keep=1.5", "keep takes shares from 0 to 1, not '1.5'"),
        ("keep=0.5/0.5", "1 share or 3"),
        ("revive=2", "revive must be 0 or 1, not 2"),
    ],
)
def test_bad_values_are_named(options: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        resolve_method(f"lazyllm:{options}")


@pytest.mark.parametrize(
    ("after", "message"),
    [("0.5/9", "ascending order, not .15, 9."), ("9/30", "layer 30, but the model's last is 29")],
)
def test_layers_have_to_suit_the_model(after: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        LazyLLM(after).for_model(ServedModel(config()))


def test_models_with_windowed_layers_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="layers see the whole text"):
        LazyLLM().for_model(ServedModel(config(sliding_window=24)))
