"""Rotary tables: frequencies against transformers' own, cosines and sines against libm's."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from midfill.models.config import ModelConfig, RopeScaling
from midfill.models.families import config_from_huggingface
from midfill.runners.rope import rope_frequencies, rope_tables

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


def reference_frequencies(config: LlamaConfig, length: int) -> tuple[np.ndarray, float]:
    """transformers' radians per position, and its factor, for a sequence of that length."""
    torch = pytest.importorskip("torch")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config)
    rotary(torch.zeros(1), torch.arange(length)[None])
    return rotary.inv_freq.numpy(), rotary.attention_scaling


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
def test_frequencies_are_those_of_transformers(
    scaling: dict[str, Any] | None, theta: float, head_dim: int
) -> None:
    config = reference_config(scaling, theta, head_dim)
    frequencies, factor = rope_frequencies(ours(config))
    expected, expected_factor = reference_frequencies(config, 2048)
    assert frequencies.dtype == np.float32
    # torch's powers are one unit in the last place off now and then.
    np.testing.assert_allclose(frequencies, expected, rtol=3e-7)
    assert factor == pytest.approx(expected_factor)


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 273768.0, 1e6])
def test_powers_cosines_and_sines_are_rounded_once(theta: float) -> None:
    config = ours(reference_config(YARN | {"attention_factor": 1.3}, theta))
    plain = replace(config, rope_scaling=RopeScaling())
    frequencies, _ = rope_frequencies(plain)
    exponents = np.arange(0, 64, 2, dtype=np.float32) / np.float32(64)
    powers = np.array([math.pow(theta, one) for one in exponents]).astype(np.float32)
    np.testing.assert_array_equal(frequencies, 1 / powers)
    for tables, factor in ((rope_tables(plain, 3000), 1.0), (rope_tables(config, 3000), 1.3)):
        turns = rope_frequencies(plain if factor == 1.0 else config)[0]
        for position in (0, 1, 7, 1023, 1024, 2999):
            angles = (np.float32(position) * turns).tolist()
            for table, function in zip(tables, (math.cos, math.sin), strict=True):
                expected = np.array([function(angle) for angle in angles]).astype(np.float32)
                np.testing.assert_array_equal(table[position], expected * np.float32(factor))


def test_dynamic_scaling_is_that_of_a_sequence_as_long_as_the_context() -> None:
    config = reference_config(DYNAMIC, context=512)
    assert ours(config).context == 2048
    # transformers has theta in float32 here.
    expected, _ = reference_frequencies(config, 2048)
    np.testing.assert_allclose(rope_frequencies(ours(config))[0], expected, rtol=1e-6)


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
