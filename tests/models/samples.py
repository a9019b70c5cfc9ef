"""Structures and small networks that the tests of the models share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.models import InteratomicPotential, PaiNN, PotentialNet

ELEMENTS = ("H", "C", "O")
REFERENCES = {"H": -13.6, "C": -1029.5, "O": -2042.0}


def molecule(n: int = 9, seed: int = 0, dtype: torch.dtype = torch.float64, **fields: Any) -> AtomicData:
    """A random cluster of n atoms of H, C and O, none nearer than about 1 Å to another."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.cartesian_prod(*[torch.arange(4.0, dtype=torch.float64)] * 3)
    sites = grid[torch.randperm(len(grid), generator=generator)[:n]] * 1.5
    positions = sites + 0.4 * (torch.rand(n, 3, generator=generator, dtype=torch.float64) - 0.5)
    numbers = torch.tensor([1, 6, 8])[torch.randint(0, 3, (n,), generator=generator)]
    return AtomicData(positions.to(dtype), numbers, **fields)


def crystal(seed: int = 0, dtype: torch.dtype = torch.float64, n: int = 4) -> AtomicData:
    """A few atoms in a skewed periodic cell, thinner than the cutoffs in use."""
    generator = torch.Generator().manual_seed(seed)
    cell = torch.tensor([[4.0, 0.0, 0.0], [0.7, 3.8, 0.0], [-0.4, 0.9, 4.3]], dtype=torch.float64)
    sites = torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]], dtype=torch.float64)[:n]
    positions = sites @ cell + 0.2 * torch.rand(n, 3, generator=generator, dtype=torch.float64)
    return AtomicData(
        positions.to(dtype), torch.tensor([1, 6, 8, 6])[:n], cell=cell.to(dtype), pbc=torch.tensor([True, True, True])
    )


def painn(
    dtype: torch.dtype = torch.float64, references: dict[str, float] | None = REFERENCES, **settings: Any
) -> InteratomicPotential:
    """A small PaiNN with no zero among its parameters."""
    torch.manual_seed(7)
    settings = {"n_features": 16, "n_interactions": 2, "n_rbf": 8, "cutoff": 4.0, **settings}
    model = InteratomicPotential(PaiNN(ELEMENTS, **settings), reference_energies=references, energy_scale=1.3)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.3)
    return model.to(dtype)


class LennardJones(PotentialNet):
    """The pair potential of argon-like atoms, faded out at the cutoff, with one learnable strength."""

    def __init__(self, sigma: float = 1.0, cutoff: float = 5.0) -> None:
        super().__init__()
        self.sigma, self.cutoff = sigma, cutoff
        self.strength = nn.Parameter(torch.tensor(0.4))

    def forward(self, atomic_numbers: Tensor, vectors: Tensor, edge_index: Tensor) -> Tensor:
        square = vectors.square().sum(1)
        inverse = (self.sigma**2 / square) ** 3
        fade = (1.0 - square / self.cutoff**2).clamp(min=0.0) ** 3
        pairs = 2.0 * self.strength * (inverse**2 - inverse) * fade
        return vectors.new_zeros(atomic_numbers.shape[0]).index_add(0, edge_index[1], pairs)

    def config(self) -> dict[str, Any]:
        return {"net": "lennard_jones", "sigma": self.sigma, "cutoff": self.cutoff}


def strained(data: AtomicData, strain: Tensor) -> AtomicData:
    """The structure with cell and positions stretched by one plus ``strain``."""
    stretch = torch.eye(3, dtype=data.positions.dtype) + strain.to(data.positions.dtype)
    return data.replace(positions=data.positions @ stretch, cell=data.cell @ stretch)


def rotation(seed: int = 0) -> Tensor:
    """A random proper rotation, float64."""
    q, r = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    q = q * r.diagonal().sign()
    return q * q.det().sign()


def energy(model: InteratomicPotential, *data: AtomicData) -> Tensor:
    """Energies without a graph."""
    with torch.no_grad():
        return model(Batch.from_data_list(list(data)))
