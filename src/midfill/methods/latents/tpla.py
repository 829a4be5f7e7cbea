"""TPLA: each worker keeps and reads a part of the latents, for all heads.

Source: Tang et al., "TPLA: Tensor Parallel Latent Attention for Efficient Disaggregated Prefill &
Decode Inference", 2025, arXiv 2508.15881; prefill and decode as in its section 5 (PD separation):
prompts are computed with whole latents, and rows of answers part by part. How latents are turned
and cut is the runner's (``runners.torch.latent_parts``), once for the model.
"""

from dataclasses import dataclass

from midfill.methods.budget import require
from midfill.methods.served_model import ServedModel


@dataclass(frozen=True)
class Tpla:
    """The method; it has no hyper-parameters: the number of parts is the server's."""

    @property
    def attends_by_parts(self) -> bool:
        """See ``PartedLatents``."""
        return True

    def for_model(self, model: ServedModel) -> "Tpla":
        """See ``ModelSpecific.for_model``."""
        require(
            model.latent_parts > 1,
            "needs a model whose latents are kept in parts: midfill serve MODEL --backend torch"
            " --latent-parts 2",
            "tpla",
        )
        return self
