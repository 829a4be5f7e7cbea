"""Anchors: what contents of agents' prompts were where these were computed whole, see ``kvcomm``.

All of it is one ``AnchorStore``, whose memory is bounded: what was used least recently goes first.
Nothing in it depends on slots, so it outlives the prefix cache's text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from midfill.arrays import Float32Array, Float64Array

_OLDEST = 5  # of so many, the least used anchor goes
_USED = 0.9  # anchors that make up so much of p count as used


class PieceKV(NamedTuple):
    """KV of consecutive tokens in all layers, or a difference of two.

    Attributes:
        keys, values: float32 [layers, kv_heads, tokens, head_dim]; keys as at position 0.
    """

    keys: Float32Array
    values: Float32Array

    @property
    def tokens(self) -> int:
        """Number of the tokens."""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Memory of both, in bytes."""
        return self.keys.nbytes + self.values.nbytes

    def part(self, start: int, end: int) -> "PieceKV":
        """Return the tokens start <= i < end, as views."""
        return PieceKV(self.keys[:, :, start:end], self.values[:, :, start:end])

    def minus(self, other: "PieceKV") -> "PieceKV":
        """Return by how much this differs from another."""
        return PieceKV(self.keys - other.keys, self.values - other.values)


@dataclass(eq=False)
class Anchor:
    """What a content was in one prompt that was computed whole.

    Attributes:
        name: tells contents apart.
        content: its base KV.
        offset: by how much its KV differed there.
        after: the same of the fixed segment after it; None if there is none.
        uses: how often it counted as used.
    """

    name: bytes
    content: PieceKV
    offset: PieceKV
    after: PieceKV | None
    uses: int = 0


class AnchorPool:
    """The anchors of one content of a template, the oldest first.

    Args:
        limit: how many there may be.
    """

    def __init__(self, limit: int) -> None:
        self.anchors: list[Anchor] = []
        self._limit = limit

    def add(self, anchor: Anchor) -> None:
        """Keep an anchor, in place of one of the same content."""
        self.anchors = [each for each in self.anchors if each.name != anchor.name]
        self.anchors.append(anchor)
        if len(self.anchors) > self._limit:
            oldest = self.anchors[: min(_OLDEST, self._limit)]
            self.anchors.remove(min(oldest, key=lambda each: each.uses))

    def as_long_as(self, tokens: int) -> list[Anchor]:
        """Return the anchors whose contents have at least so many tokens."""
        return [each for each in self.anchors if each.content.tokens >= tokens]

    def use(self, anchors: Sequence[Anchor], nearness: Float64Array) -> None:
        """Count those as used that make up most of p, the nearest first."""
        reached = 0.0
        for place in np.argsort(-nearness, kind="stable"):
            if reached >= _USED:
                return
            anchors[place].uses += 1
            reached += float(nearness[place])


@dataclass(eq=False)
class Template:
    """What is kept of an agent.

    Attributes:
        segments: base KV of the fixed segments after f_0.
        pools: the anchors of each content.
    """

    segments: list[PieceKV]
    pools: list[AnchorPool]

    @property
    def nbytes(self) -> int:
        """Memory of it without the anchors' base KV, in bytes."""
        found = sum(segment.nbytes for segment in self.segments)
        for anchor in (each for pool in self.pools for each in pool.anchors):
            found += anchor.offset.nbytes
            found += 0 if anchor.after is None else anchor.after.nbytes
        return found


Key = tuple[str, bytes]
"""A tenant, and a digest of tokens."""


class AnchorStore:
    """Templates and contents of all tenants; what was used least recently is forgotten.

    Args:
        limit: of its memory, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._templates: dict[Key, Template] = {}
        self._contents: dict[Key, PieceKV] = {}
        self._used: dict[Key, int] = {}  # digests tell templates from contents
        self._clock = 0

    @property
    def nbytes(self) -> int:
        """Memory of all KV and offsets, in bytes."""
        contents = sum(content.nbytes for content in self._contents.values())
        return contents + sum(template.nbytes for template in self._templates.values())

    def template(self, key: Key) -> Template | None:
        """Return what is kept of an agent; None if it is not known."""
        if key in self._templates:
            self._touch(key)
        return self._templates.get(key)

    def content(self, key: Key) -> PieceKV | None:
        """Return a content's base KV; None if it is not known."""
        if key in self._contents:
            self._touch(key)
        return self._contents.get(key)

    def add_template(self, key: Key, template: Template) -> Template:
        """Keep an agent; return what is kept of it, if another request was faster."""
        kept = self._templates.setdefault(key, template)
        self._touch(key)
        self._forget()
        return kept

    def add_content(self, key: Key, content: PieceKV) -> PieceKV:
        """Keep a content; return what is kept of it, if another request was faster."""
        kept = self._contents.setdefault(key, content)
        self._touch(key)
        self._forget()
        return kept

    def add_anchors(self, key: Key, template: Template, anchors: dict[int, Anchor]) -> None:
        """Keep anchors by number of their content, unless the agent is forgotten."""
        if self._templates.get(key) is not template:
            return
        for number, anchor in anchors.items():
            anchor.content = self._contents.setdefault((key[0], anchor.name), anchor.content)
            self._touch((key[0], anchor.name))
            template.pools[number].add(anchor)
        self._forget()

    def _touch(self, key: Key) -> None:
        self._clock += 1
        self._used[key] = self._clock

    def _forget(self) -> None:
        """Forget what was used least recently, until the limit is kept: agents with their anchors,
        and contents of no anchor."""
        excess = self.nbytes - self._limit
        while excess > 0:
            held = {
                id(anchor.content)
                for template in self._templates.values()
                for pool in template.pools
                for anchor in pool.anchors
            }
            contents = (key for key, each in self._contents.items() if id(each) not in held)
            oldest = min((*contents, *self._templates), key=lambda key: self._used[key])
            found = self._templates.pop(oldest, None) or self._contents.pop(oldest)
            excess -= found.nbytes
            del self._used[oldest]
