"""Random weights as GGUF files store them: blocks of random bits with scales that fit."""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

_MAX_ROWS = 16_384  # of a tensor drawn at a time


def draw(
    name: str,
    dimensions: tuple[int, ...],
    kind: GGMLQuantizationType,
    random: np.random.Generator,
    mask: npt.NDArray[np.bool_] | None,
) -> Iterator[npt.NDArray[np.generic]]:
    """Rows of a tensor as they are stored: of matrices uniform with deviation 0.02.

    Args:
        mask: bool [rows]: where False, a row is zero.
    """
    if kind is GGMLQuantizationType.F32:
        yield _draw_plain(name, dimensions, random)
        return
    rows, columns = math.prod(dimensions[:-1]), dimensions[-1]
    block, size = GGML_QUANT_SIZES[kind]
    for start in range(0, rows, _MAX_ROWS):
        count = min(_MAX_ROWS, rows - start)
        blocks = random.integers(0, 256, (count, columns // block, size), np.uint8)
        zero = None if mask is None else ~mask[start : start + count]
        _set_scales(blocks, kind, zero)
        yield blocks.reshape(count, -1)


def _draw_plain(
    name: str, dimensions: tuple[int, ...], random: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Draw a tensor that isn't quantised.

    Norms are 1, and what a state decays by is what Mamba-2's training begins with (Dao and Gu 2024,
    arXiv 2405.21060): A from -16 to -1, D 1, and dt from 0.001 to 0.1, log-uniform. Convolutions
    have a deviation of 0.5, which leaves rows as large as they are, others of 0.02.
    """
    if name.endswith(("norm.weight", "ssm_d")):
        return np.ones(dimensions, np.float32)
    drawn = random.random(dimensions, np.float32)
    if name.endswith("ssm_a"):
        return -1 - 15 * drawn
    if name.endswith("ssm_dt.bias"):
        lowest, highest = math.log(0.001), math.log(0.1)
        before: npt.NDArray[np.float32] = np.log(
            np.expm1(np.exp(lowest + (highest - lowest) * drawn))
        )
        return before  # softplus gives dt
    deviation = 0.5 if name.endswith("ssm_conv1d.weight") else 0.02
    return (drawn - np.float32(0.5)) * np.float32(deviation * 12**0.5)


def _set_scales(
    blocks: npt.NDArray[np.uint8],
    kind: GGMLQuantizationType,
    zero: npt.NDArray[np.bool_] | None,
) -> None:
    """Give random blocks float16 scales by which weights have a deviation of 0.02.

    Integer scales are left as they are, uniform in their range. MXFP4's are powers of two, the
    nearest of which makes it 0.023.
    """
    if kind is GGMLQuantizationType.MXFP4:
        blocks[..., 0] = 127 - 7  # 2 ** -7 of numbers whose deviation is 2.9
        return
    uniform = math.sqrt(12)  # the range of uniform numbers, in deviations
    scale, at = 0.02 * uniform, 0
    if kind is GGMLQuantizationType.Q4_0:
        scale /= 16
    elif kind is GGMLQuantizationType.Q8_0:
        scale /= 256
    elif kind is GGMLQuantizationType.Q4_K:
        # The integer minima are the integer scales: weights are then symmetric about 0.
        blocks[..., 8:12] = blocks[..., 4:8]
        blocks[..., 12:16] = (blocks[..., 12:16] & 15) * 17
        scale /= 16 * 64 / math.sqrt(3)
        _set_halves(blocks, 2, 7.5 * scale, zero)
    else:
        scale, at = scale / (64 * 256 / uniform), 208
    _set_halves(blocks, at, scale, zero)


def _set_halves(
    blocks: npt.NDArray[np.uint8], at: int, value: float, zero: npt.NDArray[np.bool_] | None
) -> None:
    """Set the float16 at a byte of each block, to 0 in some rows."""
    blocks[..., at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    if zero is not None:
        blocks[zero, :, at : at + 2] = 0
