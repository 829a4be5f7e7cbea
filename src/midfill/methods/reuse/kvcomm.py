"""KVCOMM: assemble agents' prompts from pieces, with offsets interpolated from earlier prompts.

Ye et al., "KVCOMM: Online Cross-context KV-cache Communication for Efficient LLM-based Multi-agent
Systems", NeurIPS 2025, arXiv 2510.12872. An agent's prompt is a template with contents in it:

    f_0, content, f_1, content, f_2, ...

f_0 is an exact prefix. Each content has base KV, computed alone, once for all agents; the fixed
segments after f_0 have it too, computed without the contents. Where a prompt is computed whole,
each content leaves an anchor: its base, by how much its KV there differs (dK, dV), and by how much
that of the segment after it does (eK, eV). A new content x may be assembled if few are near:

    D_a = ||V_x - V_a||,  p = softmax(-D),  -sum p log2 p <= gamma log2 n

over the n >= 2 anchors that are at least as long as x. If all contents of a prompt may, no layer
runs for them or the segments: K' = K + sum_a w_a dK_a, and so on, with

    w_a[token] = softmax_a(-mean |K_x - K_a|)              for the content
    w_a[layer, head, channel] = softmax_a(-||K_x - K_a||)  for the segment after it

from keys for keys and from values for values; the first layer's KV needs no offset. Otherwise the
prompt is computed, with the KV that it has without a method, and contents that may not be assembled
become anchors. Of ``anchors`` per place in a template, when there is one more, the least used of
the five oldest goes.

What differs: keys, and offsets of keys, are kept as they are at position 0, so that they suit any
start. An agent is known by its fixed segments, and anchors of a place are one agent's, so an agent
that is new has none. An agent's answer has no base KV from where it was written: like every
content, it is computed alone when it is first shown. Anchors of a prompt come into use together,
when the last of its contents is computed, and a prompt is decided about in one go, so there is no
task to wait for the end of. A content is computed alone behind the prompt's first token, which is
dropped, so that none becomes a second sink.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array, Int64Array
from midfill.methods.budget import require
from midfill.methods.reuse.anchors import Anchor, AnchorPool, AnchorStore, Key, PieceKV, Template
from midfill.methods.reuse.method import require_least, require_one_of, require_shares
from midfill.methods.reuse.sequence import BlendedSequence, ReuseKind
from midfill.methods.sequence_method import Admitted, MethodChunk, RequestFacts, SequenceView
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.rope import layer_frequencies, shift_keys

NAME = "kvcomm"
_DISTANCES = ("norm", "rms")
_MAX_ROWS = 512


@dataclass(frozen=True)
class KVComm:
    """Implements ``methods.reuse.sequence.OwnSequences``.

    The bounds of a request's files are those of contents and fixed segments in turn: the first
    content begins at the first bound and ends at the second, where a fixed segment begins.

    Attributes:
        gamma: how uncertain p may be, as a share of the largest entropy; 0: never.
        anchors: at most so many per content of a template.
        distance: "norm", D as above, or "rms", D divided by the root of the count of its numbers,
            which doesn't grow with the model and the content; it needs another gamma.
        temperature: divides distances where w is computed.
        memory: of all tenants' anchors and base KV, in MiB.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    gamma: float = 0.3
    anchors: int = 20
    distance: str = "norm"
    temperature: float = 1.0
    memory: int = 256

    def __post_init__(self) -> None:
        require_shares(self, NAME, "gamma")
        require_least(2, self, NAME, "anchors")
        require_one_of(_DISTANCES, self, NAME, "distance")
        require(
            0.0 < self.temperature < np.inf,
            f"temperature must be above 0, not {self.temperature:g}",
            NAME,
        )
        require(self.memory >= 1, f"memory must be at least 1 MiB, not {self.memory}", NAME)

    def attach(self, name: str, request: RequestFacts, shared: ReuseKind) -> BlendedSequence | None:
        """See ``OwnSequences.attach``: prompts without contents, or with an empty one, are served
        as ever."""
        last = request.prompt - 1
        bounds = tuple(sorted(min(max(bound, 1), last) for bound in request.contexts))
        contents = list(zip(bounds[::2], bounds[1::2], strict=False))
        if not contents or any(start >= end for start, end in contents):
            return None
        return AssembledSequence(name, self, shared, bounds)

    @property
    def kept(self) -> "KVComm":
        """What its anchors depend on: methods of which this is the same share them."""
        return KVComm(anchors=self.anchors, memory=self.memory)

    def nearness(self, content: PieceKV, bases: Sequence[PieceKV]) -> Float64Array:
        """Return p: [anchors] float64.

        Args:
            content: a new one.
            bases: those of the anchors, each at least as long.
        """
        count = content.tokens
        values = content.values
        squares = [np.square(values - base.values[:, :, :count]).sum(dtype=np.float64)
                   for base in bases]  # fmt: skip
        distances = np.sqrt(np.array(squares))
        if self.distance == "rms":
            distances /= np.sqrt(values.size)
        return softmax(-distances)

    def may_assemble(self, nearness: Float64Array) -> bool:
        """Return whether so few anchors are near that a content may be assembled from them."""
        return entropy(nearness) <= self.gamma * float(np.log2(len(nearness)))

    def content_weights(self, content: Float32Array, bases: Sequence[Float32Array]) -> Float64Array:
        """Return w of each token of a content: [anchors, tokens] float64.

        Args:
            content: its keys, or its values: [layers, kv_heads, tokens, head_dim].
            bases: the same of each anchor; it may have more tokens.
        """
        count = content.shape[2]
        distances = [np.abs(content - base[:, :, :count]).mean(axis=(0, 1, 3), dtype=np.float64)
                     for base in bases]  # fmt: skip
        return softmax(-np.stack(distances) / self.temperature)

    def segment_weights(self, content: Float32Array, bases: Sequence[Float32Array]) -> Float64Array:
        """Return w of each channel of the segment after a content: [anchors, layers, kv_heads,
        head_dim] float64.

        Args:
            content, bases: see ``content_weights``; they are compared from the end on.
        """
        count = content.shape[2]
        squares = [np.square(content - base[:, :, -count:]).sum(axis=2, dtype=np.float64)
                   for base in bases]  # fmt: skip
        return softmax(-np.sqrt(np.stack(squares)) / self.temperature)

    def estimate_content(self, content: PieceKV, anchors: Sequence[Anchor]) -> PieceKV:
        """Return what a content's KV is estimated to be in the prompt."""
        count = content.tokens
        found = []
        for part, (own, bases, offsets) in enumerate(_by_part(content, anchors)):
            weights = self.content_weights(own, bases)
            estimate = own.copy()
            for weight, offset in zip(weights, offsets, strict=True):
                estimate[1:] += weight[:, None].astype(np.float32) * offset[part][1:, :, :count]
            found.append(estimate)
        return PieceKV(*found)

    def estimate_segment(
        self, segment: PieceKV, content: PieceKV, anchors: Sequence[Anchor]
    ) -> PieceKV:
        """Return what the KV of the segment after a content is estimated to be."""
        found = []
        for part, (own, bases, _) in enumerate(_by_part(content, anchors)):
            weights = self.segment_weights(own, bases)
            estimate = segment[part].copy()
            for weight, anchor in zip(weights, anchors, strict=True):
                assert anchor.after is not None
                estimate[1:] += weight[1:, :, None].astype(np.float32) * anchor.after[part][1:]
            found.append(estimate)
        return PieceKV(*found)


def softmax(scores: Float64Array) -> Float64Array:
    """Return the softmax of [n, ...] over the first axis."""
    exponents = np.exp(scores - scores.max(axis=0))
    weights: Float64Array = exponents / exponents.sum(axis=0)
    return weights


def entropy(shares: Float64Array) -> float:
    """Return the entropy of a distribution [n], in bits."""
    some = shares[shares > 0.0]
    return max(float(-(some * np.log2(some)).sum()), 0.0)


def _by_part(
    content: PieceKV, anchors: Sequence[Anchor]
) -> Iterable[tuple[Float32Array, list[Float32Array], list[PieceKV]]]:
    """Return a content and the anchors' bases, keys and then values, and the anchors' offsets."""
    offsets = [anchor.offset for anchor in anchors]
    for part in (0, 1):
        yield content[part], [anchor.content[part] for anchor in anchors], offsets


# --- one sequence


@dataclass
class _Apart:
    """Tokens that are computed apart from the prompt, in slots that it doesn't need yet.

    Attributes:
        tokens: [n] int32.
        behind: how many of the prompt's first tokens they attend to as well.
        keep: called with the KV of all of them.
        done: how many of them have run.
    """

    tokens: Int32Array
    behind: int
    keep: Callable[[PieceKV], None]
    done: int = 0


@dataclass
class _Work:
    """What is known of a prompt's pieces, from its admission on.

    Attributes:
        template: None before the fixed segments are computed.
        contents: base KV by digest.
        apart: what is yet to be computed apart.
        new: numbers of the contents that become anchors; None before that is decided.
    """

    template: Template | None
    contents: dict[bytes, PieceKV]
    apart: list[_Apart] = field(default_factory=list)
    new: list[int] | None = None


class AssembledSequence(BlendedSequence):
    """KVCOMM at work on one sequence.

    Attributes:
        bounds: numbers of the first token of each content and segment after f_0 in turn, and of
            what follows the last one.
    """

    def __init__(self, name: str, method: KVComm, shared: ReuseKind, bounds: Sequence[int]) -> None:
        super().__init__(name, method, shared)
        self.bounds = tuple(bounds)
        self._comm = method
        limit = method.kept.memory << 20
        self._store = shared.state_of(method.kept, lambda: AnchorStore(limit))
        self._work: _Work | None = None
        self._names: list[bytes] = []

    def allows_draft(self, tokens: int) -> bool:
        """See ``BlendedSequence``."""
        return not self.blends and super().allows_draft(tokens)

    def restart(self) -> None:
        """See ``SequenceMethod``."""
        super().restart()
        self._work = None

    def fork(self) -> "AssembledSequence":
        """See ``SequenceMethod``."""
        return AssembledSequence(self.name, self._comm, self.shared, self.bounds)

    @property
    def blends(self) -> bool:
        """See ``BlendedSequence``."""
        return self._work is not None and self._work.new is None

    def found_elsewhere(self, sequence: SequenceView, cached: int) -> int:
        """See ``SequenceMethod``: nothing, before the contents are compared."""
        return 0

    def admitted(self, sequence: SequenceView) -> Admitted:
        """See ``BlendedSequence``: look up the pieces; which are missing is computed apart."""
        kv = sequence.kv
        assert kv is not None
        self._work = None
        is_plain = kv.is_exact and sequence.next_scored is None
        is_new = sequence.length == sequence.prompt_length
        if is_plain and is_new and sequence.computed < self.bounds[-1]:
            self._work = self._look_up(sequence)
        return Admitted(sequence.computed)

    def run_chunk(self, sequence: SequenceView, tokens: int) -> MethodChunk | None:
        """Compute what comes before the first content and what is missing; then decide."""
        work, kv = self._work, sequence.kv
        if work is None or work.new is not None or kv is None:
            return None
        layers = self.shared.runner.config.layers
        computed, left = sequence.computed, tokens
        while computed < self.bounds[0] and left > 0:
            count = min(self.bounds[0] - computed, left, _MAX_ROWS)
            self.run_rows(sequence, np.arange(computed, computed + count), None, 0, layers)
            computed, left = computed + count, left - count
        if sequence.computed < self.bounds[0] == computed:
            kv.cache_prefix(sequence.tokens[:computed])
        while work.apart and computed >= self.bounds[0] and left > 0:
            ran = self._run_apart(sequence, work.apart[0], computed, left)
            if ran is None:  # there is no room: the prompt is computed
                self._work = None
                return MethodChunk(left, computed, 0, (tokens - left) * layers)
            left -= ran
            if work.apart[0].done == len(work.apart[0].tokens):
                del work.apart[0]
        row_layers = (tokens - left) * layers
        if work.apart or computed < self.bounds[0]:
            return MethodChunk(0, computed, 0, row_layers)
        near, new = self._near_anchors(sequence, work)
        if new:
            work.new = new
            return MethodChunk(left, computed, 0, row_layers)
        self._work = None
        self._assemble(sequence, work, near, computed)
        return MethodChunk(left, self.bounds[-1], self.bounds[-1] - computed, row_layers)

    def committed(self, sequence: SequenceView) -> int:
        """See ``SequenceMethod``: keep anchors of a prompt that was computed whole."""
        work = self._work
        if work is not None and work.new and sequence.computed >= self.bounds[-1]:
            self._work = None
            self._keep_anchors(sequence, work, work.new)
        return sequence.computed

    # --- pieces

    def _content_bounds(self) -> list[tuple[int, int]]:
        return list(zip(self.bounds[::2], self.bounds[1::2], strict=False))

    def _segment_bounds(self) -> list[tuple[int, int]]:
        """Return where fixed segments after f_0 begin and end; the last content may have none."""
        return list(zip(self.bounds[1::2], self.bounds[2::2], strict=False))

    def _template_key(self, sequence: SequenceView) -> Key:
        """Return what tells agents apart: all that is fixed, and how it is divided."""
        digest, tokens = blake2b(digest_size=16), sequence.tokens
        for start, end in ((0, self.bounds[0]), *self._segment_bounds()):
            digest.update((end - start).to_bytes(8, "little"))
            digest.update(tokens[start:end].tobytes())
        digest.update(len(self.bounds).to_bytes(8, "little"))
        return sequence.tenant, digest.digest()

    def _content_names(self, sequence: SequenceView) -> list[bytes]:
        """Return a digest of each content and of the token that it is computed behind."""
        if not self._names:
            tokens = sequence.tokens
            for start, end in self._content_bounds():
                behind_first = np.concatenate((tokens[:1], tokens[start:end]))
                self._names.append(blake2b(behind_first.tobytes(), digest_size=16).digest())
        return self._names

    def _look_up(self, sequence: SequenceView) -> _Work:
        """Return what is known of the prompt's pieces, and what has to be computed apart."""
        tenant, tokens = sequence.tenant, sequence.tokens
        key = self._template_key(sequence)
        work = _Work(self._store.template(key), {})
        if work.template is None:
            spans = self._segment_bounds()
            fixed = np.concatenate([tokens[:0], *(tokens[start:end] for start, end in spans)])

            def keep_template(kv: PieceKV) -> None:
                ends = np.cumsum([0, *(end - start for start, end in spans)]).tolist()
                segments = [kv.part(start, end) for start, end in pairwise(ends)]
                pools = [AnchorPool(self._comm.anchors) for _ in self._content_bounds()]
                work.template = self._store.add_template(key, Template(segments, pools))

            work.apart.append(_Apart(fixed, self.bounds[0], keep_template))
        names = self._content_names(sequence)
        for name, (start, end) in dict(zip(names, self._content_bounds(), strict=True)).items():
            known = self._store.content((tenant, name))
            if known is not None:
                work.contents[name] = known
                continue

            def keep_content(kv: PieceKV, name: bytes = name) -> None:
                alone = PieceKV(*(each[:, :, 1:].copy() for each in kv))
                work.contents[name] = self._store.add_content((tenant, name), alone)

            alone = np.concatenate((tokens[:1], tokens[start:end]))
            work.apart.append(_Apart(alone, 0, keep_content))
        return work

    def _run_apart(
        self, sequence: SequenceView, apart: _Apart, computed: int, most: int
    ) -> int | None:
        """Run some rows of tokens computed apart; return how many, None if there is no room.

        Their KV lies in slots that the prompt holds and has computed nothing in. Once the last has
        run, it is kept.
        """
        kv, count = sequence.kv, len(apart.tokens)
        assert kv is not None
        own = kv.slots[max(computed, kv.shared) :][:count]
        if len(own) < count:
            return None
        slots = np.concatenate((kv.slots[: apart.behind], own))
        ran = min(count - apart.done, most, _MAX_ROWS)
        numbers = np.arange(apart.behind + apart.done, apart.behind + apart.done + ran)
        if ran:
            rows = apart.tokens[apart.done : apart.done + ran]
            self._run(rows, numbers, slots[: int(numbers[-1]) + 1])
            apart.done += ran
        if apart.done == count:
            apart.keep(self._read(own, apart.behind))
        return ran

    def _run(self, tokens: Int32Array, numbers: Int64Array, slots: Int32Array) -> None:
        """Run rows through all layers, each behind the slots up to its own."""
        layers = self.shared.runner.config.layers
        batch = ForwardBatch(
            token_ids=tokens,
            positions=numbers.astype(np.int32),
            write_slots=slots[numbers],
            query_indptr=np.array([0, len(numbers)], np.int32),
            kv_indptr=np.array([0, len(slots)], np.int32),
            kv_slots=slots,
            logit_rows=np.zeros(0, np.int32),
            visible_slots=(numbers + 1).astype(np.int32),
        )
        runner = self.shared.runner
        runner.run_layers(batch, runner.embed(batch), 0, layers)

    # --- anchors

    def _near_anchors(
        self, sequence: SequenceView, work: _Work
    ) -> tuple[list[list[Anchor]], list[int]]:
        """Return the anchors of each content, and which contents may not be assembled."""
        assert work.template is not None
        method = self._comm
        near: list[list[Anchor]] = []
        new: list[int] = []
        for number, name in enumerate(self._content_names(sequence)):
            content, pool = work.contents[name], work.template.pools[number]
            anchors = pool.as_long_as(content.tokens)
            near.append(anchors)
            if len(anchors) >= 2:
                nearness = method.nearness(content, [each.content for each in anchors])
                if method.may_assemble(nearness):
                    pool.use(anchors, nearness)
                    continue
            new.append(number)
        return near, new

    def _assemble(
        self, sequence: SequenceView, work: _Work, near: list[list[Anchor]], computed: int
    ) -> None:
        """Write the estimated KV of contents and segments; what is computed already stays."""
        kv = sequence.kv
        assert kv is not None
        assert work.template is not None
        base = sequence.tokens[: kv.shared]
        kv.start_branch(self.shared.branches.start(sequence.tenant, self.method, base))
        segments = list(zip(self._segment_bounds(), work.template.segments, strict=True))
        for number, (start, _) in enumerate(self._content_bounds()):
            content = work.contents[self._content_names(sequence)[number]]
            estimate = self._comm.estimate_content(content, near[number])
            self._write(kv.slots, start, estimate, computed)
            if number < len(segments):
                (after, _), segment = segments[number]
                estimate = self._comm.estimate_segment(segment, content, near[number])
                self._write(kv.slots, after, estimate, computed)

    def _keep_anchors(self, sequence: SequenceView, work: _Work, new: Sequence[int]) -> None:
        """Keep what some contents and the segments after them are in this prompt."""
        kv = sequence.kv
        assert kv is not None
        assert work.template is not None
        segments = self._segment_bounds()
        found: dict[int, Anchor] = {}
        for number in new:
            name = self._content_names(sequence)[number]
            start, end = self._content_bounds()[number]
            content, after = work.contents[name], None
            offset = self._read(kv.slots[start:end], start).minus(content)
            if number < len(segments):
                start, end = segments[number]
                base = work.template.segments[number]
                after = self._read(kv.slots[start:end], start).minus(base)
            numbers = (*offset, *(after or ()))
            if all(np.isfinite(each).all() for each in numbers):
                found[number] = Anchor(name, content, offset, after)
        self._store.add_anchors(self._template_key(sequence), work.template, found)

    # --- cells

    def _read(self, slots: Int32Array, position: int) -> PieceKV:
        """Return the KV of tokens that stand one after the other from a position on."""
        config = self.shared.runner.config
        shape = (config.layers, config.kv_heads, len(slots), config.head_dim)
        if not len(slots):
            return PieceKV(np.zeros(shape, np.float32), np.zeros(shape, np.float32))
        every = self._cells(slots, list(range(config.layers)))
        keys, values = self.shared.runner.cells.read(every)
        return PieceKV(self._turned(keys, shape, -position, -1).reshape(shape),
                       values.reshape(shape).astype(np.float32))  # fmt: skip

    def _write(self, slots: Int32Array, start: int, piece: PieceKV, computed: int) -> None:
        """Store a piece whose first token has the number ``start``, from token ``computed`` on."""
        first = max(computed - start, 0)
        if first >= piece.tokens:
            return
        part = piece.part(first, piece.tokens)
        begin, width = start + first, part.keys.shape[3]
        keys = self._turned(part.keys.reshape(-1, width), part.keys.shape, begin, 1)
        every = self._cells(
            slots[begin : begin + part.tokens], list(range(self.shared.runner.config.layers))
        )
        self.shared.runner.cells.write(every, keys, part.values.reshape(-1, width))

    def _turned(
        self, keys: Float32Array, shape: tuple[int, ...], first: int, step: int
    ) -> Float32Array:
        """Return keys [layers * kv_heads * tokens, head_dim] turned by first, first + step, ..."""
        layers, heads, tokens, _ = shape
        each = np.repeat(np.arange(layers, dtype=np.int32), heads * tokens)
        shift = np.tile(first + step * np.arange(tokens, dtype=np.int32), layers * heads)
        frequencies = layer_frequencies(self.shared.runner.config)
        return shift_keys(keys, shift.astype(np.int32), frequencies, each)
