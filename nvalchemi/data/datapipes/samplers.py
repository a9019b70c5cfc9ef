"""Which sample comes when: sequential, shuffled, divided between ranks, and grouped into batches.

Every sampler here computes the sample at any position of an epoch (:meth:`IndexSampler.epoch_order`), so a run resumes by index and never by
replay, an epoch is begun in microseconds, and no list as long as the data set is ever made. A sampler knows two integers of the
distributed world, ``num_replicas`` and ``rank``, and neither reads the environment nor communicates.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import chain, islice
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from nvalchemi.data.datapipes.divisible import Divisible, Facts
from nvalchemi.data.datapipes.permutation import Permutation
from nvalchemi.errors import ConfigError

T = TypeVar("T")

#: Positions computed at once: enough to spread NumPy's cost a call thin.
BLOCK = 4096


@runtime_checkable
class DistributedSamplerProtocol(Protocol):
    """What makes a sampler distributed-aware: a loader that has one is left as it is when the data are divided between ranks."""

    num_replicas: int
    rank: int

    def set_epoch(self, epoch: int) -> None: ...

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


@runtime_checkable
class Padded(Protocol):
    """A sampler that repeats samples so that all ranks have as many, and says how many of its own, the last ones, are such."""

    num_padded: int

    def __len__(self) -> int: ...


#: The order of one epoch: sample indices (int64) at positions (int64, each from 0 to the epoch's length).
Order = Callable[[NDArray[np.int64]], NDArray[np.int64]]


class IndexSampler(ABC):
    """A sampler whose sample at any position of the epoch can be computed.

    A subclass says how long an epoch is (``__len__``) and gives the order of the current one (``epoch_order``); iterating, seeking and
    batching follow.
    """

    epoch: int = 0

    @abstractmethod
    def __len__(self) -> int:
        """Samples in an epoch."""

    @abstractmethod
    def epoch_order(self) -> Order:
        """The order of the current epoch, as a function that a later ``set_epoch`` does not touch."""

    def set_epoch(self, epoch: int) -> None:
        """Go to the order of ``epoch``; iterators already made keep theirs."""
        self.epoch = int(epoch)

    def __iter__(self) -> Iterator[int]:
        return self.iter_from(0)

    def iter_from(self, position: int) -> Iterator[int]:
        """Sample indices from ``position`` to the end of the epoch; nothing before it is computed."""
        return chain.from_iterable(block.tolist() for block in self.blocks(position, 1))

    def blocks(self, position: int, unit: int) -> Iterator[NDArray[np.int64]]:
        """The same in arrays, each (but the last) a multiple of ``unit`` long."""
        if not 0 <= position <= len(self):
            raise ConfigError(f"the epoch has no sample {position}", needed=f"a position from 0 to {len(self)}")
        return _blocks(self.epoch_order(), position, len(self), unit)


def _blocks(order: Order, position: int, stop: int, unit: int) -> Iterator[NDArray[np.int64]]:
    size = unit  # a short first block: the first batch does not wait for the order of thousands
    while position < stop:
        yield order(np.arange(position, min(position + size, stop), dtype=np.int64))
        position += size
        size = unit * max(1, BLOCK // unit)


class _WholeSampler(IndexSampler):
    """All samples of a data set, for one process: it has neither ``num_replicas`` nor ``rank``, so a loader with it is divided."""

    shuffle: bool
    seed: int = 0

    def __init__(self, data_source: Sized | int) -> None:
        self.num_samples = _length(data_source)

    def __len__(self) -> int:
        return self.num_samples

    def remaining(self) -> int:
        return self.num_samples

    def dealt(self) -> int:
        return self.num_samples

    def used(self, count: int) -> int:
        return min(count, self.num_samples)

    def after(self, samples: int) -> DistributedSampler:
        return self._alone().after(samples)

    def order_facts(self) -> Facts:
        return self._alone().order_facts()

    def division_facts(self) -> Facts:
        return self._alone().division_facts()

    def _alone(self) -> DistributedSampler:
        """The same order as a sampler that can begin within the epoch."""
        same = DistributedSampler(self.num_samples, shuffle=self.shuffle, seed=self.seed)
        same.set_epoch(self.epoch)
        return same


class SequentialSampler(_WholeSampler):
    """Samples in the order of the data set, the same in every epoch."""

    shuffle = False

    def epoch_order(self) -> Order:
        return _identity


def _identity(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return positions


class RandomSampler(_WholeSampler):
    """All samples once an epoch, in an order drawn from ``(seed, epoch)``: what ``DataLoader(shuffle=True)`` uses.

    It knows of no ranks, so that a loader which has it is divided between them.
    """

    shuffle = True

    def __init__(self, data_source: Sized | int, seed: int = 0) -> None:
        super().__init__(data_source)
        self.seed = seed

    def epoch_order(self) -> Order:
        return Permutation(self.num_samples, (self.seed, self.epoch))


class DividedSampler(IndexSampler):
    """One rank's part of an order that is the same on any number of ranks.

    A subclass sets ``total`` and ``num_samples`` (by ``divide``), and has its ranks use up the order from ``start`` on in step: when each
    has had its first k samples, ``k * num_replicas`` samples of the order have been used.
    """

    num_replicas: int
    rank: int
    total: int  # samples of the epoch, on all ranks, before it is padded
    num_samples: int  # of this rank
    drop_last: bool
    start: int = 0  # samples of the epoch, on all ranks, that are not given any more

    def __len__(self) -> int:
        return self.num_samples

    @abstractmethod
    def divide(self) -> None:
        """Set ``num_samples`` from what is left of the epoch."""

    @abstractmethod
    def order_facts(self) -> Facts:
        """See `Divisible`."""

    def remaining(self) -> int:
        return self.total - self.start

    def dealt(self) -> int:
        return self.num_samples * self.num_replicas

    def used(self, count: int) -> int:
        return min(self.start + count * self.num_replicas, self.total)

    def after(self, samples: int) -> Self:
        check_integer("samples", samples, 0)
        rest = copy.copy(self)
        rest.start = min(self.start + samples, self.total)
        rest.divide()
        return rest

    def division_facts(self) -> Facts:
        return {"ranks": self.num_replicas, "drop_last": self.drop_last}


class DistributedSampler(DividedSampler):
    """The samples of one rank: every ``num_replicas``-th of the epoch's order, from ``rank`` on.

    All ranks get the same number of samples. Where the data do not divide evenly, the order is continued from its start
    (``drop_last=False``; ``num_padded`` says how many of this rank's samples, the last ones, are such repeats) or cut short
    (``drop_last=True``). The constructor is that of ``torch.utils.data.DistributedSampler``; with its defaults it is the plain sampler of
    one process. The shuffled order depends on ``(seed, epoch)`` alone, never on the number of ranks.

    Parameters
    ----------
    dataset
        The data set, or its length.
    num_replicas, rank
        Number of ranks, and which of them this one is.
    shuffle, seed
        Whether the order is a permutation, and which one.
    drop_last
        Cut the tail that does not divide evenly, instead of padding it.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas < 1 or not 0 <= rank < num_replicas:
            raise ConfigError(
                "a rank is one of its replicas",
                found=f"rank={rank}, num_replicas={num_replicas}",
                needed="0 <= rank < num_replicas",
            )
        self.total = _length(dataset)
        self.num_replicas, self.rank = num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.divide()

    def divide(self) -> None:
        whole, rest = divmod(self.remaining(), self.num_replicas)
        self.num_samples = whole if self.drop_last or not rest else whole + 1
        self.total_size = self.num_samples * self.num_replicas

    @property
    def num_padded(self) -> int:
        """How many of this rank's last samples repeat ones that some rank has had in the same epoch: 0 or 1."""
        return int(self.total_size - self.num_replicas + self.rank >= self.remaining() > 0)

    def epoch_order(self) -> Order:
        length, stride, first = self.total, self.num_replicas, self.start + self.rank
        permutation = Permutation(length, (self.seed, self.epoch)) if self.shuffle else _identity
        return lambda positions: permutation(positions + first if stride == 1 else (positions * stride + first) % length)

    def order_facts(self) -> Facts:
        return {"samples": self.total, "order": f"shuffled by seed {self.seed}" if self.shuffle else "of the data set"}


class BatchSampler:
    """Groups a sampler's samples into lists of ``batch_size`` indices.

    Parameters
    ----------
    sampler
        One of the samplers above, or any iterable of indices (torch's samplers, a list). See ``iter_from`` for what seeking needs.
    batch_size
        Samples a batch, at least 1.
    drop_last
        Leave out a last batch that is not full.
    """

    def __init__(self, sampler: Iterable[int], batch_size: int, drop_last: bool = False) -> None:
        check_integer("batch_size", batch_size, 1)
        check_sampler(sampler)
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __len__(self) -> int:
        if not isinstance(self.sampler, Sized):
            raise ConfigError(f"{type(self.sampler).__name__} has no length, so its batches cannot be counted", needed="__len__")
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    @property
    def num_padded(self) -> int:
        """How many of the last samples of this rank's batches repeat others of the epoch, so that ranks have as many: not to be counted twice."""
        if not isinstance(self.sampler, Padded) or (self.drop_last and len(self.sampler) % self.batch_size):
            return 0  # where a last batch is left out, the repeat was in it
        return self.sampler.num_padded

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` on to the sampler, where it takes one."""
        tell_epoch(self.sampler, epoch)

    def remaining(self) -> int:
        """See `Divisible`."""
        return self._order.remaining()

    def dealt(self) -> int:
        """See `Divisible`."""
        dealt, own = self._order.dealt(), len(self.sampler)  # type: ignore[arg-type]
        return dealt - dealt // own * (own % self.batch_size) if self.drop_last and own else dealt

    def used(self, count: int) -> int:
        """Samples of the epoch, of all ranks together, that are used when every rank has had its first ``count`` batches."""
        return self._order.used(min(count * self.batch_size, len(self.sampler)))  # type: ignore[arg-type]

    def after(self, samples: int) -> BatchSampler:
        """Batches of what is left of the epoch once its first ``samples`` samples, of all ranks together, have been used.

        Whatever number of ranks used them: see `Divisible`. ConfigError where the sampler cannot tell.
        """
        return BatchSampler(self._order.after(samples), self.batch_size, self.drop_last)  # type: ignore[arg-type]

    def order_facts(self) -> Facts:
        """See `Divisible`."""
        return self._order.order_facts()

    def division_facts(self) -> Facts:
        """See `Divisible`."""
        return {**self._order.division_facts(), "batch_size": self.batch_size, "drop_last": self.drop_last}

    @property
    def _order(self) -> Divisible:
        if not isinstance(self.sampler, Divisible):
            raise ConfigError(
                f"{type(self.sampler).__name__} cannot tell the rest of an epoch",
                needed="the methods of Divisible: after, used, ...",
            )
        return self.sampler

    def __iter__(self) -> Iterator[list[int]]:
        return self.iter_from(0)

    def iter_from(self, batch: int) -> Iterator[list[int]]:
        """Batches from number ``batch`` on.

        A sampler of this module is sought by index. A foreign one is too if it has ``iter_from``; with ``set_epoch`` (whose order is
        therefore settled) or as a sequence its first indices are passed over without reading data; any other is refused for
        ``batch > 0``, because nothing says that it would repeat its order.
        """
        if not isinstance(self.sampler, IndexSampler):
            return self._grouped(seek(self.sampler, batch * self.batch_size))
        if not 0 <= batch <= len(self):
            raise ConfigError(f"the epoch has no batch {batch}", needed=f"a position from 0 to {len(self)}")
        return self._sliced(self.sampler.blocks(min(batch * self.batch_size, len(self.sampler)), self.batch_size))

    def _sliced(self, blocks: Iterable[NDArray[np.int64]]) -> Iterator[list[int]]:
        size = self.batch_size
        for block in blocks:
            stop = len(block) // size * size if self.drop_last else len(block)
            for start in range(0, stop, size):
                yield block[start : start + size].tolist()

    def _grouped(self, indices: Iterator[int]) -> Iterator[list[int]]:
        while group := list(islice(indices, self.batch_size)):
            if len(group) == self.batch_size or not self.drop_last:
                yield group


def seek(sampler: Iterable[T], position: int) -> Iterator[T]:
    """Items of any sampler from ``position`` on, by its ``iter_from`` or, where its order is settled, past its first items."""
    if hasattr(sampler, "iter_from"):
        return sampler.iter_from(position)  # type: ignore[no-any-return]
    if position == 0:
        return iter(sampler)
    if _is_settled(sampler):
        return islice(iter(sampler), position, None)
    raise ConfigError(
        f"{type(sampler).__name__} cannot be sought: nothing says that it would repeat the order that it had",
        needed="iter_from(k), or set_epoch(epoch) with an order that depends on the epoch alone",
        fix="use nvalchemi.data.datapipes.RandomSampler, or give the sampler one of these methods",
    )


def _is_settled(sampler: object) -> bool:
    """Whether a foreign sampler has one order an epoch: a list, torch's sequential one, one that is told the epoch, or batches of such."""
    if isinstance(sampler, Sequence | torch.utils.data.SequentialSampler) or hasattr(sampler, "set_epoch"):
        return True
    return hasattr(sampler, "sampler") and _is_settled(sampler.sampler)


def tell_epoch(sampler: object, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` of a sampler, or of the sampler inside it: torch's BatchSampler does not pass the epoch on."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    elif hasattr(sampler, "sampler"):
        tell_epoch(sampler.sampler, epoch)


def check_sampler(sampler: object) -> None:
    """ConfigError unless ``sampler`` can be iterated once an epoch."""
    if not isinstance(sampler, Iterable) or isinstance(sampler, Iterator):
        raise ConfigError(
            "a sampler is iterated anew in every epoch",
            found=type(sampler).__name__,
            needed="a sampler or a list",
            fix="pass the list itself, not an iterator over it",
        )


def check_integer(name: str, value: object, least: int) -> None:
    """ConfigError unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"{name} is a whole number", found=repr(value), needed=f"an integer of at least {least}")


def _length(data_source: Sized | int) -> int:
    length = int(data_source) if isinstance(data_source, int | np.integer) else len(data_source)
    if length < 0:
        raise ConfigError("a sampler needs a length", found=length, needed="0 or more")
    return length
