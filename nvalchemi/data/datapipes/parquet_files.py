"""Parquet files as one source of samples: a row is a sample, and a row group is what one read decodes.

``pyarrow`` is an extra (``pip install nvalchemi[parquet]``), and nothing here imports it before a file is opened.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.store_reader import CACHE_BYTES
from nvalchemi.errors import ConfigError, DataError

T = TypeVar("T")
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def arrow() -> Any:
    """``pyarrow``, with its ``parquet`` and ``compute`` modules.

    Raises
    ------
    ConfigError
        ``pyarrow`` is not installed.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("pyarrow is not installed", found=str(error), fix="pip install nvalchemi[parquet]") from error
    return pyarrow


class _State(Generic[T]):
    """What a process owns: the lock, and the decoded row groups that it guards, the one used longest ago first."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.groups: OrderedDict[int, tuple[T, int]] = OrderedDict()
        self.bytes = 0
        self.decoded = 0


class ParquetSource(ABC, Generic[T]):
    """Row groups of one or several files, decoded when first needed and kept up to ``cache_bytes``.

    Safe to use from several threads. A forked process, and a pickled copy, begins with nothing decoded and a lock of its own.

    Parameters
    ----------
    files
        A file, a folder (its ``*.parquet``, by name), or a list of files. All have the same columns.
    cache_bytes
        Memory for decoded row groups. One is kept however large it is.

    Raises
    ------
    ConfigError
        ``pyarrow`` is not installed.
    DataError
        A file that is missing, damaged or no parquet file; files of different columns.
    """

    def __init__(self, files: Paths, cache_bytes: int = CACHE_BYTES) -> None:
        self._paths = _listed(files)
        self._name = str(files) if isinstance(files, str | os.PathLike) else _names(self._paths)
        self.cache_bytes = int(cache_bytes)
        self._states: dict[int, _State[T]] = {}
        self._metadata: list[Any] = []
        self._groups: list[tuple[int, int]] = []  # file, and row group in it
        rows: list[int] = []
        self.schema: Any = None
        for number, path in enumerate(self._paths):
            opened = self._open(number)
            schema = opened.schema_arrow
            if self.schema is None:
                self.schema = schema
            elif _types(schema) != _types(self.schema):
                raise DataError(
                    f"{path} has other columns than {self._paths[0]}", found=_types(schema), needed=_types(self.schema)
                )
            metadata = opened.metadata
            self._metadata.append(metadata)
            for group in range(metadata.num_row_groups):
                if metadata.row_group(group).num_rows:
                    self._groups.append((number, group))
                    rows.append(metadata.row_group(group).num_rows)
        self._starts = np.cumsum([0, *rows])

    # -- for a reader to fill in -------------------------------------------------------------------------------------

    @abstractmethod
    def _columns(self) -> list[str]:
        """The columns that are read."""

    @abstractmethod
    def _decode(self, table: Any, first: int, where: str) -> tuple[T, int]:
        """The samples of a row group, the first of which is number ``first``, and how many bytes they take."""

    # -- for a reader to use -----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Where the samples come from, for messages."""
        return self._name

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_states": {}}

    @property
    def block_size(self) -> int:
        """Samples in a row group, on the average; see `StoredInBlocks`."""
        return max(1, len(self) // max(1, len(self._groups)))

    @property
    def cached_samples(self) -> int:
        """Samples whose row groups ``cache_bytes`` holds, going by the first of them."""
        if not self._groups:
            return 0
        _, size = self._group(0)
        samples = self.cache_bytes * int(self._starts[1]) // max(1, size)
        return min(len(self), max(samples, self.block_size))

    @property
    def decoded(self) -> int:
        """How many row groups this process has decoded, for tests and benchmarks."""
        return self._state.decoded

    @property
    def _state(self) -> _State[T]:
        pid = os.getpid()
        state = self._states.get(pid)
        if state is None:
            state = self._states.setdefault(pid, _State())
            for other in [p for p in self._states if p != pid]:
                self._states.pop(other, None)
        return state

    def _parts(self, indices: NDArray[np.int64]) -> Iterator[tuple[T, NDArray[np.int64], NDArray[np.int64]]]:
        """Decoded row groups, the rows that are wanted of each, and the places of these among ``indices``."""
        if not len(indices):
            return
        which = np.searchsorted(self._starts, indices, side="right") - 1
        order = np.argsort(which, kind="stable")
        groups, starts = np.unique(which[order], return_index=True)
        for group, places in zip(groups.tolist(), np.split(order, starts[1:]), strict=True):
            samples, _ = self._group(group)
            yield samples, indices[places] - self._starts[group], places

    def _group(self, group: int) -> tuple[T, int]:
        """A row group, and how many bytes it takes."""
        state = self._state
        with state.lock:
            found = state.groups.get(group)
            if found is None:
                found = self._decode(self._table(group, self._columns()), int(self._starts[group]), self._where(group))
                state.decoded += 1
                state.groups[group] = found
                state.bytes += found[1]
                while state.bytes > self.cache_bytes and len(state.groups) > 1:
                    _, (_, size) = state.groups.popitem(last=False)
                    state.bytes -= size
            else:
                state.groups.move_to_end(group)
            return found

    def _column(self, column: str) -> Iterator[tuple[Any, str]]:
        """One column, row group by row group, not kept; and where each is, for messages."""
        for group in range(len(self._groups)):
            yield self._table(group, [column]).column(0), self._where(group)

    def _where(self, group: int) -> str:
        number, part = self._groups[group]
        return f"{self._paths[number]}, row group {part}"

    # -- the files ---------------------------------------------------------------------------------------------------

    def _open(self, number: int) -> Any:
        pa = arrow()
        path, known = self._paths[number], self._metadata[number] if number < len(self._metadata) else None
        try:
            # Opened for each row group: a thousand files, or a file that is open across a fork, would be worse.
            return pa.parquet.ParquetFile(path, metadata=known, pre_buffer=False, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be opened as a parquet file", found=f"{type(error).__name__}: {error}") from error

    def _table(self, group: int, columns: list[str]) -> Any:
        pa = arrow()
        number, part = self._groups[group]
        with self._open(number) as opened:
            try:
                # One thread: a loader has its own, and those of arrow would not be there after a fork.
                return opened.read_row_group(part, columns=columns, use_threads=False)
            except (OSError, pa.ArrowException) as error:
                raise DataError(
                    f"{self._where(group)} cannot be read",
                    found=f"{type(error).__name__}: {error}",
                    fix="restore the file from a copy",
                ) from error


def _listed(files: Paths) -> list[Path]:
    if not isinstance(files, str | os.PathLike):
        paths = [Path(path) for path in files]
    elif Path(files).is_dir():
        paths = sorted(Path(files).glob("*.parquet"))
    else:
        paths = [Path(files)]
    if not paths:
        raise DataError(
            f"there are no parquet files in {files}", needed="a file, a folder with *.parquet files, or a list of files"
        )
    return paths


def _types(schema: Any) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def _names(paths: list[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


class Leaves:
    """The numbers of a column of numbers, or of lists, or of lists of lists of them, without the lists.

    Parameters
    ----------
    column
        As arrow gives it.
    where
        What it is, for messages.

    Attributes
    ----------
    values
        (m,) all numbers, one after the other.
    lengths
        For each depth of lists how many elements each list has; those of missing rows are 0.
    present
        (rows,) whether a row has a value at all.

    Raises
    ------
    DataError
        Values that are no numbers; a missing value within a list.
    """

    def __init__(self, column: Any, where: str) -> None:
        pa = arrow()
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
        self.where = where
        self.present: NDArray[np.bool_] = np.asarray(array.is_valid())
        if not pa.types.is_nested(array.type):
            array = array.drop_null()
        self.lengths: list[NDArray[np.int64]] = []
        kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        while any(kind(array.type) for kind in kinds):
            if self.lengths and array.null_count:
                raise DataError(f"{where} has missing values within a list", found=f"{array.null_count} of them")
            counts = pa.compute.list_value_length(array).fill_null(0)
            self.lengths.append(np.asarray(counts).astype(np.int64))
            array = pa.compute.list_flatten(array)
        if array.null_count:
            raise DataError(f"{where} has missing values within a list", found=f"{array.null_count} of them")
        numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
        if not any(kind(array.type) for kind in numbers):
            raise DataError(f"{where} does not hold numbers", found=array.type, needed="numbers, or lists of numbers")
        self.values: NDArray[Any] = array.to_numpy(zero_copy_only=False)

    def constant(self, depth: int) -> int:
        """The number of elements that all lists of a depth have; DataError where they differ."""
        lengths = self.lengths[depth] if depth else self.lengths[0][self.present]
        first = int(lengths[0]) if len(lengths) else 0
        if (lengths != first).any():
            raise DataError(f"{self.where} has lists of different lengths", found=f"{lengths.min()} and {lengths.max()}")
        return first
