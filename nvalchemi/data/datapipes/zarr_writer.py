"""Structures to a zarr store: streaming, appending, and committing last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from nvalchemi.data.atoms import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.files import open_files
from nvalchemi.data.datapipes.layout import ATOMIC_FORMAT, FIELD_GROUPS, Cut, check_metadata, check_name
from nvalchemi.data.datapipes.reader import as_indices
from nvalchemi.data.datapipes.store_writer import Appender, StoreWriter
from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader
from nvalchemi.data.fields import FIELDS, Level, missing_value
from nvalchemi.errors import DataError

GROUP_SYSTEMS = 512
"""Structures that are put together before they are cut into columns."""
GROUP_ATOMS = 65536
"""Atoms after which a group is full all the same."""

Systems = AtomicData | Batch | Iterable[AtomicData | Batch]


class AtomicDataZarrWriter:
    """Writes structures to a zarr v3 store (see `nvalchemi.data.datapipes.layout`).

    Whatever it is given is streamed: memory is bounded by a shard (about 4 MiB) of each field, whatever the length. Nothing
    is visible before the commit at the end, which is one atomic replacement of a file: a writer that is killed leaves the
    store as it was, and the same call can be made again. One writer at a time; a second is refused.

    Parameters
    ----------
    store
        Path of the store's folder, or a zarr store object.
    chunk_rows, shard_rows
        Rows (systems, atoms or edges) in a chunk, the unit of reading, and in a shard, a file. By default by the size of a
        row: chunks of about 128 KiB, 32 to a shard. Arrays that exist already keep theirs.
    compressor
        ``"blosc"`` (shuffle and LZ4), ``"zstd"``, ``"none"`` or a zarr v3 codec as a mapping.
    overwrite
        Let `write` replace a store that exists. The old one stays readable until the new one is committed.
    units
        Units of further named fields. A unit given for a known field, or for one that the store has, must be the same.
    metadata
        The user's own, JSON only; kept with the store. An append updates it. A function is called at the commit, for what
        is known only after the last structure.

    Examples
    --------
    >>> AtomicDataZarrWriter("a.zarr").write(systems)                 # doctest: +SKIP
    >>> AtomicDataZarrWriter("a.zarr").append(more for more in source)  # doctest: +SKIP
    """

    def __init__(
        self,
        store: Any,
        *,
        chunk_rows: int | None = None,
        shard_rows: int | None = None,
        compressor: str | Mapping[str, Any] | None = "blosc",
        overwrite: bool = False,
        units: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._files = open_files(store)
        self._cut = Cut(chunk_rows, shard_rows, compressor)
        self._overwrite = overwrite
        self._units = {name: _plain(unit) for name, unit in (units or {}).items()}
        for name, unit in self._units.items():
            if name in FIELDS and unit != FIELDS[name].unit:
                raise _other_unit(self._files.name, name, unit, FIELDS[name].unit)
        self._later = metadata if callable(metadata) else None
        self._given = check_metadata(None if callable(metadata) else metadata)

    def write(self, systems: Systems) -> int:
        """Make a new store of these structures.

        Parameters
        ----------
        systems
            Structures, batches, or anything that yields them; nothing is kept longer than a shard needs.

        Returns
        -------
        int
            Structures written.

        Raises
        ------
        DataError
            The store exists (and ``overwrite`` is False), somebody else is writing it, there is nothing to write, or the
            structures do not fit together: dtypes, shapes, levels, edges on only some, different cutoffs.
        """
        with self._begin("replace" if self._overwrite else "new") as rows:
            count = sum(rows.add(batch) for batch in batches(systems))
            if not count:
                raise DataError(f"{self._files.name}: there is nothing to write", found="no structures")
            rows.commit(self._metadata())
        return count

    def append(self, systems: Systems) -> int:
        """Add structures behind those that are there; a store that does not exist is made.

        Fields may be new: the structures before count as lacking them. Fields may be missing likewise.

        Returns
        -------
        int
            Structures added. With none, nothing is committed.

        Raises
        ------
        DataError
            As for `write`; also a field whose level, dtype, shape or declared unit is not that of the store.
        """
        with self._begin("append") as rows:
            count = sum(rows.add(batch) for batch in batches(systems))
            if count:
                rows.commit({**rows.metadata, **self._metadata()})
        return count

    def delete(self, indices: Any) -> int:
        """Hide structures; readers opened from now on count without them. `defragment` frees their space.

        Parameters
        ----------
        indices
            Whole numbers, as a reader of the store counts at present.

        Returns
        -------
        int
            Structures hidden.
        """
        with self._begin("append") as rows:
            count = rows.delete(indices)
            rows.commit({**rows.metadata, **self._metadata()})
        return count

    def defragment(self) -> None:
        """Write the structures that are not deleted anew, with this writer's chunks, shards and compressor.

        The old arrays stay until the new ones are committed, so there must be room for both. Readers that are open then must
        be opened anew.
        """
        with self._begin("append") as rows:
            reader = AtomicDataZarrReader(self._files)
            rows.restart(reader.units)
            step = GROUP_SYSTEMS
            for start in range(0, len(reader), step):
                rows.add(reader.read_many(range(start, min(start + step, len(reader)))))
            rows.commit({**reader.metadata, **self._metadata()})

    def _metadata(self) -> dict[str, Any]:
        return self._given if self._later is None else check_metadata(self._later())

    def _begin(self, mode: Literal["new", "replace", "append"]) -> _Rows:
        return _Rows(StoreWriter(self._files, ATOMIC_FORMAT, mode), self._cut, self._units, self._files.name)


class _Rows:
    """The columns of one transaction: takes batches apart and keeps every array of a level at the same length."""

    def __init__(self, store: StoreWriter, cut: Cut, units: Mapping[str, str], name: str) -> None:
        self._store, self._cut, self._declared, self._name = store, cut, units, name

    def __enter__(self) -> _Rows:
        self._store.__enter__()
        try:
            self._extra = dict(self._store.record.extra)
            self._units = dict(self._declared)
            for path, array in self._store.arrays.items():
                group, name = path.split("/", 1)
                unit = self._declared.get(name)
                if group in FIELD_GROUPS and unit is not None and unit != array.spec.unit:
                    raise _other_unit(self._name, name, unit, array.spec.unit)
        except BaseException as error:
            self._store.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._store.__exit__(kind, error, trace)

    @property
    def metadata(self) -> dict[str, Any]:
        """The user's metadata as committed."""
        return self._store.record.metadata

    def _count(self, path: str) -> int:
        array = self._store.arrays.get(path)
        return 0 if array is None else array.rows

    def add(self, batch: Batch) -> int:
        """Append the structures of a batch."""
        batch = batch.to("cpu")
        systems, new = self._count("ends/atom"), len(batch)
        before = {"system": systems, "atom": self._count("atom/positions"), "edge": self._count("edge/edge_index")}
        added = {"system": new, "atom": batch.num_nodes, "edge": batch.num_edges}
        self._add_ends(batch, before)
        columns = {f"{batch.levels[name]}/{name}": name for name in batch.fields}
        for path, name in columns.items():
            array = self._column(path, name, batch, before)
            array.add(_rows(batch, name))
            self._add_mask(name, batch.present.get(name), systems, new)
        for path, array in list(self._store.arrays.items()):
            group, name = path.split("/", 1)
            if group in FIELD_GROUPS and path not in columns:
                value = missing_value(name, getattr(torch, array.spec.dtype))
                array.fill(added[array.spec.level], value)
                self._add_mask(name, torch.zeros(new, dtype=torch.bool), systems, new)
            elif group == "deleted":
                array.fill(new, 0)
        return new

    def commit(self, metadata: dict[str, Any]) -> None:
        """Commit what was added."""
        for name in self._declared:
            if not any(f"{group}/{name}" in self._store.arrays for group in FIELD_GROUPS):
                raise DataError(
                    f"{self._name}: a unit is declared for {name!r}, which no structure has", found=f"units[{name!r}]"
                )
        self._store.commit(extra=self._extra, metadata=metadata)

    def delete(self, indices: Any) -> int:
        """Replace the deletion mask by one that has these structures too."""
        old = self._extra.get("deleted")
        systems = self._count("ends/atom")
        mask = np.zeros(systems, bool)
        if old is not None:
            mask = AtomicDataZarrReader(self._store.files)._store.column(old).copy()
        live = np.flatnonzero(~mask)
        chosen = np.unique(as_indices(indices, len(live), self._name))
        mask[live[chosen]] = True
        path = f"deleted/{self._store.record.commit + 1}"
        self._store.create(path, self._cut.spec("system", "bool", (), "")).add(mask)
        if old is not None:
            self._store.drop(old)
        self._extra["deleted"] = path
        return len(chosen)

    def restart(self, units: Mapping[str, str]) -> None:
        """Begin a new revision, empty, in which further named fields have ``units``."""
        self._store.begin_revision()
        self._extra = {}
        self._units = {**units, **self._declared}

    # -- one array at a time -----------------------------------------------------------------------------------------

    def _column(self, path: str, name: str, batch: Batch, before: Mapping[str, int]) -> Appender:
        """The array of a field, made and brought up to length if it is new."""
        level = batch.levels[name]
        tensor = batch.fields[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = (2,) if name == "edge_index" else tuple(tensor.shape[1:])
        array = self._store.arrays.get(path)
        if array is None:
            for other in Level:
                if f"{other}/{name}" in self._store.arrays:
                    raise DataError(f"{self._name}: {name} has another level in the store", found=level.value, needed=other.value)
            unit = FIELDS[name].unit if name in FIELDS else self._units.get(name, "")
            array = self._store.create(path, self._cut.spec(level.value, dtype, shape, unit))
            array.fill(before[level.value], missing_value(name, tensor.dtype))
            if before["system"]:
                self._mask(name).fill(before["system"], 0)
        spec = array.spec
        if (spec.dtype, spec.shape) != (dtype, shape):
            raise DataError(
                f"{self._name}: {name} does not fit to what the store holds",
                found=f"{dtype}, rows of shape {shape}",
                needed=f"{spec.dtype}, rows of shape {spec.shape}",
                fix="convert first, floats with data.to(dtype=...)" if spec.shape == shape else None,
            )
        return array

    def _mask(self, name: str) -> Appender:
        return self._store.create(f"present/{check_name(name)}", self._cut.spec("system", "bool", (), ""))

    def _add_mask(self, name: str, present: torch.Tensor | None, systems: int, new: int) -> None:
        array = self._store.arrays.get(f"present/{name}")
        if array is None:
            if present is None or bool(present.all()):
                return
            array = self._mask(name)
            array.add(np.ones(systems, bool))
        array.add(np.ones(new, bool) if present is None else present.numpy())

    def _add_ends(self, batch: Batch, before: Mapping[str, int]) -> None:
        has, had = batch.edge_offsets is not None, "ends/edge" in self._store.arrays
        cutoff, known = batch.neighbor_cutoff, self._extra.get("neighbor_cutoff")
        if before["system"] and (has, cutoff) != (had, known):
            raise DataError(
                f"{self._name}: all structures of a store have edges of one cutoff, or none has",
                found=f"edges within {cutoff} Å" if has else "no edges",
                needed=f"edges within {known} Å" if had else "no edges",
                fix="leave the edges out (they are made when a model needs them), or make them anew for all",
            )
        if has:
            self._extra["neighbor_cutoff"] = cutoff
        for level, offsets in (("atom", batch.atom_offsets), ("edge", batch.edge_offsets)):
            if offsets is not None:
                path = f"ends/{level}"
                array = self._store.arrays.get(path) or self._store.create(path, self._cut.spec("system", "int64", (), ""))
                array.add(offsets[1:].numpy() + before[level])


def _rows(batch: Batch, name: str) -> np.ndarray:
    """A field's rows as they are stored: ``edge_index`` as pairs, counted from the first atom of their system."""
    tensor = batch.fields[name].detach()
    if name == "edge_index":
        assert batch.edge_offsets is not None
        first = torch.repeat_interleave(batch.atom_offsets[:-1], batch.edge_offsets.diff())
        tensor = (tensor - first).T
    array: np.ndarray = tensor.contiguous().numpy()
    return array


def batches(systems: Systems) -> Iterator[Batch]:
    """Structures, batches or an iterable of both as batches of bounded size, in their order."""
    if isinstance(systems, Batch):
        yield systems
        return
    if isinstance(systems, AtomicData):
        systems = [systems]
    if not isinstance(systems, Iterable):
        raise DataError("no structures", found=type(systems).__name__, needed="AtomicData, a Batch, or an iterable of them")
    group: list[AtomicData] = []
    atoms = 0
    for item in systems:
        if isinstance(item, AtomicData):
            group.append(item)
            atoms += item.num_atoms
        if group and (isinstance(item, Batch) or len(group) >= GROUP_SYSTEMS or atoms >= GROUP_ATOMS):
            yield Batch.from_data_list(group)
            group, atoms = [], 0
        if isinstance(item, Batch):
            yield item
        elif not isinstance(item, AtomicData):
            raise DataError(
                "not a structure", found=type(item).__name__, needed="AtomicData or Batch", fix="AtomicData.from_atoms(atoms)"
            )
    if group:
        yield Batch.from_data_list(group)


def _plain(unit: str) -> str:
    return unit.replace("Å", "angstrom").replace("\u212b", "angstrom")


def _other_unit(store: str, name: str, found: str, needed: str) -> DataError:
    return DataError(
        f"{store}: the declared unit of {name} is not the store's",
        found=found,
        needed=needed,
        fix="convert the numbers, then declare",
    )
