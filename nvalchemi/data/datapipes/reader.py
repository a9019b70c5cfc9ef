"""What a source of structures must offer: the contract between a store and the data sets on top of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from nvalchemi.data.atoms import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.fields import Level
from nvalchemi.errors import DataError

Indices = Sequence[int] | np.ndarray | torch.Tensor
"""Indices of samples: a list, a range, an array or a tensor of whole numbers."""


@runtime_checkable
class Reads(Protocol):
    """Samples read by number: readers of structures (`Reader`) or of dense arrays (`ArrayZarrReader`), and data sets."""

    def __len__(self) -> int: ...

    def read_many(self, indices: Any) -> Any: ...


@runtime_checkable
class StoredInBlocks(Protocol):
    """A source that decodes samples of neighbouring numbers together, and keeps what it has decoded: what a shuffle by blocks goes by."""

    def __len__(self) -> int: ...

    @property
    def block_size(self) -> int:
        """Samples that are worth reading together: a few chunks of the array that has the most, on the average."""

    @property
    def cached_samples(self) -> int:
        """How many samples, on the average, are kept decoded at a time."""


class Reader(ABC):
    """A source of structures, read by number, many at a time.

    A reader may be used by several threads at once, can be pickled, and works in a process forked from one that has read.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Number of structures."""

    @abstractmethod
    def read_many(self, indices: Indices) -> Batch:
        """The structures ``indices`` as a batch on the CPU, in the order asked for, repeats allowed.

        ``sample_index`` of the batch holds the indices. A field that any structure of the source has is in every batch.

        Raises
        ------
        DataError
            An index that is negative, too large or no whole number; data that are missing or damaged.
        """

    @property
    @abstractmethod
    def name(self) -> str:
        """Where the structures come from, for messages."""

    @property
    @abstractmethod
    def field_names(self) -> tuple[str, ...]:
        """Every field that any structure has."""

    @property
    @abstractmethod
    def levels(self) -> Mapping[str, Level]:
        """The level of each field."""

    @property
    @abstractmethod
    def num_atoms(self) -> np.ndarray:
        """(n,) int64: atoms of each structure."""

    def read(self, index: int) -> AtomicData:
        """One structure."""
        data: AtomicData = self.read_many([index])[0]
        return data


def as_indices(indices: Any, length: int, name: str) -> np.ndarray:
    """Indices as a (n,) int64 array, checked.

    Parameters
    ----------
    indices
        As a caller gave them.
    length
        Number of samples there are.
    name
        Where they are, for messages.

    Raises
    ------
    DataError
        Anything but whole numbers from 0 to ``length - 1``.
    """
    if isinstance(indices, torch.Tensor):
        indices = indices.detach().cpu().numpy()
    try:
        found = np.asarray(indices)
    except (ValueError, TypeError) as error:
        raise DataError(f"{name}: indices must be whole numbers", found=f"{type(indices).__name__}: {error}") from error
    if found.size == 0:
        return np.empty(0, np.int64)
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise DataError(
            f"{name}: indices must be a list of whole numbers",
            found=f"{type(indices).__name__} of {found.dtype}, {found.ndim} dimensions",
            fix="turn a mask into indices with nonzero()" if found.dtype.kind == "b" else None,
        )
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= length:
        raise DataError(
            f"{name}: there is no sample {low if low < 0 else high}",
            found=f"{length} samples",
            needed=f"indices from 0 to {length - 1}" if length else "a store that is not empty",
        )
    return found.astype(np.int64, copy=False)


def ragged(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row numbers of many runs one after the other, and the offset at which each run begins among them.

    Parameters
    ----------
    starts, counts
        (B,) first row and number of rows of each run.

    Returns
    -------
    rows, offsets
        (sum of counts,) and (B + 1,) int64.
    """
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    rows = np.repeat(starts - offsets[:-1], counts)
    rows += np.arange(offsets[-1])
    return rows, offsets
