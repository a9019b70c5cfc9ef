"""NumPy archives of equal-length arrays: rMD17 (and MD17, QM-style padded sets), streamed row by row."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from nvalchemi.data.convert.frames import Frame, FrameSource, Selection
from nvalchemi.data.convert.labels import looks_like
from nvalchemi.errors import DataError

_NUMBERS = ("nuclear_charges", "atomic_numbers", "numbers", "z", "Z")
_POSITIONS = ("coords", "coordinates", "positions", "R")
_COUNTS = ("N",)  # atoms of each frame, in padded sets
_CELLS = ("cell", "cells", "lattice")


class NpzSource(FrameSource):
    """An ``.npz`` with an array of positions (frames, atoms, 3) and atomic numbers, for one frame or for all.

    Arrays with one row a frame are keys of the frame; if a row has one entry an atom, it belongs to the atoms. Rows with
    atomic number 0 are padding and are left out. Nothing is unpickled.
    """

    format = "npz"
    standard: Mapping[str, tuple[str, ...]] = {
        "energy": ("energies", "energy", "E"),
        "forces": ("forces", "F"),
        "stress": ("stress", "stresses"),
        "virial": ("virial", "virials"),
    }

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.heads = self._read_heads()
        self.positions = self._key(_POSITIONS, "positions")
        self.numbers = self._key(_NUMBERS, "atomic numbers")
        shape = self.heads[self.positions][0]
        if len(shape) != 3 or shape[2] != 3:
            raise DataError(f"{self.name}: {self.positions!r} has no positions", found=shape, needed="(frames, atoms, 3)")
        self._total, self._atoms = shape[:2]
        numbers = self.heads[self.numbers][0]
        if numbers not in ((self._atoms,), (self._total, self._atoms)):
            raise DataError(
                f"{self.name}: {self.numbers!r} does not fit {self.positions!r}",
                found=numbers,
                needed=f"({self._atoms},) or ({self._total}, {self._atoms})",
            )

    def total(self) -> int | None:
        return self._total

    def frames(self, select: Selection) -> Iterator[tuple[int, Frame]]:
        indices = select.indices(self._total)
        with zipfile.ZipFile(self.path) as archive:
            rows = {
                key: _Rows(archive, key, self)
                for key, (shape, dtype) in self.heads.items()
                if shape[:1] == (self._total,) and key != self._shared_numbers and dtype.kind in "fiub"
            }
            shared = _read_whole(archive, self._shared_numbers) if self._shared_numbers else None
            for index in indices:
                row = {key: reader.row(index) for key, reader in rows.items()}
                yield index, self._frame(row, shared)

    @property
    def _shared_numbers(self) -> str | None:
        """The key of the atomic numbers, where they are the same for all frames."""
        return self.numbers if len(self.heads[self.numbers][0]) == 1 else None

    def _frame(self, row: dict[str, np.ndarray], shared: np.ndarray | None) -> Frame:
        numbers = np.asarray(row.pop(self.numbers) if shared is None else shared, dtype=np.int64)
        real = numbers != 0
        frame = Frame(numbers[real], row.pop(self.positions)[real])
        for key, value in row.items():
            if key in _CELLS and value.size == 9 and value.any():
                frame.cell, frame.pbc = value.reshape(3, 3), np.ones(3, dtype=bool)
            elif self._belongs_to_atoms(key, value):
                frame.atom[key] = value[real]
            else:
                frame.system[key] = value.item() if value.size == 1 else value
        return frame

    def _belongs_to_atoms(self, key: str, row: np.ndarray) -> bool:
        """By shape; by name where six numbers may be a stress or a molecule of six."""
        if key in _COUNTS or any(looks_like(label, key) for label in ("stress", "virial")) or key == "dipole":
            return False
        return self._atoms > 1 and row.ndim >= 1 and len(row) == self._atoms

    def _read_heads(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of every array, from the first bytes of each."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                heads = {}
                for member in archive.namelist():
                    with archive.open(member) as file:
                        shape, _, dtype = _read_head(file)
                        heads[member.removesuffix(".npy")] = (shape, dtype)
                return heads
        except (zipfile.BadZipFile, ValueError, OSError) as error:
            raise DataError(f"{self.name} cannot be read as an npz archive: {error}") from error

    def _key(self, names: tuple[str, ...], what: str) -> str:
        for name in names:
            if name in self.heads:
                return name
        keys = ", ".join(f"{key} {shape}" for key, (shape, _) in self.heads.items())
        raise DataError(f"{self.name} has no {what}", found=keys, needed=f"one of the keys {', '.join(names)}")


class _Rows:
    """Rows of one array of an archive, in rising order, read from the stream."""

    def __init__(self, archive: zipfile.ZipFile, key: str, source: NpzSource) -> None:
        self.key, self.source = key, source
        self.file = archive.open(f"{key}.npy")
        shape, fortran, self.dtype = _read_head(self.file)
        self.shape = shape[1:]
        self.bytes = self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))
        self.start = self.file.tell()
        # Fortran order has no rows in a stream; such a file is rare enough to be read whole
        self.whole = _read_whole(archive, key) if fortran and len(shape) > 1 else None

    def row(self, index: int) -> np.ndarray:
        if self.whole is not None:
            return self.whole[index]
        try:
            self.file.seek(self.start + index * self.bytes)
            data = self.file.read(self.bytes)
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            raise self.source.broken(index, f"{self.key}: {error}") from error
        if len(data) != self.bytes:
            raise self.source.broken(index, f"{self.key} ends before it")
        return np.frombuffer(data, dtype=self.dtype).reshape(self.shape)


def _read_head(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    return read(file)


def _read_whole(archive: zipfile.ZipFile, key: str) -> np.ndarray:
    with archive.open(f"{key}.npy") as file:
        return npy.read_array(file, allow_pickle=False)
