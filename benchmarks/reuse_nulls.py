"""Nulls of CacheBlend: as many tokens are computed again, but not those that differ most."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from midfill.arrays import Int64Array
from midfill.methods.registry import resolve_method
from midfill.methods.reuse.cacheblend import CacheBlend
from midfill.methods.reuse.method import LayerKV


@dataclass(frozen=True)
class RandomRows(CacheBlend):
    """Tokens at random, which follow from the copied tokens alone."""

    def select(self, copied: LayerKV, computed: LayerKV) -> Int64Array:
        """See ``ReuseMethod.select``."""
        seed = blake2b(computed.keys.tobytes(), digest_size=16).digest()
        count = len(computed.keys)
        drawn = np.random.default_rng(list(seed)).choice(
            count, self.recomputed(count), replace=False
        )
        chosen: Int64Array = np.sort(drawn).astype(np.int64)
        return chosen


@dataclass(frozen=True)
class FirstRows(CacheBlend):
    """The first of the copied tokens."""

    def select(self, copied: LayerKV, computed: LayerKV) -> Int64Array:
        """See ``ReuseMethod.select``."""
        return np.arange(self.recomputed(len(computed.keys)), dtype=np.int64)


_NULLS = {"random tokens": RandomRows, "first tokens": FirstRows}


def reuse_nulls(specifications: Sequence[str]) -> dict[str, tuple[str, CacheBlend]]:
    """Return the nulls of the methods that choose tokens to compute again.

    Args:
        specifications: of methods of reuse.

    Returns:
        By name, the specification of a null's method, and the null.
    """
    found: dict[str, tuple[str, CacheBlend]] = {}
    for specification in specifications:
        method = resolve_method(specification)
        if not isinstance(method, CacheBlend) or not 0 < method.ratio < 1:
            continue
        for title, null in _NULLS.items():
            fields = (method.ratio, method.check_layer, method.compare, method.min_run)
            found[f"{specification} {title}"] = (specification, null(*fields))
    return found
