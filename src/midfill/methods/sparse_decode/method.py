"""SparseDecodeMethod: the protocol of methods whose rows choose keys while they decode.

The prompt is computed exactly, and its KV is the tenant's. Rows after it attend to the pages that a
query chose, so their KV is approximate: it is the sequence's own, and never cached. What a row
attends to depends on its position and on the tokens before it alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from midfill.arrays import BoolArray, Int32Array
from midfill.models.config import ModelConfig
from midfill.runners.forward.page_selection import SelectionRule

PageChoice = Callable[[ModelConfig, SelectionRule, int], Int32Array]
"""Chooses pages for a row that sees so many keys, without its query: [layers, query_heads, width],
see ``PageSelection.chosen``; called where there are more pages than are read."""


@runtime_checkable
class SparseDecodeMethod(Protocol):
    """A method with its hyper-parameters, ready for a model. It has no state."""

    @property
    def selection_rule(self) -> SelectionRule:
        """How much rows read, and what they choose it by."""

    @property
    def choice_interval(self) -> int:
        """Rows choose at multiples of this; those in between use the choice before them."""

    @property
    def page_choice(self) -> PageChoice | None:
        """What chooses; None has the rows' queries choose, within the step."""

    def choosing_heads(self, config: ModelConfig) -> BoolArray:
        """Return whose query heads choose: bool [layers, kv_heads]; others read all they hold."""


@dataclass(frozen=True)
class ChosenPages:
    """Implements ``SparseDecodeMethod`` for heads that all choose, but for those of first layers.

    Attributes:
        selection_rule, choice_interval, page_choice: see there.
        dense_layers: first layers whose heads read all keys.
    """

    selection_rule: SelectionRule
    choice_interval: int
    page_choice: PageChoice | None = None
    dense_layers: int = 0

    def choosing_heads(self, config: ModelConfig) -> BoolArray:
        """See ``SparseDecodeMethod``."""
        chooses = np.ones((config.layers, config.kv_heads), bool)
        chooses[: self.dense_layers] = False
        return chooses
