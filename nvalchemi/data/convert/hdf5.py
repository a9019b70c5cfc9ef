"""HDF5 files with a group for each molecule, or for each number of atoms: SPICE, ANI, AIMNet and their like.

``h5py`` is an extra (``pip install nvalchemi[hdf5]``), and nothing here imports it before a file is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nvalchemi.data.convert.frames import Frame, FrameSource, Selection
from nvalchemi.data.convert.labels import looks_like
from nvalchemi.errors import ConfigError, DataError

_NUMBERS = ("atomic_numbers", "numbers", "species", "nuclear_charges", "Z", "z")
_POSITIONS = ("conformations", "coordinates", "coord", "coords", "positions", "R")
_ROWS = 256  # read at once
_CELLS = ("cell", "cells", "lattice")


class Hdf5Source(FrameSource):
    """Groups with positions (frames, atoms, 3) and atomic numbers, for one frame or for all; groups in the order of their names.

    Data sets with one row a frame are keys of the frame; if a row has one entry an atom, it belongs to the atoms. A data set that is named a
    gradient is given with its sign turned, as ``minus_NAME``, for that is a force. Where positions, energies and gradients or forces have an
    attribute ``units``, the file declares them. Atoms of number 0 or less are padding.
    """

    format = "HDF5"
    standard: Mapping[str, tuple[str, ...]] = {
        "energy": ("energy", "energies"),
        "forces": ("forces", "force"),
        "stress": ("stress",),
        "virial": ("virial", "virials"),
    }

    def total(self) -> int | None:
        with self._open() as file:
            return sum(group[positions].shape[0] for group, positions, _ in self._groups(file))

    def frames(self, select: Selection) -> Iterator[tuple[int, Frame]]:
        start = 0
        with self._open() as file:
            for group, positions, numbers in self._groups(file):
                length, atoms, _ = group[positions].shape
                units = self._units(group, positions)
                rows = {
                    name: data
                    for name, data in group.items()
                    if hasattr(data, "dtype") and data.dtype.kind in "fiub" and data.shape[:1] == (length,) and name != numbers
                }
                for first in range(0, length, _ROWS):
                    wanted = [row for row in range(first, min(first + _ROWS, length)) if select.takes(start + row)]
                    if not wanted:
                        continue
                    # h5py takes a tenth of a millisecond a call, so rows are read together
                    here = slice(wanted[0], wanted[-1] + 1)
                    block = {name: data[here] for name, data in rows.items()}
                    elements = (
                        group[numbers][here] if group[numbers].ndim == 2 else [group[numbers][:]] * (here.stop - here.start)
                    )
                    for row in wanted:
                        values = {name: data[row - here.start] for name, data in block.items()}
                        of_row = np.asarray(elements[row - here.start], dtype=np.int64)
                        yield start + row, self._frame(values, values.pop(positions), of_row, atoms, units)
                start += length
                if select.is_past(start):
                    return

    def _frame(
        self, row: dict[str, Any], positions: np.ndarray, numbers: np.ndarray, atoms: int, units: Mapping[str, str]
    ) -> Frame:
        real = numbers > 0
        frame = Frame(numbers[real], np.asarray(positions, dtype=np.float64)[real], system=dict(units))
        for name, value in row.items():
            array = np.asarray(value)
            if name in _CELLS and array.size == 9 and array.any():
                frame.cell, frame.pbc = array.astype(np.float64).reshape(3, 3), np.ones(3, dtype=bool)
            elif array.ndim == 0 or len(array) != atoms or atoms == 1 or _is_of_system(name):
                frame.system[name] = array.item() if array.size == 1 else array
            elif "grad" in name.lower():
                frame.atom[f"minus_{name}"] = -array[real]
            else:
                frame.atom[name] = (array[:, 0] if array.shape == (atoms, 1) else array)[real]
        return frame

    def _groups(self, file: Any) -> Iterator[tuple[Any, str, str]]:
        """Every group with positions, and the names of its positions and atomic numbers."""
        import h5py

        waiting, found = [file], False
        while waiting:
            group = waiting.pop()
            positions = next((name for name in _POSITIONS if name in group), None)
            if positions is not None:
                found = True
                yield group, positions, self._numbers(group, positions)
            # an external or soft link may lead out of this file
            inside = [n for n in group if isinstance(group.get(n, getlink=True), h5py.HardLink)]
            waiting += [group[n] for n in reversed(inside) if isinstance(group[n], h5py.Group)]
        if not found:
            raise DataError(
                f"{self.name} has no group with positions",
                found=", ".join(list(file)[:10]),
                needed=f"one of {', '.join(_POSITIONS)}",
            )

    def _numbers(self, group: Any, positions: str) -> str:
        shape = group[positions].shape
        if len(shape) != 3 or shape[2] != 3:
            raise DataError(
                f"{self.name}: {positions!r} of {group.name} has no positions", found=shape, needed="(frames, atoms, 3)"
            )
        name = next((name for name in _NUMBERS if name in group), None)
        if name is None:
            raise DataError(
                f"{self.name}: {group.name} has no atomic numbers", found=", ".join(group), needed=f"one of {', '.join(_NUMBERS)}"
            )
        if group[name].shape not in (shape[1:2], shape[:2]) or group[name].dtype.kind not in "iu":
            raise DataError(
                f"{self.name}: {name!r} of {group.name} does not fit {positions!r}",
                found=f"{group[name].shape} of {group[name].dtype}",
                needed=f"whole numbers, {shape[1:2]} or {shape[:2]}",
            )
        return name

    def _units(self, group: Any, positions: str) -> dict[str, str]:
        """What the attributes of the data sets declare, under keys that are checked against the units of the conversion."""
        declared = {}
        for name, data in group.items():
            unit = data.attrs.get("units", data.attrs.get("unit"))
            unit = unit.decode() if isinstance(unit, bytes) else unit
            if not isinstance(unit, str):
                continue
            if name == positions:
                declared["length_unit"] = unit
            elif looks_like("energy", name):
                declared["energy_unit"] = unit
            elif looks_like("forces", name):
                declared["forces_unit"] = unit
        return declared

    def _open(self) -> Any:
        try:
            import h5py
        except ImportError as error:
            raise ConfigError(
                f"{self.name} is an HDF5 file and h5py is not installed", fix='pip install "nvalchemi[hdf5]"'
            ) from error
        return h5py.File(self.path, "r")


def _is_of_system(name: str) -> bool:
    """By name, where a row of six or nine numbers might be of as many atoms."""
    return looks_like("stress", name) or looks_like("virial", name) or "pole" in name.lower()
