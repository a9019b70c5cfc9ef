"""Which sample of which data set stands at any position of an epoch that mixes several: computed, without a list of the epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nvalchemi.data.datapipes.allocation import counts_before
from nvalchemi.data.datapipes.permutation import Permutation, derived_keys, splitmix64

#: Positions among which the data sets' turns are shuffled.
WINDOW = 1024
_HALF_BITS = np.uint64(5)
_HALF = np.uint64((1 << 5) - 1)
_TOP = np.uint64(64 - 5)
_UPPER = np.uint64(32)


class Turns:
    """Whose turn it is at each position, and for which time: data sets alternating evenly at the rates of their quotas."""

    def __init__(self, quotas: Sequence[int]) -> None:
        self.counts = tuple(quotas)

    def __call__(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The data set of each position, and how many samples it has given before."""
        child, before = np.zeros_like(positions), np.zeros_like(positions)
        now, after = counts_before(positions, self.counts), counts_before(positions + 1, self.counts)
        for number, (a, b) in enumerate(zip(now, after, strict=True)):
            mine = a != b
            child[mine], before[mine] = number, a[mine]
        return child, before


class FixedTurns:
    """The same where every batch has one composition: in each, the data sets one after the other."""

    def __init__(self, composition: Sequence[int]) -> None:
        self.counts = tuple(composition)
        self.composition = np.asarray(composition, np.int64)
        self.starts = np.cumsum([0, *composition])

    def __call__(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        batch, place = np.divmod(positions, self.starts[-1])
        child = np.searchsorted(self.starts, place, side="right") - 1
        return child, batch * self.composition[child] + place - self.starts[child]


class Draws:
    """The samples that each data set gives in one epoch, as indices of the whole.

    Parameters
    ----------
    sizes
        Samples of each data set.
    key
        Seed and epoch.
    replacement
        Every draw is independent of the others. Otherwise a data set gives each sample once before it gives any again, in a new order
        at every pass and in every epoch: of a data set that is not gone through, every epoch takes another part.
    shuffle
        With False, and no replacement, a data set's samples come in its own order.
    """

    def __init__(self, sizes: Sequence[int], key: tuple[int, ...], replacement: bool, shuffle: bool) -> None:
        self.sizes, self.key, self.replacement, self.shuffle = sizes, key, replacement, shuffle
        self.starts = np.cumsum([0, *sizes])

    def __call__(self, child: NDArray[np.int64], draw: NDArray[np.int64]) -> NDArray[np.int64]:
        out = self.starts[child]
        for number in np.unique(child).tolist():
            mine = np.flatnonzero(child == number)
            out[mine] += self._of(number, draw[mine])
        return out

    def _of(self, number: int, draw: NDArray[np.int64]) -> NDArray[np.int64]:
        size = self.sizes[number]
        if self.replacement:
            (key,) = derived_keys((*self.key, number), 1)
            return _below(splitmix64(key, draw.astype(np.uint64)), size)
        passes, place = np.divmod(draw, size)
        if not self.shuffle or size == 1:
            return place
        for turn in np.unique(passes).tolist():
            mine = passes == turn
            place[mine] = Permutation(size, (*self.key, number, turn))(place[mine])
        return place


def _below(words: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
    """Uniform integers below ``size`` from random words, by multiplication where the size allows it."""
    if size < 2**32:
        return ((words >> _UPPER) * np.uint64(size) >> _UPPER).astype(np.int64)
    return (words % np.uint64(size)).astype(np.int64)


def locally_shuffled(positions: NDArray[np.int64], length: int, key: tuple[int, ...]) -> NDArray[np.int64]:
    """A bijection of ``range(length)`` that moves every position within its window of `WINDOW`, each window in another way.

    Turns come round in a fixed rhythm; this breaks it, so that ranks that take every n-th position do not get one data set each. It is a
    four-round Feistel network with cycle walking, as in `nvalchemi.data.datapipes.permutation`. Positions from ``length`` on stay.
    """
    keys = derived_keys(key, 4)
    out = positions.copy()
    todo = np.flatnonzero(positions < length)
    while todo.size:
        window, place = np.divmod(out[todo], WINDOW)
        number = window.astype(np.uint64) << _HALF_BITS
        left, right = place.astype(np.uint64) >> _HALF_BITS, place.astype(np.uint64) & _HALF
        for round_key in keys:
            left, right = right, left ^ (splitmix64(round_key, number | right) >> _TOP)
        out[todo] = window * WINDOW + ((left << _HALF_BITS) | right).astype(np.int64)
        todo = todo[out[todo] >= length]
    return out
