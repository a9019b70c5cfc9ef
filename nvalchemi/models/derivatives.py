"""Forces and stress of any energy of a batch of structures: its derivatives with respect to positions and strain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.models.gradient import check_energy, differentiable, input_gradients, leaf, plain


def energy_and_derivatives(
    energy_of: Callable[[Batch], Tensor], batch: Batch, outputs: Sequence[str], *, graph: bool
) -> dict[str, Tensor]:
    """Give those of energy, forces and stress that ``outputs`` names.

    Parameters
    ----------
    energy_of
        From a batch to energies (B,) in eV, differentiable with respect to its ``positions`` and, for stress, its ``cell``.
    batch
        The structures.
    outputs
        Some of ``"energy"`` (B,) eV, ``"forces"`` (N, 3) eV/Å and ``"stress"`` (B, 3, 3) eV/Å³ with tension positive.
    graph
        Keep the graph, for a loss that is differentiated with respect to the parameters.

    Returns
    -------
    dict
        By name. The stress of a structure that repeats nowhere is NaN.
    """
    with differentiable():
        positions = leaf(batch.positions)
        moved, inputs = batch.replace(positions=positions), [positions]
        if "stress" in outputs:
            strain = positions.new_zeros(batch.num_graphs, 3, 3).requires_grad_()
            moved, inputs = strained(batch, positions, strain), [positions, strain]
        energy = check_energy(energy_of(moved), batch.num_graphs)
        gradients = input_gradients(energy, inputs, create_graph=graph)
    result = {"energy": energy if graph else energy.detach()} if "energy" in outputs else {}
    if "forces" in outputs:
        result["forces"] = -gradients[0]
    if "stress" in outputs:
        result["stress"] = per_volume(gradients[1], batch)
    return result


def strained(batch: Batch, positions: Tensor, strain: Tensor) -> Batch:
    """The batch with ``positions`` (N, 3) and cells stretched by the symmetric part of ``strain`` (B, 3, 3)."""
    symmetric = 0.5 * (strain + strain.mT)
    stretch = symmetric.index_select(0, plain(batch.batch_idx))
    moved = batch.replace(positions=positions + (positions.unsqueeze(1) @ stretch).squeeze(1))
    return moved.replace(cell=batch.cell + plain(batch.cell) @ symmetric) if "cell" in batch else moved


def per_volume(virial: Tensor, batch: Batch) -> Tensor:
    """The derivative (B, 3, 3) with strain, eV, over the volume of each cell: stress in eV/Å³, NaN where nothing repeats."""
    if "cell" not in batch or "pbc" not in batch:
        return torch.full_like(virial, torch.nan)
    volume = torch.linalg.det(batch.cell.double()).abs().to(virial.dtype)
    periodic = batch.pbc.any(dim=1) & (volume > 0)
    # Divided by one where there is no volume: a NaN that reached the quotient would reach the parameters through its gradient.
    stress = virial / torch.where(periodic, volume, torch.ones_like(volume))[:, None, None]
    return torch.where(periodic[:, None, None], stress, torch.full_like(stress, torch.nan))
