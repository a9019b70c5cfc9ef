"""Data sets: samples by index, transformed and checked, from a store or from memory.

Every data set reads many samples at once (`read_many`), which is what the loader calls. It can stand in ``torch.utils.data.DataLoader`` too,
with or without worker processes: give that loader ``collate_fn=collate``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi.data.atoms import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.pipeline import Samples, Transforms, add_provenance, cast, check_finite, transformed
from nvalchemi.data.datapipes.reader import Indices, Reads, as_indices
from nvalchemi.errors import ConfigError, DataError


class BaseDataset(ABC):
    """What all data sets share: transforms, checks, and access by index.

    Parameters
    ----------
    name
        What to call the data set in messages.
    device
        Where a loader delivers its batches. Reading itself is on the CPU.
    transforms
        Callables from `AtomicData` to `AtomicData` (or a `Transform`, for random numbers; of dense data, from the tensor, or dict of
        tensors, of one sample), applied in order to every sample that is read.
    dtype
        Floating dtype of the batches (float32 or float64); energies stay float64. None leaves it as stored.
    seed
        Of the transforms' random numbers.
    check_finite
        Check that the positions (of dense data, all floating numbers) of every batch are finite, and name the sample where not.
    """

    #: Whether a batch costs less to make than to hand over from another thread. A loader on the CPU then makes it when it is asked for.
    immediate: bool = False

    def __init__(
        self,
        name: str,
        device: torch.device | str = "cpu",
        transforms: Transforms = (),
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        check_finite: bool = True,
    ) -> None:
        if callable(transforms) or not all(callable(transform) for transform in transforms):
            raise ConfigError("transforms is a sequence of callables", found=repr(transforms), fix="transforms=[...]")
        if dtype not in (None, torch.float32, torch.float64):
            raise ConfigError(
                "batches are made in float32 or float64",
                found=dtype,
                fix="for shorter numbers let the model compute in them: MixedPrecisionHook('bf16'), or FSDP2Hook(param_dtype=...)",
            )
        self.name = name
        self.device = torch.device(device)
        self.transforms = tuple(transforms)
        self.dtype, self.seed, self.check_finite = dtype, seed, check_finite
        # Shared memory, so that worker processes that live on between epochs see the new one.
        self._epoch = torch.tensor(-1).share_memory_() if self.transforms else torch.tensor(-1)

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @property
    @abstractmethod
    def field_names(self) -> tuple[str, ...]:
        """Names of the fields of the source."""

    @property
    @abstractmethod
    def num_atoms(self) -> NDArray[np.int64]:
        """(n,) int64: atoms of each structure. DataError where the samples are dense arrays."""

    @abstractmethod
    def _read(self, indices: NDArray[np.int64]) -> Samples:
        """The samples as they are stored, on the CPU, in the asked-for order; ``indices`` have been checked."""

    def read_many(self, indices: Indices, *, epoch: int = 0, stream: int = 0) -> Any:
        """Samples ``indices``, in that order, on the CPU.

        Parameters
        ----------
        indices
            Integers from 0 to ``len(self) - 1``; repeats are allowed.
        epoch, stream
            What the random numbers of transforms depend on, beside the seed and the index of the sample; ``stream`` tells apart data
            sets that are read together.

        Returns
        -------
        Batch
            With ``sample_index``; of dense data a tensor (len(indices), ...) or a dict of them.
        """
        idx = as_indices(indices, len(self), self.name)
        return self._finish(self._read(idx), idx, (self.seed, epoch, stream))

    def _finish(self, samples: Samples, idx: NDArray[np.int64], key: tuple[int, ...]) -> Samples:
        samples = add_provenance(samples, idx, self.name)
        if self.dtype is not None:
            samples = cast(samples, self.dtype)
        if self.transforms:
            samples = transformed(samples, self.transforms, idx, key)
        if self.check_finite:
            check_finite(samples, idx, self.name)
        return samples

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to reads by ``dataset[i]``, which torch's loader makes; its worker processes see it too."""
        self._epoch.fill_(epoch)

    def __getitem__(self, index: int) -> Any:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"{self.name} has {length} samples, so there is none at {index}")
        return one_sample(self.__getitems__([index % length]))

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """What torch's loader calls for a batch: `read_many` of the epoch last told by `set_epoch`.

        Where none was told, transforms draw from a seed that is drawn from torch's generator of this process: torch seeds it anew in
        every worker and every epoch, and ``torch.manual_seed`` makes the run repeatable.
        """
        epoch = int(self._epoch)
        if epoch >= 0 or not self.transforms:
            return self.read_many(indices, epoch=max(epoch, 0))
        idx = as_indices(indices, len(self), self.name)
        return self._finish(self._read(idx), idx, (self.seed, int(torch.randint(2**62, ()))))

    def require_fields(self, *names: str) -> None:
        """DataError, listing what is wanted and what is there, unless the data have all these fields."""
        missing = [name for name in names if name not in self.field_names]
        if missing:
            raise DataError(
                f"{self.name} lacks {', '.join(missing)}",
                found=f"the fields {', '.join(self.field_names) or 'of one unnamed array'}",
                needed=", ".join(names),
                fix="convert the data with the right key, or leave out the term that wants it",
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}: {len(self)} samples, {self.device})"


class Dataset(BaseDataset):
    """The samples of a reader, read as they are asked for.

    Parameters
    ----------
    reader
        `AtomicDataZarrReader`, or `ArrayZarrReader` for dense arrays.
    device, transforms, dtype, seed, check_finite
        See `BaseDataset`.

    Examples
    --------
    >>> dataset = Dataset(AtomicDataZarrReader("train.zarr"), device="cuda", transforms=[NeighborList(5.0)])  # doctest: +SKIP
    """

    def __init__(
        self,
        reader: Reads,
        device: torch.device | str = "cpu",
        transforms: Transforms = (),
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        check_finite: bool = True,
    ) -> None:
        if not isinstance(reader, Reads):
            raise ConfigError(
                "a Dataset reads through a reader",
                found=type(reader).__name__,
                needed="AtomicDataZarrReader or ArrayZarrReader",
                fix="Dataset(AtomicDataZarrReader(path)), or InMemoryDataset(...) for structures or tensors at hand",
            )
        name = str(getattr(reader, "name", type(reader).__name__))
        super().__init__(name, device, transforms, dtype=dtype, seed=seed, check_finite=check_finite)
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader)

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(getattr(self.reader, "field_names", ()))

    @property
    def num_atoms(self) -> NDArray[np.int64]:
        counts = getattr(self.reader, "num_atoms", None)
        if counts is None:
            raise DataError(f"{self.name} holds no structures, so they have no atoms to count")
        return np.asarray(counts)

    def _read(self, indices: NDArray[np.int64]) -> Samples:
        return self.reader.read_many(indices)  # type: ignore[no-any-return]


def one_sample(samples: Samples) -> Any:
    """The only sample of a batch, without the batch dimension."""
    if isinstance(samples, Mapping):
        return {name: value[0] for name, value in samples.items()}
    return samples[0]


def collate(samples: Any) -> Any:
    """``collate_fn`` of ``torch.utils.data.DataLoader`` over the data sets of this package.

    Parameters
    ----------
    samples
        What the data set gave for a batch: a `Batch` or tensors as they are, or a list of `AtomicData`, tensors or dicts to be put together.
    """
    if not isinstance(samples, list):
        return samples
    first = samples[0]
    if isinstance(first, AtomicData):
        return Batch.from_data_list(samples)
    if isinstance(first, Tensor):
        return torch.stack(samples)
    if isinstance(first, Mapping):
        return {name: torch.stack([sample[name] for sample in samples]) for name in first}
    raise DataError(
        "samples that cannot be put together", found=type(first).__name__, needed="AtomicData, tensors or dicts of tensors"
    )
