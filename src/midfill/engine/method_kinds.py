"""MethodKinds: puts a method to work on a sequence, as what it is.

There are five kinds: methods that make KV smaller, that take KV from elsewhere, that compute files
apart from each other, that compute a part of a prompt's attention, and that drop rows between
layers. A method may be of the first kind and
the third at once: heads that keep few keys need not see the others while the prompt is computed.
"""

from midfill.engine.cascade import Cascade, CascadeSize
from midfill.engine.parallel_contexts import ParallelContexts
from midfill.engine.request import EngineRequest
from midfill.engine.row_pruning import RowPruning
from midfill.engine.sequences.sequence import Sequence
from midfill.engine.sparse_prefill import ChunkNumbers, KeyPairs, SparsePrefill
from midfill.engine.validation import check_parallel, check_prunable
from midfill.methods.contexts.method import ParallelMethod
from midfill.methods.evict.cascade import CascadingMethod
from midfill.methods.evict.full_layers import FullLayers
from midfill.methods.evict.method import CompressionMethod
from midfill.methods.method import Method
from midfill.methods.reuse.method import ReuseMethod
from midfill.methods.rows.method import PruningMethod
from midfill.methods.sparse_prefill.method import PrefillMethod
from midfill.runners.forward.runner import Runner


class MethodKinds:
    """What the engine's methods have in common, over all sequences.

    Attributes:
        key_pairs: what was computed of prompts' attention under methods of sparse prefill.
    """

    def __init__(self, runner: Runner, full_layers: FullLayers) -> None:
        """Create it.

        Args:
            runner: the model.
            full_layers: the layers that methods of compression decide on.
        """
        self._runner = runner
        self._full_layers = full_layers
        self._chunk_numbers = ChunkNumbers()
        self.key_pairs = KeyPairs(runner.config)

    def attach(self, method: Method, request: EngineRequest, sequence: Sequence) -> None:
        """Put a method to work on a new sequence.

        Raises:
            InvalidRequestError: the request wants what the method can't do.
        """
        if isinstance(method, ReuseMethod):
            sequence.reuse = method
        if isinstance(method, ParallelMethod) and len(request.contexts) > 1:
            check_parallel(request)
            sequence.parallel = ParallelContexts(method, request.contexts)
        if isinstance(method, PruningMethod):
            check_prunable(request)
            sequence.pruning = RowPruning(
                method, self._runner, sequence.prompt_length, sequence.max_length
            )
        if isinstance(method, PrefillMethod):
            tokens = sequence.tokens[: sequence.compress_after]
            sparse = SparsePrefill(method, tokens, self._chunk_numbers, self.key_pairs)
            sequence.sparse_prefill = sparse if sparse.lists_any else None
        if isinstance(method, CompressionMethod):
            sequence.compress_with(method, self._full_layers.config)
        trims, prompt = _trimming(method), sequence.compress_after
        if trims is not None and trims.kept_tokens(prompt) is not None:
            sequence.cascade = Cascade(trims, self._runner, self._full_layers, prompt)

    def max_length(self, method: Method | None, request: EngineRequest) -> int:
        """Return how many tokens of a request, prompt and answer together, the KV cache holds."""
        size, slots = self._cascade_size(method), self._runner.slots
        if size is None:
            return slots
        return size.most_tokens(request.compress_after or len(request.token_ids), slots)

    def saved_positions(self, method: Method | None, request: EngineRequest) -> int:
        """Return by how much a request may exceed the context, since its files share positions."""
        if not isinstance(method, ParallelMethod) or len(request.contexts) < 2:
            return 0
        return ParallelContexts(method, request.contexts).saved_positions

    def longest_prompt(self, method: Method | None, context: int) -> int:
        """Return how long a prompt may be, its answer's first token included.

        Args:
            method: of its request.
            context: maximum tokens that the model sees.
        """
        size, slots = self._cascade_size(method), self._runner.slots
        if size is None:
            return min(context, slots)
        return min(context, size.longest_prompt(slots, context) + 1)

    def _cascade_size(self, method: Method | None) -> CascadeSize | None:
        trims = _trimming(method)
        if trims is None:
            return None
        return CascadeSize(trims, self._full_layers, self._runner)


def _trimming(method: object) -> CascadingMethod | None:
    """Return a method that trims prompts while they are prefilled; None if this doesn't."""
    return method if isinstance(method, CascadingMethod) and method.cascades else None
