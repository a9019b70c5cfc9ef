"""One order of an epoch on any number of ranks, and what is left of it as a loader."""

from __future__ import annotations

from typing import Any

import torch.utils.data

from nvalchemi.data.datapipes.divisible import Divisible
from nvalchemi.data.datapipes.loader import DataLoader
from nvalchemi.data.datapipes.multi_samplers import ShuffledMixture
from nvalchemi.data.datapipes.multidataset import MultiDataset
from nvalchemi.data.datapipes.samplers import BatchSampler, RandomSampler, SequentialSampler
from nvalchemi.data.datapipes.sharding import is_plain, rebuilt


def in_one_order(loader: Any, seed: int = 0) -> Any:
    """The loader with an order that any number of ranks can divide: torch's, where it was not given a sampler, takes this package's.

    Torch's own shuffle draws its order from a random stream, which no other number of ranks and no later epoch can repeat. Any other
    loader stays as it is.

    Parameters
    ----------
    loader
        Any loader.
    seed
        Of a shuffled order, where the loader has no generator.
    """
    if not isinstance(loader, torch.utils.data.DataLoader) or type(loader).__iter__ is not torch.utils.data.DataLoader.__iter__:
        return loader
    batches = loader.batch_sampler
    if type(batches) is not torch.utils.data.BatchSampler or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return loader
    sampler: Any = batches.sampler
    if isinstance(sampler, Divisible):
        return rebuilt(loader, BatchSampler(batches.sampler, batches.batch_size, batches.drop_last))
    if not is_plain(sampler):
        return loader
    data: Any = loader.dataset
    order: Any = SequentialSampler(data)
    if isinstance(sampler, torch.utils.data.RandomSampler):
        generator = sampler.generator or loader.generator
        seed = seed if generator is None else generator.initial_seed()
        if isinstance(data, MultiDataset):
            mixture = ShuffledMixture(data, batches.batch_size, seed=seed, drop_last=batches.drop_last)
            return rebuilt(loader, mixture)
        order = RandomSampler(data, seed)
    return rebuilt(loader, BatchSampler(order, batches.batch_size, batches.drop_last))


def division_of(loader: Any) -> Divisible | None:
    """The loader's batch sampler, where what is left of its epoch can be divided anew."""
    if not isinstance(loader, DataLoader | torch.utils.data.DataLoader):
        return None
    batches: Any = loader.batch_sampler
    if isinstance(batches, BatchSampler) and not isinstance(batches.sampler, Divisible):
        return None
    return batches if isinstance(batches, Divisible) else None


def rest_of(loader: Any, samples: int) -> Any:
    """A loader of what is left of the current epoch once its first ``samples`` samples, of all ranks together, have been used.

    Parameters
    ----------
    loader
        One of which `division_of` gives the batches.
    samples
        Position in the order of the epoch.
    """
    batches = division_of(loader)
    assert batches is not None
    return rebuilt(loader, batches.after(samples))
