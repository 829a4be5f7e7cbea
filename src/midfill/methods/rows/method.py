"""PruningMethod: the protocol of methods that drop rows of a prompt between layers.

The prompt runs through the model by layers, as a whole. After some layers the engine shows a
method how much the prompt's last rows attend to each token; those that it doesn't keep go no
further. So the layers above have neither rows nor KV of them.
"""

from typing import Protocol, runtime_checkable

from midfill.arrays import Float32Array, Int64Array
from midfill.models.config import ModelConfig


@runtime_checkable
class PruningMethod(Protocol):
    """A method with its hyper-parameters; it has no state."""

    @property
    def scoring_rows(self) -> int:
        """How many of the last rows score the tokens, at least 1."""

    @property
    def revives(self) -> bool:
        """Whether tokens are chosen anew for each token of the answer.

        A token that was dropped before then goes on from the layer at which it was, if it is
        chosen. Otherwise what was dropped stays so.
        """

    def pruning_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """Return the layers after which tokens are dropped: numbers from 0, ascending."""

    def select(self, place: int, scores: Float32Array, prompt: int) -> Int64Array:
        """Decide which tokens go on.

        Args:
            place: which of ``pruning_layers`` it is after, from 0.
            scores: float32 [n], the attention to each of the prompt's tokens that have come so far,
                the mean over query heads and scoring rows.
            prompt: tokens of the whole prompt.

        Returns:
            [m] int64, ascending: places in ``scores``. The scoring rows go on in any case.
        """
