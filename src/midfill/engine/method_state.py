"""MethodState: what published methods have to do with one sequence."""

from midfill.engine.blend import Blend
from midfill.engine.cascade import Cascade
from midfill.engine.compression_state import CompressionState
from midfill.engine.parallel_contexts import ParallelContexts
from midfill.engine.row_pruning import RowPruning
from midfill.engine.sparse_prefill import SparsePrefill
from midfill.methods.reuse.method import ReuseMethod


class MethodState:
    """The methods that a sequence is under, and what they have done to its KV.

    Attributes:
        compress_after: how many of the prompt's tokens a method sees and compresses.
        compression: the method that decides which keys stay; None keeps all.
        cascade: trims the prompt's KV while it is prefilled; None leaves it whole until then.
        pruning: the method that drops rows between layers; None drops none.
        sparse_prefill: the method that lists what the prompt's rows attend to; None lets them
            attend to everything.
        parallel: files that are computed apart from each other; None computes all in order.
        reuse: the method that repairs KV from elsewhere; None copies none.
        blend: a prefill that is being blended; None before and after.
        loaded_variant: names the tree of KV that a lossy codec has coded, where its own is; ""
            where it is exact.
        reused_tokens: of how many prompt tokens KV was copied from elsewhere, and kept.
    """

    __slots__ = (
        "blend",
        "cascade",
        "compress_after",
        "compression",
        "loaded_variant",
        "parallel",
        "pruning",
        "reuse",
        "reused_tokens",
        "sparse_prefill",
    )

    def __init__(self, compress_after: int) -> None:
        self.compress_after = compress_after
        self.compression: CompressionState | None = None
        self.cascade: Cascade | None = None
        self.pruning: RowPruning | None = None
        self.sparse_prefill: SparsePrefill | None = None
        self.parallel: ParallelContexts | None = None
        self.reuse: ReuseMethod | None = None
        self.loaded_variant = ""
        self.blend: Blend | None = None
        self.reused_tokens = 0

    def restart_methods(self) -> None:
        """Have the methods begin again: no KV is held any more."""
        self.blend = None
        if self.pruning is not None:
            self.pruning.restart()
        if self.compression is not None:
            self.compression.restart()
        if self.cascade is not None:
            self.cascade.restart()
        if self.parallel is not None:
            self.parallel.restart()

    def fork_methods(self) -> None:
        """Give a copy of a sequence methods' states of its own."""
        self.compression = self.compression and self.compression.fork()
        self.cascade = self.cascade and self.cascade.fork()
        self.parallel = self.parallel and self.parallel.fork()
