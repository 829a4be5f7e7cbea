"""TorchLogits: what sampling asks of logits, on their device; little of them is copied from it."""

from collections.abc import Sequence

import torch

from midfill.arrays import Float32Array, Float64Array, Int64Array


class TorchLogits:
    """Implements ``runners.forward.logits.LogitsOps``."""

    def to_numpy(self, logits: torch.Tensor) -> Float32Array:
        """See ``LogitsOps``."""
        found: Float32Array = logits.float().cpu().numpy()
        return found

    def copy(self, vector: torch.Tensor) -> torch.Tensor:
        """See ``LogitsOps``."""
        return vector.clone()

    def add(self, vector: torch.Tensor, ids: Int64Array, values: Float64Array) -> None:
        """See ``LogitsOps``."""
        vector[torch.from_numpy(ids).to(vector.device)] += torch.from_numpy(values).to(vector)

    def mask_nonfinite(self, vector: torch.Tensor) -> torch.Tensor:
        """See ``LogitsOps``."""
        return torch.where(torch.isfinite(vector), vector, -torch.inf)

    def argmax(self, vectors: Sequence[torch.Tensor]) -> list[tuple[int, float]]:
        """See ``LogitsOps``."""
        if not vectors:
            return []
        stacked = torch.stack(list(vectors))
        ids = stacked.argmax(-1)
        values = stacked.gather(-1, ids[:, None])[:, 0]
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    def second_largest(self, vector: torch.Tensor, best: int) -> float | None:
        """See ``LogitsOps``: waiting for the device takes longer than it saves."""
        return None

    def top_k(self, vectors: Sequence[torch.Tensor], count: int) -> Int64Array:
        """See ``LogitsOps``."""
        ids = torch.stack(list(vectors)).topk(count).indices
        found: Int64Array = ids.sort().values.cpu().numpy()
        return found

    def gather(self, vectors: Sequence[torch.Tensor], ids: Int64Array) -> Float64Array:
        """See ``LogitsOps``."""
        stacked = torch.stack(list(vectors))
        values = stacked.gather(-1, torch.from_numpy(ids).to(stacked.device))
        found: Float64Array = values.double().cpu().numpy()
        return found

    def log_normalizers(
        self, vectors: Sequence[torch.Tensor], temperatures: Sequence[float]
    ) -> Float64Array:
        """See ``LogitsOps``."""
        found: Float64Array = _scaled(vectors, temperatures).logsumexp(-1).double().cpu().numpy()
        return found

    def draw(
        self,
        vectors: Sequence[torch.Tensor],
        temperatures: Sequence[float],
        draws: Sequence[float],
    ) -> list[int]:
        """See ``LogitsOps``."""
        probabilities = _scaled(vectors, temperatures).softmax(-1)
        cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        shares = torch.tensor(draws, dtype=torch.float64)[:, None].to(cumulative)
        ids = torch.searchsorted(cumulative, shares * cumulative[:, -1:], right=True)
        found: list[int] = ids[:, 0].tolist()
        return found


def _scaled(vectors: Sequence[torch.Tensor], temperatures: Sequence[float]) -> torch.Tensor:
    """Return the vectors, each divided by its temperature: [vectors, n]."""
    stacked = torch.stack(list(vectors))
    return stacked / torch.tensor(temperatures)[:, None].to(stacked)
