"""A shuffle for stores larger than memory: blocks of neighbouring samples in random order, some of them at a time, mixed.

A store decodes a chunk at a time. In a full shuffle each sample of a batch lies in another chunk, and where the decoded chunks do not fit
in memory each is decoded again for every few samples. Here blocks of neighbouring samples, a few chunks each, are put in random order, and
``window`` of them at a time are gone through together: taking turns, each in a random order of its own. A chunk is then decoded about once
an epoch, and memory holds a window. This is the two-level shuffle of

    L. Xu et al., "In-Database Machine Learning with CorgiPile: Stochastic Gradient Descent without Full Data Shuffle", SIGMOD 2022,

with turns in place of a buffer that is shuffled, for two reasons. Each batch holds as many samples of one block as of any other. And of
``R`` ranks, which take every ``R``-th sample, each reads ``window / R`` blocks and no others where ``R`` divides the window, while the
order of the epoch is the same for any number of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.dataset import Dataset
from nvalchemi.data.datapipes.divisible import Facts
from nvalchemi.data.datapipes.multidataset import MultiDataset
from nvalchemi.data.datapipes.permutation import ROUNDS, Permutation, derived_keys, shifted, splitmix64
from nvalchemi.data.datapipes.reader import StoredInBlocks
from nvalchemi.data.datapipes.samplers import DistributedSampler, Order, check_integer
from nvalchemi.errors import ConfigError

#: Blocks that are mixed at a time, on all ranks together: a power of two, so that the usual numbers of ranks divide it.
WINDOW = 64
_TWEAK_BITS = np.uint64(32)


class BlockPermutation:
    """A bijection of ``range(n)`` that goes through blocks of neighbours in random order, ``window`` of them at a time.

    Parameters
    ----------
    n
        Number of elements, from 0 to 2**62.
    seed
        One integer or several (``(seed, epoch)``).
    block_size
        Elements of a block, below 2**32; the last may be shorter.
    window
        Blocks that take turns.

    Notes
    -----
    The image of any position is computed from the position alone, as in `Permutation`.
    """

    def __init__(self, n: int, seed: int | Sequence[int], block_size: int, window: int) -> None:
        self.n, self.block_size, self.window = n, min(block_size, max(1, n)), window
        self._full, self._short = divmod(n, self.block_size)
        self._blocks = self._full + (self._short > 0)
        self._order = Permutation(self._full, seed)
        # Not the words that the permutation of the blocks is made of.
        words = derived_keys(seed, 2 * ROUNDS + 1)[ROUNDS:]
        self._keys = words[:ROUNDS]
        # The last two windows share what is left between them: one of a few blocks would end every epoch poorly mixed.
        self._windows = -(-self._blocks // window)
        self._tail = max(0, self._windows - 2) * window
        self._last = self._tail + (self._blocks - self._tail + 1) // 2 if self._windows > 1 else 0
        # The short block stands last in the window that it falls into, and shortens it.
        self._shortened, self._lacking, self._end = self._windows, 0, n
        if self._short:
            number = np.array([int(words[ROUNDS]) % self._blocks])
            window_of, first, count = (int(x[0]) for x in self._window_of(number))
            self._shortened, self._lacking = window_of, self.block_size - self._short
            self._begin, self._end = first * self.block_size, (first + count) * self.block_size - self._lacking

    def __len__(self) -> int:
        return self.n

    def _window_of(self, block: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The window of each place in the order of blocks, its first block, and how many it has."""
        number = np.where(block < self._tail, block // self.window, self._windows - 1 - (block < self._last))
        first = np.where(block < self._tail, number * self.window, np.where(block < self._last, self._tail, self._last))
        after = np.where(block < self._tail, first + self.window, np.where(block < self._last, self._last, self._blocks))
        return number, first, after - first

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Images of ``positions``, an int64 array with values in ``range(n)`` (IndexError otherwise)."""
        where = np.asarray(positions, dtype=np.int64)
        if where.size and (where.min() < 0 or where.max() >= self.n):
            raise IndexError(f"positions run from {where.min()} to {where.max()}, but the permutation has {self.n} elements")
        filled = where + self._lacking * (where >= self._end)  # as if all blocks were full
        window, first, count = self._window_of(filled // self.block_size)
        place, turn = np.divmod(filled - first * self.block_size, count)
        if not self._short:
            return self._within(self._order(first + turn), place, self.block_size)
        block = first + turn - (window > self._shortened)  # numbers of full blocks, among which the short one is not counted
        short = np.zeros(len(where), bool)
        mine = np.flatnonzero(window == self._shortened)
        if mine.size:
            x, m = where[mine] - self._begin, int(count[mine[0]])
            late = x >= m * self._short  # the short block has no more turns
            rest, others = x - m * self._short, max(1, m - 1)
            turn = np.where(late, rest % others, x % m)
            place[mine] = np.where(late, self._short + rest // others, x // m)
            block[mine] = first[mine] + turn
            short[mine] = ~late & (turn == m - 1)
        out = np.empty(len(where), np.int64)
        some = np.flatnonzero(~short)
        out[some] = self._within(self._order(block[some]), place[some], self.block_size)
        some = np.flatnonzero(short)
        if some.size:
            out[some] = self._within(np.full(some.size, self._full), place[some], self._short)
        return out

    def _within(self, block: NDArray[np.int64], place: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """Elements at ``place`` of each block's own order: a network as in `Permutation`, with the block's number in every round."""
        tweak = block.astype(np.uint64) << _TWEAK_BITS
        width = math.isqrt(size - 1) + 1
        sides, limit = (np.uint64(width), np.uint64(-(-size // width))), np.uint64(size)
        image = self._network(place.astype(np.uint64), tweak, *sides)
        outside = np.flatnonzero(image >= limit)
        while outside.size:
            image[outside] = walked = self._network(image[outside], tweak[outside], *sides)
            outside = outside[walked >= limit]
        return block * self.block_size + image.astype(np.int64)

    def _network(
        self, x: NDArray[np.uint64], tweak: NDArray[np.uint64], width: np.uint64, height: np.uint64
    ) -> NDArray[np.uint64]:
        row = x // width
        column = x - row * width
        for number, key in enumerate(self._keys):
            if number % 2:
                column = shifted(column, splitmix64(key, row | tweak), width)
            else:
                row = shifted(row, splitmix64(key, column | tweak), height)
        return row * width + column


class BlockShuffleSampler(DistributedSampler):
    """All samples once an epoch, shuffled so that a store larger than memory is decoded about once: ``DataLoader(shuffle="blocks")``.

    Blocks of ``block_size`` neighbouring samples come in random order; ``window`` of them at a time take turns, and each gives its samples
    in a random order. Dividing between ranks, padding and ``after`` are those of `DistributedSampler`; the order depends on ``(seed,
    epoch)``, ``block_size`` and ``window`` alone. Where the number of ranks divides ``window``, each rank reads blocks of its own.

    How random is it? Batches of data that are sorted vary as those of a full shuffle do where a batch (of all ranks together) has at most
    ``window`` samples, and their means have ``batch / window`` times its variance where it has more. A run of samples shorter than a
    window, ``window * block_size``, has samples of its blocks only. ``benchmarks/block_shuffle.py`` measures both.

    Parameters
    ----------
    dataset
        The data set, or its length.
    block_size
        Samples of a block, at most 2**32 - 1; by default four chunks' worth, if the data set is read from a store.
    window
        Blocks that are mixed, on all ranks together. A rank holds ``window / num_replicas`` of them in memory.
    num_replicas, rank
        Number of ranks, and which this one is. Left out, the sampler is divided when its loader is.
    seed
        Of the order.
    drop_last
        Cut the tail that does not divide evenly between ranks, instead of padding it.

    Raises
    ------
    ConfigError
        No ``block_size`` where the data set does not know one; a window that does not fit in the memory that the reader keeps chunks in.
    """

    def __init__(
        self,
        dataset: Sized | int,
        block_size: int | None = None,
        window: int = WINDOW,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if (num_replicas is None) != (rank is None):
            raise ConfigError("num_replicas and rank go together", found=f"num_replicas={num_replicas}, rank={rank}")
        self.undivided = rank is None
        super().__init__(dataset, 1 if num_replicas is None else num_replicas, rank or 0, True, seed, drop_last)
        check_integer("window", window, 1)
        self._dataset, self.window = dataset, window
        self.block_size = block_size_of(dataset) if block_size is None else block_size
        check_integer("block_size", self.block_size, 1)
        if self.block_size >= 2**32:
            raise ConfigError("block_size is too large", found=self.block_size, needed="less than 2**32")
        if not self.undivided:
            check_window(dataset, self.block_size, window, self.num_replicas)

    def divided(self, num_replicas: int, rank: int) -> BlockShuffleSampler:
        """The same sampler for one of several ranks."""
        return type(self)(self._dataset, self.block_size, self.window, num_replicas, rank, self.seed, self.drop_last)

    def order_facts(self) -> Facts:
        order = f"shuffled by seed {self.seed} in blocks of {self.block_size}, {self.window} at a time"
        return {**super().order_facts(), "order": order}

    def epoch_order(self) -> Order:
        if self.undivided:
            check_window(self._dataset, self.block_size, self.window, 1)
        order = BlockPermutation(self.total, (self.seed, self.epoch), self.block_size, self.window)
        length, stride, first = self.total, self.num_replicas, self.start + self.rank
        return lambda positions: order((positions * stride + first) % length)


def block_size_of(dataset: object) -> int:
    """How many neighbouring samples of a data set are worth reading together; ConfigError where it is not read from a store."""
    sizes = [stored.block_size for stored, _ in _stores(dataset)]
    if not sizes:
        raise ConfigError(
            "a shuffle by blocks needs to know how many samples are stored together",
            found=type(dataset).__name__,
            needed="a data set that reads a store, or block_size",
            fix="shuffle=True for data in memory; otherwise sampler=BlockShuffleSampler(dataset, block_size=...)",
        )
    return min(sizes)


def check_window(dataset: object, block_size: int, window: int, sharers: int) -> None:
    """ConfigError where a window's part of one of ``sharers`` ranks is more than its readers keep: chunks would be decoded many times."""
    shares = [stored.cached_samples / share for stored, share in _stores(dataset) if stored.cached_samples < len(stored)]
    kept, held = int(min(shares, default=0)), -(-window // sharers) * block_size
    if shares and held > kept:
        fits = 2 ** int(math.log2(max(1, kept // block_size))) * sharers
        raise ConfigError(
            "the reader's memory for decoded chunks does not hold a window of the shuffle",
            found=f"room for about {kept} samples",
            needed=f"{held}: window={window} blocks of {block_size} samples, on {sharers} ranks",
            fix=f"a larger cache_bytes of the reader, or window={fits}",
        )


def _stores(dataset: object) -> list[tuple[StoredInBlocks, float]]:
    """The readers of a data set that keep what they decode, and the part of its samples that each of them has."""
    if isinstance(dataset, MultiDataset):
        return [(stored, len(child) / len(dataset)) for child in dataset.datasets if len(child) for stored, _ in _stores(child)]
    source = dataset.reader if isinstance(dataset, Dataset) else dataset
    return [(source, 1.0)] if isinstance(source, StoredInBlocks) else []
