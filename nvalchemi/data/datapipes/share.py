"""One rank's share of data that are looked at once: every sample on one rank, none repeated, shares of unlike sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any

import torch

from nvalchemi.data.datapipes.loader import DataLoader
from nvalchemi.data.datapipes.pre_sharded import PreShardedSampler
from nvalchemi.data.datapipes.samplers import BatchSampler, IndexSampler, Order, tell_epoch
from nvalchemi.data.datapipes.sharding import gives_all, rebuilt, shard_loader
from nvalchemi.errors import ConfigError


class ShareSampler(IndexSampler):
    """Every ``num_replicas``-th sample from ``rank`` on, in order; the first ranks have one more where it does not divide evenly.

    Parameters
    ----------
    dataset
        The data set, or its length.
    num_replicas, rank
        Number of ranks, and which of them this one is.
    """

    def __init__(self, dataset: Sized | int, num_replicas: int = 1, rank: int = 0) -> None:
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        self.num_replicas, self.rank = num_replicas, rank

    def __len__(self) -> int:
        return len(range(self.rank, self.length, self.num_replicas))

    def epoch_order(self) -> Order:
        stride, rank = self.num_replicas, self.rank
        return lambda positions: positions * stride + rank


class TakingTurns:
    """Every ``num_replicas``-th batch of another batch sampler, from number ``rank`` on.

    Together the ranks have the batches that one process has. A sampler that draws from torch's global random stream draws the same on
    all of them.

    Parameters
    ----------
    batches
        A batch sampler that knows of no ranks.
    num_replicas, rank
        Number of ranks, and which of them this one is.
    """

    def __init__(self, batches: Iterable[Sequence[int]], num_replicas: int, rank: int) -> None:
        self.batches, self.num_replicas, self.rank = batches, num_replicas, rank

    def __iter__(self) -> Iterator[Sequence[int]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return iter(list(islice(self.batches, self.rank, None, self.num_replicas)))

    def set_epoch(self, epoch: int) -> None:
        """Go to the order of ``epoch``, where the batch sampler has one."""
        tell_epoch(self.batches, epoch)


def share_for_validation(data: Iterable[Any], rank: int, num_replicas: int) -> Iterable[Any]:
    """Give this rank's part of ``data``, a loader or a sequence of batches, without a repeat.

    A plain loader is divided sample by sample. One that leaves out samples or has a sampler of its own that knows of no ranks is divided
    batch by batch, so that the ranks together look at what one process looks at.

    Raises
    ------
    ConfigError
        For what cannot be divided, and for a loader that is divided already with samples repeated to fill the last round.
    """
    if isinstance(data, Sequence):
        return data[rank::num_replicas]
    sampler = getattr(data, "sampler", None)
    if isinstance(sampler, PreShardedSampler):  # all that the owner has, once
        share = ShareSampler(sampler.size, sampler.ranks_per_store, sampler.place)
        return rebuilt(data, BatchSampler(share, data.batch_size))  # type: ignore[attr-defined,no-any-return]
    if all(hasattr(sampler, name) for name in ("num_replicas", "rank", "set_epoch")):
        if isinstance(sampler, ShareSampler):
            return data
        if sampler.num_replicas == 1 < num_replicas:  # type: ignore[union-attr]
            return rebuilt(data, TakingTurns(data.batch_sampler, num_replicas, rank))  # type: ignore[attr-defined,no-any-return]
        size = len(data.dataset) if isinstance(getattr(data, "dataset", None), Sized) else 0  # type: ignore[attr-defined]
        if isinstance(sampler, Sized) and len(sampler) * sampler.num_replicas > size:  # type: ignore[attr-defined]
            raise ConfigError(
                "the validation loader repeats samples to fill the last round, and they would count twice",
                found=type(sampler).__name__,
                fix="give a plain loader, which is divided without repeats, or a sampler with drop_last=True",
            )
        return data
    if isinstance(data, torch.utils.data.DataLoader) and isinstance(data.dataset, torch.utils.data.IterableDataset):
        raise ConfigError(
            "validation data of an iterable data set cannot be divided between ranks",
            fix="give a data set with a length, or a list of batches",
        )
    if isinstance(data, DataLoader | torch.utils.data.DataLoader) and data.batch_sampler is not None and not gives_all(data):
        return rebuilt(data, TakingTurns(data.batch_sampler, num_replicas, rank))  # type: ignore[no-any-return]
    shared: Iterable[Any] = shard_loader(data, rank, num_replicas, ShareSampler, {})
    return shared
