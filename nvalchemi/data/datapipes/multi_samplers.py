"""Samplers that say how often each child of a `MultiDataset` is drawn from, sample by sample or batch by batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch

from nvalchemi.data.datapipes.allocation import EpochPolicy, apportion, batch_composition, epoch_length, shares_of
from nvalchemi.data.datapipes.divisible import Facts
from nvalchemi.data.datapipes.mixture import Draws, FixedTurns, Turns, locally_shuffled
from nvalchemi.data.datapipes.samplers import BatchSampler, DistributedSampler, DividedSampler, Order, check_integer
from nvalchemi.errors import ConfigError


@runtime_checkable
class HasChildren(Protocol):
    """What these samplers need of a data set: `MultiDataset` has it."""

    lengths: tuple[int, ...]
    names: tuple[str, ...]


class _MixtureSampler(DividedSampler):
    """What the two samplers share: sizes, seed, and the rank's place. A subclass sets ``turns``, ``total`` and ``num_samples``."""

    turns: Turns | FixedTurns
    kind: str  # what the order is called beside orders that are made in another way

    def __init__(
        self,
        dataset: HasChildren,
        replacement: bool,
        shuffle: bool,
        generator: torch.Generator | None,
        num_replicas: int | None,
        rank: int | None,
        seed: int,
        drop_last: bool,
    ) -> None:
        if not isinstance(dataset, HasChildren):
            raise ConfigError(
                "this sampler mixes the children of a MultiDataset",
                found=type(dataset).__name__,
                fix="MultiDataset(first, second, ...), or DistributedSampler for a single data set",
            )
        if (num_replicas is None) != (rank is None):
            raise ConfigError("num_replicas and rank go together", found=f"num_replicas={num_replicas}, rank={rank}")
        if generator is not None and seed:
            raise ConfigError("a generator and a seed are two sources of one order", fix="leave out either")
        self.undivided = rank is None
        self.num_replicas, self.rank = num_replicas or 1, rank or 0
        check_integer("num_replicas", 1 if num_replicas is None else num_replicas, 1)
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigError(
                "a rank is one of its replicas",
                found=f"rank={rank}, num_replicas={num_replicas}",
                needed="0 <= rank < num_replicas",
            )
        self.lengths, self.names = dataset.lengths, dataset.names
        self.replacement, self.shuffle, self.drop_last = replacement, shuffle, drop_last
        # Its first seed, which is the same on all ranks, and not a number drawn from it, which need not be.
        self.seed = seed if generator is None else generator.initial_seed()

    def order_facts(self) -> Facts:
        return {
            "samples": self.total,
            "order": f"{'shuffled' if self.shuffle else 'unshuffled'} mixture {self.kind} by seed {self.seed}"
            + (", with replacement" if self.replacement else ""),
            "data sets": " + ".join(
                f"{count} of {length}" for count, length in zip(self.turns.counts, self.lengths, strict=True)
            ),
        }

    def shares(self, weights: Sequence[float] | None) -> list[Any]:
        """Weights, or the sizes where none are given, as shares; nothing but zeros where all data sets are empty."""
        if weights is None and not any(self.lengths):
            return [0 for _ in self.lengths]
        return shares_of(self.lengths if weights is None else weights, self.lengths, self.names)

    def draws(self) -> Draws:
        return Draws(self.lengths, (self.seed, self.epoch), self.replacement, self.shuffle)


def whole_samples(length: Any, policy: str) -> int:
    """Whole samples of an epoch: rounded so that the first data set to run out is not begun again, and every one is gone through."""
    return math.ceil(length) if policy == "max_size" else math.floor(length)


class MultiDatasetSampler(_MixtureSampler):
    """Samples of several data sets at given rates, one by one; a loader groups them into batches of its own.

    Data sets take turns evenly and in an order that is mixed locally, so that any few thousand samples keep the rates, on every rank;
    single batches vary. For an exact composition of every batch take `MultiDatasetBatchSampler`. The order depends on the seed and the
    epoch, not on the number of ranks, which take every ``num_replicas``-th sample.

    Parameters
    ----------
    dataset
        A `MultiDataset`.
    weights
        Rate of each data set, of any sum. None takes their sizes: with the other defaults, every sample comes once an epoch.
    num_samples
        Samples an epoch, on all ranks together, in place of what ``epoch_policy`` says.
    replacement
        Draw each sample independently. With False a data set gives all its samples once before it gives any again, in a new order at
        every pass.
    shuffle
        With False each data set's samples come in its own order.
    generator
        Its initial seed in place of ``seed``.
    num_replicas, rank
        Number of ranks, and which this one is. Left out, the sampler is divided when its loader is.
    seed
        Of the order.
    drop_last
        Cut a tail that does not divide evenly between ranks, instead of going on with the next samples to fill it (``num_padded`` says
        how many of this rank's last samples are such).
    epoch_policy
        Length of an epoch: ``"dataset_size"``: as many samples as all data sets have. ``"min_size"``: until the first data set is used
        up. ``"max_size"``: until every data set has been gone through at least once.
    """

    kind = "of samples"

    def __init__(
        self,
        dataset: HasChildren,
        *,
        weights: Sequence[float] | None = None,
        num_samples: int | None = None,
        replacement: bool = False,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        epoch_policy: EpochPolicy = "dataset_size",
    ) -> None:
        super().__init__(dataset, replacement, shuffle, generator, num_replicas, rank, seed, drop_last)
        self._dataset, self._weights, self._num_samples, self._policy = dataset, weights, num_samples, epoch_policy
        shares = self.shares(weights)
        length = epoch_length(self.lengths, shares, epoch_policy)
        if num_samples is not None:
            check_integer("num_samples", num_samples, 1)
            length = length.__class__(num_samples)
        self.total = whole_samples(length, epoch_policy) if any(shares) else 0
        self.turns = Turns(apportion(self.total, shares) if self.total else [0 for _ in shares])
        self.divide()

    def divide(self) -> None:
        whole, rest = divmod(self.remaining(), self.num_replicas)
        self.num_samples = whole + (1 if rest and not self.drop_last else 0)

    @property
    def num_padded(self) -> int:
        """How many of this rank's last samples lie beyond the end of the epoch: 0 or 1."""
        return int((self.num_samples - 1) * self.num_replicas + self.rank >= self.remaining() > 0)

    def epoch_order(self) -> Order:
        draws, turns, total, stride, first = self.draws(), self.turns, self.total, self.num_replicas, self.start + self.rank
        key = (self.seed, self.epoch)
        return lambda positions: draws(*turns(locally_shuffled(positions * stride + first, total, key)))

    def divided(self, num_replicas: int, rank: int) -> MultiDatasetSampler:
        """The same sampler for one of several ranks."""
        return type(self)(
            self._dataset,
            weights=self._weights,
            num_samples=self._num_samples,
            replacement=self.replacement,
            shuffle=self.shuffle,
            num_replicas=num_replicas,
            rank=rank,
            seed=self.seed,
            drop_last=self.drop_last,
            epoch_policy=self._policy,
        )


class _BatchPositions(_MixtureSampler):
    """The samples of a rank's batches, one batch after the other: batches are dealt to ranks whole, but for a last, shorter round."""

    kind = "of batches"

    def __init__(
        self,
        dataset: HasChildren,
        batch_size: int,
        weights: Sequence[float] | None,
        samples_per_dataset: Sequence[float] | None,
        num_batches: int | None,
        epoch_policy: EpochPolicy,
        *common: Any,
    ) -> None:
        super().__init__(dataset, *common)
        self.batch_size = batch_size
        if num_batches is not None:
            check_integer("num_batches", num_batches, 1)
        if weights is not None and samples_per_dataset is not None:
            raise ConfigError("weights and samples_per_dataset both say what a batch holds", fix="leave out either")
        if samples_per_dataset is not None:
            self._fix(batch_composition(batch_size, samples_per_dataset, self.lengths, self.names), num_batches, epoch_policy)
            return
        shares = self.shares(weights)
        length = epoch_length(self.lengths, shares, epoch_policy)
        self.total = whole_samples(length, epoch_policy) if num_batches is None else num_batches * batch_size
        self.total = self.total if any(shares) else 0
        self.turns = Turns(apportion(self.total, shares) if self.total else [0 for _ in shares])
        self.divide()

    def _fix(self, composition: list[int], num_batches: int | None, epoch_policy: EpochPolicy) -> None:
        self.turns = FixedTurns(composition)
        shares = shares_of(composition, self.lengths, self.names)
        batches = epoch_length(self.lengths, shares, epoch_policy) / self.batch_size
        if num_batches is not None:
            batches = batches.__class__(num_batches)
        self.total = (math.floor if self.drop_last else math.ceil)(batches) * self.batch_size
        self.divide()

    def divide(self) -> None:
        self.rounds, rest = divmod(self.remaining(), self.num_replicas * self.batch_size)
        tail = 0 if self.drop_last else -(-rest // self.num_replicas)
        if isinstance(self.turns, FixedTurns):
            if self.start % self.batch_size:
                raise ConfigError(
                    "batches of a fixed composition cannot begin in the middle of one",
                    found=f"{self.start} samples used, batch_size={self.batch_size}",
                    fix="go on with the batch size that the epoch was begun with",
                )
            self.rounds, tail = self.rounds + (1 if tail else 0), 0
        self.num_samples = self.rounds * self.batch_size + tail

    @property
    def num_padded(self) -> int:
        """How many of this rank's last samples lie beyond the end of the epoch."""
        if isinstance(self.turns, FixedTurns):
            beyond = ((self.rounds - 1) * self.num_replicas + self.rank) * self.batch_size >= self.remaining()
            return self.batch_size if self.rounds and beyond else 0
        return int(self.num_samples > self.rounds * self.batch_size and self._last_round()[1] < self.num_samples)

    def _last_round(self) -> tuple[int, int, int]:
        """Of the last, shorter round: where this rank's samples begin, how many they are with those before, and what repeats after them.

        Each rank takes samples that follow each other, which keep the rates as those of any batch do; every n-th one need not.
        """
        whole, rest = self.rounds * self.batch_size, self.remaining() - self.rounds * self.num_replicas * self.batch_size
        each, more = divmod(rest, self.num_replicas)
        first = self.rounds * self.num_replicas * self.batch_size + self.rank * each + min(self.rank, more)
        return first, whole + each + (self.rank < more), self.remaining() + self.rank - more

    def epoch_order(self) -> Order:
        draws, turns, size, stride, rank = self.draws(), self.turns, self.batch_size, self.num_replicas, self.rank
        whole, start = self.rounds * size, self.start
        first, fresh, beyond = self._last_round()

        def order(positions: Any) -> Any:
            number, place = positions // size, positions % size
            where = (number * stride + rank) * size + place
            tail = positions >= whole
            where[tail] = np.where(positions[tail] < fresh, first + positions[tail] - whole, beyond)
            return draws(*turns(where + start))

        return order


class MultiDatasetBatchSampler(BatchSampler):
    """Batches that mix the children of a `MultiDataset` in a given proportion.

    Whole batches are dealt to ranks in turn, so the epoch is the same sequence of batches on any number of them, and every rank gets the
    same number. Any batch is computed from its number; an epoch costs no list.

    Parameters
    ----------
    dataset
        A `MultiDataset`.
    batch_size
        Samples a batch, on each rank.
    weights
        Rate of each data set, of any sum. A batch holds the nearest whole numbers, which even out from batch to batch: over an epoch the
        rates are exact to a sample. None takes the sizes: with the other defaults, every sample comes once an epoch.
    samples_per_dataset
        In place of weights, for batches that all have one composition: whole numbers that sum to ``batch_size``, or floats, which are
        ratios and are rounded to such numbers once (largest remainders). Every batch is then full.
    num_batches
        Batches an epoch, on all ranks together, in place of what ``epoch_policy`` says.
    epoch_policy
        Length of an epoch: ``"dataset_size"``: as many samples as all data sets have. ``"min_size"``: until the first data set is used
        up. ``"max_size"``: until every data set has been gone through at least once.
    replacement
        Draw each sample independently. With False a data set gives all its samples once before it gives any again, in a new order at
        every pass and in every epoch; of a data set that an epoch does not go through, every epoch takes another part.
    shuffle
        With False each data set's samples come in its own order.
    generator
        Its initial seed in place of ``seed``.
    num_replicas, rank
        Number of ranks, and which this one is. Left out, the sampler is divided when its loader is.
    seed
        Of the order.
    drop_last
        Leave out batches that are not full, or that not every rank would have. With False the epoch goes on with the next samples until
        every rank has as many (``num_padded`` says how many of this rank's last samples are such: at most one, of fixed compositions at
        most a batch).

    Raises
    ------
    ConfigError
        Settings that contradict each other, or ask for samples of an empty data set.
    """

    def __init__(
        self,
        dataset: HasChildren,
        batch_size: int,
        weights: Sequence[float] | None = None,
        samples_per_dataset: Sequence[float] | None = None,
        num_batches: int | None = None,
        epoch_policy: EpochPolicy = "dataset_size",
        replacement: bool = False,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        check_integer("batch_size", batch_size, 1)
        self._what = (dataset, batch_size, weights, samples_per_dataset, num_batches, epoch_policy, replacement, shuffle)
        positions = _BatchPositions(*self._what, generator, num_replicas, rank, seed, drop_last)
        super().__init__(positions, batch_size, drop_last)
        self.num_replicas, self.rank, self.undivided = positions.num_replicas, positions.rank, positions.undivided
        self.seed, self.shuffle = positions.seed, shuffle
        self._positions: _BatchPositions | DistributedSampler = positions

    @classmethod
    def balanced(cls, dataset: HasChildren, batch_size: int, **kwargs: Any) -> Self:
        """As many samples of each data set in a batch as of any other.

        Where ``batch_size`` is a multiple of the number of data sets every batch is exact; otherwise what is left over goes round.

        Parameters
        ----------
        dataset, batch_size, **kwargs
            As for the class.
        """
        check_integer("batch_size", batch_size, 1)
        count, rest = divmod(batch_size, len(dataset.lengths))
        if rest:
            return cls(dataset, batch_size, weights=[1] * len(dataset.lengths), **kwargs)
        return cls(dataset, batch_size, samples_per_dataset=[count] * len(dataset.lengths), **kwargs)

    @property
    def epoch(self) -> int:
        """The epoch last told."""
        return self._positions.epoch

    @property
    def num_padded(self) -> int:
        """How many of this rank's last samples lie beyond the end of the epoch."""
        return self._positions.num_padded

    def divided(self, num_replicas: int, rank: int) -> Self:
        """The same sampler for one of several ranks."""
        return type(self)(*self._what, None, num_replicas, rank, self.seed, self.drop_last)


class ShuffledMixture(MultiDatasetBatchSampler):
    """What a shuffled loader over a `MultiDataset` makes where it was given no sampler: dividing the loader may replace it.

    It is the order that the loader's ranks have, so that one process trains on the same global batches as many.
    """


class OrderedMixture(MultiDatasetBatchSampler):
    """What a loader over a `MultiDataset` that is not shuffled is divided into, where nothing says how to mix: the order of one process."""

    def __init__(
        self, dataset: HasChildren, batch_size: int, num_replicas: int = 1, rank: int = 0, drop_last: bool = False
    ) -> None:
        super().__init__(dataset, batch_size, shuffle=False, num_replicas=num_replicas, rank=rank, drop_last=drop_last)
        order = DistributedSampler(sum(dataset.lengths), num_replicas, rank, shuffle=False, drop_last=drop_last)
        BatchSampler.__init__(self, order, batch_size, drop_last)
        self._positions = order

    def divided(self, num_replicas: int, rank: int) -> Self:
        """The same sampler for one of several ranks."""
        return type(self)(self._what[0], self.batch_size, num_replicas, rank, self.drop_last)
