"""What is done to a structure or a batch between the store and the model.

A transform of single structures is any callable from `AtomicData` to `AtomicData`; a transform of batches is any callable from
`Batch` to `Batch`. One that wants random numbers is a `Transform`: it is handed a generator, seeded from the seed, the epoch,
the data set and the index of the structure, so that its draws depend on no thread, worker or order, differ between epochs,
and come again when a run is repeated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import overload

import torch

from nvalchemi.data.atoms import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.neighbors import neighbor_list, neighbor_list_data
from nvalchemi.errors import DataError

PlainTransform = Callable[[AtomicData], AtomicData]


class Transform(ABC):
    """A transform of single structures that takes a random generator.

    Attributes
    ----------
    deterministic
        True for one that gives the same for the same structure at any time; a data set kept in memory applies it once.
    """

    deterministic: bool = False

    @abstractmethod
    def __call__(self, data: AtomicData, generator: torch.Generator) -> AtomicData:
        """The transformed structure.

        Parameters
        ----------
        data
            One structure, not to be changed in place.
        generator
            The only source of random numbers to use.
        """


def apply(transform: Transform | PlainTransform, data: AtomicData, generator: torch.Generator) -> AtomicData:
    """``transform`` of ``data``, with ``generator`` where it takes one.

    Raises
    ------
    DataError
        The transform gave back something else than an `AtomicData`.
    """
    out = transform(data, generator) if isinstance(transform, Transform) else transform(data)
    if not isinstance(out, AtomicData):
        raise DataError(
            f"the transform {name_of(transform)} gave no structure",
            found=type(out).__name__,
            needed="AtomicData",
            fix="return the new structure, for example data.replace(...)",
        )
    return out


def is_deterministic(transform: Transform | PlainTransform) -> bool:
    """Whether a transform says of itself (``deterministic = True``) that it may be applied once and kept."""
    return getattr(transform, "deterministic", False) is True


def name_of(transform: object) -> str:
    """What to call a transform in a message."""
    return getattr(transform, "__name__", type(transform).__name__)


class NeighborList:
    """Edges within a cutoff; works on a structure and on a batch.

    Parameters
    ----------
    cutoff
        Å, at least the model's.
    """

    deterministic = True

    def __init__(self, cutoff: float) -> None:
        self.cutoff = cutoff

    @overload
    def __call__(self, data: AtomicData) -> AtomicData: ...
    @overload
    def __call__(self, data: Batch) -> Batch: ...
    def __call__(self, data: AtomicData | Batch) -> AtomicData | Batch:
        """The structure or batch with ``edge_index``, ``edge_shift`` where periodic, and ``neighbor_cutoff``."""
        return neighbor_list(data, self.cutoff) if isinstance(data, Batch) else neighbor_list_data(data, self.cutoff)

    def __repr__(self) -> str:
        return f"NeighborList({self.cutoff})"
