"""LazyLLM: drop prompt tokens layer by layer; revive any of them while decoding.

Source: Fu et al., "LazyLLM: Dynamic Token Pruning for Efficient Long Context LLM Inference", 2024,
arXiv 2407.14057, section 3. After a pruning layer l, a token's importance is the attention that the
last token pays to it there, the mean over heads (equation 1),

    s_i = 1/H * sum over h of A[l, h, last, i]

and the share of the active tokens with the largest s goes on. Each token of the answer chooses
anew: a chosen token whose KV is missing goes on from its hidden state, which was kept where it was
dropped (the auxiliary cache). No token is computed twice in a layer.

Where and how much to prune, the paper found by experiment and does not state. Tokens of the answer
are never dropped. Slots are held for all tokens in all layers, so this saves time, not memory.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from midfill.arrays import Float32Array, Int64Array
from midfill.errors import InvalidRequestError
from midfill.methods.budget import require
from midfill.methods.evict.streaming_heads import refuse_windows
from midfill.methods.served_model import ServedModel
from midfill.models.config import ModelConfig

NAME = "lazyllm"


@dataclass(frozen=True)
class LazyLLM:
    """Implements ``methods.rows.method.PruningMethod``.

    Attributes:
        after: the layers after which tokens are dropped, as numbers from 0, or below 1 as shares of
            the depth, separated by slashes.
        keep: which share of the tokens goes on each time; one for all, or one per layer of
            ``after``.
        revive: 1 chooses anew for each token of the answer; 0 leaves dropped what the prompt's last
            token has dropped.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    after: str = "0.3/0.5/0.7"
    keep: str = "0.7"
    revive: int = 1

    def __post_init__(self) -> None:
        places, shares = self._after, self._keep
        require(
            all(0 <= place < 10_000 for place in places),
            f"after takes numbers of layers, or shares below 1, not {self.after!r}",
            NAME,
        )
        require(
            all(0 <= share <= 1 for share in shares),
            f"keep takes shares from 0 to 1, not {self.keep!r}",
            NAME,
        )
        require(
            len(shares) in (1, len(places)),
            f"keep takes 1 share or {len(places)}, one per layer of after",
            NAME,
        )
        require(self.revive in (0, 1), f"revive must be 0 or 1, not {self.revive}", NAME)

    @property
    def _after(self) -> list[float]:
        return _numbers("after", self.after)

    @property
    def _keep(self) -> list[float]:
        return _numbers("keep", self.keep)

    @property
    def scoring_rows(self) -> int:
        """See ``PruningMethod.scoring_rows``."""
        return 1

    @property
    def revives(self) -> bool:
        """See ``PruningMethod.revives``."""
        return self.revive == 1

    def for_model(self, model: ServedModel) -> "LazyLLM":
        """Return the method.

        Raises:
            InvalidRequestError: the model lacks a layer that it names, or has windowed layers.
        """
        refuse_windows(NAME, model.config)
        layers = self.pruning_layers(model.config)
        require(
            all(first < second for first, second in pairwise(layers)),
            f"after must name layers in ascending order, not {list(layers)}",
            NAME,
        )
        require(
            layers[-1] < model.config.layers,
            f"after names layer {layers[-1]}, but the model's last is {model.config.layers - 1}",
            NAME,
        )
        return self

    def pruning_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """See ``PruningMethod.pruning_layers``."""
        return tuple(
            int(depth * config.layers) if depth < 1 else int(depth) for depth in self._after
        )

    def select(self, place: int, scores: Float32Array, prompt: int) -> Int64Array:
        """See ``PruningMethod.select``; of equal scores, the earlier token's counts."""
        share = self._keep[place if len(self._keep) > 1 else 0]
        ranked = np.argsort(-scores, kind="stable")
        kept: Int64Array = np.sort(ranked[: int(np.ceil(share * len(scores)))])
        return kept


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split("/")]
    except ValueError:
        message = f"{NAME}: {name} takes numbers separated by slashes, not {text!r}"
        raise InvalidRequestError(message, param="method") from None
