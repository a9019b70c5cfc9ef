"""Energies of structures with a known canonical distribution."""

from __future__ import annotations

import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.models import EnergyModel, InteratomicPotential, PotentialNet


class Springs(EnergyModel):
    """k/2 times the squared distances of all pairs of a structure.

    Of n atoms that is n k/2 times their squared displacements from the centre: 3 (n - 1) independent coordinates of variance T / (n k).
    """

    def __init__(self, k: float = 1.0) -> None:
        super().__init__()
        self.net = torch.nn.Module()
        self.net.k = torch.nn.Parameter(torch.tensor(k, dtype=torch.float64))

    def forward(self, batch: Batch) -> torch.Tensor:
        count = batch.num_nodes_per_graph.to(batch.dtype)
        sums = batch.positions.new_zeros(len(batch), 3).index_add(0, batch.batch_idx, batch.positions)
        inner = batch.positions - (sums / count[:, None]).index_select(0, batch.batch_idx)
        squares = inner.new_zeros(len(batch)).index_add(0, batch.batch_idx, inner.square().sum(1))
        return 0.5 * self.net.k * count * squares


class Bumps(PotentialNet):
    """A repulsion a (1 - r²/c²)³ of each pair within c."""

    cutoff = 2.5

    def __init__(self, height: float = 2.0) -> None:
        super().__init__()
        self.height = torch.nn.Parameter(torch.tensor(height, dtype=torch.float64))

    def forward(self, atomic_numbers, vectors, edge_index):
        pair = 0.5 * self.height * (1 - vectors.square().sum(1) / self.cutoff**2).clamp(min=0) ** 3
        return pair.new_zeros(len(atomic_numbers)).index_add(0, edge_index[1], pair)

    def config(self):
        return {}


def bumps() -> InteratomicPotential:
    return InteratomicPotential(Bumps())


def placed(positions: list[torch.Tensor], number: int = 6, **fields: torch.Tensor) -> Batch:
    """Atoms at any positions, also such as no structure has that is read from a file."""
    line = [1.5 * torch.arange(len(x), dtype=torch.float64)[:, None] * torch.ones(3, dtype=torch.float64) for x in positions]
    data = [AtomicData(x, torch.tensor([number] * len(x)), **fields) for x in line]
    return Batch.from_data_list(data).replace(positions=torch.cat(positions))


def molecules(sizes, seed: int = 0, spread: float = 0.3, number: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return placed([spread * torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in sizes], number)


def crystals(count: int, n: int = 2, length: float = 3.0, seed: int = 0) -> Batch:
    """Atoms anywhere in a skewed periodic cell."""
    generator = torch.Generator().manual_seed(seed)
    cell = length * (torch.eye(3, dtype=torch.float64) + 0.2 * torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0]]).double())
    at = [torch.rand(n, 3, generator=generator, dtype=torch.float64) @ cell for _ in range(count)]
    return placed(at, cell=cell, pbc=torch.tensor([True, True, True]))


class PairSprings(PotentialNet):
    """The energy of `Springs` from the vectors between neighbours, with a cutoff beyond the structure."""

    cutoff = 50.0

    def __init__(self, k: float) -> None:
        super().__init__()
        self.k = torch.nn.Parameter(torch.tensor(k, dtype=torch.float64))

    def forward(self, atomic_numbers, vectors, edge_index):
        pair = 0.25 * self.k * vectors.square().sum(1)
        return pair.new_zeros(len(atomic_numbers)).index_add(0, edge_index[1], pair)

    def config(self):
        return {}


def pair_springs(k: float = 1.0) -> InteratomicPotential:
    return InteratomicPotential(PairSprings(k))


def equilibrium(sizes, k: float, seed: int = 0) -> Batch:
    """Exact draws from the springs at temperature 1, their centres anywhere near the origin."""
    generator = torch.Generator().manual_seed(seed)
    return placed([torch.randn(n, 3, generator=generator, dtype=torch.float64) / (n * k) ** 0.5 for n in sizes])
