"""MethodKinds: puts a method to work on a sequence, as what it is.

There are four kinds: methods that make KV smaller, that take KV from elsewhere, that compute a part
of a prompt's attention, and that drop rows between layers. A method may be of the first kind and
the third at once: heads that keep few keys need not see the others while the prompt is computed.
"""

from midfill.compression.method import CompressionMethod, Method
from midfill.engine.request import EngineRequest
from midfill.engine.row_pruning import RowPruning
from midfill.engine.sequence import Sequence
from midfill.engine.sparse_prefill import ChunkNumbers, KeyPairs, SparsePrefill
from midfill.engine.validation import check_prunable
from midfill.forward.runner import Runner
from midfill.models.config import ModelConfig
from midfill.prefill.method import PrefillMethod
from midfill.pruning.method import PruningMethod
from midfill.reuse.method import ReuseMethod


class MethodKinds:
    """What the engine's methods have in common, over all sequences.

    Attributes:
        key_pairs: what was computed of prompts' attention under methods of sparse prefill.
    """

    def __init__(self, runner: Runner, compressed: ModelConfig) -> None:
        """Create it.

        Args:
            runner: the model.
            compressed: the model as methods of compression see it.
        """
        self._runner = runner
        self._compressed = compressed
        self._chunk_numbers = ChunkNumbers()
        self.key_pairs = KeyPairs(runner.config)

    def attach(self, method: Method, request: EngineRequest, sequence: Sequence) -> None:
        """Put a method to work on a new sequence.

        Raises:
            InvalidRequestError: the request wants what the method can't do.
        """
        if isinstance(method, ReuseMethod):
            sequence.reuse = method
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
            sequence.compress_with(method, self._compressed)
