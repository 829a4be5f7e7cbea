"""Methods that trim a prompt's KV layer by layer while it is prefilled, and one of them at work.

The prompt's rows run through the layers as a whole, one layer at a time. A layer's K and V go to
places (``kv.places``) of a few slots, all rows attend to them, the method ranks the tokens, and
those that stay move together: the best of each head to the first of the layer's places, and so on.
A layer that is trimmed again gives back its last places, and nothing moves. The next layer takes
places that are free by then. In the end all places that are used move to the first slots.

So a prompt of N tokens of which C per layer stay takes C + N / layers slots, and not N. Its exact
KV never exists as a whole, so it doesn't come into the prefix cache; a prefix that is there already
is used, layer by layer, as long as that leaves room.
"""

import bisect
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from midfill.arrays import Float32Array, Int32Array, Int64Array
from midfill.kv.compressed_prefix import CompressedPrefix
from midfill.kv.places import Places
from midfill.kv.pool import KVPool
from midfill.kv.ragged import RaggedIndex, cells_of_slots
from midfill.kv.sequence_kv import SequenceKV
from midfill.methods.evict.full_layers import FullLayers
from midfill.methods.evict.method import SequenceKeys
from midfill.models.config import ModelConfig
from midfill.runners.forward.layer_rows import LayerRows
from midfill.runners.forward.runner import Runner


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

    def sizes(self) -> Int64Array:
        """Return how many of the ranked tokens each layer so far keeps per head, at least 1.

        Together at most ``layers * kept_tokens``, of all layers of the model. A layer that was
        trimmed doesn't grow again, whatever is said.
        """


@runtime_checkable
class CascadingMethod(Protocol):
    """A method of compression that can do so."""

    @property
    def observed_rows(self) -> int:
        """How many of the prompt's last rows have their queries observed."""

    @property
    def cascades(self) -> bool:
        """Whether prompts are trimmed while they are prefilled."""

    def kept_tokens(self, prompt: int) -> int | None:
        """Return how many tokens per layer, on average, stay of a prompt; None if all do.

        Args:
            prompt: its tokens.
        """

    def start_cascade(self, config: ModelConfig, prompt: int) -> LayerTrimmer:
        """Return a trimmer for a new prompt that doesn't stay as a whole.

        Args:
            config: the model; layers that have a window beside others that haven't are left out.
            prompt: its tokens.
        """


class CascadeSize:
    """How many slots prompts take that a method trims while they are prefilled.

    Args:
        method: what trims.
        full_layers: the layers that it decides on.
        runner: the model.
    """

    def __init__(self, method: CascadingMethod, full_layers: FullLayers, runner: Runner) -> None:
        self._method = method
        self._full = full_layers.config.layers
        self._layers = runner.config.layers
        self._window = runner.config.sliding_window or 0

    def kept_slots(self, prompt: int) -> int | None:
        """Return the most slots that what stays of a prompt fills; None if all stays."""
        kept = self._kept_places(prompt)
        return None if kept is None else -(-kept // self._layers)

    def peak_slots(self, prompt: int) -> int | None:
        """Return how many slots a prompt takes while it is prefilled; None if all stays."""
        kept = self._kept_places(prompt)
        return None if kept is None else -(-(kept + prompt) // self._layers)

    def most_tokens(self, prompt: int, slots: int) -> int:
        """Return the largest length, prompt and answer together, that so many slots allow.

        Args:
            prompt: tokens that are trimmed.
            slots: of the KV cache.
        """
        kept, peak = self.kept_slots(prompt), self.peak_slots(prompt)
        if kept is None or peak is None:
            return slots
        return prompt + slots - kept if peak <= slots else min(prompt, slots)

    def longest_prompt(self, slots: int, most: int) -> int:
        """Return the longest prompt that so many slots serve, at most ``most`` tokens."""
        prompts = range(1, most + 1)
        too_long = partial(self._is_too_long, slots=slots)
        return bisect.bisect_left(prompts, True, key=too_long)

    def _is_too_long(self, prompt: int, slots: int) -> bool:
        return self.most_tokens(prompt, slots) <= prompt

    def _kept_places(self, prompt: int) -> int | None:
        kept = self._method.kept_tokens(prompt)
        if kept is None:
            return None
        shown = min(prompt, max(self._window - 1, 1))
        return kept * self._full + shown * (self._layers - self._full)


@dataclass
class _TrimmedLayer:
    """What stays of a layer.

    Attributes:
        ranked: [kv_heads, n] int32, tokens, the best first.
        places: [n] int64: number i holds the tokens in column i.
    """

    ranked: Int32Array
    places: Int64Array


class Cascade:
    """Implements ``layer_rows.RowChanges``: drops no rows, but tells where their KV is.

    Attributes:
        slots: how many slots the prompt takes while it is prefilled.
        kept_slots: how many at most hold what stays of it.
    """

    def __init__(
        self, method: CascadingMethod, runner: Runner, full_layers: FullLayers, prompt: int
    ) -> None:
        """Prepare for a prompt that doesn't stay as a whole.

        Args:
            method: what trims.
            runner: the model and its KV cache.
            full_layers: the layers that the method decides on.
            prompt: tokens that are trimmed.
        """
        size = CascadeSize(method, full_layers, runner)
        peak, kept = size.peak_slots(prompt), size.kept_slots(prompt)
        assert peak is not None
        assert kept is not None
        self.slots, self.kept_slots = peak, kept
        self._method, self._runner, self._full_layers = method, runner, full_layers
        self._prompt = prompt
        self.restart()

    @property
    def stops(self) -> tuple[int, ...]:
        """See ``RowChanges.stops``: before every layer, and after the last."""
        return tuple(range(self._runner.config.layers + 1))

    def slots_needed(self, length: int) -> int:
        """Return how many slots a sequence of a length takes when it is admitted."""
        return max(self.slots, self.kept_slots + length - self._prompt)

    def exact_tokens(self, length: int) -> int:
        """Return how many tokens of such a sequence may come from the prefix cache.

        Its slots fit beside these, so that it can always be admitted when nothing else runs.
        """
        return max(self._runner.slots - self.slots_needed(length), 0)

    def restart(self) -> None:
        """Begin again, since the sequence holds no KV any more."""
        self._trimmed: list[_TrimmedLayer] = []
        self._places: Places | None = None
        self._shared: Int32Array = np.zeros(0, np.int32)
        self._scratch: Int64Array = np.zeros(0, np.int64)
        self._trimmer: LayerTrimmer | None = None
        self._failure: Exception | None = None

    def fork(self) -> "Cascade":
        """Return one for another answer to the same prompt, which computes it by itself."""
        return Cascade(self._method, self._runner, self._full_layers, self._prompt)

    def begin(self, kv: SequenceKV) -> None:
        """Prepare for a pass.

        Args:
            kv: shares the prompt's cached prefix, and owns ``slots`` slots or more behind it.
        """
        self.restart()
        config = self._runner.config
        self._shared = kv.slots[: kv.shared].copy()
        own = kv.slots[kv.shared : kv.shared + self.slots].copy()
        self._places = Places(own, config.layers, config.kv_heads, self._runner.slots)
        self._trimmer = self._method.start_cascade(self._full_layers.config, self._prompt)

    def change(self, rows: LayerRows) -> None:
        """See ``RowChanges.change``: trim the layer that has run, and make room for the next."""
        layer = rows.next_layer
        if layer and self._failure is None:
            try:
                self._trim(rows, layer - 1)
            except Exception as failure:
                self._failure = failure
        assert self._places is not None
        if self._failure is not None:  # what comes is written over all that was
            self._places.give_back_all()
        if layer < self._runner.config.layers:
            self._scratch = self._places.take(rows.tokens)
            own = self._places.slot_numbers(self._scratch, layer)
            rows.slots = np.concatenate((self._shared, own))

    def finish(self, kv: SequenceKV, pool: KVPool) -> None:
        """Put what stays in the place of the sequence's slots, all layers being trimmed.

        Args:
            kv: the same as in ``begin``.
            pool: where its slots come from.

        Raises:
            Exception: what the method raised. The prompt's rows ran on to their end, so that it
                disturbs no other sequence.
        """
        if self._failure is not None:
            raise self._failure
        assert self._places is not None
        places = self._places
        count = places.slots_filled(sum(len(trimmed.places) for trimmed in self._trimmed))
        self._gather(count)
        cells, sizes = [], [0]
        for trimmed in self._trimmed:
            order = np.argsort(trimmed.ranked, axis=1)
            ordered = np.take_along_axis(places.cells(trimmed.places), order, axis=1)
            cells.append(ordered.reshape(-1))
            sizes += [ordered.shape[1]] * len(ordered)
        index = RaggedIndex(np.concatenate(cells), np.cumsum(sizes).astype(np.int32))
        slots = kv.exchange(count)  # the first of its own, which all cells are in
        kv.prefix = CompressedPrefix(self._prompt, index, slots, pool.slots)
        self.restart()

    def _trim(self, rows: LayerRows, layer: int) -> None:
        """Trim a layer whose KV is whole, and all before it."""
        assert self._places is not None
        places = self._places
        cells = self._whole_layer(layer)
        if self._runner.config.window_of(layer) is None or not self._full_layers.is_part:
            ranked, sizes = self._rank(rows, layer, cells)
        else:
            ranked, sizes = self._shown(layer), None
        self._trimmed.append(_TrimmedLayer(ranked, np.zeros(0, np.int64)))
        if sizes is not None:
            self._shorten(sizes)
        ranked = self._trimmed[-1].ranked
        kept = np.take_along_axis(cells, ranked, axis=1)
        stored = self._runner.cells.take(kept.reshape(-1))
        places.give_back(self._scratch)
        target = places.take(ranked.shape[1])
        self._runner.cells.put(places.cells(target).reshape(-1), stored)
        self._trimmed[-1].places = target

    def _whole_layer(self, layer: int) -> Int32Array:
        """Return the cells of all tokens in a layer: [kv_heads, prompt] int32."""
        assert self._places is not None
        config, total = self._runner.config, self._runner.slots
        shared = cells_of_slots(self._shared, config.kv_heads, total)
        shared += np.int32(layer * config.kv_heads * total)
        return np.concatenate((shared, self._places.cells(self._scratch)), axis=1)

    def _rank(
        self, rows: LayerRows, layer: int, cells: Int32Array
    ) -> tuple[Int32Array, Int64Array]:
        """Have the method rank a layer's tokens: see ``LayerTrimmer``."""
        assert self._trimmer is not None
        config = replace(self._full_layers.config, layers=1)
        keys = SequenceKeys(config, list(cells), self._runner.cells)
        queries = rows.queries
        assert queries is not None
        ranked = self._trimmer.rank(keys, queries[layer : layer + 1])
        return ranked, self._trimmer.sizes()

    def _shown(self, layer: int) -> Int32Array:
        """Return the tokens that a layer's sliding window still shows, for each head."""
        config = self._runner.config
        window = config.window_of(layer)
        assert window is not None
        first = max(0, self._prompt - max(window - 1, 1))
        tokens = np.arange(first, self._prompt, dtype=np.int32)
        return np.tile(tokens, (config.kv_heads, 1))

    def _shorten(self, sizes: Int64Array) -> None:
        """Trim the layers that the method decides on, the latest of which has no places yet."""
        assert self._places is not None
        config, is_part = self._runner.config, self._full_layers.is_part
        decided = [
            trimmed
            for layer, trimmed in enumerate(self._trimmed)
            if not is_part or config.window_of(layer) is None
        ]
        for trimmed, size in zip(decided, sizes.tolist(), strict=True):
            self._places.give_back(trimmed.places[size:])
            trimmed.ranked, trimmed.places = trimmed.ranked[:, :size], trimmed.places[:size]

    def _gather(self, slots: int) -> None:
        """Move all places that are used into the first slots."""
        assert self._places is not None
        places, end = self._places, self._places.first_places(slots)
        beyond = [trimmed.places >= end for trimmed in self._trimmed]
        moving = np.concatenate(
            [trimmed.places[far] for trimmed, far in zip(self._trimmed, beyond, strict=True)]
        )
        if not len(moving):
            return
        target = places.take(len(moving))
        store = self._runner.cells
        stored = store.take(places.cells(moving).reshape(-1))
        store.put(places.cells(target).reshape(-1), stored)
        ends = np.cumsum([int(far.sum()) for far in beyond])[:-1]
        for trimmed, far, moved in zip(self._trimmed, beyond, np.split(target, ends), strict=True):
            trimmed.places = trimmed.places.copy()
            trimmed.places[far] = moved
