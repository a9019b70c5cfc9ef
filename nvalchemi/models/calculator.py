"""A trained potential as an ASE calculator."""

from __future__ import annotations

from typing import Any

import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.neighbors import neighbor_list
from nvalchemi.errors import ConfigError
from nvalchemi.models.potential import InteratomicPotential


class NvalchemiCalculator(Calculator):
    """Energy, forces and stress of `ase.Atoms` from an `InteratomicPotential`.

    Parameters
    ----------
    model
        The potential; it is used as it is, moved to ``device`` and put into evaluation mode.
    device
        Where to compute.
    skin
        Å beyond the cutoff within which neighbours are listed; the list is made anew only when an atom has moved by half of this, or
        the cell has changed.
    **kwargs
        For `ase.calculators.calculator.Calculator`.

    Raises
    ------
    ConfigError
        The model is no potential.
    """

    implemented_properties = ["energy", "free_energy", "forces", "stress"]

    def __init__(
        self, model: InteratomicPotential, device: torch.device | str = "cpu", *, skin: float = 0.5, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if not isinstance(model, InteratomicPotential):
            raise ConfigError("no potential to calculate with", found=type(model).__name__, needed="InteratomicPotential")
        if skin < 0:
            raise ConfigError("a negative skin", found=skin, needed="0 or more Å")
        self.device = torch.device(device)
        self.model = model.to(self.device).eval()
        self.skin = float(skin)
        self._listed: Batch | None = None

    def calculate(self, atoms: Any = None, properties: list[str] | None = None, system_changes: list[str] = all_changes) -> None:
        """Fill ``results`` with what ``properties`` asks for; ASE calls this."""
        super().calculate(atoms, properties, system_changes)
        wanted = set(properties or ["energy"])
        outputs = ["energy"] + [name for name in ("forces", "stress") if name in wanted]
        predicted = self.model.predict(self._batch(), outputs)
        energy = float(predicted["energy"])
        self.results = {"energy": energy, "free_energy": energy}
        if "forces" in predicted:
            self.results["forces"] = predicted["forces"].double().cpu().numpy()
        if "stress" in predicted:
            s = predicted["stress"][0].double().cpu().numpy()
            self.results["stress"] = s[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]

    def _batch(self) -> Batch:
        """The atoms with their neighbours, from the list kept where this is still good."""
        atoms: Any = self.atoms
        bare = Atoms(
            numbers=atoms.numbers, positions=atoms.positions, cell=atoms.cell, pbc=atoms.pbc
        )  # no labels, no constraints
        batch = Batch.from_data_list([AtomicData.from_atoms(bare, dtype=torch.float64)])
        old = self._listed
        if old is None or not same_neighbours(old, batch, self.skin):
            self._listed = neighbor_list(batch, self.model.cutoff + self.skin).to(self.device)
            return self._listed
        return old.replace(positions=batch.positions.to(self.device))


def same_neighbours(old: Batch, new: Batch, skin: float) -> bool:
    """Whether the neighbour list of ``old`` still holds every pair of ``new`` within the list's cutoff less ``skin``."""
    for name in ("atomic_numbers", "cell", "pbc"):
        before, after = old.fields.get(name), new.fields.get(name)
        if (before is None) != (after is None):
            return False
        if before is not None and after is not None and not torch.equal(before.cpu(), after):
            return False
    moved = (old.positions.cpu() - new.positions).square().sum(1).max()
    return bool(2.0 * moved.sqrt() < skin)
