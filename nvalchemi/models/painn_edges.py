"""What PaiNN's hand-written passes know of the edges: radial functions and directions, and sums over the edges of an atom."""

from __future__ import annotations

import math

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

    Attributes
    ----------
    radial
        (K, E): ``sin(k pi r / cutoff) / r`` times half of one plus ``cos(pi r / cutoff)``, zero beyond the cutoff.
    direction, axes
        (3, E, 1), and its three parts (E, 1).
    """

    def __init__(self, vectors: Tensor, n_rbf: int, cutoff: float) -> None:
        length = vectors.square().sum(1).sqrt_()
        self.inverse = length.reciprocal()
        step = math.pi / cutoff
        wave = torch.arange(1, n_rbf + 1, dtype=length.dtype, device=length.device).mul_(step)
        phase = torch.outer(wave, length)
        sines, cosines = torch.sin(phase), torch.cos(phase)
        half = (length < cutoff).to(length.dtype).mul_(0.5)
        fade = (cosines[0] + 1.0).mul_(half).mul_(self.inverse)
        slope = sines[0].mul(half).mul_(-step).sub_(fade).mul_(self.inverse)
        self.radial = sines * fade
        self.slopes = cosines.mul_(fade).mul_(wave.unsqueeze(1)).addcmul_(sines, slope)
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
