"""The model that servers are compared on."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

from midfill.errors import MidfillError
from midfill.infill.formats import find_format
from midfill.lab.bench.clients import SPARE_TOKENS, Sentinels
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.model_store import resolve
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import tensor_shapes


@dataclass(frozen=True)
class ComparedModel:
    """A model on disk.

    Attributes:
        name: as the user names it.
        path: a GGUF file or a Hugging Face folder.
        sentinels: texts of the PRE, SUF and MID tokens that prompts are laid out with.
        own_sentinels: whether the checkpoint itself names them.
        random_weights: whether its weights are random, so that it repeats itself endlessly.
    """

    name: str
    path: Path
    checkpoint: Checkpoint
    sentinels: Sentinels
    own_sentinels: bool
    random_weights: bool = False

    @property
    def gguf(self) -> Path | None:
        """The model's file if it is in GGUF format."""
        path = self.checkpoint.path
        return path if path.is_file() else None

    @property
    def context(self) -> int:
        """Maximum tokens of a sequence."""
        return self.checkpoint.config.context

    @property
    def kv_values_per_token(self) -> int:
        """Values of K and V per token of context."""
        config = self.checkpoint.config
        return 2 * config.layers * config.kv_heads * config.head_dim

    @cached_property
    def parameters_read(self) -> int:
        """Parameters read per decoded token: all but an embedding that is not the output head."""
        shapes = tensor_shapes(self.checkpoint.config)
        return sum(prod(shape) for name, shape in shapes.items() if not self._only_looked_up(name))

    @cached_property
    def stored_bytes_read(self) -> int:
        """Bytes of these parameters as stored."""
        names = [name for name in self.checkpoint.names() if not self._only_looked_up(name)]
        return sum(self.checkpoint.tensor(name).data.nbytes for name in names)

    @cached_property
    def layer_kinds(self) -> tuple[str, ...]:
        """Formats of its layers' matrices, such as ("q4_1",)."""
        tensors = [self.checkpoint.tensor(name) for name in self.checkpoint.names()]
        layers = {t.kind for t in tensors if len(t.shape) > 1 and t.name.startswith("layers.")}
        return tuple(sorted(layers))

    @cached_property
    def stored_kinds(self) -> str:
        """Formats of all its matrices, such as "q4_1, embedding q8_0"."""
        embedding = self.checkpoint.tensor("embed.weight").kind
        return f"{', '.join(self.layer_kinds)}, embedding {embedding}"

    def _only_looked_up(self, name: str) -> bool:
        return name == "embed.weight" and not self.checkpoint.config.tied_embeddings


def open_compared(
    name: str, sentinels: Sentinels | None, *, random_weights: bool = False
) -> ComparedModel:
    """Open a model by path or name, fetched if needed.

    Args:
        sentinels: PRE, SUF and MID; None takes the checkpoint's own, or spare tokens of it.
        random_weights: whether its weights are random.

    Raises:
        MidfillError: there is no such model, or it lacks tokens to use as sentinels.
    """
    path = resolve(name)
    checkpoint = open_checkpoint(path)
    special = checkpoint.tokenizer.special_tokens
    format = find_format(checkpoint.config.family, special, checkpoint.metadata)
    own = None
    if format is not None and format.order == "psm" and format.middle is not None:
        own = (format.prefix.text, format.suffix.text, format.middle.text)
    chosen = sentinels or own or SPARE_TOKENS
    if absent := [text for text in chosen if text not in special]:
        raise MidfillError(
            f"{name} has no token {absent[0]!r}: name three of its special tokens with --fim-tokens"
        )
    label = Path(name).stem if Path(name).exists() else name
    return ComparedModel(label, path, checkpoint, chosen, chosen == own, random_weights)
