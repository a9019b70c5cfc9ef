"""Dense arrays (vectors, images) in a zarr store, for energy-based training; committed and checked as structures are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch

from nvalchemi.data.datapipes.files import open_files
from nvalchemi.data.datapipes.layout import ARRAY_FORMAT, DTYPES, Cut, check_metadata, check_name
from nvalchemi.data.datapipes.reader import Indices, as_indices
from nvalchemi.data.datapipes.store_reader import CACHE_BYTES, StoreReader
from nvalchemi.data.datapipes.store_writer import StoreWriter
from nvalchemi.errors import DataError

Array = torch.Tensor | np.ndarray
Arrays = Array | Mapping[str, Array]

SINGLE = "x"
"""Name of an array that was given without one."""


class ArrayZarrWriter:
    """Writes samples of fixed shape: one array (n, ...), or several named ones of equal n.

    Streaming, committing and locking are those of `AtomicDataZarrWriter`.

    Parameters
    ----------
    store
        Path of the store's folder, or a zarr store object.
    chunk_rows, shard_rows
        Samples in a chunk, the unit of reading, and in a shard, a file; by default by the size of a sample.
    compressor
        ``"blosc"``, ``"zstd"``, ``"none"`` or a zarr v3 codec as a mapping.
    overwrite
        Let `write` replace a store that exists.
    units
        Unit of each named array.
    metadata
        The user's own, JSON only.
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
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self._files = open_files(store)
        self._cut = Cut(chunk_rows, shard_rows, compressor)
        self._overwrite = overwrite
        self._units = dict(units or {})
        self._metadata = check_metadata(metadata)

    def write(self, arrays: Arrays | Iterable[Arrays]) -> int:
        """Make a new store.

        Parameters
        ----------
        arrays
            (n, ...) samples, a mapping of such, or an iterable that yields either, block by block.

        Returns
        -------
        int
            Samples written.

        Raises
        ------
        DataError
            The store exists, somebody else is writing it, there is nothing to write, or the blocks do not fit together.
        """
        return self._add(arrays, "replace" if self._overwrite else "new")

    def append(self, arrays: Arrays | Iterable[Arrays]) -> int:
        """Add samples, of the same arrays, behind those that are there; a store that does not exist is made."""
        return self._add(arrays, "append")

    def _add(self, arrays: Arrays | Iterable[Arrays], mode: Literal["new", "replace", "append"]) -> int:
        with StoreWriter(self._files, ARRAY_FORMAT, mode) as store:
            single: bool | None = store.record.extra.get("single") if store.arrays else None
            count = 0
            for block in _blocks(arrays):
                if single is None:
                    single = not isinstance(block, Mapping)
                if single == isinstance(block, Mapping):
                    raise DataError(
                        f"{self._files.name}: one array and named arrays are mixed",
                        found="named arrays" if single else "an array without a name",
                        needed="one array" if single else "named arrays",
                    )
                count += self._add_block(store, {SINGLE: block} if not isinstance(block, Mapping) else block)
            if not count and mode != "append":
                raise DataError(f"{self._files.name}: there is nothing to write", found="no samples")
            if count:
                metadata = store.record.metadata if mode == "append" else {}
                store.commit(extra={"single": single}, metadata={**metadata, **self._metadata})
        return count

    def _add_block(self, store: StoreWriter, block: Mapping[str, Array]) -> int:
        rows = {check_name(name): _as_rows(name, value) for name, value in block.items()}
        lengths = {len(value) for value in rows.values()}
        if len(lengths) != 1:
            raise DataError(
                f"{self._files.name}: arrays of different lengths", found={name: len(value) for name, value in rows.items()}
            )
        if not store.arrays:
            for name, value in rows.items():
                unit = self._units.get(name, "")
                store.create(f"sample/{name}", self._cut.spec("sample", value.dtype.name, value.shape[1:], unit))
        if store.arrays.keys() != {f"sample/{name}" for name in rows}:
            raise DataError(
                f"{self._files.name}: every block must have the same arrays",
                found=", ".join(rows),
                needed=", ".join(path.removeprefix("sample/") for path in store.arrays),
            )
        for name, value in rows.items():
            spec = store.arrays[f"sample/{name}"].spec
            if (spec.dtype, spec.shape) != (value.dtype.name, value.shape[1:]):
                raise DataError(
                    f"{self._files.name}: array {name} does not fit to what the store holds",
                    found=f"{value.dtype.name}, samples of shape {value.shape[1:]}",
                    needed=f"{spec.dtype}, samples of shape {spec.shape}",
                )
            if self._units.get(name, spec.unit) != spec.unit:
                raise DataError(
                    f"{self._files.name}: the declared unit of {name} is not the store's",
                    found=self._units[name],
                    needed=spec.unit,
                )
        for name, value in rows.items():
            store.arrays[f"sample/{name}"].add(value)
        return lengths.pop()


class ArrayZarrReader:
    """Reads samples of fixed shape by number, many at a time and in any order.

    Safe to use from several threads, can be pickled, and works in a process forked from one that has read.

    Parameters
    ----------
    store
        Path of the store's folder, or a zarr store object.
    cache_bytes
        Memory for decoded chunks, in bytes.

    Raises
    ------
    DataError
        There is no committed store of dense arrays, or it is damaged.
    """

    def __init__(self, store: Any, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._store = StoreReader(store, ARRAY_FORMAT, cache_bytes)
        self._paths = {path.removeprefix("sample/"): path for path in self._store.record.arrays}

    def __len__(self) -> int:
        return self._store.record.rows.get("sample", 0)

    @property
    def name(self) -> str:
        """The path of the store, as given."""
        return self._store.files.name

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names of the arrays; ``("x",)`` for a single one that was given without a name."""
        return tuple(self._paths)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one sample of each array."""
        return {name: self._store.record.arrays[path].shape for name, path in self._paths.items()}

    @property
    def units(self) -> dict[str, str]:
        """The unit of each array, ``""`` where there is none."""
        return {name: self._store.record.arrays[path].unit for name, path in self._paths.items()}

    @property
    def metadata(self) -> dict[str, Any]:
        """What the writer was given as ``metadata``."""
        return dict(self._store.record.metadata)

    @property
    def block_size(self) -> int:
        """Samples in four chunks of the array that has the most; see `StoredInBlocks`."""
        return self._store.block_size(len(self), list(self._paths.values()))

    @property
    def cached_samples(self) -> int:
        """Samples whose chunks ``cache_bytes`` holds."""
        return self._store.cached_samples(len(self), list(self._paths.values()))

    def read_many(self, indices: Indices) -> torch.Tensor | dict[str, torch.Tensor]:
        """The samples ``indices``, in the order asked for, repeats allowed.

        Parameters
        ----------
        indices
            (B,) whole numbers from 0 to ``len - 1``.

        Returns
        -------
        Tensor or dict of Tensor
            (B, ...) on the CPU; a mapping if the arrays were written with names.

        Raises
        ------
        DataError
            An index that is negative, too large or no whole number; a chunk that is missing or damaged (the message names
            store, array, chunk and file).
        """
        rows = as_indices(indices, len(self), self.name)
        found = self._store.take({"sample": rows}, list(self._paths.values()))
        tensors = {name: torch.from_numpy(found[path]) for name, path in self._paths.items()}
        return tensors[SINGLE] if self._store.record.extra["single"] else tensors

    def verify(self) -> None:
        """Read and check every byte of the store."""
        self._store.verify()

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}{shape}" for name, shape in self.shapes.items())
        return f"ArrayZarrReader({self.name!r}, {len(self)} samples: {shapes})"


def _as_rows(name: str, value: Array) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise DataError(f"array {name} has no rows to write", found=value.layout, fix="write tensor.to_dense()")
        try:
            rows = value.detach().resolve_neg().cpu().numpy()
        except TypeError as error:  # numpy has no such numbers
            raise DataError(
                f"array {name} has a dtype that the store cannot hold",
                found=value.dtype,
                needed=", ".join(DTYPES),
                fix="write tensor.float(); a model in short numbers takes batches of float32 under MixedPrecisionHook('bf16')",
            ) from error
    else:
        rows = np.asarray(value)
    if rows.ndim == 0:
        raise DataError(f"array {name} has no samples", found="a single number", needed="shape (n, ...)")
    return rows


def _blocks(arrays: Arrays | Iterable[Arrays]) -> Iterator[Arrays]:
    if isinstance(arrays, (torch.Tensor, np.ndarray, Mapping)):
        yield arrays
        return
    for block in arrays:
        if not isinstance(block, (torch.Tensor, np.ndarray, Mapping)):
            raise DataError(
                "not a block of samples", found=type(block).__name__, needed="a tensor, an array, or a mapping of them"
            )
        yield block
