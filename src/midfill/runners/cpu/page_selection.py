"""Packs the page selections of a batch as the kernels take them, and takes their choices back."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from midfill.arrays import Int32Array, Int64Array
from midfill.kernels.cpu.attention_parts import SelectorTable
from midfill.kernels.cpu.kv_cache import KVArray
from midfill.kernels.cpu.parts.page_selector import (
    BY_CENTRES,
    BY_EVERY_KEY,
    BY_FIRSTS,
    BY_SUMMARIES,
    CHOICES,
    RECORD_FIELDS,
    ROOM,
)
from midfill.kernels.cpu.parts.tree_search import SEARCH_ROOM
from midfill.models.config import ModelConfig
from midfill.runners.forward.attention import SpanLists
from midfill.runners.forward.page_selection import PageSelection, Search, SelectionRule

_SEARCHES = {
    Search.SUMMARIES: BY_SUMMARIES,
    Search.CENTRES: BY_CENTRES,
    Search.FIRSTS: BY_FIRSTS,
    Search.EVERY_KEY: BY_EVERY_KEY,
}


class PackedSelections(NamedTuple):
    """The selections of a batch.

    Attributes:
        first: int32 [requests], where each request's record starts, -1 if it has none.
        numbers: int32, the records.
        scores: how many scores of pages they make.
        lists: room for the lists of all rows, of as many spans each as a rule's rows read at most.
        selections: those that there are, with the place of their choices in ``numbers``.
    """

    first: Int32Array
    numbers: Int32Array
    scores: int
    lists: SpanLists
    selections: list[tuple[PageSelection, int]]

    def table(self, kernel: int, summaries: KVArray, capacity: int) -> SelectorTable:
        """Return what the kernels take.

        Args:
            kernel: address of what chooses.
            summaries, capacity: the runner's memory, see ``SelectorTable``.
        """
        scores = np.empty(self.scores, np.float32)
        return SelectorTable(kernel, self.first, self.numbers, summaries, capacity, scores)

    def take(self, pairs: Int64Array) -> None:
        """Hand each selection the choices that were made for it.

        Args:
            pairs: products of queries and keys, of all of its rows and query heads.
        """
        for selection, chosen_at in self.selections:
            chosen = self.numbers[chosen_at : chosen_at + selection.chosen.size]
            selection.chosen[:] = chosen.reshape(selection.chosen.shape)
            selection.pairs[:] += pairs[: selection.pairs.size].reshape(selection.pairs.shape)
            pairs = pairs[selection.pairs.size :]


def pack_selections(
    config: ModelConfig, selections: Sequence[PageSelection | None], seen: Sequence[int]
) -> PackedSelections:
    """Return the selections of a batch.

    Args:
        config: the model.
        selections: of each request.
        seen: the most keys that a request's rows see in any head.
    """
    first, records, present = [], list[Int32Array](), []
    spans, at, scores = list[int](), 0, 0
    for selection, most_seen in zip(selections, seen, strict=True):
        if selection is None:
            first.append(-1)
            continue
        record, chosen_at = _record(config, selection, most_seen, scores)
        first.append(at)
        records.append(record)
        present.append((selection, at + chosen_at))
        at += len(record)
        scores += int(record[CHOICES]) * config.query_heads * int(record[ROOM])
        spans += [selection.rule.spans] * selection.pairs.size
    indptr = np.zeros(len(spans) + 1, np.int32)
    np.cumsum(spans, out=indptr[1:])
    lists = SpanLists(indptr, np.zeros((int(indptr[-1]), 2), np.int32))
    return PackedSelections(
        np.array(first, np.int32), np.concatenate(records), scores, lists, present
    )


def _record(
    config: ModelConfig, selection: PageSelection, seen: int, scores_at: int
) -> tuple[Int32Array, int]:
    """Return a request's record, and where in it the choices start; see ``page_selector``."""
    rule, choices = selection.rule, len(selection.made_by)
    room, nodes = _room(rule, seen), 0
    if rule.search is not Search.SUMMARIES and (selection.made_by >= 0).any():
        nodes = room * choices * config.query_heads
    arrays = (
        selection.heads.astype(np.int32).reshape(-1),
        selection.of_row,
        selection.made_by,
        selection.entries,
        selection.missing,
        np.zeros(nodes, np.int32),
        selection.chosen.reshape(-1),
    )
    places = np.cumsum([RECORD_FIELDS, *(len(array) for array in arrays[:-1])]).tolist()
    fields = (
        rule.summary, rule.page, rule.width, choices, len(selection.missing), room, *places,
        scores_at, _SEARCHES[rule.search], rule.sinks, rule.window,
    )  # fmt: skip
    return np.concatenate((np.array(fields, np.int32), *arrays)), places[-1]


def _room(rule: SelectionRule, seen: int) -> int:
    """Return how many scores a choice needs in a query head; a search needs as many for its nodes.

    Args:
        rule: how it is made.
        seen: the most keys that its row sees in any head.
    """
    candidates = rule.candidates(seen)
    if rule.search is Search.SUMMARIES:
        return candidates
    ranked = candidates if rule.search is Search.EVERY_KEY else 2 * (rule.width - 1)
    return SEARCH_ROOM * ranked
