"""ReuseMethod: the protocol of methods that repair KV which was computed in another context.

The engine finds a prompt's tokens in cached text of the same tenant, copies their KV, moves the
keys to their new positions, and computes every row through the first layers. At the check layer it
has both: what was copied, and what the row has here. A method says which rows are computed on from
there. All others keep what was copied in the layers above.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from midfill.arrays import Float32Array, Int64Array
from midfill.methods.budget import require
from midfill.methods.served_model import ServedModel


@dataclass(frozen=True)
class LayerKV:
    """K and V of some tokens in one layer.

    Attributes:
        keys, values: float32 [tokens, kv_heads, head_dim]; keys after the rotary embedding.
    """

    keys: Float32Array
    values: Float32Array


@runtime_checkable
class ReuseMethod(Protocol):
    """A method with its hyper-parameters; it has no state. Equal methods give equal KV."""

    def __hash__(self) -> int: ...

    @property
    def check_layer(self) -> int:
        """The last layer that every row is computed through, from 0."""

    @property
    def min_run(self) -> int:
        """The least number of consecutive tokens that are copied."""

    def recomputed(self, copied: int) -> int:
        """Return how many of so many copied tokens ``select`` will choose."""

    def select(self, copied: LayerKV, computed: LayerKV) -> Int64Array:
        """Return which tokens are computed in the layers above the check layer, too.

        Args:
            copied: their KV in the check layer as it was copied, at the new positions.
            computed: the same as computed in this prompt.

        Returns:
            [n] int64, ascending.
        """


def require_shares(method: object, title: str, *names: str) -> None:
    """Refuse hyper-parameters that are no shares.

    Args:
        method: whose they are.
        title: its name, which the message begins with.
        names: of the hyper-parameters.

    Raises:
        InvalidRequestError: one isn't from 0 to 1.
    """
    for name in names:
        value = getattr(method, name)
        require(0.0 <= value <= 1.0, f"{name} must be from 0 to 1, not {value:g}", title)


def require_least(least: int, method: object, title: str, *names: str) -> None:
    """Refuse hyper-parameters below a number, or that are no finite numbers; see above.

    Raises:
        InvalidRequestError: one is.
    """
    bound = "0 or more" if least == 0 else f"at least {least}"
    for name in names:
        value = getattr(method, name)
        require(least <= value < math.inf, f"{name} must be {bound}, not {value:g}", title)


def require_one_of(known: Sequence[str], method: object, title: str, name: str) -> None:
    """Refuse a hyper-parameter that is none of the known words; see above.

    Raises:
        InvalidRequestError: it is another.
    """
    value = getattr(method, name)
    words = " or ".join(known) if len(known) == 2 else f"one of {', '.join(known)}"
    require(value in known, f"{name} must be {words}, not {value!r}", title)


def require_layer_above(check_layer: int, model: ServedModel, method: str) -> None:
    """Refuse a check layer that no other layer of a model is above.

    Args:
        check_layer: the last layer that every row is computed through, from 0.
        model: to serve.
        method: name that the message begins with.

    Raises:
        InvalidRequestError: it is the last layer, or there is no such layer.
    """
    last = model.config.layers - 1
    require(
        check_layer < last,
        f"check_layer must be below {last}, the model's last layer, not {check_layer}",
        method,
    )
