"""Reference energies: what each element contributes to the energy whatever surrounds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes.reader import Reads
from nvalchemi.errors import DataError

MAX_Z = 118
_TABLE = (
    "X H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb Mo Tc Ru Rh Pd "
    "Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th "
    "Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts Og"
)
_SYMBOLS = _TABLE.split()
_NUMBERS = {symbol: z for z, symbol in enumerate(_SYMBOLS) if z}

SHIFTED = "removed_energy"
"""A system field that a data pipe must add when it takes reference energies out of the labels: what it took, in eV.
A model that adds reference energies refuses such a batch."""


def symbol(z: int) -> str:
    """The chemical symbol of atomic number ``z``."""
    return _SYMBOLS[z] if 0 < z <= MAX_Z else f"Z={z}"


def atomic_number(element: int | str) -> int:
    """The atomic number of ``element``, given as number, symbol or number in letters (a JSON key).

    Raises
    ------
    DataError
        For what is no element.
    """
    if isinstance(element, str):
        z = _NUMBERS.get(element) or (int(element) if element.isdecimal() else 0)
    else:
        z = int(element)
    if not 0 < z <= MAX_Z:
        raise DataError("no such element", found=repr(element), needed="a symbol such as 'Cu', or an atomic number from 1 to 118")
    return z


def element_rows(elements: Sequence[int]) -> Tensor:
    """(119,) int64: the place of each atomic number among ``elements``, -1 for those that are not among them."""
    rows = torch.full((MAX_Z + 1,), -1, dtype=torch.int64)
    rows[list(elements)] = torch.arange(len(elements))
    return rows


def by_number(energies: Mapping[Any, float]) -> dict[int, float]:
    """The same energies by atomic number, sorted.

    Raises
    ------
    DataError
        For an unknown element, one given twice, or a value that is no finite number.
    """
    result: dict[int, float] = {}
    for element, value in energies.items():
        z = atomic_number(element)
        if z in result:
            raise DataError("an element has two reference energies", found=symbol(z))
        number = float(value)
        if not np.isfinite(number):
            raise DataError(f"the reference energy of {symbol(z)} is not finite", found=value)
        result[z] = number
    return dict(sorted(result.items()))


@dataclass(frozen=True)
class ReferenceFit:
    """Reference energies found from data.

    Parameters
    ----------
    energies
        eV by atomic number.
    determined
        Whether the data fix every single one of them. Where all structures have the same composition, or elements occur in a fixed
        ratio only, just some sums are fixed; then the solution with the smallest sum of squares is given. It is right for every composition
        that is a mix of those in the data, and means nothing for an atom alone or another composition.
    residual_rms
        eV per atom: what the fit leaves.
    structures
        How many labelled structures were used.
    """

    energies: dict[int, float]
    determined: bool
    residual_rms: float
    structures: int


def fit_counts(counts: Any, energies: Any, elements: Iterable[int]) -> ReferenceFit:
    """Least squares of energies on compositions.

    Parameters
    ----------
    counts
        (S, n): how many atoms of each element a structure has.
    energies
        (S,) eV; NaN where there is no label.
    elements
        n atomic numbers, of the columns.

    Raises
    ------
    DataError
        Shapes that do not fit, or no labelled structure.
    """
    x = np.asarray(counts, dtype=np.float64)
    y = np.asarray(energies, dtype=np.float64)
    numbers = [atomic_number(z) for z in elements]
    if x.ndim != 2 or y.shape != x.shape[:1] or x.shape[1] != len(numbers):
        raise DataError(
            "counts, energies and elements do not fit together",
            found=f"{x.shape}, {y.shape} and {len(numbers)} elements",
            needed="(S, n), (S,) and n",
        )
    labelled = np.isfinite(y)
    x, y = x[labelled], y[labelled]
    if len(y) == 0:
        raise DataError(
            "no structure has an energy to fit reference energies to", fix="give reference energies, or label energies"
        )
    columns = np.flatnonzero((x != 0).any(axis=0))
    kept = [numbers[i] for i in columns]
    x = x[:, columns]
    # Per atom, so that a structure of 200 atoms does not outweigh two hundred of one.
    atoms = x.sum(axis=1)
    solution, _, rank, _ = np.linalg.lstsq(x / atoms[:, None], y / atoms, rcond=1e-10)
    residual = (y - x @ solution) / atoms
    found = {z: float(value) for z, value in zip(kept, solution, strict=True)}
    return ReferenceFit(found, bool(rank == len(kept)), float(np.sqrt(np.mean(residual**2))), len(y))


def fit_reference_energies(source: Any) -> ReferenceFit:
    """Least squares of the energies of ``source`` on its compositions.

    Parameters
    ----------
    source
        The training set: a data set or reader (with ``read_many``), a `Batch`, a list of structures or batches.

    Raises
    ------
    DataError
        Where nothing has an energy.
    """
    rows, energies = [], []
    for batch in batches(source):
        refuse_shifted(batch)
        if "energy" not in batch:
            raise DataError(
                "no energies to fit reference energies to", found=f"fields {', '.join(batch.field_names)}", needed="energy"
            )
        rows.append(composition(batch).cpu().numpy())
        energies.append(torch.where(batch.has("energy"), batch.energy, torch.nan).cpu().numpy())
    if not rows:
        raise DataError("no structures to fit reference energies to", found="an empty data set")
    counts = np.concatenate(rows)
    elements = np.flatnonzero(counts.any(axis=0))
    return fit_counts(counts[:, elements], np.concatenate(energies), elements.tolist())


def force_rms(source: Any) -> float:
    """Root mean square over all labelled force components of ``source``, eV/Å; see `fit_reference_energies` for ``source``.

    Raises
    ------
    DataError
        Where nothing has forces, or all are zero.
    """
    total, count = 0.0, 0
    for batch in batches(source):
        if "forces" not in batch:
            continue
        forces = batch.forces.double()
        known = forces.isfinite()
        total += float(forces[known].square().sum())
        count += int(known.sum())
    if count == 0 or total == 0.0:
        raise DataError(
            "no forces to take a scale from", found=f"{count} labelled components", fix="give energy_scale as a number"
        )
    return float(np.sqrt(total / count))


def composition(batch: Batch) -> Tensor:
    """(B, 119) int64: how many atoms of each atomic number a structure has."""
    flat = batch.batch_idx * (MAX_Z + 1) + batch.atomic_numbers
    return torch.bincount(flat, minlength=batch.num_graphs * (MAX_Z + 1)).view(batch.num_graphs, MAX_Z + 1)


def refuse_shifted(batch: Batch) -> None:
    """Refuse a batch whose labels have lost their reference energies already, for these would be taken off twice.

    Raises
    ------
    DataError
        Where the batch says so.
    """
    if SHIFTED in batch:
        raise DataError(
            "reference energies would be used twice",
            found=f"a batch whose energies are without them (field {SHIFTED!r}) and a model that adds them",
            fix="give the model reference_energies=None, or leave the labels as they are",
        )


def batches(source: Any, rows: int = 1024) -> Iterator[Batch]:
    """The structures of ``source`` in batches of at most ``rows``, for one pass over a set of any size."""
    if isinstance(source, Batch):
        yield source
    elif isinstance(source, AtomicData):
        yield Batch.from_data_list([source])
    elif isinstance(source, Reads):
        for start in range(0, len(source), rows):
            yield source.read_many(np.arange(start, min(start + rows, len(source))))
    else:
        singles: list[AtomicData] = []
        for item in source:
            if isinstance(item, Batch):
                yield item
            elif isinstance(item, AtomicData):
                singles.append(item)
                if len(singles) == rows:
                    yield Batch.from_data_list(singles)
                    singles = []
            else:
                raise DataError("no structure", found=type(item).__name__, needed="AtomicData or Batch")
        if singles:
            yield Batch.from_data_list(singles)
