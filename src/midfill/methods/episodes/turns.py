"""Where a conversation's turns, windows and last question are, by its token ids; no state.

A turn ends with one of the model's end tokens, such as those that chat templates put after each
message, or after each answer alone. Where a prompt has none, each line is a turn. The last complete
turn is the question, with what follows it, such as the beginning of the answer; all before it is
the conversation's history.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from midfill.arrays import BoolArray, Int32Array, Int64Array
from midfill.methods.sentences.selection import end_tokens


class Parts(NamedTuple):
    """What a prompt is made of.

    Attributes:
        history: how many of the first tokens are the history; 0 if there is none.
        first: how many of these are the first turn.
        question: number of the question's first token.
    """

    history: int
    first: int
    question: int


@dataclass(frozen=True, eq=False)
class TurnReader:
    """Finds turns in prompts of one model.

    Attributes:
        message_ends: [vocab] bool, the model's end tokens.
        line_ends: [vocab] bool, tokens with a newline in them.
        sentence_ends: [vocab] bool.
        characters: [vocab] int64, how many a token stands for.
    """

    message_ends: BoolArray
    line_ends: BoolArray
    sentence_ends: BoolArray
    characters: Int64Array

    @classmethod
    def of(
        cls, token_bytes: Callable[[int], bytes], vocab: int, end_ids: tuple[int, ...]
    ) -> "TurnReader":
        """Return the reader for a vocabulary.

        Args:
            token_bytes: returns what a token stands for.
            vocab: how many tokens there are.
            end_ids: tokens that end a message.
        """
        message_ends = np.zeros(vocab, bool)
        message_ends[[token for token in end_ids if token < vocab]] = True
        texts = (token_bytes(token).decode("utf-8", errors="replace") for token in range(vocab))
        characters = np.fromiter(map(len, texts), np.int64, vocab)
        lines = end_tokens(token_bytes, vocab, lines=True)
        sentences = end_tokens(token_bytes, vocab, lines=False)
        return cls(message_ends, lines, sentences, characters)

    def read(self, tokens: Int32Array, history: int | None = None) -> Parts:
        """Return the parts of a prompt.

        Args:
            tokens: [n] int32.
            history: how many of the first tokens are the history; all others are the question then.
                None finds it.
        """
        ends = self._turn_ends(tokens if history is None else tokens[:history])
        if history is not None:
            return Parts(history, int(ends[0]) if len(ends) else history, history)
        if len(ends) < 2:
            return Parts(0, 0, 0)
        return Parts(int(ends[-2]), int(ends[0]), int(ends[-2]))

    def windows(self, tokens: Int32Array, first: int, turns: int, longest: int) -> Int32Array:
        """Return where the windows of a history begin, and where the last one ends.

        Args:
            tokens: [n] int32, the history.
            first: number of the first token that is in a window.
            turns: of a window; a turn that is too long counts as its sentences.
            longest: characters of a turn that isn't.

        Returns:
            [windows + 1] int32, ascending from ``first`` to n; [first] alone if nothing is left.
        """
        starts = [first]
        ends = [int(end) for end in self._turn_ends(tokens) if end > first]
        for start, end in pairwise([first, *ends, max(len(tokens), first)]):
            turn = tokens[start:end]
            if self.characters[turn].sum() > longest:
                # What follows the last sentence is mostly the turn's end, and goes with it.
                starts += (start + _ends(self.sentence_ends, turn)[:-1]).tolist()
            starts.append(end)
        bounds = np.unique(np.array(starts, np.int32))
        if len(bounds) < 2:
            return bounds
        return np.append(bounds[:-1:turns], bounds[-1]).astype(np.int32)

    def _turn_ends(self, tokens: Int32Array) -> Int64Array:
        """Return the number of the first token after each turn that has ended: ascending."""
        # A prompt may begin with an end token, where that is the model's first token, too.
        is_chat = bool(self.message_ends[tokens[1:]].any())
        return _ends(self.message_ends if is_chat else self.line_ends, tokens)


def _ends(mask: BoolArray, tokens: Int32Array) -> Int64Array:
    """Return the number after each run of tokens that end something: [n] int64."""
    is_end = mask[tokens]
    is_last = is_end.copy()
    is_last[:-1] &= ~is_end[1:]
    return np.flatnonzero(is_last) + 1
