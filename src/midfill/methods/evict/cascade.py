"""CascadingMethod: the protocol of methods that trim a prompt's KV while it is prefilled.

The prompt runs through one layer after another as a whole. After each, the method ranks the layer's
tokens and says anew how many each layer so far keeps, fewer and fewer. So no more than one layer is
whole at any time, and the prompt needs only as many slots as that takes, however long it is.
"""

from typing import Protocol, runtime_checkable

from midfill.arrays import Float32Array, Int32Array, Int64Array
from midfill.methods.evict.method import SequenceKeys
from midfill.models.config import ModelConfig


class LayerTrimmer(Protocol):
    """A method at work on one prompt, from its first layer to its last."""

    def rank(self, keys: SequenceKeys, queries: Float32Array) -> Int32Array:
        """Rank the tokens of the next layer.

        Args:
            keys: of the layer alone: a view of a model that has no other.
            queries: float32 [1, n, query_heads, head_dim], rotated: of the prompt's last
                ``observed_rows`` rows.

        Returns:
            [kv_heads, n] int32, tokens by their number in the prompt, the best first; those that
            are left out don't stay.
        """
        ...

    def sizes(self) -> Int64Array:
        """Return how many of the ranked tokens each layer so far keeps per head, at least 1.

        Together at most ``layers * kept_tokens``, of all layers of the model. A layer that was
        trimmed doesn't grow again, whatever is said.
        """
        ...


@runtime_checkable
class CascadingMethod(Protocol):
    """A method of compression that can do so."""

    @property
    def observed_rows(self) -> int:
        """How many of the prompt's last rows have their queries observed."""
        ...

    @property
    def cascades(self) -> bool:
        """Whether prompts are trimmed while they are prefilled."""
        ...

    def kept_tokens(self, prompt: int) -> int | None:
        """Return how many tokens per layer, on average, stay of a prompt; None if all do.

        Args:
            prompt: its tokens.
        """
        ...

    def start_cascade(self, config: ModelConfig, prompt: int) -> LayerTrimmer:
        """Return a trimmer for a new prompt that doesn't stay as a whole.

        Args:
            config: the model; layers that have a window beside others that haven't are left out.
            prompt: its tokens.
        """
        ...
