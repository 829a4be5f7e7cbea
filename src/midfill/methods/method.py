"""Method: what a request can ask for, of whichever kind."""

from typing import Protocol, runtime_checkable

from midfill.methods.contexts.method import ParallelMethod
from midfill.methods.evict.method import CompressionMethod
from midfill.methods.reuse.method import ReuseMethod
from midfill.methods.rows.method import PruningMethod
from midfill.methods.served_model import ServedModel
from midfill.methods.sparse_prefill.method import PrefillMethod


@runtime_checkable
class ModelSpecific(Protocol):
    """A method that doesn't suit every model, or that needs what was computed for this one."""

    def for_model(self, model: ServedModel) -> "Method":
        """Return the method, ready to be used with a model.

        Raises:
            InvalidRequestError: they don't suit each other; the message says why, and what to do.
        """
        ...


Method = CompressionMethod | ParallelMethod | PrefillMethod | PruningMethod | ReuseMethod
"""What a request can ask for."""
