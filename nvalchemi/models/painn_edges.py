"""What PaiNN's hand-written passes know of the edges: radial functions and directions, and sums over the edges of an atom."""

from __future__ import annotations

import torch
from torch import Tensor


class Neighbours:
    """Where messages come from and go to, prepared for sums over the edges of an atom.

    Parameters
    ----------
    edge_index
        (2, E): neighbours above centres, sorted by centre.
    n
        Number of atoms N.
    """

    def __init__(self, edge_index: Tensor, n: int) -> None:
        self.senders, self.receivers = edge_index.unbind(0)
        self.n, edges = n, edge_index.shape[1]
        if edges == 0:
            return
        device = edge_index.device
        order = torch.argsort(self.senders, stable=True)
        centres = torch.stack([self.receivers, self.senders.index_select(0, order)])
        starts = torch.searchsorted(centres, torch.arange(n, device=device).repeat(2, 1))
        blocks = torch.arange(0, 6 * edges, edges, device=device).unsqueeze(1)
        # Up to five blocks of E rows are summed in one call; each is followed by another, or by empty sums.
        self._in_order = torch.arange(5 * edges, device=device)
        self._by_sender = (blocks[:5] + order).flatten()
        self._in_starts = (blocks[:5] + starts[0]).flatten()
        self._out_starts = torch.cat([(blocks[:5] + starts[1]).flatten(), blocks[5].expand(n + 1)])

    def to_receivers(self, x: Tensor) -> Tensor:
        """Sums (4, N, F) of rows (4, E, F) over the edges of each centre."""
        blocks, edges, width = x.shape
        if edges == 0:
            return x.new_zeros(blocks, self.n, width)
        order, starts = self._in_order[: blocks * edges], self._in_starts[: blocks * self.n + 1]
        rows = torch.embedding_bag(x.view(blocks * edges, width), order, starts, include_last_offset=True)
        return rows[0].view(blocks, self.n, width)

    def to_senders(self, x: Tensor) -> Tensor:
        """Sums (C, N, F) of rows (C, E, F) over the edges of each neighbour, C being 2, or 5 and then a sixth block of zeros."""
        blocks, edges, width = x.shape
        sums = 6 if blocks == 5 else blocks
        if edges == 0:
            return x.new_zeros(sums, self.n, width)
        order, starts = self._by_sender[: blocks * edges], self._out_starts[: sums * self.n + 1]
        rows = torch.embedding_bag(x.view(blocks * edges, width), order, starts, include_last_offset=True)
        return rows[0].view(sums, self.n, width)


class EdgeBasis:
    """Radial functions and directions of vectors (E, 3), and how derivatives pass through them.

    The radial functions are Gaussians, evenly spaced and as wide as their distance, that fade to nothing at the cutoff with the
    quintic step ``1 - 10 x^3 + 15 x^4 - 6 x^5``, which is twice differentiable there.

    Parameters
    ----------
    vectors
        (E, 3) Å.
    n_rbf
        K, how many Gaussians.
    cutoff
        Å.

    Attributes
    ----------
    radial
        (K, E).
    direction, axes
        (3, E, 1), and its three parts (E, 1).
    """

    def __init__(self, vectors: Tensor, n_rbf: int, cutoff: float) -> None:
        length = vectors.square().sum(1).sqrt_()
        self.inverse = length.reciprocal()
        x = (length / cutoff).clamp_(max=1.0)
        square = x * x
        fade = x.mul(6.0).sub_(15.0).mul_(x).add_(10.0).mul_(x).mul_(square).neg_().add_(1.0)
        slope = x.sub(square).square_().mul_(-30.0 / cutoff)
        first, width = gaussians(n_rbf, cutoff)
        centres = torch.arange(n_rbf, dtype=length.dtype, device=length.device).add_(first / width)
        t = (length / width) - centres.unsqueeze(1)
        bell = (t * t).mul_(-0.5).exp_()
        self.radial = bell * fade
        self.slopes = bell.mul_(slope).addcmul_(self.radial, t, value=-1.0 / width)
        self.unit = vectors * self.inverse.unsqueeze(1)
        self.direction = self.unit.t().contiguous().unsqueeze(2)
        self.axes = self.direction.unbind(0)

    def pull_back(self, g_radial: Tensor, g_direction: Tensor) -> Tensor:
        """Gradient with respect to the vectors (E, 3) from that with respect to radial functions and directions (3, E)."""
        g = g_direction.t()
        along = (g_radial * self.slopes).sum(0).addcmul_((g * self.unit).sum(1), self.inverse, value=-1)
        return (g * self.inverse.unsqueeze(1)).addcmul_(self.unit, along.unsqueeze(1))

    def push_forward(self, g_: Tensor) -> tuple[Tensor, Tensor]:
        """Adjoint of `pull_back`: (K, E) and (3, E, 1) from (E, 3)."""
        along = (g_ * self.unit).sum(1)
        across = (g_ - self.unit * along.unsqueeze(1)).mul_(self.inverse.unsqueeze(1))
        return self.slopes * along, across.t().contiguous().unsqueeze(2)


def gaussians(n_rbf: int, cutoff: float) -> tuple[float, float]:
    """Centre of the first of ``n_rbf`` Gaussians and the width of all, in Å; none is spent below a tenth of the cutoff."""
    first = 0.1 * cutoff
    return first, (cutoff - first) / (n_rbf - 1)
