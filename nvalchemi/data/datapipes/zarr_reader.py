"""Structures from a zarr store, many at a time and in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.layout import ATOMIC_FORMAT, FIELD_GROUPS
from nvalchemi.data.datapipes.reader import Indices, Reader, as_indices, ragged
from nvalchemi.data.datapipes.store_reader import CACHE_BYTES, StoreReader
from nvalchemi.data.fields import FIELDS, Level
from nvalchemi.errors import DataError


class AtomicDataZarrReader(Reader):
    """Reads the structures of a store written by `AtomicDataZarrWriter`, as they were committed when it was opened.

    A read gathers its rows from decoded chunks. Chunks are kept, up to ``cache_bytes``: a store that fits is decoded once,
    however it is shuffled. Every chunk's checksum is checked when it is decoded.

    Parameters
    ----------
    store
        Path of the store's folder, or a zarr store object (in memory, zipped, in the cloud).
    cache_bytes
        Memory for decoded chunks, in bytes. A store that does not fit is read correctly and more slowly.

    Raises
    ------
    DataError
        There is no committed store, it is damaged or newer than this package, or its units are not those of the package.

    Examples
    --------
    >>> reader = AtomicDataZarrReader("a.zarr")          # doctest: +SKIP
    >>> reader.read_many([5, 0, 5]).num_graphs           # doctest: +SKIP
    3
    """

    def __init__(self, store: Any, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._store = StoreReader(store, ATOMIC_FORMAT, cache_bytes)
        record = self._store.record
        self._fields: dict[str, str] = {}
        self._levels: dict[str, Level] = {}
        self._masks: dict[str, str] = {}
        for path, spec in record.arrays.items():
            group, name = path.split("/", 1)
            if group == "present":
                self._masks[name] = path
            elif group in FIELD_GROUPS:
                self._fields[name] = path
                self._levels[name] = Level(group)
                known = FIELDS.get(name)
                if known is not None and (known.level, known.unit) != (spec.level, spec.unit):
                    raise DataError(
                        f"{self.name}: field {name} is not what the package means by it",
                        found=f"{spec.level} level, unit {spec.unit!r}",
                        needed=f"{known.level} level, unit {known.unit!r}",
                        fix="convert the data anew, with their units",
                    )
        self._paths = [*self._fields.values(), *self._masks.values()]
        self._offsets_of: dict[str, np.ndarray] = {}
        self._live: np.ndarray | None = None
        deleted = record.extra.get("deleted")
        if deleted is not None:
            self._live = np.flatnonzero(~self._store.column(deleted))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_offsets_of": {}}

    # -- what there is -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._store.record.rows.get("system", 0) if self._live is None else len(self._live)

    @property
    def name(self) -> str:
        """The path of the store, as given."""
        return self._store.files.name

    @property
    def field_names(self) -> tuple[str, ...]:
        """Every field that any structure has."""
        return tuple(self._fields)

    @property
    def levels(self) -> dict[str, Level]:
        """The level of each field."""
        return dict(self._levels)

    @property
    def units(self) -> dict[str, str]:
        """The unit of each field, ``""`` where there is none."""
        return {name: self._store.record.arrays[path].unit for name, path in self._fields.items()}

    @property
    def metadata(self) -> dict[str, Any]:
        """What the writer was given as ``metadata``."""
        return dict(self._store.record.metadata)

    @property
    def neighbor_cutoff(self) -> float | None:
        """Å; the radius within which stored edges are complete, None without edges."""
        cutoff: float | None = self._store.record.extra.get("neighbor_cutoff")
        return cutoff

    @property
    def num_atoms(self) -> np.ndarray:
        """(n,) int64: atoms of each structure."""
        return self._counts("atom")

    @property
    def num_edges(self) -> np.ndarray:
        """(n,) int64: stored edges of each structure."""
        return self._counts("edge")

    @property
    def block_size(self) -> int:
        """Structures in four chunks, on the average; see `StoredInBlocks`."""
        return self._store.block_size(len(self), self._paths)

    @property
    def cached_samples(self) -> int:
        """Structures whose chunks ``cache_bytes`` holds, on the average."""
        return self._store.cached_samples(len(self), self._paths)

    def __repr__(self) -> str:
        return f"AtomicDataZarrReader({self.name!r}, {len(self)} structures: {', '.join(self.field_names)})"

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_many(self, indices: Indices) -> Batch:
        """The structures ``indices`` as a batch on the CPU, in the order asked for, repeats allowed.

        Parameters
        ----------
        indices
            (B,) whole numbers from 0 to ``len - 1``.

        Raises
        ------
        DataError
            An index that is negative, too large or no whole number; a chunk that is missing or damaged (the message names
            store, array, chunk and file).
        """
        index = as_indices(indices, len(self), self.name)
        system = index if self._live is None else self._live[index]
        offsets = self._offsets("atom")
        start = offsets[system]
        atom_rows, atom_offsets = ragged(start, offsets[system + 1] - start)
        whole = len(system) == len(offsets) - 1 and np.array_equal(system, np.arange(len(system)))
        rows: dict[str, np.ndarray | None] = {"system": None, "atom": None, "edge": None}
        if not whole:
            rows = {"system": system, "atom": atom_rows}
        edge_offsets = None
        if self.neighbor_cutoff is not None:
            ends = self._offsets("edge")
            first = ends[system]
            edge_rows, edge_offsets = ragged(first, ends[system + 1] - first)
            if not whole:
                rows["edge"] = edge_rows
        found = self._store.take(rows, self._paths)
        fields: dict[str, torch.Tensor] = {}
        for name, path in self._fields.items():
            value = found[path]
            if name == "edge_index":
                assert edge_offsets is not None
                value = np.ascontiguousarray((value + np.repeat(atom_offsets[:-1], np.diff(edge_offsets))[:, None]).T)
            fields[name] = torch.from_numpy(value)
        present = {name: torch.from_numpy(found[path]) for name, path in self._masks.items() if not found[path].all()}
        return Batch(
            fields,
            self._levels,
            torch.from_numpy(atom_offsets),
            None if edge_offsets is None else torch.from_numpy(edge_offsets),
            present,
            sample_index=torch.from_numpy(index.copy()),
            neighbor_cutoff=self.neighbor_cutoff,
        )

    def verify(self) -> None:
        """Read and check every byte of the store.

        Raises
        ------
        DataError
            The first chunk that is missing or damaged, or offsets that contradict each other.
        """
        self._offsets_of.clear()
        self._offsets("atom")
        self._offsets("edge")
        self._store.verify()

    # -- offsets -----------------------------------------------------------------------------------------------------

    def _offsets(self, level: str) -> np.ndarray:
        """(systems + 1,) int64: where each system's rows begin; read when first needed."""
        offsets = self._offsets_of.get(level)
        if offsets is None:
            record, path = self._store.record, f"ends/{level}"
            offsets = np.zeros(record.rows.get("system", 0) + 1, np.int64)
            if path in record.arrays:
                offsets[1:] = self._store.column(path)
            counts = np.diff(offsets)
            if (counts < 0).any() or offsets[-1] != record.rows.get(level, 0):
                raise DataError(
                    f"{self.name}: {record.path(path)} contradicts the commit record",
                    found=f"ends at {offsets[-1]}",
                    needed=f"rising to {record.rows.get(level, 0)}",
                )
            self._offsets_of[level] = offsets
        return offsets

    def _counts(self, level: str) -> np.ndarray:
        counts = np.diff(self._offsets(level))
        return counts if self._live is None else counts[self._live]
