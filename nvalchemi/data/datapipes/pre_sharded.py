"""Data that lie divided already: a store for each rank or each node, read by its owner alone.

Nothing here asks who is who: an owner is a number, and `PreShardedSampler` finds it from ``rank`` and ``ranks_per_store``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence, Sized
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.block_shuffle import WINDOW, BlockPermutation, block_size_of, check_window
from nvalchemi.data.datapipes.permutation import Permutation
from nvalchemi.data.datapipes.samplers import IndexSampler, Order, check_integer
from nvalchemi.errors import ConfigError


def deal_stores(sizes: Sequence[int], owners: int) -> list[list[int]]:
    """Deal stores to owners so that each has about as many samples: the largest first, each to the owner that has least.

    Parameters
    ----------
    sizes
        Samples of each store.
    owners
        Number of ranks, or of nodes.

    Returns
    -------
    list of list of int
        For each owner the numbers of its stores, in rising order; the same wherever it is computed.

    Raises
    ------
    ConfigError
        Fewer stores that are not empty than owners.
    """
    check_integer("owners", owners, 1)
    filled = [number for number, size in enumerate(sizes) if size > 0]
    if len(filled) < owners:
        raise ConfigError(
            "there are not enough stores for every owner to have one",
            found=f"{len(filled)} stores that are not empty",
            needed=f"at least {owners}",
            fix="divide the data into more stores, or let several ranks share one (ranks_per_store)",
        )
    shares: list[list[int]] = [[] for _ in range(owners)]
    least = [(0, owner) for owner in range(owners)]
    for number in sorted(filled, key=lambda number: (-sizes[number], number)):
        held, owner = heapq.heappop(least)
        shares[owner].append(number)
        heapq.heappush(least, (held + sizes[number], owner))
    return [sorted(share) for share in shares]


class PreShardedSampler(IndexSampler):
    """The samples of one rank, out of a data set that holds the data of its owner only.

    All ranks get the same number of samples, though the owners have unlike numbers: as many as the largest owner's ranks need to go
    through all of its data once. Those who have fewer begin again, in a new order. With ``drop_last=True`` it is as many as the smallest
    has, and of the others every epoch takes another part. A loader with this sampler is divided already and left as it is.

    Parameters
    ----------
    dataset
        The owner's data set, or its length.
    sizes
        Samples of every owner's data set, in the order of the owners; the same on all ranks. ``len(reader)`` of a store reads no data.
    num_replicas, rank
        Number of ranks, and which this one is.
    ranks_per_store
        Ranks that share a data set: 1 where each rank has its own, the ranks of a node where each node has. Neighbours share: rank ``r``
        belongs to owner ``r // ranks_per_store``.
    shuffle
        A new order every epoch; ``"blocks"`` for stores larger than memory, see `BlockShuffleSampler`.
    seed
        Of the order.
    drop_last
        Give as many samples as the smallest owner has, in place of repeating.
    window
        Blocks that ``shuffle="blocks"`` mixes at a time, for each owner.

    Notes
    -----
    Which samples have been used depends on who had them, so an epoch goes on with as many ranks as it began with: this is no `Divisible`.

    Attributes
    ----------
    num_padded
        How many of this rank's samples, the last ones, are beyond its data and repeat.

    Raises
    ------
    ConfigError
        Sizes that do not fit to the number of ranks or to the data set, or an owner without data.
    """

    def __init__(
        self,
        dataset: Sized | int,
        sizes: Sequence[int],
        num_replicas: int = 1,
        rank: int = 0,
        ranks_per_store: int = 1,
        shuffle: bool | Literal["blocks"] = True,
        seed: int = 0,
        drop_last: bool = False,
        window: int = WINDOW,
    ) -> None:
        check_integer("ranks_per_store", ranks_per_store, 1)
        check_integer("window", window, 1)
        if num_replicas < 1 or not 0 <= rank < num_replicas:
            raise ConfigError(
                "a rank is one of its replicas",
                found=f"rank={rank}, num_replicas={num_replicas}",
                needed="0 <= rank < num_replicas",
            )
        if len(sizes) * ranks_per_store != num_replicas:
            raise ConfigError(
                "every rank belongs to one owner of data",
                found=f"{len(sizes)} sizes, {ranks_per_store} ranks each, for {num_replicas} ranks",
                needed="len(sizes) * ranks_per_store == num_replicas",
                fix="deal_stores(sizes, num_replicas // ranks_per_store) deals any number of stores to the owners",
            )
        empty = [owner for owner, size in enumerate(sizes) if size < 1]
        if empty:
            raise ConfigError(f"owner {empty[0]} has no samples", found=f"sizes {list(sizes)}", needed="at least one sample each")
        self.num_replicas, self.rank, self.ranks_per_store = num_replicas, rank, ranks_per_store
        self.owner, self.place = divmod(rank, ranks_per_store)
        self.size = sizes[self.owner]
        length = dataset if isinstance(dataset, int | np.integer) else len(dataset)
        if length != self.size:
            raise ConfigError(
                f"the data set of rank {rank} is not that of owner {self.owner}",
                found=f"{length} samples",
                needed=f"{self.size}, by sizes[{self.owner}]",
                fix="open the store of this owner, and give its size at its place",
            )
        self.shuffle, self.seed, self.drop_last, self.window = shuffle, seed, drop_last, window
        self.num_samples = min(sizes) // ranks_per_store if drop_last else -(-max(sizes) // ranks_per_store)
        self._block_size = 0
        if shuffle == "blocks":
            self._block_size = block_size_of(dataset)
            check_window(dataset, self._block_size, window, ranks_per_store)
        elif not isinstance(shuffle, bool):
            raise ConfigError("shuffle is no such word", found=repr(shuffle), needed='True, False or "blocks"')

    def __len__(self) -> int:
        return self.num_samples

    @property
    def num_padded(self) -> int:
        """How many of this rank's samples, the last ones, are beyond its data and repeat."""
        return max(0, self.num_samples - len(range(self.place, self.size, self.ranks_per_store)))

    def epoch_order(self) -> Order:
        size, stride, place, key = self.size, self.ranks_per_store, self.place, (self.seed, self.epoch, self.owner)
        shuffle, block_size, window = self.shuffle, self._block_size, self.window

        def order(positions: NDArray[np.int64]) -> NDArray[np.int64]:
            passes, where = np.divmod(positions * stride + place, size)
            if not shuffle:
                return where
            for number in np.unique(passes).tolist():
                mine, seed = passes == number, (*key, number)
                drawn = BlockPermutation(size, seed, block_size, window) if block_size else Permutation(size, seed)
                where[mine] = drawn(where[mine])
            return where

        return order
