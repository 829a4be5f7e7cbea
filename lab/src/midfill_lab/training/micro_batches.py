"""Micro-batches: the rows of a step, joined until a GPU is full, in one shape.

A GPU needs tens of thousands of tokens at a time. Rows are joined into one long row, which
attention reads example by example. All micro-batches of a run have the same shape, so that the
model's layers are compiled once: missing tokens are padded with an example of which nothing is
learned.
"""

from collections.abc import Callable
from typing import Any

from midfill_lab.training.examples import PackedRow
from midfill_lab.training.recipe import STEP_FILL, TrainingRecipe

_MAX_TOKENS = 65_536  # of a micro-batch; a 135M model keeps some 40 GB of activations of them
_MIN_EXAMPLE_TOKENS = 256  # on average; with shorter ones a micro-batch ends early. Attention's
# kernels start blocks for the longest example in the place of each empty one, too.


class MicroBatches:
    """Joins the rows of steps.

    Args:
        recipe: tells the tokens of a step and of its rows.

    Attributes:
        tokens: of every micro-batch.
        examples: of every micro-batch, empty ones included.
    """

    def __init__(self, recipe: TrainingRecipe) -> None:
        self._length = recipe.row_tokens
        most = round(recipe.tokens_per_step * STEP_FILL) + recipe.row_tokens  # of a step's rows
        parts = -(-most // _MAX_TOKENS)
        slack = recipe.row_tokens if parts > 1 else 0
        self.tokens = max(recipe.row_tokens, -(-most // parts) + slack)
        self.examples = self.tokens // _MIN_EXAMPLE_TOKENS

    def join(self, rows: list[PackedRow]) -> list[PackedRow]:
        """Join rows, in their order, into as few micro-batches as they fit."""
        room = self.examples - self.tokens // self._length - 1  # padding takes examples, too
        groups: list[list[PackedRow]] = []
        tokens = examples = 0
        for row in rows:
            tokens += len(row.ids)
            examples += len(row.cu_seqlens) - 1
            if not groups or tokens > self.tokens or examples > room:
                groups.append([])
                tokens, examples = len(row.ids), len(row.cu_seqlens) - 1
            groups[-1].append(row)
        return [self._pad(PackedRow.join(group)) for group in groups]

    def _pad(self, row: PackedRow) -> PackedRow:
        padding = -(-(self.tokens - len(row.ids)) // self._length)
        # One row of very short examples may have more of them; layers are compiled again for it.
        examples = max(self.examples, len(row.cu_seqlens) - 1 + padding)
        return row.padded(self.tokens, examples, self._length)


def compile_layers(model: Any, backend: str | Callable[..., Any] = "inductor") -> None:
    """Let PyTorch compile the layers of a transformers model, each by itself.

    They share the compiled code, so it takes as long as one layer.

    Args:
        model: the model, or PEFT's wrapper around it.
        backend: PyTorch's compiler.
    """
    causal = model.get_base_model() if hasattr(model, "peft_config") else model
    for layer in causal.get_decoder().layers:
        layer.compile(backend=backend)
