"""Small stores of rattled copper, labelled by EMT, and a configuration that trains on them in a second."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml
from ase.build import bulk
from ase.calculators.emt import EMT

from nvalchemi.data import AtomicData
from nvalchemi.data.datapipes import AtomicDataZarrWriter

CONFIG = {
    "data": {"train": "train.zarr", "validation": "valid.zarr", "batch_size": 4},
    "model": {"cutoff": 3.0, "net": {"n_features": 8, "n_interactions": 1, "n_rbf": 5}},
    "schedule": {"kind": "constant"},
    "training": {"steps": 6, "ema_decay": 0.5},
    "report_every_n_steps": 1,
}


@cache
def structures(count: int) -> tuple[AtomicData, ...]:
    found = []
    for seed in range(count):
        atoms = bulk("Cu", cubic=True)
        atoms.rattle(0.1, seed=seed)
        atoms.calc = EMT()
        atoms.get_forces(), atoms.get_stress()
        found.append(AtomicData.from_atoms(atoms))
    return tuple(found)


def make_stores(folder: Path) -> Path:
    """``train.zarr``, ``valid.zarr``, ``test.zarr`` and ``config.yaml`` in ``folder``; returns the last."""
    systems = list(structures(20))
    for name, part in (("train", systems[:12]), ("valid", systems[12:16]), ("test", systems[16:])):
        AtomicDataZarrWriter(folder / f"{name}.zarr").write(part)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path
