"""One order on any number of ranks, and the rest of an epoch as a loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import RandomSampler as TorchRandomSampler
from torch.utils.data import TensorDataset, WeightedRandomSampler

from nvalchemi.data.datapipes import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    InMemoryDataset,
    MultiDataset,
    MultiDatasetBatchSampler,
    RandomSampler,
    SequentialSampler,
    collate,
    shard_loader,
)
from nvalchemi.data.datapipes.rest import division_of, in_one_order, rest_of
from nvalchemi.data.datapipes.share import share_for_validation
from nvalchemi.errors import ConfigError


def several() -> MultiDataset:
    return MultiDataset(InMemoryDataset(torch.arange(27)), InMemoryDataset(torch.arange(27, 40)))


def batches(loader: Any) -> list[list[int]]:
    return [[int(value) for value in (batch[0] if isinstance(batch, list) else batch)] for batch in loader]


KINDS = {
    "ours": lambda size: DataLoader(InMemoryDataset(torch.arange(40)), batch_size=size, shuffle=True, seed=3),
    "several": lambda size: DataLoader(several(), batch_size=size, shuffle=True, seed=3),
    "torch's": lambda size: TorchLoader(TensorDataset(torch.arange(40)), batch_size=size, shuffle=True),
    "torch's of several": lambda size: TorchLoader(several(), batch_size=size, shuffle=True, collate_fn=collate),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_has_the_global_batches_of_many(kind: str) -> None:
    """B23: three different orders; a step of 2 ranks is a step of one process with batches twice as large."""
    alone = in_one_order(KINDS[kind](8), seed=3)
    ranks = [shard_loader(in_one_order(KINDS[kind](4), seed=3), rank, 2) for rank in range(2)]
    orders = []
    for epoch in range(3):
        for loader in (alone, *ranks):
            loader.batch_sampler.set_epoch(epoch)
        whole, parts = batches(alone), [batches(loader) for loader in ranks]
        assert len(whole) == len(parts[0]) == len(parts[1]) == 5
        assert [set(batch) for batch in whole] == [{*a, *b} for a, b in zip(*parts, strict=True)]
        orders.append(tuple(i for batch in whole for i in batch))
        assert sorted(orders[-1]) == list(range(40))
    assert len(set(orders)) == 3


def test_a_shuffled_loader_of_several_may_still_be_divided_in_any_way() -> None:
    loader = DataLoader(several(), batch_size=4, shuffle=True, seed=3)
    assert isinstance(shard_loader(loader, 1, 2, DistributedSampler).sampler, DistributedSampler)
    mixture = shard_loader(loader, 1, 2, None, {"weights": [1, 1], "epoch_policy": "max_size", "seed": 1234}).batch_sampler
    assert (type(mixture), mixture.seed, mixture.remaining()) == (MultiDatasetBatchSampler, 1234, 54)
    assert type(shard_loader(loader, 1, 2).batch_sampler) is MultiDatasetBatchSampler
    assert "ShuffledMixture" in repr(loader)


def test_torchs_loader_takes_the_order_of_ours() -> None:
    data = TensorDataset(torch.arange(40))
    ours = batches(DataLoader(InMemoryDataset(torch.arange(40)), batch_size=4, shuffle=True, seed=7))
    assert batches(in_one_order(TorchLoader(data, batch_size=4, shuffle=True), seed=7)) == ours
    generator = torch.Generator().manual_seed(7)
    assert batches(in_one_order(TorchLoader(data, batch_size=4, shuffle=True, generator=generator))) == ours
    short = in_one_order(TorchLoader(data, batch_size=7, drop_last=True))
    assert isinstance(short.batch_sampler.sampler, SequentialSampler) and len(batches(short)) == 5
    divided = in_one_order(TorchLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, 1)))
    assert isinstance(divided.batch_sampler, BatchSampler) and divided.batch_sampler.sampler.rank == 1


class Own(TorchLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


def test_what_has_an_order_of_its_own_keeps_it() -> None:
    data = TensorDataset(torch.arange(4))
    for loader in (
        [1, 2],
        DataLoader(several(), batch_size=4),
        Own(data, shuffle=True),
        TorchLoader(data, batch_size=None),
        TorchLoader(data, sampler=WeightedRandomSampler([1.0] * 4, 4)),
        TorchLoader(data, sampler=TorchRandomSampler(data, replacement=True)),
        TorchLoader(data, batch_sampler=[[0, 1], [2]]),
    ):
        assert in_one_order(loader) is loader
    with pytest.raises(ConfigError, match="RandomSampler knows of no ranks"):
        shard_loader(TorchLoader(data, sampler=TorchRandomSampler(data, num_samples=2)), 0, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_an_epoch_as_a_loader(kind: str) -> None:
    loader = in_one_order(KINDS[kind](4), seed=3)
    (loader if isinstance(loader, DataLoader) else loader.batch_sampler).set_epoch(1)
    whole = batches(loader)
    rest = rest_of(loader, 12)
    assert type(rest) is type(loader) and rest.dataset is loader.dataset
    assert batches(rest) == whole[3:]
    assert batches(rest_of(loader, 40)) == [] == batches(rest_of(rest, 28))


def test_what_cannot_be_divided_anew() -> None:
    data = InMemoryDataset(torch.arange(4))
    for loader in ([1], DataLoader(data, sampler=[3, 1]), DataLoader(data, batch_sampler=[[3], [1]]), TorchLoader(data)):
        assert division_of(loader) is None
    assert division_of(DataLoader(data, sampler=RandomSampler(4))) is not None


@pytest.mark.parametrize(
    "loader", [DataLoader(several(), 4, shuffle=True), TorchLoader(several(), 4, shuffle=True, collate_fn=collate)]
)
def test_validation_on_several_data_sets_counts_each_sample_once(loader: Any) -> None:
    """B27: also where the loader has made a mixture of its own."""
    for ranks in (2, 3):
        found = [i for rank in range(ranks) for batch in batches(share_for_validation(loader, rank, ranks)) for i in batch]
        assert sorted(found) == list(range(40))
