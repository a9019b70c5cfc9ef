from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler as TorchDistributedSampler
from torch.utils.data import IterableDataset, TensorDataset

from nvalchemi.data.datapipes import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    InMemoryDataset,
    MultiDataset,
    MultiDatasetBatchSampler,
    MultiDatasetSampler,
    shard_loader,
)
from nvalchemi.errors import ConfigError


def values(n: int = 40, start: int = 0) -> InMemoryDataset:
    return InMemoryDataset(torch.arange(start, start + n))


def seen(loader: Any) -> list[int]:
    return [int(value) for batch in loader for value in (batch[0] if isinstance(batch, list) else batch)]


def parts(loader: Any, replicas: int, *args: Any) -> list[list[int]]:
    return [seen(shard_loader(loader, rank, replicas, *args)) for rank in range(replicas)]


# -- the four outcomes, in their order ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [DistributedSampler(40, 2, 1), TorchDistributedSampler(range(40), 2, 1)])
def test_a_loader_that_knows_its_rank_stays(sampler: Any) -> None:
    loader = DataLoader(values(), batch_size=4, sampler=sampler)
    assert shard_loader(loader, 1, 2, MultiDatasetSampler, {"unknown": 1}) is loader
    theirs = TorchLoader(TensorDataset(torch.arange(40)), batch_size=4, sampler=sampler)
    assert shard_loader(theirs, 1, 2) is theirs


@pytest.mark.parametrize(("replicas", "mine", "told"), [(2, 1, False), (2, 0, True), (4, 1, True)])
def test_a_sampler_of_another_rank_stays_and_is_told(caplog: Any, replicas: int, mine: int, told: bool) -> None:
    """Every rank with the sampler of rank 0 trains on the same samples."""
    loader = DataLoader(values(), batch_size=4, sampler=DistributedSampler(40, replicas, mine))
    assert shard_loader(loader, 1, 2) is loader
    assert (f"DistributedSampler is that of rank {mine} of {replicas}, and this is rank 1 of 2" in caplog.text) == told


class Blocks:
    """A batch sampler with names of its own."""

    def __init__(self, data: Any, size: int, world: int, mine: int, stop: int | None = None) -> None:
        self.stop = len(data) if stop is None else stop
        self.size, self.world, self.mine = size, world, mine

    def __iter__(self):
        for start in range(self.mine * self.size, self.stop, self.size * self.world):
            yield list(range(start, min(start + self.size, self.stop)))

    def __len__(self) -> int:
        return len(list(iter(self)))


def test_a_class_of_ones_own_gets_what_its_signature_names() -> None:
    loader = DataLoader(values(), batch_size=4, shuffle=True, seed=9)
    blocks = shard_loader(loader, 1, 2, Blocks, {"size": 5, "world": 2, "mine": 1})
    assert next(iter(blocks)).tolist() == [5, 6, 7, 8, 9]
    given_: dict[str, Any] = {}

    def factory(dataset: Any, rank: int, num_replicas: int, seed: int, drop_last: bool, reverse: bool = False) -> Any:
        given_.update(rank=rank, num_replicas=num_replicas, seed=seed, drop_last=drop_last, reverse=reverse)
        return range(rank, len(dataset), num_replicas)

    sharded = shard_loader(loader, 1, 2, factory, {"reverse": True, "seed": 3})
    assert given_ == {"rank": 1, "num_replicas": 2, "seed": 3, "drop_last": False, "reverse": True}
    assert next(iter(sharded)).tolist() == [1, 3, 5, 7]
    both = DataLoader(MultiDataset(values(), values(10, 40)), batch_size=4)
    assert isinstance(
        shard_loader(both, 0, 2, DistributedSampler).sampler, DistributedSampler
    )  # before the outcome of a MultiDataset
    with pytest.raises(ConfigError, match="Blocks does not take length"):
        shard_loader(loader, 0, 2, Blocks, {"length": 5})


def test_a_multidataset_gets_its_batch_sampler() -> None:
    loader = DataLoader(MultiDataset(values(30), values(10, 30)), batch_size=4, shuffle=True, seed=2)
    sharded = shard_loader(loader, 1, 2)
    assert isinstance(sharded.batch_sampler, MultiDatasetBatchSampler)
    assert (sharded.batch_sampler.seed, sharded.batch_sampler.shuffle, sharded.batch_size) == (2, True, 4)
    assert sorted(chain(*parts(loader, 2))) == list(range(40))
    options = {"epoch_policy": "max_size", "replacement": True, "seed": 1234}
    assert shard_loader(loader, 0, 2, None, options).batch_sampler.seed == 1234
    theirs = TorchLoader(loader.dataset, batch_size=4, collate_fn=lambda x: x)
    assert sorted(chain(*parts(theirs, 2))) == list(range(40))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_multidataset_that_is_not_shuffled_keeps_its_order(drop_last: bool) -> None:
    """A step of two ranks is that of one process with batches twice as large."""
    both = MultiDataset(values(30), values(11, 30))
    first, second = (shard_loader(DataLoader(both, batch_size=4, drop_last=drop_last), rank, 2) for rank in range(2))
    assert isinstance(first.batch_sampler, MultiDatasetBatchSampler)
    steps = [sorted(a + b) for a, b in zip(first.batch_sampler, second.batch_sampler, strict=True)]
    whole = [list(range(start, start + 8)) for start in range(0, 40, 8)]
    assert steps == (whole if drop_last else [*whole, [0, 40]])
    mixed = shard_loader(DataLoader(both, batch_size=4), 0, 2, None, {"weights": [1, 1]})
    assert sum(index < 30 for index in next(iter(mixed.batch_sampler))) == 2
    # divided again, and gone on with, as any other
    assert next(iter(first.batch_sampler.divided(1, 0))) == [0, 1, 2, 3]
    assert next(iter(first.batch_sampler.after(8))) == [8, 10, 12, 14]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 200),
    replicas=st.integers(1, 16),
    batch_size=st.integers(1, 20),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    theirs=st.booleans(),
)
def test_any_other_loader_is_dealt_out(
    n: int, replicas: int, batch_size: int, shuffle: bool, drop_last: bool, theirs: bool
) -> None:
    loader: Any = DataLoader(values(n), batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, seed=5, prefetch_factor=0)
    if theirs:
        loader = TorchLoader(TensorDataset(torch.arange(n)), batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
    loaders = [shard_loader(loader, rank, replicas) for rank in range(replicas)]
    assert {type(one) for one in loaders} == {type(loader)}
    assert len({len(one) for one in loaders}) == 1
    if not drop_last:
        found = [seen(one) for one in loaders]
        assert {value for part in found for value in part} == set(range(n))
        assert len({len(part) for part in found}) == 1
    if not shuffle and not drop_last and n % replicas == 0:
        assert parts(loader, replicas)[0] == list(range(0, n, replicas))


def test_epochs_differ_also_in_torchs_loader() -> None:
    loader = shard_loader(TorchLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True), 0, 2)
    first = seen(loader)
    loader.batch_sampler.set_epoch(1)
    assert seen(loader) != first
    ours = shard_loader(DataLoader(values(), batch_size=4, shuffle=True), 0, 2)
    first = seen(ours)
    ours.set_epoch(1)
    assert seen(ours) != first and len(first) == 20


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 100),
    replicas=st.integers(1, 16),
    batch_size=st.integers(1, 9),
    drop_last=st.booleans(),
    several=st.booleans(),
)
def test_padding_is_declared_by_the_batch_sampler(n: int, replicas: int, batch_size: int, drop_last: bool, several: bool) -> None:
    """What an exact validation leaves out: the last ``num_padded`` samples of a rank."""
    data = MultiDataset(values(n), values(3, n)) if several else values(n + 3)
    loader = DataLoader(data, batch_size=batch_size, drop_last=drop_last, prefetch_factor=0)
    fresh = []
    for rank in range(replicas):
        part = shard_loader(loader, rank, replicas)
        found = seen(part)
        fresh += found[: len(found) - getattr(part.batch_sampler, "num_padded", 0)]
    assert len(fresh) == len(set(fresh))
    if not drop_last:
        assert set(fresh) == set(range(n + 3))


def test_one_process_keeps_its_loader() -> None:
    loader = DataLoader(values(), batch_size=4, sampler=[3, 1])
    assert shard_loader(loader, 0, 1) is loader


def test_a_torch_loader_keeps_its_settings() -> None:
    loader = TorchLoader(
        TensorDataset(torch.arange(8)), batch_size=2, num_workers=1, persistent_workers=True, prefetch_factor=3, timeout=9
    )
    sharded = shard_loader(loader, 1, 2)
    assert (sharded.num_workers, sharded.persistent_workers, sharded.prefetch_factor, sharded.timeout) == (1, True, 3, 9)
    assert seen(sharded) == [1, 3, 5, 7]


def test_a_maker_that_takes_anything_gets_the_ranks() -> None:
    loader = DataLoader(MultiDataset(values(30), values(10, 30)), batch_size=4, shuffle=True, seed=3)
    found = parts(loader, 2, MultiDatasetBatchSampler.balanced)
    assert len(found[0]) == len(found[1]) == 20 and found[0] != found[1]
    with pytest.raises(ConfigError, match="all samples to one rank"):
        shard_loader(loader, 0, 2, lambda dataset: MultiDatasetBatchSampler(dataset, 4))


# -- samplers of a MultiDataset that were not told their ranks --------------------------------------------------------------------------


def test_a_mixture_is_divided_with_its_settings() -> None:
    both = MultiDataset(values(30), values(10, 30))
    for loader in (
        DataLoader(both, batch_sampler=MultiDatasetBatchSampler(both, 4, samples_per_dataset=[2, 2], num_batches=10, seed=3)),
        DataLoader(both, batch_size=4, sampler=MultiDatasetSampler(both, weights=[1, 1], num_samples=40, seed=3)),
    ):
        found = parts(loader, 2)
        assert len(found[0]) == len(found[1]) == 20
        assert sorted(found[0] + found[1]) == sorted(seen(loader))
    told = DataLoader(both, batch_sampler=MultiDatasetBatchSampler(both, 4, num_replicas=1, rank=0))
    with pytest.raises(ConfigError, match="all samples to one rank"):
        shard_loader(told, 0, 2)


# -- what cannot be divided --------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


CANNOT: list[tuple[Any, str]] = [
    ([torch.zeros(2)], "list cannot be divided"),
    ((x for x in range(3)), "generator cannot be divided"),
    (TorchLoader(Stream(), batch_size=2), "IterableDataset"),
    (TorchLoader(TensorDataset(torch.arange(4)), batch_size=None), "batch_size=None"),
    (DataLoader(values(), batch_size=4, sampler=[1, 2, 3]), "list knows of no ranks"),
    (DataLoader(values(), batch_sampler=[[1, 2], [3]]), "list knows of no ranks"),
    (DataLoader(values(), batch_size=4, sampler=DistributedSampler(40)), "all samples to one rank"),
    (
        TorchLoader(TensorDataset(torch.arange(4)), sampler=torch.utils.data.WeightedRandomSampler([1, 1, 1, 1], 4)),
        "WeightedRandomSampler knows of no ranks",
    ),
]


@pytest.mark.parametrize(("loader", "message"), CANNOT, ids=range(len(CANNOT)))
def test_never_a_silent_copy(loader: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shard_loader(loader, 0, 2)


def test_wrong_ranks_and_makers() -> None:
    loader = DataLoader(values(), batch_size=4)
    with pytest.raises(ConfigError, match="rank"):
        shard_loader(loader, 2, 2)
    with pytest.raises(ConfigError, match="made no sampler"):
        shard_loader(loader, 0, 2, lambda dataset: None)


def test_variable_batches_of_a_batch_sampler() -> None:
    loader = shard_loader(DataLoader(values(), batch_size=4), 0, 2, lambda dataset: [[0], [1, 2, 3], [4, 5]])
    assert [len(batch) for batch in loader] == [1, 3, 2]
    assert isinstance(shard_loader(loader, 0, 1).batch_sampler, list | BatchSampler)
