"""From labelled structures to a tested potential: a store, a strategy with hooks, an evaluation.

    python examples/basic/01_train_a_potential.py

Copper clusters and crystals of unlike sizes, with and without a cell, labelled by ASE's EMT. Energies, forces and, where
there is a cell, stresses are learnt together.
"""

from __future__ import annotations

import shutil

import torch
from ase.build import bulk, molecule
from ase.calculators.emt import EMT

from nvalchemi.data import AtomicData
from nvalchemi.data.datapipes import AtomicDataZarrReader, AtomicDataZarrWriter, DataLoader, InMemoryDataset
from nvalchemi.data.transforms import NeighborList
from nvalchemi.models import InteratomicPotential, PaiNN
from nvalchemi.training import (
    EnergyMSELoss,
    Every,
    ForceMSELoss,
    OptimizerConfig,
    StressMSELoss,
    TrainingStrategy,
    ValidationConfig,
    evaluate,
)
from nvalchemi.training.hooks import CheckpointHook, EMAHook, GradientClipHook, MetricsHook, ProgressHook

CUTOFF = 5.0


def labelled(count: int, seed: int) -> list[AtomicData]:
    """Rattled crystals with their stress, and rattled clusters that have none."""
    structures = []
    for i in range(count):
        atoms = bulk("Cu", cubic=True) if i % 2 else molecule("CH4")
        if i % 2:
            atoms.set_cell(atoms.cell * (0.97 + 0.06 * i / count), scale_atoms=True)
        atoms.rattle(0.08, seed=seed + i)
        atoms.calc = EMT()
        atoms.get_forces()
        if i % 2:
            atoms.get_stress()
        structures.append(AtomicData.from_atoms(atoms))
    return structures


def main() -> None:
    """Write the stores, train, and test on structures that the model never saw."""
    AtomicDataZarrWriter("train.zarr", overwrite=True).write(labelled(96, seed=0))
    AtomicDataZarrWriter("valid.zarr", overwrite=True).write(labelled(20, seed=1000))
    AtomicDataZarrWriter("test.zarr", overwrite=True).write(labelled(40, seed=2000))
    train, valid, test = (
        InMemoryDataset(AtomicDataZarrReader(f"{name}.zarr"), dtype=torch.float32, transforms=[NeighborList(CUTOFF)])
        for name in ("train", "valid", "test")
    )

    shutil.rmtree("runs/copper", ignore_errors=True)  # this example always starts afresh
    torch.manual_seed(0)
    model = InteratomicPotential(PaiNN(["H", "C", "Cu"], n_features=32, n_interactions=2, cutoff=CUTOFF))
    model.fit_reference_energies(train)
    model.fit_energy_scale(train)
    before = evaluate(model, DataLoader(test, batch_size=20))

    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.AdamW, {"lr": 3e-3}),
        loss_fn=EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss() + 1000.0 * StressMSELoss(),
        validation_config=ValidationConfig(validation_data=DataLoader(valid, batch_size=20), every_n_epochs=4),
        num_epochs=8,
        hooks=[
            ProgressHook(),
            GradientClipHook(10.0),
            EMAHook(0.98),
            MetricsHook("runs/copper", every=Every(steps=10)),
            CheckpointHook("runs/copper", every=Every(epochs=4), keep_last=2, keep_best=1),
        ],
    )
    ctx = strategy.run(DataLoader(train, batch_size=8, shuffle=True, seed=0))

    after = evaluate(model, DataLoader(test, batch_size=20))
    print(f"\n{ctx.progress.step} steps; errors on {after['n']:.0f} unseen structures, before and after:")
    for name, unit in (("energy_per_atom_mae", "eV/atom"), ("forces_mae", "eV/Å"), ("stress_mae", "eV/Å³")):
        print(f"  {name:20s} {before[name]:9.5f} -> {after[name]:9.5f} {unit}")
    if after["forces_mae"] > 0.7 * before["forces_mae"]:
        raise SystemExit("the potential did not learn")


if __name__ == "__main__":
    main()
