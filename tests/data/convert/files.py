"""Small files of labelled structures, made for a test, whose right labels are known."""

from __future__ import annotations

from pathlib import Path

import ase
import ase.io
import numpy as np
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator


def ethanol(n: int = 3, seed: int = 0) -> list[ase.Atoms]:
    """Ethanol, shaken, with made-up labels of the size that an all-electron calculation gives (eV, eV/Å)."""
    rng = np.random.default_rng(seed)
    frames = []
    for _ in range(n):
        atoms = molecule("CH3CH2OH")
        atoms.positions += rng.normal(0, 0.05, atoms.positions.shape)
        energy = -4209.6 + rng.normal(0, 0.2)
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=rng.normal(0, 1.2, atoms.positions.shape))
        frames.append(atoms)
    return frames


def copper(scales: np.ndarray | list[float] = (0.98, 1.0, 1.02), rattle: float = 0.05) -> list[ase.Atoms]:
    """Copper at several volumes, sheared and shaken, with labels of EMT: consistent energy, forces and stress."""
    frames = []
    for i, scale in enumerate(scales):
        atoms = bulk("Cu", cubic=True)
        atoms.set_cell(atoms.cell @ (scale * (np.eye(3) + 0.01 * np.eye(3, k=1))), scale_atoms=True)
        atoms.rattle(rattle, seed=i)
        atoms.calc = EMT()
        results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces(), "stress": atoms.get_stress()}
        atoms.calc = SinglePointCalculator(atoms, **results)
        frames.append(atoms)
    return frames


def write(path: Path, frames: list[ase.Atoms]) -> Path:
    """Write the frames in the format of the suffix."""
    ase.io.write(path, frames)
    return path


def renamed(path: Path, frames: list[ase.Atoms], **names: str) -> Path:
    """Extended XYZ with the labels as info and arrays under other names: ``energy="REF_energy"``."""
    plain = []
    for atoms in frames:
        copy = atoms.copy()
        for label, name in names.items():
            value = atoms.calc.results[label]
            if label == "forces":
                copy.arrays[name] = value
            else:
                copy.info[name] = value
        plain.append(copy)
    return write(path, plain)


def rmd17(path: Path, frames: list[ase.Atoms], factor: float = 1.0) -> Path:
    """The npz layout of rMD17, decoys included; labels are multiplied by ``factor``."""
    energies = np.array([atoms.get_potential_energy() for atoms in frames]) * factor
    forces = np.array([atoms.get_forces() for atoms in frames]) * factor
    np.savez(
        path,
        nuclear_charges=frames[0].numbers.astype(np.uint8),
        coords=np.array([atoms.positions for atoms in frames]),
        energies=energies,
        forces=forces,
        old_indices=np.arange(len(frames)),
        old_energies=energies - 5.2 * factor,
        old_forces=forces * 1.01,
    )
    return path
