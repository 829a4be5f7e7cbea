"""SparseDecodeMethod: the protocol of methods whose rows choose pages of keys while they decode.

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
from midfill.runners.forward.page_selection import PageRule

PageChoice = Callable[[ModelConfig, PageRule, int], Int32Array]
"""Chooses pages for a row that sees so many keys, without its query: [layers, query_heads, pages],
see ``PageSelection.chosen``; called where there are more pages than are read."""


@runtime_checkable
class SparseDecodeMethod(Protocol):
    """A method with its hyper-parameters, ready for a model. It has no state."""

    @property
    def page_rule(self) -> PageRule:
        """How many pages rows read, and of what size."""

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
    """Implements ``SparseDecodeMethod`` for heads that all choose.

    Attributes:
        page_rule, choice_interval, page_choice: see there.
    """

    page_rule: PageRule
    choice_interval: int
    page_choice: PageChoice | None = None

    def choosing_heads(self, config: ModelConfig) -> BoolArray:
        """See ``SparseDecodeMethod``."""
        return np.ones((config.layers, config.kv_heads), bool)
