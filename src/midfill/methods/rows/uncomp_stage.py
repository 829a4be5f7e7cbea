"""UNComp, its part on hidden rows: groups of layers, each with fewer rows than the one before.

Source: Xiong et al., "UNComp: Can Matrix Entropy Uncover Sparsity? A Compressor Design from an
Uncertainty-Aware Perspective", 2024, arXiv 2410.03090, section 3.2. A layer begins a new group
where the entropy of the queries, the sum over heads, drops from the layer before by more than a
share. Of G groups, group g keeps of a prompt of N tokens

    n_g = n_min + floor((N - n_min) / (G - 1)) * (G - 1 - g)

those to which the last rows attend most in the layer before the group; the last rows always stay.
Later layers have KV of these alone, while the answer is decoded, too.

Entropies are those that ``uncomp`` is calibrated with. The paper's n_min of 1,536 tokens suits its
prompts of many thousands; ``least`` is a share of the prompt if below 1. Slots are held for all
tokens in all layers. The other part of the method, fewer keys per head, is ``uncomp``.
"""

from dataclasses import dataclass

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int64Array
from midfill.methods.budget import require
from midfill.methods.calibration_store import load_tables
from midfill.methods.evict.streaming_heads import refuse_windows
from midfill.methods.evict.uncomp import NAME as CALIBRATED
from midfill.methods.evict.uncomp import VERSION
from midfill.methods.served_model import ServedModel
from midfill.models.config import ModelConfig

NAME = "uncomp-stage"


@dataclass(frozen=True)
class UNCompStage:
    """The method's hyper-parameters.

    Attributes:
        least: tokens of the last group, or a share of the prompt if below 1; the paper's 1,536.
        drop: by which share the entropy has to drop where a group begins; the paper's threshold is
            about 0.014 of its scale.
        window: the last rows, which score the tokens and always stay; the paper's 8.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    least: float = 0.4
    drop: float = 0.014
    window: int = 8

    def __post_init__(self) -> None:
        require(0 < self.least < np.inf, f"least must be above 0, not {self.least:g}", NAME)
        require(0 < self.drop < 1, f"drop must be above 0 and below 1, not {self.drop:g}", NAME)
        require(self.window >= 1, f"window must be at least 1, not {self.window}", NAME)

    def for_model(self, model: ServedModel) -> "LayerGroups":
        """See ``ModelSpecific.for_model``."""
        refuse_windows(NAME, model.config)
        entropy = load_tables(CALIBRATED, VERSION, model)["entropy"]
        require(
            len(entropy) == model.config.layers, "the tables are of a model with other layers", NAME
        )
        starts = group_starts(entropy.sum(axis=1), self.drop)
        require(
            len(starts) >= 2,
            f"the entropy drops by {self.drop:g} in no layer, so all layers are one group;"
            " drop takes less",
            NAME,
        )
        return LayerGroups(self, tuple(starts))


def group_starts(entropy: Float64Array, drop: float) -> list[int]:
    """Return the layers with which groups begin.

    Args:
        entropy: [layers].
        drop: see ``UNCompStage``.
    """
    falls = entropy[1:] < entropy[:-1] * (1 - drop)
    return [0, *(int(layer) + 1 for layer in np.flatnonzero(falls))]


@dataclass(frozen=True)
class LayerGroups:
    """The method with what it knows of a model; implements ``methods.rows.method.PruningMethod``.

    Attributes:
        method: the hyper-parameters.
        starts: the layers with which groups begin.
    """

    method: UNCompStage
    starts: tuple[int, ...]

    @property
    def scoring_rows(self) -> int:
        """See ``PruningMethod.scoring_rows``."""
        return self.method.window

    @property
    def revives(self) -> bool:
        """See ``PruningMethod.revives``."""
        return False

    def pruning_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """See ``PruningMethod.pruning_layers``."""
        return tuple(start - 1 for start in self.starts[1:])

    def select(self, place: int, scores: Float32Array, prompt: int) -> Int64Array:
        """See ``PruningMethod.select``; of equal scores, the earlier token's counts."""
        count = self.tokens(place + 1, prompt)
        # The window always stays, and is part of the count.
        own = min(self.method.window, len(scores))
        ranked = np.argsort(-scores[: len(scores) - own], kind="stable")[: max(count - own, 0)]
        last = np.arange(len(scores) - own, len(scores))
        kept: Int64Array = np.sort(np.concatenate((ranked, last)))
        return kept

    def tokens(self, group: int, prompt: int) -> int:
        """Return how many of a prompt's tokens a group keeps."""
        least = self.method.least
        floor = min(int(np.ceil(least * prompt if least < 1 else least)), prompt)
        steps = len(self.starts) - 1
        return floor + (prompt - floor) // steps * (steps - group)
