"""ggml's type numbers against those of the gguf library."""

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from midfill.models.checkpoints.ggml_types import (
    GGML_TYPES,
    GGUF_ARRAY,
    GGUF_SCALARS,
    GGUF_STRING,
)


def test_numbers_and_block_sizes_are_ggml_s() -> None:
    for number, kind in GGML_TYPES.items():
        known = GGMLQuantizationType(number)
        assert kind.kind == known.name.lower()
        assert (kind.block_values, kind.block_bytes) == GGML_QUANT_SIZES[known]


@pytest.mark.parametrize("number", GGML_TYPES)
def test_all_types_can_be_dequantised(number: int) -> None:
    row = np.zeros((1, GGML_TYPES[number].block_bytes), np.uint8)
    if GGML_TYPES[number].block_values > 1:
        assert dequantize(row, GGMLQuantizationType(number)).shape[-1] % 32 == 0


def test_gguf_s_values_are_all_known() -> None:
    assert {*GGUF_SCALARS, GGUF_STRING, GGUF_ARRAY} == set(map(int, GGUFValueType))
    assert (GGUF_STRING, GGUF_ARRAY) == (GGUFValueType.STRING, GGUFValueType.ARRAY)
