"""Nulls of MiKV and GEAR: as many bytes, spent without the method's idea.

MiKV's give the exact keys to other tokens, or all tokens alike as many bits as that makes, or keep
as many bytes of whole keys and drop the rest. GEAR's put the bytes of its corrections into smaller
groups or wider codes, or take directions and outliers at random.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from midfill.arrays import BoolArray, Float32Array, Int32Array
from midfill.kv.quantized_layout import BITS_PER_CODE
from midfill.methods.budget import require
from midfill.methods.evict.h2o import H2O
from midfill.methods.quantize import gear, mikv
from midfill.methods.quantize.gear import Gear
from midfill.methods.quantize.mikv import EXACT, MiKV
from midfill.models.config import ModelConfig
from midfill_lab.bench.methods.spending import prompt_generator


class RandomSplit(MiKV):
    """Tokens at random are important beside the newest ones, other ones in each head."""

    def important(self, head: int, received: Float32Array, count: int) -> Int32Array:
        """See ``MiKV.important``; what is random follows from the attention, so from the prompt."""
        drawn = prompt_generator(received.view(np.int32)).random(len(received), np.float32)
        return super().important(head, drawn, count)


class LeastAttended(MiKV):
    """The tokens with the least attention are important beside the newest ones."""

    def important(self, head: int, received: Float32Array, count: int) -> Int32Array:
        """See ``MiKV.important``."""
        return super().important(head, -received, count)


def random_split(settings: object) -> MiKV:
    """Return MiKV whose important tokens are random ones, and the newest."""
    return RandomSplit(**asdict(_mikv(settings)))


def reversed_score(settings: object) -> MiKV:
    """Return MiKV whose important tokens are those with the least attention, and the newest."""
    return LeastAttended(**asdict(_mikv(settings)))


def no_balancer(settings: object) -> MiKV:
    """Return MiKV that quantises keys as they are."""
    return replace(_mikv(settings), balance=0)


def uniform_bits(settings: object, config: ModelConfig) -> MiKV:
    """Return MiKV with as many bits for all tokens as it has on average.

    What is left over, since bits are whole, keeps the newest tokens exact.
    """
    method = _mikv(settings)
    average = bits_per_number(method, config)
    low = max(bits for bits in mikv.LOW_BITS if _coded(bits, config) <= average)
    exact = (average - _coded(low, config)) / (EXACT - _coded(low, config))
    return replace(method, low=low, high=EXACT, ratio=exact, recent=1.0)


def eviction(settings: object, config: ModelConfig) -> H2O:
    """Return H2O, whose scores MiKV has, which keeps as many bytes of exact keys."""
    method = _mikv(settings)
    share = bits_per_number(method, config) / EXACT
    require(share < 1, "the low tier is as large as exact keys", mikv.NAME)
    return H2O(budget=share, recent=method.recent, interval=method.interval)


def bits_per_number(method: MiKV, config: ModelConfig) -> float:
    """Return what a number of a key or value takes on average, scales and zeros included."""
    high, low = (_coded(bits, config) for bits in (method.high, method.low))
    return method.ratio * high + (1 - method.ratio) * low


def _coded(bits: int, config: ModelConfig) -> float:
    groups = mikv.channel_groups(config.head_dim)
    return bits if bits == EXACT else bits + 32 * groups / config.head_dim


def _mikv(settings: object) -> MiKV:
    assert isinstance(settings, MiKV)
    return settings


class RandomDirections(Gear):
    """Residuals are projected on random directions."""

    def factors(self, residual: Float32Array, rank: int) -> tuple[Float32Array, Float32Array]:
        """See ``Gear.factors``."""
        drawn = np.random.default_rng(1).standard_normal((residual.shape[2], rank), np.float32)
        basis = np.linalg.qr(drawn).Q
        return residual @ basis, np.repeat(basis.T[None], len(residual), axis=0)


class RandomOutliers(Gear):
    """Numbers at random places are stored as they are, as many per vector."""

    def find_outliers(self, vectors: Float32Array, count: int, axis: int) -> BoolArray:
        """See ``Gear.find_outliers``."""
        drawn = np.random.default_rng(1).random(vectors.shape, np.float32)
        return super().find_outliers(drawn, count, axis)


def random_directions(settings: object) -> Gear:
    """Return GEAR whose low rank is in random directions."""
    return RandomDirections(**asdict(_gear(settings)))


def random_outliers(settings: object) -> Gear:
    """Return GEAR whose outliers are random numbers."""
    return RandomOutliers(**asdict(_gear(settings)))


def smaller_groups(settings: object, config: ModelConfig) -> Gear:
    """Return the backbone alone, with groups so small that it costs as much."""
    plain = _backbone(settings)
    groups = [size for size in (16, 32, 64) if config.head_dim % size == 0] or [plain.group]
    return _dearest(
        [
            replace(plain, block=block, group=group)
            for block in (16, 32, 64, 128, 256)
            for group in groups
        ],
        _gear(settings),
        config,
    )


def wider_codes(settings: object, config: ModelConfig) -> Gear:
    """Return the backbone alone, with so many bits that it costs as much."""
    plain = _backbone(settings)
    wider = [replace(plain, bits=bits) for bits in BITS_PER_CODE if bits >= plain.bits]
    return _dearest(wider, _gear(settings), config)


def bytes_per_token(method: Gear, config: ModelConfig) -> float:
    """Return what a token of a prompt's block takes per head, in whole float16 cells."""
    zeros = np.zeros((config.kv_heads, method.block, config.head_dim), np.float32)
    cell_bytes = 4 * config.head_dim
    cells = [block.cells(cell_bytes) for block in method.encode(zeros, zeros, method.rank)]
    return sum(cells) * cell_bytes / len(cells) / method.block


def _dearest(methods: Sequence[Gear], than: Gear, config: ModelConfig) -> Gear:
    """Return the dearest of some methods that cost at most what another does."""
    most = bytes_per_token(than, config)
    costs = [bytes_per_token(method, config) for method in methods]
    require(min(costs) <= most, "its corrections cost too little to be spent otherwise", gear.NAME)
    _, place = max((cost, place) for place, cost in enumerate(costs) if cost <= most)
    return methods[place]


def _backbone(settings: object) -> Gear:
    return replace(_gear(settings), rank=0, later_rank=0, outliers=0.0)


def _gear(settings: object) -> Gear:
    assert isinstance(settings, Gear)
    return settings
