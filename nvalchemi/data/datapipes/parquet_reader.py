"""Structures and dense arrays from parquet files: a row is a structure, atoms are in lists."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.parquet_files import Leaves, ParquetSource, Paths, arrow
from nvalchemi.data.datapipes.reader import Indices, Reader, as_indices
from nvalchemi.data.datapipes.store_reader import CACHE_BYTES
from nvalchemi.data.fields import FIELDS, Level, missing_value
from nvalchemi.errors import DataError

NEEDED = ("positions", "atomic_numbers")


class AtomicDataParquetReader(ParquetSource[Batch], Reader):
    """Reads structures from parquet files, one a row.

    A column is a field: one that belongs to a structure holds a number or a list, one that belongs to its atoms a list with an element for each atom. What
    has several numbers (positions, a cell) is a list of lists or one flat list in the same order. Numbers are in the package's units (see
    `nvalchemi.data.fields`); a column that says another (``unit`` in its metadata) is refused. A missing value means that the structure
    does not have the field. Row groups are decoded when first needed, checked, and kept up to ``cache_bytes``.

    Parameters
    ----------
    files
        A file, a folder (its ``*.parquet``, by name), or a list of files. All have the same columns.
    columns
        The column of a field, where it does not bear the field's name.
    levels
        Further columns to read, that are no fields that the package knows: ``"system"`` or ``"atom"``.
    cache_bytes
        Memory for decoded row groups, in bytes; one is kept however large it is.

    Raises
    ------
    ConfigError
        ``pyarrow`` is not installed.
    DataError
        A file that is missing, damaged or no parquet file; files of different columns; no positions or atomic numbers; another unit.

    Notes
    -----
    A row group is read as a whole. Write files with some hundred or thousand rows in each, and take ``DataLoader(shuffle="blocks")`` where
    ``cache_bytes`` does not hold all of them.
    """

    def __init__(
        self,
        files: Paths,
        columns: Mapping[str, str] | None = None,
        levels: Mapping[str, Literal["system", "atom"]] | None = None,
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(files, cache_bytes)
        columns, further = dict(columns or {}), {name: Level(level) for name, level in (levels or {}).items()}
        known = {name: spec.level for name, spec in FIELDS.items() if spec.level is not Level.EDGE}
        every = {**known, **further}
        there = set(self.schema.names)
        self._fields = {name: columns.get(name, name) for name in every if columns.get(name, name) in there}
        asked = {*NEEDED, *columns, *further}
        lacking = [columns.get(name, name) for name in asked if name not in self._fields]
        if lacking or asked - every.keys():
            unknown = sorted(asked - every.keys())
            raise DataError(
                f"{self.name}: {', '.join(unknown)} is no known field" if unknown else f"{self.name} has no column {lacking[0]}",
                found=f"the columns {', '.join(self.schema.names)}",
                fix='levels={"name": "atom"} says what a further field belongs to' if unknown else 'columns={"field": "column"}',
            )
        self._levels = {name: every[name] for name in self._fields}
        for name, column in self._fields.items():
            unit = (self.schema.field(column).metadata or {}).get(b"unit")
            if name in FIELDS and unit is not None and unit.decode() != FIELDS[name].unit:
                raise DataError(
                    f"{self.name}: the declared unit of {column} is not the package's",
                    found=unit.decode(),
                    needed=FIELDS[name].unit,
                    fix="convert the data, with their units",
                )
        self._num_atoms: NDArray[np.int64] | None = None
        self._shapes = {name: spec.shape for name, spec in FIELDS.items()}
        positions = self.schema.field(self._fields["positions"]).type
        while arrow().types.is_nested(positions):
            positions = positions.value_type
        #: as `AtomicData`: one floating dtype for all fields but energies, here that of the positions
        self._dtype = torch.float64 if positions == arrow().float64() else torch.float32

    # -- what there is -----------------------------------------------------------------------------------------------

    @property
    def field_names(self) -> tuple[str, ...]:
        """Every field that any structure may have."""
        return tuple(self._fields)

    @property
    def levels(self) -> dict[str, Level]:
        """The level of each field."""
        return dict(self._levels)

    @property
    def num_atoms(self) -> NDArray[np.int64]:
        """(n,) int64: atoms of each structure; reads one column when first asked for."""
        if self._num_atoms is None:
            column = self._fields["atomic_numbers"]
            parts = [Leaves(part, f"{where}, column {column}").lengths[0] for part, where in self._column(column)]
            self._num_atoms = np.concatenate([np.empty(0, np.int64), *parts])
        return self._num_atoms

    def __repr__(self) -> str:
        return f"AtomicDataParquetReader({self.name!r}, {len(self)} structures: {', '.join(self.field_names)})"

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
            An index that is negative, too large or no whole number; a row group that is damaged or holds what is no structure (the message
            names file, row group and column).
        """
        index = as_indices(indices, len(self), self.name)
        parts = list(self._parts(index))
        if not parts:
            return self._group(0)[0].index_select(slice(0, 0))
        batch = _joined([group.index_select(torch.from_numpy(rows)) for group, rows, _ in parts])
        places = np.concatenate([places for _, _, places in parts])
        if (places[1:] < places[:-1]).any():
            batch = batch.index_select(torch.from_numpy(np.argsort(places)))
        batch.sample_index = torch.from_numpy(index.copy())
        batch.present = {name: mask for name, mask in batch.present.items() if not bool(mask.all())}
        return batch

    def _columns(self) -> list[str]:
        return list(self._fields.values())

    def _shape(self, name: str, one: Leaves) -> tuple[int, ...]:
        """The shape of a field's row: of one that the package does not know, that of the first value there is."""
        if name not in self._shapes:
            outer, column = int(self._levels[name] is Level.ATOM), self._fields[name]
            if not len(one.values):
                others = (Leaves(part, f"{where}, column {column}") for part, where in self._column(column))
                one = next((other for other in others if len(other.values)), one)
            self._shapes[name] = tuple(one.constant(depth) for depth in range(outer, len(one.lengths)))
        return self._shapes[name]

    def _decode(self, table: Any, first: int, where: str) -> tuple[Batch, int]:
        leaves = {name: Leaves(table.column(column), f"{where}, column {column}") for name, column in self._fields.items()}
        numbers = leaves["atomic_numbers"]
        if not numbers.lengths:
            raise DataError(f"{numbers.where} has one number a row", needed="a list with the atomic number of each atom")
        counts = numbers.lengths[0]
        fields, present = {}, {}
        for name, one in leaves.items():
            if not one.present.all() and name in NEEDED:
                row = int(np.flatnonzero(~one.present)[0])
                raise DataError(
                    f"{one.where} is missing in a row", found=f"sample {first + row}", needed=f"{name} of every structure"
                )
            rows = counts if self._levels[name] is Level.ATOM else np.ones(len(counts), np.int64)
            tensor = _tensor(name, one, rows * one.present, self._levels[name], self._shape(name, one), self._dtype)
            fields[name] = _filled(name, tensor, one.present, rows)
            if not one.present.all():
                present[name] = torch.from_numpy(one.present.copy())
        offsets = torch.from_numpy(np.cumsum([0, *counts]))
        batch = Batch(fields, self._levels, offsets, None, present, torch.arange(first, first + len(counts)))
        batch.dataset_names = (where,)
        batch.validate()
        batch.dataset_names = ()
        return batch, sum(tensor.nbytes for tensor in fields.values())


class ArrayParquetReader(ParquetSource[dict[str, torch.Tensor]]):
    """Reads samples of fixed shape from parquet files, one a row, for energy-based training.

    Parameters
    ----------
    files
        A file, a folder (its ``*.parquet``, by name), or a list of files. All have the same columns.
    columns
        The name of one column, whose samples are tensors; or several, whose samples are dicts. By default all, as dicts. A column holds numbers, or
        lists (of lists) of the same lengths in every row.
    cache_bytes
        Memory for decoded row groups, in bytes; one is kept however large it is.

    Raises
    ------
    ConfigError
        ``pyarrow`` is not installed.
    DataError
        A file that is missing, damaged or no parquet file; files of different columns; no such column.
    """

    def __init__(self, files: Paths, columns: str | list[str] | None = None, *, cache_bytes: int = CACHE_BYTES) -> None:
        super().__init__(files, cache_bytes)
        self._single = isinstance(columns, str)
        names = [columns] if isinstance(columns, str) else list(self.schema.names if columns is None else columns)
        lacking = [name for name in names if name not in self.schema.names]
        if lacking or not names:
            raise DataError(
                f"{self.name} has no column {', '.join(lacking)}", found=f"the columns {', '.join(self.schema.names)}"
            )
        self._names = names

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names of the columns that are read."""
        return tuple(self._names)

    def read_many(self, indices: Indices) -> torch.Tensor | dict[str, torch.Tensor]:
        """The samples ``indices``, in the order asked for, repeats allowed.

        Parameters
        ----------
        indices
            (B,) whole numbers from 0 to ``len - 1``.

        Returns
        -------
        Tensor or dict of Tensor
            (B, ...) on the CPU.

        Raises
        ------
        DataError
            An index that is negative, too large or no whole number; a row group that is damaged, or rows that are missing or of different
            lengths (the message names file, row group and column).
        """
        index = as_indices(indices, len(self), self.name)
        parts = list(self._parts(index))
        if not parts:
            found = {name: tensor[:0] for name, tensor in self._group(0)[0].items()}
        else:
            order = torch.from_numpy(np.argsort(np.concatenate([places for _, _, places in parts])))
            found = {}
            for name in self._names:
                pieces = [group[name].index_select(0, torch.from_numpy(rows)) for group, rows, _ in parts]
                if len({piece.shape[1:] for piece in pieces}) > 1:
                    raise DataError(
                        f"{self.name}: samples of column {name} have different shapes",
                        found=sorted({tuple(piece.shape[1:]) for piece in pieces}),
                    )
                found[name] = torch.cat(pieces).index_select(0, order)
        return found[self._names[0]] if self._single else found

    def __repr__(self) -> str:
        return f"ArrayParquetReader({self.name!r}, {len(self)} samples: {', '.join(self._names)})"

    def _columns(self) -> list[str]:
        return self._names

    def _decode(self, table: Any, first: int, where: str) -> tuple[dict[str, torch.Tensor], int]:
        tensors = {}
        for name in self._names:
            one = Leaves(table.column(name), f"{where}, column {name}")
            if not one.present.all():
                row = int(np.flatnonzero(~one.present)[0])
                raise DataError(f"{one.where} is missing in a row", found=f"sample {first + row}", needed="a value in every row")
            shape = tuple(one.constant(depth) for depth in range(len(one.lengths)))
            tensors[name] = torch.from_numpy(np.array(one.values.reshape(table.num_rows, *shape)))
        return tensors, sum(tensor.nbytes for tensor in tensors.values())


def _tensor(
    name: str, one: Leaves, rows: NDArray[np.int64], level: Level, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The numbers of a column in rows of ``shape``: (sum of rows, ...).

    ``rows`` says how many of these each structure has.
    """
    outer, nested = int(level is Level.ATOM), len(one.lengths)
    if nested < outer:
        raise DataError(f"{one.where} has one number a row", needed="a list with an element for each atom")
    flat = nested == 1 and len(shape) > 1 - outer
    if not flat and nested != outer + len(shape):
        raise DataError(
            f"{one.where} is not nested as {name} is", found=f"{nested} lists in each other", needed=outer + len(shape)
        )
    each = 1 if outer else next(iter(shape), 1)
    wanted = rows * (math.prod(shape) if flat else each)
    wrong = np.flatnonzero(one.lengths[0] != wanted) if nested else np.empty(0, np.int64)
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"{one.where} does not fit the structure in row {row}",
            found=f"a list of {one.lengths[0][row]}",
            needed=f"{wanted[row]}, as {rows[row]} {'atoms' if outer else 'rows'} of shape {shape} have",
        )
    for depth in range(1, 1 if flat else nested):
        if len(one.values) and one.constant(depth) != shape[depth - outer]:
            raise DataError(f"{one.where} has lists of the wrong length", found=one.constant(depth), needed=shape[depth - outer])
    return torch.from_numpy(_cast(name, one, dtype).reshape(int(rows.sum()), *shape))


def _cast(name: str, one: Leaves, dtype: torch.dtype) -> NDArray[Any]:
    """The numbers in the dtype that the field has, in memory of their own."""
    kind = one.values.dtype.kind
    floating = np.float64 if dtype == torch.float64 else np.float32
    own = {"f": "float", "i": "int64", "u": "int64", "b": "bool"}[kind]
    wanted = own if name not in FIELDS else FIELDS[name].kind
    if own != wanted and (not wanted.startswith("float") or own == "bool"):
        raise DataError(f"{one.where} has the wrong kind of numbers", found=one.values.dtype, needed=wanted)
    target: Any = {"float": floating, "float64": np.float64, "int64": np.int64, "bool": np.bool_}[wanted]
    return one.values.astype(target)


def _filled(name: str, tensor: torch.Tensor, present: NDArray[np.bool_], rows: NDArray[np.int64]) -> torch.Tensor:
    """The same with rows for the structures that lack the field; ``rows`` says how many each structure has."""
    if present.all():
        return tensor
    out = tensor.new_full((int(rows.sum()), *tensor.shape[1:]), missing_value(name, tensor.dtype))
    out[torch.from_numpy(np.repeat(present, rows))] = tensor
    return out


def _joined(batches: list[Batch]) -> Batch:
    """Batches of one reader as one."""
    first = batches[0]
    if len(batches) == 1:
        return first
    counts = torch.cat([batch.num_nodes_per_graph for batch in batches])
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=offsets[1:])
    fields = {name: torch.cat([batch[name] for batch in batches]) for name in first.fields}
    masked = {name for batch in batches for name in batch.present}
    present = {name: torch.cat([batch.has(name) for batch in batches]) for name in masked}
    return Batch(fields, first.levels, offsets, None, present)
