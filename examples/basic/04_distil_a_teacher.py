"""Several models: a small student learns forces from a large frozen teacher.

    python examples/basic/04_distil_a_teacher.py

Models are named; one without an optimizer config is frozen and in eval mode during the run, and is put back afterwards.
"""

from __future__ import annotations

import torch
from ase.build import molecule

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.data.transforms import NeighborList
from nvalchemi.models import InteratomicPotential, PaiNN
from nvalchemi.training import OptimizerConfig, TrainingStrategy


def structures(count: int) -> list[AtomicData]:
    """Rattled ethanol without any label: the teacher is the label."""
    molecules = []
    for seed in range(count):
        atoms = molecule("CH3CH2OH")
        atoms.rattle(0.1, seed=seed)
        molecules.append(AtomicData.from_atoms(atoms, dtype=torch.float32))
    return molecules


def both(models: dict[str, InteratomicPotential], batch: Batch) -> dict[str, torch.Tensor]:
    """What the loss compares: the student's forces and the teacher's."""
    student = models["student"].predict(batch, outputs=("forces",))
    teacher = models["teacher"].predict(batch, outputs=("forces",))
    return {"student": student["forces"], "teacher": teacher["forces"]}


def difference(predictions: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
    """The mean squared difference of the forces."""
    return (predictions["student"] - predictions["teacher"]).square().mean()


def main() -> None:
    """Let the student see nine hundred structures, and compare the last loss with the first."""
    torch.manual_seed(0)
    elements = ["H", "C", "O"]
    models = {
        "student": InteratomicPotential(PaiNN(elements, n_features=16, n_interactions=1, cutoff=4.0)),
        "teacher": InteratomicPotential(PaiNN(elements, n_features=32, n_interactions=2, cutoff=4.0)),
    }
    dataset = InMemoryDataset(structures(60), transforms=[NeighborList(4.0)])
    probe = DataLoader(dataset, batch_size=60)

    def loss() -> float:
        (batch,) = probe
        return difference(both(models, batch), batch).item()

    before = loss()
    TrainingStrategy(
        models=models,
        optimizer_configs={"student": OptimizerConfig(torch.optim.Adam, {"lr": 3e-3})},
        training_fn=both,
        loss_fn=difference,
        num_epochs=15,
    ).run(DataLoader(dataset, batch_size=10, shuffle=True, seed=0))
    after = loss()
    print(f"mean squared difference of the forces: {before:.5f} -> {after:.5f} (eV/Å)²")
    if after > 0.5 * before:
        raise SystemExit("the student did not learn")


if __name__ == "__main__":
    main()
