"""Where chains are kept: rows of one tensor, or structures of unequal sizes; both read and written by slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.fields import Level
from nvalchemi.distributed import Manager, exchange, gather
from nvalchemi.errors import DataError

Samples = Tensor | Batch


class Chains(ABC):
    """The samples of all slots of one rank."""

    @abstractmethod
    def __len__(self) -> int:
        """How many slots."""

    @abstractmethod
    def read(self, slots: Tensor) -> Any:
        """Copies of the samples at ``slots``."""

    @abstractmethod
    def write(self, slots: Tensor, samples: Any) -> None:
        """Put samples, which fit, at ``slots``; of equal slots the last one stays."""

    @abstractmethod
    def exchanged(self, order: Tensor, counts: Sequence[int], back: Sequence[int], manager: Manager) -> Chains:
        """The chains that the ranks send here: taken in ``order``, ``counts[r]`` of ours go to rank r, ``back[r]`` come from it."""

    @abstractmethod
    def joined(self, samples: Any) -> Chains:
        """These chains and, behind them, ``samples``."""

    @abstractmethod
    def plain(self) -> Any:
        """All samples as tensors and plain containers, sharing no memory."""


class Rows(Chains):
    """Chains of fixed shape: one tensor (size, ...)."""

    def __init__(self, samples: Tensor) -> None:
        self.samples = samples

    @classmethod
    def of(cls, samples: Tensor) -> Rows:
        """Rows that share no memory with these."""
        return cls(samples.detach().clone(memory_format=torch.contiguous_format))

    def __len__(self) -> int:
        return self.samples.shape[0]

    def read(self, slots: Tensor) -> Tensor:
        return self.samples.index_select(0, slots)

    def write(self, slots: Tensor, samples: Any) -> None:
        if not isinstance(samples, Tensor) or samples.shape[1:] != self.samples.shape[1:]:
            raise DataError(
                "samples of another kind than the chains",
                found=tuple(samples.shape) if isinstance(samples, Tensor) else type(samples).__name__,
                needed=f"(n, {', '.join(str(n) for n in self.samples.shape[1:])})",
            )
        samples = samples.detach().to(self.samples)
        # a draw of more than there are slots repeats them, each stretch of as many only once
        for ours, given in zip(slots.split(len(self)), samples.split(len(self)), strict=True):
            self.samples.index_copy_(0, ours, given)

    def exchanged(self, order: Tensor, counts: Sequence[int], back: Sequence[int], manager: Manager) -> Rows:
        return Rows(exchange(self.samples.index_select(0, order), counts, back, manager))

    def joined(self, samples: Tensor) -> Rows:
        return Rows(torch.cat([self.samples, samples]))

    def plain(self) -> Tensor:
        return self.samples.clone()


class Structures(Chains):
    """Chains of atoms: a list of structures, which may differ in size from slot to slot and from write to write."""

    def __init__(self, structures: list[AtomicData]) -> None:
        self.structures = structures

    @classmethod
    def of(cls, batch: Batch) -> Structures:
        """A batch, cut into its structures; positions are cut from their graph."""
        own = batch.replace(positions=batch.positions.detach())
        return cls([structure.clone() for structure in own.to_data_list()])

    def __len__(self) -> int:
        return len(self.structures)

    def read(self, slots: Tensor) -> Batch:
        return Batch.from_data_list([self.structures[slot] for slot in slots.tolist()])

    def write(self, slots: Tensor, samples: Any) -> None:
        if not isinstance(samples, Batch):
            raise DataError("samples of another kind than the chains", found=type(samples).__name__, needed="a Batch")
        first = self.structures[0].positions
        if samples.dtype != first.dtype or samples.device != first.device:
            samples = samples.cast(first.dtype).to(first.device)
        for slot, structure in zip(slots.tolist(), Structures.of(samples).structures, strict=True):
            self.structures[slot] = structure

    def exchanged(self, order: Tensor, counts: Sequence[int], back: Sequence[int], manager: Manager) -> Structures:
        device = self.structures[0].positions.device
        ends = list(accumulate(counts, initial=0))
        slots = order.tolist()
        # structures have no common shape: every rank hears of all, in plain tensors, and keeps what is for it
        parcels = [
            batch_to_plain(Batch.from_data_list([self.structures[slot] for slot in slots[start:end]]).to("cpu"))
            if end > start
            else None
            for start, end in pairwise(ends)
        ]
        mine = [sent[manager.rank] for sent in gather(parcels, manager)]
        return Structures(
            [s for parcel in mine if parcel is not None for s in Structures.of(batch_from_plain(parcel).to(device)).structures]
        )

    def joined(self, samples: Batch) -> Structures:
        return Structures([*self.structures, *Structures.of(samples).structures])

    def plain(self) -> dict[str, Any]:
        return batch_to_plain(Batch.from_data_list(self.structures))


def chains_of(samples: Samples) -> Chains:
    """Chains that start at ``samples``, sharing no memory with them."""
    if isinstance(samples, Batch):
        return Structures.of(samples)
    return Rows.of(samples)


def batch_to_plain(batch: Batch) -> dict[str, Any]:
    """What a batch is made of, in tensors and plain containers: nothing in it runs code when it is loaded."""
    return {
        "fields": dict(batch.fields),
        "levels": {name: str(Level(level)) for name, level in batch.levels.items() if name in batch.fields},
        "atom_offsets": batch.atom_offsets,
        "edge_offsets": batch.edge_offsets,
        "present": dict(batch.present),
        "neighbor_cutoff": batch.neighbor_cutoff,
    }


def batch_from_plain(state: Mapping[str, Any]) -> Batch:
    """The batch of which `batch_to_plain` was taken."""
    return Batch(
        dict(state["fields"]),
        {name: Level(level) for name, level in state["levels"].items()},
        state["atom_offsets"],
        state["edge_offsets"],
        dict(state["present"]),
        neighbor_cutoff=state["neighbor_cutoff"],
    )


def pooled(saved: Sequence[Any], slots: Sequence[int]) -> Any:
    """What `Chains.plain` would give of the chains ``slots``, counted through what it gave of several sets of them."""
    if isinstance(saved[0], Tensor):
        return torch.cat(list(saved))[torch.tensor(slots)]
    structures = [structure for state in saved for structure in batch_from_plain(state).to_data_list()]
    return batch_to_plain(Batch.from_data_list([structures[slot] for slot in slots]))
