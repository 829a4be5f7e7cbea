"""Which topic questions about dialogues are sent to, by three ways of embedding texts.

Nothing is computed with the model but its input embeddings, which are read from the checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from benchmarks.conversations.dialogues import Dialogue
from midfill.arrays import Float32Array, Float64Array, Int32Array, Int64Array
from midfill.methods.episodes.clustering import (
    Episodes,
    TokenVectors,
    find_sentence_episodes,
    find_token_episodes,
    unit,
)
from midfill.methods.episodes.epicache import text_vector
from midfill.methods.episodes.turns import TurnReader
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.sentence_encoder import SentenceEncoder

TURNS, EPISODES, LONGEST = 4, 4, 500
_SAMPLE = 8192


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """Where the questions about one dialogue went.

    Attributes:
        kind, seed: of the dialogue.
        right: by embedding, of each question, whether it went to the topic whose windows have the
            line that answers it.
        pure: by embedding, the share of windows that are about what most of their topic's are.
    """

    kind: str
    seed: int
    right: dict[str, list[bool]]
    pure: dict[str, float]


class Router:
    """Sends questions to topics.

    Args:
        checkpoint: the model that the caches would be of.
        encoder: a sentence encoder; None leaves it out.
    """

    def __init__(self, checkpoint: Checkpoint, encoder: SentenceEncoder | None) -> None:
        tokenizer, config = checkpoint.tokenizer, checkpoint.config
        self._encode, self._continue = tokenizer.encode, tokenizer.encode_continuation
        self._reader = TurnReader.of(tokenizer.token_bytes, config.vocab, config.eos_token_ids)
        self._table: Float32Array = checkpoint.tensor("embed.weight").to_float32()
        sample = np.linspace(0, len(self._table) - 1, _SAMPLE).astype(int)
        self._vectors = TokenVectors(self._table[sample])
        finders: dict[str, Callable[[Int32Array, Int32Array], Episodes]] = {
            "plain means": self._plain, "corrected means": self._corrected,
        }  # fmt: skip
        if encoder is not None:
            embed = encoder.encode
            vector = lambda tokens: text_vector(tokenizer.token_bytes, embed, tokens)  # noqa: E731
            finders["sentence encoder"] = lambda tokens, bounds: _divide(tokens, bounds, vector)
        self._finders = finders

    def route(self, kind: str, seed: int, dialogue: Dialogue) -> Routing:
        """Send all questions about a dialogue to topics, by each embedding."""
        tokens = np.array(self._encode(dialogue.text), np.int32)
        bounds = self._reader.windows(tokens, 0, TURNS, LONGEST)
        windows = self._windows_of_lines(dialogue, bounds)
        asked = [np.array(self._continue(each.question), np.int32) for each in dialogue.asked]
        right, pure = {}, {}
        for name, find in self._finders.items():
            found = find(tokens, bounds)
            own = [int(found.labels[windows[each.line]]) for each in dialogue.asked]
            right[name] = [
                found.nearest(question) == label for question, label in zip(asked, own, strict=True)
            ]
            pure[name] = _purity(found.labels, windows, dialogue.topics)
        return Routing(kind=kind, seed=seed, right=right, pure=pure)

    def _windows_of_lines(self, dialogue: Dialogue, bounds: Int32Array) -> Int64Array:
        """Return the window that each line begins in: [lines] int64."""
        starts = [
            len(self._encode("".join(f"{line}\n" for line in dialogue.lines[:number])))
            for number in range(len(dialogue.lines))
        ]
        return np.searchsorted(bounds, starts, side="right") - 1

    def _plain(self, tokens: Int32Array, bounds: Int32Array) -> Episodes:
        """Divide by plain means of embeddings."""

        def mean(part: Int32Array) -> Float64Array:
            return unit(self._table[part].mean(axis=0).astype(np.float64))

        return _divide(tokens, bounds, mean)

    def _corrected(self, tokens: Int32Array, bounds: Int32Array) -> Episodes:
        """Divide as the method does without an encoder."""
        vectors = self._vectors.of(self._table[np.unique(tokens)])
        return find_token_episodes(tokens, bounds, vectors, EPISODES, TURNS, 0)


def _divide(
    tokens: Int32Array, bounds: Int32Array, vector: Callable[[Int32Array], Float64Array]
) -> Episodes:
    points = np.stack([vector(tokens[start:end]) for start, end in pairwise(bounds)])
    return find_sentence_episodes(points, vector, EPISODES, TURNS, 0)


def _purity(labels: Int64Array, windows: Int64Array, topics: Sequence[str]) -> float:
    """Return the share of lines in windows whose topic most lines of the cluster have."""
    counts: dict[int, dict[str, int]] = {}
    for window, topic in zip(windows.tolist(), topics, strict=True):
        own = counts.setdefault(int(labels[window]), {})
        own[topic] = own.get(topic, 0) + 1
    return sum(max(own.values()) for own in counts.values()) / len(topics)


def shares(found: Sequence[Routing], kind: str) -> Mapping[str, list[bool]]:
    """Return whether questions about dialogues of a kind went right, by embedding."""
    own = [each for each in found if each.kind == kind]
    return {name: [one for each in own for one in each.right[name]] for name in own[0].right}
