"""Batches for ranks whose calls of a model wait for each other: as many on each, though their shares differ in size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from nvalchemi.distributed import Manager
from nvalchemi.distributed.collectives import agree, broadcast
from nvalchemi.training.cursor import to_device
from nvalchemi.training.filler import Filler


def in_step(batches: Iterable[Any], manager: Manager) -> Iterator[Any]:
    """The batches, and then fillers for as long as another rank has batches.

    A filler is the rank's last batch. A rank that has none is sent one by another rank. All ranks must iterate, and to the end.
    """
    own = iter(batches)
    last: Any = None
    while True:
        batch = next(own, None)
        with_batch, without = agree([batch is not None, batch is None and last is None], manager)
        if not with_batch:
            return
        if without:  # only in the first round
            ranks = agree([float(batch is not None and rank == manager.rank) for rank in range(manager.world_size)], manager)
            source = next(rank for rank, has in enumerate(ranks) if has)
            # in a list: a bare tensor would go as one, of a shape that nobody else knows
            (sent,) = broadcast([to_device(batch, torch.device("cpu"))] if manager.rank == source else None, manager, source)
            last = sent if batch is None else last
        if batch is not None:
            last = batch
            yield batch
        else:
            yield Filler(last)
