"""APE: encode files apart from each other, at shared positions, and correct what sees them.

Yang et al., "APE: Faster and Longer Context-Augmented Generation via Adaptive Parallel Encoding",
ICLR 2025, arXiv 2502.05431, section 4: a shared prefix, so that no file has an attention sink of
its own; a temperature T of the scores of files' tokens; and a scale S of the logarithm of their
mass, whose power is S T.

What differs: the shared prefix is what the prompt begins with, one separator at least, and not an
instruction.
"""

from dataclasses import dataclass

from midfill.methods.budget import require
from midfill.methods.served_model import ServedModel


@dataclass(frozen=True)
class Ape:
    """Implements ``methods.contexts.method.ParallelMethod``.

    Attributes:
        temperature: T, above 0 and at most 1; the paper's demonstration has 0.9. It is searched per
            model and task, with the scale.
        scale: S, above 0 and at most 1; likewise 0.9.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    temperature: float = 0.9
    scale: float = 0.9

    def __post_init__(self) -> None:
        for name in ("temperature", "scale"):
            value = getattr(self, name)
            require(0.0 < value <= 1.0, f"ape: {name} must be above 0 and at most 1, not {value:g}")

    def for_model(self, model: ServedModel) -> "Ape":
        """Return the method.

        Raises:
            InvalidRequestError: some layers of the model have a sliding window.
        """
        require(
            model.config.sliding_window is None,
            "ape: a model whose layers have a sliding window doesn't see all files at once",
        )
        return self
