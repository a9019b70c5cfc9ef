"""Systems of DeePMD-kit: folders of ``type.raw``, ``type_map.raw`` and ``set.*/*.npy``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from nvalchemi.data.convert.frames import Frame, FrameSource, Selection
from nvalchemi.data.convert.labels import looks_like
from nvalchemi.errors import DataError

_TYPES = "real_atom_types"  # of systems of mixed type, a row a frame; -1 is padding


class DeepmdSource(FrameSource):
    """A system in DeePMD-kit's NumPy format (its documentation, "System" and "Formats of a system"), sets in the order of their names.

    Every array is one row a frame. Without a file ``nopbc`` the system repeats along the vectors of ``box.npy``. A positive virial is
    one of compression, as everywhere here.
    """

    format = "DeePMD npy"
    standard: Mapping[str, tuple[str, ...]] = {
        "energy": ("energy",),
        "forces": ("force",),
        "stress": (),
        "virial": ("virial",),
    }

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.sets = sorted(folder for folder in path.glob("set.*") if folder.is_dir())
        if not self.sets:
            raise DataError(f"{self.name} has no frames", needed="folders set.000, set.001, ... with coord.npy")
        self.types = self._integers(path / "type.raw")
        self.elements = self._elements(path / "type_map.raw")
        self.periodic = not (path / "nopbc").exists()
        self.lengths = [len(self._array(folder, "coord")) for folder in self.sets]

    def total(self) -> int | None:
        return sum(self.lengths)

    def frames(self, select: Selection) -> Iterator[tuple[int, Frame]]:
        start = 0
        for folder, length in zip(self.sets, self.lengths, strict=True):
            arrays = {path.stem: self._array(folder, path.stem) for path in sorted(folder.glob("*.npy"))}
            for name, array in arrays.items():
                if len(array) != length:
                    raise DataError(
                        f"{self.name}: {name}.npy of {folder.name} does not fit coord.npy",
                        found=f"{len(array)} rows",
                        needed=f"{length} rows, one a frame",
                    )
            if self.periodic and "box" not in arrays:
                raise DataError(
                    f"{self.name} repeats in space and {folder.name} has no box.npy",
                    fix="a file nopbc in the folder says that the system is not periodic",
                )
            for row in range(length):
                if select.takes(start + row):
                    yield start + row, self._frame({name: np.asarray(array[row]) for name, array in arrays.items()})
            start += length

    def _frame(self, row: dict[str, np.ndarray]) -> Frame:
        types = np.asarray(row.pop(_TYPES, self.types))
        atoms, real = len(types), types >= 0
        if int(types.max(initial=0)) >= len(self.elements):
            raise DataError(f"{self.name}: a frame has a type that type_map.raw does not name", found=f"type {int(types.max())}")
        numbers = self.elements[types[real]]
        frame = Frame(numbers, self._by_atom("coord", row.pop("coord"), atoms)[real])
        box = row.pop("box", None)
        if self.periodic and box is not None:
            frame.cell, frame.pbc = box.reshape(3, 3), np.ones(3, dtype=bool)
        for name, value in row.items():
            if name == "energy" or looks_like("virial", name) or value.size < atoms or value.size % atoms:
                frame.system[name] = value.item() if value.size == 1 else value
            else:
                frame.atom[name] = self._by_atom(name, value, atoms)[real]
        return frame

    def _by_atom(self, name: str, value: np.ndarray, atoms: int) -> np.ndarray:
        """A row of a frame as rows of its atoms."""
        if name in ("coord", "force") and value.size != 3 * atoms:
            raise DataError(
                f"{name}.npy does not fit type.raw", found=f"{value.size} numbers a frame", needed=f"3 x {atoms} atoms"
            )
        return value.reshape(atoms, -1).squeeze(1) if value.size == atoms else value.reshape(atoms, -1)

    def _array(self, folder: Path, name: str) -> np.ndarray:
        path = folder / f"{name}.npy"
        if not path.is_file():
            raise DataError(f"{self.name}: {folder.name} has no {name}.npy")
        try:
            array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f"{self.name}: {folder.name}/{path.name} cannot be read: {error}") from error
        if array.ndim == 0:
            raise DataError(f"{self.name}: {folder.name}/{path.name} has no rows", found=array.shape, needed="one row a frame")
        return array

    def _integers(self, path: Path) -> np.ndarray:
        try:
            return np.array(path.read_text(encoding="utf-8").split(), dtype=np.int64)
        except ValueError:
            raise DataError(f"{self.name}: {path.name} holds something else than whole numbers") from None

    def _elements(self, path: Path) -> np.ndarray:
        """The atomic number of each type."""
        from ase.data import atomic_numbers

        if not path.is_file():
            raise DataError(
                f"{self.name} does not say which elements its types are",
                found="no type_map.raw",
                needed="type_map.raw with the symbols of types 0, 1, ..., such as: O H",
            )
        symbols = path.read_text(encoding="utf-8").split()
        unknown = [symbol for symbol in symbols if atomic_numbers.get(symbol, 0) == 0]
        if unknown:
            raise DataError(
                f"{self.name}: type_map.raw names no elements", found=", ".join(unknown), needed="symbols such as O H"
            )
        used = int(self.types.max(initial=0))
        if used >= len(symbols) or int(self.types.min(initial=0)) < 0:
            raise DataError(
                f"{self.name}: type.raw has a type that type_map.raw does not name",
                found=f"types {int(self.types.min(initial=0))} to {used}, {len(symbols)} symbols",
            )
        return np.array([atomic_numbers[symbol] for symbol in symbols], dtype=np.int64)
