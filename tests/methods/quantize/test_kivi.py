"""KIVI: bytes, errors and the exact window, against its formula."""

from dataclasses import replace

import numpy as np
import pytest
from fake_keys import CONFIG, ArrayCells, fake_keys

from midfill.errors import InvalidRequestError
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.quantize.kivi import Kivi
from midfill.methods.served_model import ServedModel

NOTHING = np.zeros((0, 0, 0, 0), np.float32)


def one_head(tokens: int, dim: int = 64) -> SequenceKeys:
    config = replace(CONFIG, layers=1, kv_heads=1, query_heads=1, head_dim=dim)
    arrays = np.random.default_rng(0).normal(size=(2, tokens, dim)).astype(np.float32)
    cells = [np.arange(tokens, dtype=np.int32)]
    return SequenceKeys(config, cells, ArrayCells(arrays[0], arrays[1]))


def select(method: Kivi, keys: SequenceKeys) -> Selection:
    selection = method.start(keys.config).select(keys, NOTHING)
    assert selection is not None
    selection.check(keys.counts)
    return selection


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("dim", "groups"), [(32, 1), (64, 1), (80, 1), (128, 2)])
def test_bytes_are_those_of_the_formula(bits: int, dim: int, groups: int) -> None:
    selection = select(Kivi(bits=bits, residual=0), one_head(128, dim))
    assert selection.quantized is not None
    [blocks] = selection.quantized
    assert [block.tokens for block in blocks] == [64, 64]
    codes = 2 * 64 * dim * bits // 8
    parameters = 2 * 2 * (dim + 64 * groups)  # a scale and a zero in two bytes each
    assert [len(block.data) for block in blocks] == [codes + parameters] * 2
    if (dim, bits) in ((64, 2), (64, 4)):
        assert codes + parameters == {2: 2560, 4: 4608}[bits]
        assert not len(blocks[0].data) % 256, "no cell of 64 dimensions in float16 is cut"


def simple_bytes(numbers: np.ndarray, bits: int, axis: int) -> tuple[bytes, bytes, bytes]:
    """Return scales, zeros and codes of one block's [64, 64] numbers, one range at a time."""
    half, steps = np.float16, 2**bits - 1
    scales, zeros = np.zeros((2, 64), half)
    codes = np.zeros((64, 64), int)
    for i in range(64):
        group = np.take(numbers, i, axis=axis)
        zeros[i] = group.min()
        scales[i] = (group.max() - np.float32(zeros[i])) / np.float32(steps)
        found = np.rint((group - np.float32(zeros[i])) / np.float32(scales[i]))
        np.moveaxis(codes, axis, 0)[i] = np.clip(found, 0, steps)
    packed = []
    for sixteen in codes.reshape(-1, 16).tolist():
        per_byte = 8 // bits
        for i in range(16 // per_byte):
            own = sixteen[i :: 16 // per_byte]
            packed.append(sum(code << (bits * place) for place, code in enumerate(own)))
    return scales.tobytes(), zeros.tobytes(), bytes(packed)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_blocks_made_together_have_the_bytes_of_each_made_alone(bits: int) -> None:
    keys = one_head(64 * 3)
    selection = select(Kivi(bits=bits, residual=0), keys)
    assert selection.quantized is not None
    assert len(selection.quantized[0]) == 3
    for number, block in enumerate(selection.quantized[0]):
        exact = keys.read(0, np.arange(64 * number, 64 * number + 64, dtype=np.int32))
        scales, zeros, codes = simple_bytes(exact[0], bits, 1)
        of_keys = scales + zeros + codes
        scales, zeros, codes = simple_bytes(exact[1], bits, 0)
        terms = np.stack([np.frombuffer(each, np.float16) for each in (scales, zeros)], axis=1)
        assert block.data.tobytes() == of_keys + terms.tobytes() + codes


def test_keys_have_ranges_per_channel_and_values_per_token() -> None:
    keys = one_head(128, 128)
    for bits in (2, 4):
        selection = select(Kivi(bits=bits, residual=0), keys)
        assert selection.quantized is not None
        for number, block in enumerate(selection.quantized[0]):
            exact = keys.read(0, np.arange(64 * number, 64 * number + 64, dtype=np.int32))
            found = block.decode(128)
            steps = 2**bits - 1
            for channel in range(128):
                column = exact[0][:, channel]
                bound = np.ptp(column) / steps / 2 + 0.005
                assert np.abs(found[0][:, channel] - column).max() <= bound
            for token, group in np.ndindex(64, 2):
                part = np.s_[token, 64 * group : 64 * group + 64]
                bound = np.ptp(exact[1][part]) / steps / 2 + 0.005
                assert np.abs(found[1][part] - exact[1][part]).max() <= bound


def test_more_bits_err_less() -> None:
    keys, errors = one_head(192), []
    for bits in (1, 2, 3, 4, 8):
        selection = select(Kivi(bits=bits, residual=0), keys)
        assert selection.quantized is not None
        found = [np.concatenate(part) for part in zip(
            *(block.decode(64) for block in selection.quantized[0]), strict=True
        )]  # fmt: skip
        errors.append([np.linalg.norm(a - b) for a, b in zip(found, keys.read(0), strict=True)])
    assert (np.diff(np.array(errors), axis=0) < 0).all()
    assert max(errors[-1]) < 0.02 * min(errors[0])


def test_the_most_recent_tokens_stay_and_whole_groups_leave() -> None:
    method = Kivi(residual=50, group=16)
    keys, _ = fake_keys(100)
    selection = select(method, keys)
    assert method.interval == 16
    for head in range(keys.heads):
        kept = selection.kept[selection.indptr[head] : selection.indptr[head + 1]]
        assert kept.tolist() == list(range(48, 100))
        assert selection.quantized is not None
        assert [block.tokens for block in selection.quantized[head]] == [16] * 3
    later, _ = fake_keys(52 + 16)
    again = select(method, later)
    assert np.diff(again.indptr).tolist() == [52] * keys.heads
    assert again.quantized is not None
    assert [block.tokens for block in again.quantized[0]] == [16]


@pytest.mark.parametrize("count", [1, 64, 127])
def test_too_few_tokens_for_a_group_beside_the_window_stay(count: int) -> None:
    keys, _ = fake_keys(count)
    assert Kivi().select(keys, NOTHING) is None


def test_constant_channels_and_tokens_are_restored() -> None:
    keys, store = fake_keys(64)
    store.keys[:, 1], store.keys[:, 2] = 0.0, -3.0
    store.values[::2] = 0.25
    selection = select(Kivi(residual=0), keys)
    assert selection.quantized is not None
    for [block] in selection.quantized:
        found, values = block.decode(8)
        assert (found[:, 1] == 0).all()
        assert (found[:, 2] == -3).all()
        assert (values[::2] == 0.25).all()
        assert np.isfinite(found).all()
        assert np.isfinite(values).all()


@pytest.mark.parametrize("fields", [{"bits": 5}, {"bits": 16}, {"residual": -1}, {"group": 0}])
def test_nonsense_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(fields))):
        Kivi(**fields)


def test_models_whose_keys_cannot_be_quantised_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="kivi quantises keys itself"):
        Kivi().for_model(ServedModel(config=CONFIG, kv_cache_dtype="i4"))
    with pytest.raises(InvalidRequestError, match="kivi"):
        Kivi().for_model(ServedModel(config=replace(CONFIG, sliding_window=64)))
