"""Method: what a request can ask for, of whichever kind, or several of them together."""

import dataclasses
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from midfill.methods.contexts.method import ParallelMethod
from midfill.methods.episodes.method import EpisodicMethod
from midfill.methods.evict.method import CompressionMethod
from midfill.methods.latents.method import PartedLatents
from midfill.methods.reuse.method import ReuseMethod
from midfill.methods.reuse.sequence import OwnSequences
from midfill.methods.rows.method import PruningMethod
from midfill.methods.sentences.method import ChosenSentences
from midfill.methods.served_model import ServedModel
from midfill.methods.sparse_decode.method import SparseDecodeMethod
from midfill.methods.sparse_prefill.method import PrefillMethod


@runtime_checkable
class ModelSpecific(Protocol):
    """A method that doesn't suit every model, or that needs what was computed for this one."""

    def for_model(self, model: ServedModel) -> "Method":
        """Return the method, ready to be used with a model.

        Raises:
            InvalidRequestError: they don't suit each other; the message says why, and what to do.
        """


@dataclass(frozen=True)
class CombinedMethod:
    """Several methods for one request; a kind of none.

    Attributes:
        methods: by name.
    """

    methods: tuple[tuple[str, "Method"], ...]

    def for_model(self, model: ServedModel) -> "CombinedMethod":
        """Return the methods, ready to be used with a model.

        Raises:
            InvalidRequestError: one of them doesn't suit it.
        """
        ready = tuple(
            (name, each.for_model(model) if isinstance(each, ModelSpecific) else each)
            for name, each in self.methods
        )
        return dataclasses.replace(self, methods=ready)


Method = (
    ChosenSentences
    | CombinedMethod
    | CompressionMethod
    | EpisodicMethod
    | OwnSequences
    | ParallelMethod
    | PartedLatents
    | PrefillMethod
    | PruningMethod
    | ReuseMethod
    | SparseDecodeMethod
)
"""What a request can ask for."""


def methods_in(method: Method | None) -> tuple[tuple[str, Method], ...]:
    """Return the methods that a request asks for, with their names."""
    if method is None:
        return ()
    if isinstance(method, CombinedMethod):
        return method.methods
    return ((type(method).__name__.lower(), method),)
