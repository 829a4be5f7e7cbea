"""The latents of attention, turned by an orthogonal matrix and cut into parts.

Source: TPLA (Tang et al., 2025, arXiv 2508.15881), sections 3 and 4. A row's latent c = x W_DKV is
normed and multiplied by gamma, c^ = c / rms(c) * gamma. With gamma in W_UK and W_UV instead, an
orthogonal U can be put in between, and nothing changes:

    (c U) / rms(c U) = (c / rms(c)) U,    (q U) . (c U) = q . c.

Then the latents are cut into g parts of rank / g numbers. Part s alone estimates, from its share
rho_s of the energy, the norm of the whole, and from its own product, times mu_s, the whole score:

    rms(c)^2 ~ |(c U)_s|^2 / (rho_s rank),    q . c ~ mu_s (q U)_s . (c U)_s.

The paper has mu_s = 1 / rho_s, which multiplies noise where rho_s is small. ``fitted_scales`` are
the least squares instead, by the scores of calibration rows, each query's scores centred over its
keys, since the softmax sees no more of them. On the tests' model its answers lose much less.
"""

from dataclasses import dataclass, replace

import torch

from midfill.runners.torch.weights import Affine, LatentWeights

LEAST_SHARE = 1e-12
"""Of a part in a layer's energy: what is smaller is rounding."""
MOST_SCALE = 8.0
"""Of a part's scores."""
_LEAST_SQUARES = 1e-8
"""Of a part's scores: smaller ones are rounding, which nothing is fitted to."""


@dataclass(frozen=True)
class LatentRotation:
    """How each layer's latents are turned, and what their parts stand for.

    Attributes:
        axes: [layers, rank, rank] float32, U: its columns are the new axes, part after part.
        shares: [layers, parts] float32, rho: each part's share of the energy; at least
            ``LEAST_SHARE``.
        scales: [layers, parts] float32, mu: of each part's scores.
    """

    axes: torch.Tensor
    shares: torch.Tensor
    scales: torch.Tensor

    @property
    def parts(self) -> int:
        return self.shares.shape[1]


def fold_norm(weights: LatentWeights) -> LatentWeights:
    """Return the same attention with the norm's gamma in W_UK and W_UV."""
    gamma = weights.key_norm.weight
    return replace(
        weights,
        key_norm=Affine(torch.ones_like(gamma)),
        absorb=weights.absorb * gamma,
        expand=weights.expand * gamma,
    )


def rotate(weights: LatentWeights, axes: torch.Tensor) -> LatentWeights:
    """Return the same attention over latents that are turned.

    Args:
        weights: of a layer, with a norm that has no gamma (``fold_norm``): a turn and a gamma
            don't commute.
        axes: [rank, rank], orthogonal; its columns are the new axes.
    """
    rank, dtype = len(axes), weights.key.weight.dtype
    turn = axes.to(weights.key.weight.device, torch.float32)
    key = weights.key.weight.float()
    return replace(
        weights,
        key=Affine(torch.cat((turn.T @ key[:rank], key[rank:])).to(dtype)),
        absorb=(weights.absorb.float() @ turn).to(dtype),
        expand=(weights.expand.float() @ turn).to(dtype),
    )


def principal_axes(latents: torch.Tensor) -> torch.Tensor:
    """Return the principal axes of latents, that with most of the energy first.

    There may be fewer latents than numbers in one; the axes that they don't reach come last.

    Args:
        latents: [layers, n, rank], normed; their mean counts, too.

    Returns:
        [layers, rank, rank] float32; axes are columns.
    """
    rows = latents.double()
    axes: torch.Tensor = torch.linalg.eigh(rows.transpose(1, 2) @ rows).eigenvectors
    return axes.flip(-1).float()


def energy_shares(latents: torch.Tensor, parts: int) -> torch.Tensor:
    """Return rho: [layers, parts] float32, at least ``LEAST_SHARE``.

    Args:
        latents: [layers, n, rank], turned.
        parts: into how many they are cut.
    """
    layers, rows, _ = latents.shape
    energy = latents.double().square().reshape(layers, rows, parts, -1).sum((1, 3))
    shares: torch.Tensor = energy / energy.sum(1, keepdim=True)
    return shares.clamp(min=LEAST_SHARE).float()


def fitted_scales(queries: torch.Tensor, latents: torch.Tensor, parts: int) -> torch.Tensor:
    """Return mu by least squares: [layers, parts] float32.

    Args:
        queries: [layers, n, query_heads, rank], absorbed and turned, of consecutive rows.
        latents: [layers, m, rank], turned, of all rows up to the last query's.
        parts: into how many they are cut.
    """
    scales = []
    for own, keys in zip(queries.double(), latents.double(), strict=True):
        seen = torch.ones(len(own), len(keys), dtype=torch.bool, device=keys.device)
        seen = seen.tril(len(keys) - len(own))
        scores = torch.stack([
            torch.einsum("nhw,mw->nhm", *both)
            for both in zip(own.chunk(parts, -1), keys.chunk(parts, -1), strict=True)
        ])  # fmt: skip
        means = (scores * seen[:, None]).sum(-1, keepdim=True) / seen.sum(1)[:, None, None]
        centred = ((scores - means) * seen[:, None]).flatten(1)
        products, squares = centred @ centred.sum(0), centred.square().sum(1)
        known = squares > squares.sum() * _LEAST_SQUARES
        fitted = torch.where(known, products / squares, 1.0)
        scales.append(fitted.clamp(1 / MOST_SCALE, MOST_SCALE))
    return torch.stack(scales).float()
