"""Rotary tables against transformers' own rotary embedding, to the last bit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from midfill.models.config import ModelConfig, RopeScaling
from midfill.models.families import config_from_huggingface
from midfill.runners.rope import rope_tables

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def reference_config(
    scaling: dict[str, Any] | None, theta: float = 10000.0, head_dim: int = 64, context: int = 2048
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=context,
        rope_theta=theta,
        # transformers writes into the mapping it is given.
        rope_scaling=dict(scaling) if scaling else None,
    )


def reference_tables(config: LlamaConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """transformers' cos and sin [length, head_dim / 2], of a sequence of that length."""
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].numpy(), sin[0, :, :half].numpy()


def ours(config: LlamaConfig) -> ModelConfig:
    return config_from_huggingface(config.to_dict())


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 100000.0, 1e6])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3,
        LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 16.0},
        YARN,
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
        YARN | {"attention_factor": 1.3},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
        YARN | {"truncate": False},
    ],
    ids=str,
)
def test_tables_equal_transformers(
    scaling: dict[str, Any] | None, theta: float, head_dim: int
) -> None:
    config = reference_config(scaling, theta, head_dim)
    cos, sin = rope_tables(ours(config), 2048)
    expected_cos, expected_sin = reference_tables(config, 2048)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_array_equal(cos, expected_cos)
    np.testing.assert_array_equal(sin, expected_sin)


def test_dynamic_scaling_is_that_of_a_sequence_as_long_as_the_context() -> None:
    config = reference_config(DYNAMIC, context=512)
    assert ours(config).context == 2048
    tables = rope_tables(ours(config), 2048)
    # transformers has theta in float32 here, so angles differ in their last bits.
    for actual, expected in zip(tables, reference_tables(config, 2048), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-3)


def test_dynamic_angles_do_not_depend_on_how_much_of_the_table_is_wanted() -> None:
    config = ours(reference_config(DYNAMIC, context=512))
    for short, long in zip(rope_tables(config, 100), rope_tables(config, 2048), strict=True):
        np.testing.assert_array_equal(short, long[:100])


def test_dynamic_scaling_does_nothing_within_the_trained_context() -> None:
    config = ours(reference_config(DYNAMIC, context=512))
    plain = replace(config, rope_scaling=RopeScaling())
    for context in (100, 512):
        np.testing.assert_array_equal(
            rope_tables(replace(config, context=context), 100), rope_tables(plain, 100)
        )


def test_frequency_factors_express_llama3_scaling() -> None:
    scaled = ours(reference_config(LLAMA3))
    plain = replace(scaled, rope_scaling=RopeScaling())
    # Position 1 turns by exactly the frequency.
    frequency = [np.arctan2(sin[1], cos[1]) for cos, sin in _tables(plain, scaled)]
    factors = tuple((frequency[0] / frequency[1]).tolist())
    stated = replace(plain, rope_scaling=RopeScaling("factors", frequency_factors=factors))
    for actual, expected in zip(*_tables(stated, scaled), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-3)


def _tables(*configs: ModelConfig) -> list[tuple[np.ndarray, np.ndarray]]:
    return [rope_tables(config, 2048) for config in configs]
