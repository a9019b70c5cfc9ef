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


def deepmd(folder: Path, frames: list[ase.Atoms], sets: int = 1, periodic: bool = True) -> Path:
    """A system of DeePMD-kit, float64, with virials where there is a stress."""
    folder.mkdir()
    symbols = sorted(set(frames[0].symbols))
    (folder / "type_map.raw").write_text("\n".join(symbols))
    (folder / "type.raw").write_text("\n".join(str(symbols.index(symbol)) for symbol in frames[0].symbols))
    if not periodic:
        (folder / "nopbc").touch()
    for i, part in enumerate(np.array_split(np.arange(len(frames)), sets)):
        inside = folder / f"set.{i:03d}"
        inside.mkdir()
        taken = [frames[k] for k in part]
        arrays = {
            "coord": [atoms.positions.ravel() for atoms in taken],
            "energy": [atoms.calc.results["energy"] for atoms in taken],
            "force": [atoms.calc.results["forces"].ravel() for atoms in taken],
        }
        if periodic:
            arrays["box"] = [atoms.cell.array.ravel() for atoms in taken]
            arrays["virial"] = [-atoms.get_stress(voigt=False).ravel() * atoms.get_volume() for atoms in taken]
        for name, rows in arrays.items():
            np.save(inside / f"{name}.npy", np.array(rows))
    return folder


_VECTOR = "<v> {:.12f} {:.12f} {:.12f} </v>"
_KBAR = 1602.1766208  # of 1 eV/Å^3


def _rows(name: str, rows: np.ndarray) -> str:
    return f'<varray name="{name}">' + "".join(_VECTOR.format(*row) for row in rows) + "</varray>"


def _structure(atoms: ase.Atoms, name: str = "") -> str:
    cell = f"<crystal>{_rows('basis', atoms.cell.array)}</crystal>"
    return f"<structure {name}>{cell}{_rows('positions', atoms.get_scaled_positions())}</structure>"


def vasprun(path: Path, frames: list[ase.Atoms], gap: float = 0.01, complete: bool = True) -> Path:
    """What VASP writes of an ionic run, as far as it is read; ``gap`` is the free energy over the energy without smearing."""
    species = "".join(f"<rc><c>{symbol} </c><c>1</c></rc>" for symbol in frames[0].symbols)
    text = "<modeling><kpoints><varray name='kpointlist'></varray><varray name='weights'></varray></kpoints>\n<parameters></parameters>\n"
    text += (
        f'<atominfo><array name="atoms"><set>{species}</set></array></atominfo>\n'
        + _structure(frames[0], 'name="initialpos"')
        + "\n"
    )
    for atoms in frames:
        energy = atoms.calc.results["energy"]
        energies = f'<energy><i name="e_fr_energy"> {energy + gap:.8f} </i><i name="e_0_energy"> {energy:.8f} </i></energy>'
        stress = -atoms.calc.results["stress"]
        full = np.array([[stress[0], stress[5], stress[4]], [stress[5], stress[1], stress[3]], [stress[4], stress[3], stress[2]]])
        inside = [f"<scstep>{energies}</scstep>", _structure(atoms), _rows("forces", atoms.calc.results["forces"])]
        text += f"<calculation>{''.join(inside)}{_rows('stress', full * _KBAR)}{energies}</calculation>\n"
    path.write_text(text + ("</modeling>\n" if complete else ""))
    return path
