"""Random matrices of GGML's quantised kinds; the gguf library reads K-quants, but makes none."""

from dataclasses import replace

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from midfill.stored_tensor import StoredTensor

QUANTIZED_KINDS = ("q3_k", "q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0")
"""The kinds that the kernels compute with as they are."""

_HALVES_AT = {
    "q3_k": (108,), "q4_1": (0, 2), "q4_k": (0, 2), "q5_1": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip
"""Bytes of a block where float16 scales and minima are; 0 for other kinds."""
_LARGEST_INTEGERS = {"q3_k": 32, "q4_k": 63, "q5_k": 63, "q6_k": 127}


def random_matrix(kind: str, outputs: int, inputs: int, size: float = 1.0) -> StoredTensor:
    """Return a matrix of random quants, and of scales that make weights about as large as asked."""
    values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    random = np.random.default_rng(outputs * inputs)
    blocks = random.integers(0, 256, (outputs, inputs // values, block_bytes)).astype(np.uint8)
    scale = size / 2 ** int(kind.strip("iq")[0]) / _LARGEST_INTEGERS.get(kind, 1)
    for at in _HALVES_AT.get(kind, (0,)):
        halves = random.uniform(0.5, 2, blocks.shape[:2]) * scale
        blocks[..., at : at + 2] = halves.astype(np.float16)[..., None].view(np.uint8)
    return StoredTensor("w", (outputs, inputs), kind, blocks.reshape(outputs, -1))


def with_largest_quants(tensor: StoredTensor) -> StoredTensor:
    """Return the matrix with all bits of its quants set, and of its integer scales."""
    blocks = np.full_like(tensor.data, 255)
    size = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind.upper()]][1]
    for at in _HALVES_AT.get(tensor.kind, (0,)):
        for half in (at, at + 1):
            blocks[:, half::size] = tensor.data[:, half::size]
    return replace(tensor, data=blocks)


def with_bad_scale(tensor: StoredTensor, scale: float) -> StoredTensor:
    """Return the matrix with the last float16 of one block replaced."""
    data = np.array(tensor.data)
    at = _HALVES_AT.get(tensor.kind, (0,))[-1]
    data[3, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return replace(tensor, data=data)
