"""The model that servers are compared on, and prompts made with its tokenizer."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

from midfill.bench.clients import SPARE_TOKENS, Sentinels
from midfill.bench.documents import standard_library_documents
from midfill.checkpoints.checkpoint import Checkpoint
from midfill.checkpoints.model_store import resolve
from midfill.checkpoints.opening import open_checkpoint
from midfill.errors import MidfillError
from midfill.infill.formats import find_format
from midfill.models.tensor_shapes import tensor_shapes

_CORPUS_FILES = 40


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


class Prompts:
    """Prompts as token ids or text; the same model and seed give the same prompts."""

    def __init__(self, model: ComparedModel, seed: int) -> None:
        self._tokenizer = model.checkpoint.tokenizer
        self._random = random.Random(seed)
        special = set(self._tokenizer.special_tokens.values())
        self._files = standard_library_documents(
            _CORPUS_FILES, seed=seed + 1, shortest=8000, longest=30_000
        )
        self._ids: list[int] = []
        self._plain = [i for i in range(self._tokenizer.vocab_size) if i not in special]

    def random_tokens(self, count: int) -> list[int]:
        """Draw ordinary tokens, new ones on every call, so that no cache holds them."""
        return self._random.choices(self._plain, k=count)

    def code_tokens(self, stream: int, count: int, room: int) -> list[int]:
        """Return the first tokens of a stretch of real code.

        Args:
            stream: which stretch; no two share text while the corpus is large enough.
            count: how many tokens; a smaller count gives the beginning of a larger one.
            room: the largest count that will be requested.
        """
        ids = self._corpus((stream + 1) * room)
        start = stream * room % (len(ids) - room)
        return ids[start : start + count]

    def document(self, tokens: int, typed: int) -> tuple[str, str, str]:
        """Return prefix, text to type and suffix of a document with the caret in its middle.

        Args:
            tokens: of the document.
            typed: characters to type.
        """
        ids = self._corpus(2 * tokens + typed)
        prefix = self._tokenizer.decode(ids[: tokens // 2])
        rest = self._tokenizer.decode(ids[tokens // 2 : tokens + typed])
        after = self._tokenizer.encode(rest[typed:])
        return prefix, rest[:typed], self._tokenizer.decode(after[: tokens - tokens // 2])

    def count(self, prompt: str) -> int:
        """Return the number of tokens of a raw prompt, special tokens parsed."""
        return len(self._tokenizer.encode(prompt, parse_special=True))

    def longest(self, texts: Sequence[str]) -> int:
        """Return the number of tokens of the longest text."""
        return max(len(self._tokenizer.encode(text)) for text in texts)

    def _corpus(self, tokens: int) -> list[int]:
        """Return at least so many tokens of standard library files, or all that there are."""
        while self._files and len(self._ids) <= tokens:
            self._ids += self._tokenizer.encode(self._files.pop())
        return self._ids
