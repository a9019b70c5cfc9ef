"""A data set that is resident in memory, for sets that fit: nothing is read or decoded during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi.data.atoms import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.dataset import BaseDataset
from nvalchemi.data.datapipes.pipeline import Samples, Transforms, cast, check_finite, map_dense, transformed
from nvalchemi.data.datapipes.reader import Reads, ragged
from nvalchemi.data.fields import Level
from nvalchemi.data.transforms import is_deterministic
from nvalchemi.errors import ConfigError, DataError


class InMemoryDataset(BaseDataset):
    """All samples in memory at once, cut out by index.

    Transforms that say they are deterministic (`NeighborList` does) and stand before any other are applied once, while the data set is
    filled; so are the cast and the check of positions. What is left is done to each batch.

    Parameters
    ----------
    source
        Structures (a list of `AtomicData`, or a `Batch`); a reader, whose samples are all read; or dense data: a tensor or array
        (n, ...), or a dict of them.
    device, transforms, dtype, seed, check_finite
        See `BaseDataset`. The samples stay on the CPU; a loader brings each batch to ``device``.
    name
        What to call the data set in messages; the reader's name otherwise.

    Notes
    -----
    The fields are those that any structure has. A batch in which no structure has one of them still has it, with ``present`` all False.
    """

    def __init__(
        self,
        source: Sequence[AtomicData] | Batch | Reads | Tensor | NDArray[Any] | Mapping[str, Any],
        device: torch.device | str = "cpu",
        transforms: Transforms = (),
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        check_finite: bool = True,
        name: str | None = None,
    ) -> None:
        name = name or str(getattr(source, "name", None) or "memory")  # a tensor has a name too, which is None
        super().__init__(name, device, transforms, dtype=dtype, seed=seed, check_finite=check_finite)
        self._resident = self._filled(_all_samples(source))

    def _filled(self, samples: Samples) -> _Resident:
        idx = np.arange(len(next(iter(samples.values()))) if isinstance(samples, dict) else len(samples))
        if isinstance(samples, Batch):  # numbered anew, and not in the caller's object
            samples = samples.replace()
            samples.sample_index, samples.dataset_index, samples.dataset_names = torch.from_numpy(idx), None, (self.name,)
        if self.dtype is not None:
            samples = cast(samples, self.dtype)
        once = tuple(takewhile(is_deterministic, self.transforms))
        samples = transformed(samples, once, idx, (self.seed,))
        self.transforms = self.transforms[len(once) :]
        if self.check_finite:
            check_finite(samples, idx, self.name)
        return _Structures(samples, self.name) if isinstance(samples, Batch) else _Dense(samples)

    def __len__(self) -> int:
        return self._resident.length

    @property
    def immediate(self) -> bool:  # type: ignore[override]
        """True unless transforms are left to be done to each batch."""
        return not self.transforms

    @property
    def field_names(self) -> tuple[str, ...]:
        return self._resident.field_names

    @property
    def num_atoms(self) -> NDArray[np.int64]:
        if not isinstance(self._resident, _Structures):
            raise DataError(f"{self.name} holds no structures, so they have no atoms to count")
        return self._resident.num_atoms

    def _read(self, indices: NDArray[np.int64]) -> Samples:
        return self._resident.take(indices)

    def _finish(self, samples: Samples, idx: NDArray[np.int64], key: tuple[int, ...]) -> Samples:
        # Without transforms everything was done when the data set was filled.
        return super()._finish(samples, idx, key) if self.transforms else samples


class _Resident(Protocol):
    length: int
    field_names: tuple[str, ...]

    def take(self, idx: NDArray[np.int64]) -> Samples: ...


class _Structures:
    """A batch of everything as NumPy arrays: cutting rows out of these takes half the time that tensors do, on small batches a third."""

    def __init__(self, batch: Batch, name: str) -> None:
        batch = batch.to("cpu")
        self.length, self.field_names, self.levels = batch.num_graphs, batch.field_names, batch.levels
        self.names, self.cutoff = (name,), batch.neighbor_cutoff
        offsets = batch.atom_offsets.numpy()
        self.num_atoms, self.starts = np.diff(offsets), offsets[:-1].copy()
        arrays = {field: tensor.detach().contiguous().numpy() for field, tensor in batch.fields.items()}
        self.system = {field: array for field, array in arrays.items() if self.levels[field] is Level.SYSTEM}
        self.atom = {field: array for field, array in arrays.items() if self.levels[field] is Level.ATOM}
        self.present = {field: mask.numpy() for field, mask in batch.present.items()}
        self.edge: dict[str, NDArray[Any]] = {}
        if batch.edge_offsets is not None:
            ends = batch.edge_offsets.numpy()
            self.num_edges, self.edge_ends = np.diff(ends), ends.tolist()
            self.edge = {field: array for field, array in arrays.items() if self.levels[field] is Level.EDGE}
            # Counted from the first atom of each structure, in half the memory.
            self.edge["edge_index"] = (arrays["edge_index"] - np.repeat(self.starts, self.num_edges)).astype(np.int32)

    def take(self, idx: NDArray[np.int64]) -> Batch:
        counts = self.num_atoms[idx]
        rows, offsets = ragged(self.starts[idx], counts)
        fields = {}
        for field, array in self.atom.items():
            fields[field] = torch.from_numpy(array.take(rows, 0))
        for field, array in self.system.items():
            fields[field] = torch.from_numpy(array.take(idx, 0))
        edge_offsets = None
        if self.edge:
            edge_offsets = self._take_edges(idx, offsets, fields)
        masks = {field: mask.take(idx) for field, mask in self.present.items()}
        batch = Batch(
            {field: fields[field] for field in self.field_names},
            self.levels,
            torch.from_numpy(offsets),
            edge_offsets,
            {field: torch.from_numpy(mask) for field, mask in masks.items() if not mask.all()},
            torch.from_numpy(idx),
            None,
            self.names,
            self.cutoff,
        )
        # Made here, in the loader's thread, rather than in the model's.
        batch._batch_idx = torch.from_numpy(np.repeat(np.arange(len(idx)), counts))
        return batch

    def _take_edges(self, idx: NDArray[np.int64], atom_offsets: NDArray[np.int64], fields: dict[str, Tensor]) -> Tensor:
        counts = self.num_edges[idx]
        # Edges of a structure are many: joining slices is faster than gathering rows one by one.
        pieces = [slice(self.edge_ends[i], self.edge_ends[i + 1]) for i in idx.tolist()] or [slice(0, 0)]
        for field, array in self.edge.items():
            if field == "edge_index":
                local = np.concatenate([array[:, piece] for piece in pieces], axis=1)
                fields[field] = torch.from_numpy(local + np.repeat(atom_offsets[:-1], counts))
            else:
                fields[field] = torch.from_numpy(np.concatenate([array[piece] for piece in pieces]))
        offsets = np.zeros(len(counts) + 1, np.int64)
        counts.cumsum(out=offsets[1:])
        return torch.from_numpy(offsets)


class _Dense:
    """One tensor or a dict of them, with a row for each sample.

    Cut out by torch, whose memory is aligned to 64 bytes: the last bits of a matrix product may depend on the alignment of the rows.
    """

    def __init__(self, samples: Tensor | dict[str, Tensor]) -> None:
        self.samples = map_dense(samples, lambda tensor: tensor.detach().cpu().contiguous())
        parts = {} if isinstance(self.samples, Tensor) else self.samples
        self.field_names = tuple(parts)
        self.length = len(next(iter(parts.values()), self.samples))

    def take(self, idx: NDArray[np.int64]) -> Tensor | dict[str, Tensor]:
        rows = torch.from_numpy(idx)
        return map_dense(self.samples, lambda tensor: tensor.index_select(0, rows))


def _all_samples(source: Any) -> Samples:
    """Every sample of any source that `InMemoryDataset` takes, as one batch or as dense tensors."""
    if isinstance(source, Batch):
        return source.to("cpu")
    if isinstance(source, Tensor | np.ndarray):
        return _rows("the array", source)
    if isinstance(source, Mapping):
        return _same_length({field: _rows(field, value) for field, value in source.items()})
    if isinstance(source, Reads):
        if not len(source):
            raise DataError(f"{getattr(source, 'name', 'the reader')} holds no samples")
        return source.read_many(np.arange(len(source)))  # type: ignore[no-any-return]
    if isinstance(source, Sequence) and all(isinstance(data, AtomicData) for data in source):
        return Batch.from_data_list(source)
    raise ConfigError(
        "an InMemoryDataset cannot be filled from this",
        found=type(source).__name__,
        needed="a list of AtomicData, a Batch, a reader, a tensor or a dict of tensors",
    )


def _rows(field: str, value: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(value).cpu()
    except (TypeError, ValueError) as error:  # words, objects, numbers in another machine's order of bytes
        raise DataError(
            f"{field} cannot become a tensor",
            found=f"{getattr(value, 'dtype', type(value).__name__)}",
            needed="numbers as torch has them",
            fix="convert them first, such as by array.astype('float32')",
        ) from error
    if tensor.layout != torch.strided:
        raise DataError(f"{field} has no rows to cut out", found=tensor.layout, fix="give tensor.to_dense()")
    if tensor.dim() == 0 or not len(tensor):
        raise DataError(f"{field} holds no samples", found=f"shape {tuple(tensor.shape)}", needed="(n, ...) with n at least 1")
    return tensor


def _same_length(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    lengths = {field: len(tensor) for field, tensor in parts.items()}
    if len(set(lengths.values())) != 1:
        raise DataError("the arrays of a data set have a row for each sample", found=lengths or "no arrays", needed="one length")
    return parts
