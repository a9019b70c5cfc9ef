"""Batches of as many structures as fit into a number of atoms or edges, as many batches on every rank."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nvalchemi.data.datapipes.allocation import EpochPolicy
from nvalchemi.data.datapipes.divisible import Facts
from nvalchemi.data.datapipes.multi_samplers import MultiDatasetSampler
from nvalchemi.data.datapipes.multidataset import MultiDataset
from nvalchemi.data.datapipes.samplers import DistributedSampler, DividedSampler, check_integer
from nvalchemi.errors import ConfigError, DataError

Bins = list[NDArray[np.int64]]


class _Made(NamedTuple):
    """The batches of one epoch, and how many samples all ranks have had after each round of them."""

    epoch: int
    bins: Bins
    ends: NDArray[np.int64]


class AtomBudgetBatchSampler:
    """Batches that hold at most so many atoms, edges or both.

    The epoch's order is cut wherever the next structure would not fit, so batches are formed anew in every epoch and are nearly full, which
    makes ranks' work nearly equal. Batches are dealt to ranks in turn. A last round of fewer batches than ranks is made to go round by
    halving its heaviest batches; only where it has fewer structures than there are ranks does a rank get a repeated one
    (``num_padded``).

    Parameters
    ----------
    dataset
        A data set of structures, or a `MultiDataset` of such.
    max_atoms
        Most atoms a batch.
    max_edges, num_edges
        Most edges a batch, and the (n,) number of edges of each structure: `AtomicDataZarrReader.num_edges` of a store that has them.
    weights, num_samples, epoch_policy, replacement
        As for `MultiDatasetSampler`, where ``dataset`` is a `MultiDataset`.
    shuffle, seed
        Whether the order is a permutation drawn from the seed and the epoch.
    num_replicas, rank
        Number of ranks, and which this one is. Left out, the sampler is divided when its loader is.
    drop_last
        Leave out a last round that does not give every rank a batch, and in one process nothing.

    Raises
    ------
    DataError
        A structure that alone is over the budget: it is named.
    ConfigError
        No budget, or settings that the data set has no use for.

    Notes
    -----
    How many batches there are depends on the order, so ``len`` is that of the current epoch. The cuts of an epoch are made when they are
    first asked for, in a time and memory that grow with its length (8 bytes a sample).
    """

    def __init__(
        self,
        dataset: Any,
        max_atoms: int | None = None,
        *,
        max_edges: int | None = None,
        num_edges: ArrayLike | None = None,
        weights: Sequence[float] | None = None,
        num_samples: int | None = None,
        epoch_policy: EpochPolicy = "dataset_size",
        replacement: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if (num_replicas is None) != (rank is None):
            raise ConfigError("num_replicas and rank go together", found=f"num_replicas={num_replicas}, rank={rank}")
        self.undivided = rank is None
        self.num_replicas, self.rank = num_replicas or 1, rank or 0
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigError("a rank is one of its replicas", found=f"rank={rank}, num_replicas={num_replicas}")
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.order: DividedSampler  # of one process: the batches cut from it are dealt to ranks
        if isinstance(dataset, MultiDataset):
            self.order = MultiDatasetSampler(
                dataset,
                weights=weights,
                num_samples=num_samples,
                epoch_policy=epoch_policy,
                replacement=replacement,
                shuffle=shuffle,
                seed=seed,
            )
        elif weights is not None or num_samples is not None or epoch_policy != "dataset_size" or replacement:
            raise ConfigError(
                "weights, num_samples, epoch_policy and replacement are for several data sets",
                found=type(dataset).__name__,
                needed="MultiDataset",
            )
        else:
            self.order = DistributedSampler(dataset, shuffle=shuffle, seed=seed)
        self.budgets: list[tuple[NDArray[np.int64], int]] = []
        if max_atoms is not None:
            check_integer("max_atoms", max_atoms, 1)
            self._add_budget(dataset, dataset.num_atoms, max_atoms, "atoms")
        if max_edges is not None:
            check_integer("max_edges", max_edges, 1)
            if num_edges is None:
                raise ConfigError("a budget of edges needs their numbers", needed="num_edges, one number a structure")
            self._add_budget(dataset, num_edges, max_edges, "edges")
        if not self.budgets:
            raise ConfigError("there is no budget", needed="max_atoms, max_edges or both")
        self._limits: Facts = {"max_atoms": max_atoms or 0, "max_edges": max_edges or 0}
        self._made: _Made | None = None

    def _add_budget(self, dataset: Any, numbers: ArrayLike, most: int, what: str) -> None:
        counts = np.asarray(numbers, np.int64)
        if counts.shape != (len(dataset),):
            raise ConfigError(f"the number of {what} is given for each structure", found=counts.shape, needed=(len(dataset),))
        if counts.size and counts.max() > most:
            worst = int(counts.argmax())
            name, index = getattr(dataset, "name", "the data set"), worst
            if isinstance(dataset, MultiDataset):
                child, local = dataset.locate([worst])
                name, index = dataset.names[int(child[0])], int(local[0])
            raise DataError(
                f"sample {index} of {name} alone is over the budget of a batch",
                found=f"{counts[worst]} {what}; {int((counts > most).sum())} structures are over {most}",
                needed=f"max_{what} of at least {counts[worst]}",
                fix="raise the budget, or leave these structures out of the data",
            )
        self.budgets.append((counts, most))

    @property
    def epoch(self) -> int:
        """The epoch last told."""
        return self.order.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the batches of ``epoch``; iterators already made keep theirs."""
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._epoch().bins) // self.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        return self.iter_from(0)

    def iter_from(self, batch: int) -> Iterator[list[int]]:
        """Batches of this rank from number ``batch`` on."""
        if not 0 <= batch <= len(self):
            raise ConfigError(f"the epoch has no batch {batch}", needed=f"a position from 0 to {len(self)}")
        mine = self._epoch().bins[batch * self.num_replicas + self.rank :: self.num_replicas][: len(self) - batch]
        return (indices.tolist() for indices in mine)

    def after(self, samples: int) -> Self:
        """Batches of what is left of the epoch once its first ``samples`` samples, of all ranks together, have been used."""
        rest = copy.copy(self)
        rest.order, rest._made = self.order.after(samples), None
        return rest

    def divided(self, num_replicas: int, rank: int) -> Self:
        """The same sampler for one of several ranks."""
        part = copy.copy(self)
        part.order, part._made = copy.copy(self.order), None
        part.num_replicas, part.rank, part.undivided = num_replicas, rank, False
        return part

    def remaining(self) -> int:
        """See `Divisible`."""
        return self.order.remaining()

    def dealt(self) -> int:
        """See `Divisible`."""
        return int(self._epoch().ends[-1])

    def used(self, count: int) -> int:
        """Samples of the epoch, of all ranks together, that are used when every rank has had its first ``count`` batches."""
        return self.order.used(int(self._epoch().ends[min(count, len(self))]))

    def order_facts(self) -> Facts:
        """See `Divisible`."""
        return self.order.order_facts()

    def division_facts(self) -> Facts:
        """See `Divisible`."""
        return {"ranks": self.num_replicas, "drop_last": self.drop_last, **self._limits}

    @property
    def num_padded(self) -> int:
        """How many of this rank's last samples repeat others of the epoch: 0 or 1."""
        beyond = max(self.dealt() - self.remaining(), 0)
        return int(self.rank >= self.num_replicas - beyond)

    def _epoch(self) -> _Made:
        """Every rank's batches of the current epoch, those of one round one after the other."""
        if self._made is None or self._made.epoch != self.epoch:
            order = self.order.epoch_order()(np.arange(len(self.order), dtype=np.int64))
            bins = self._even(self._cut(order))
            ends = np.cumsum([0, *map(len, bins)])[:: self.num_replicas]
            self._made = _Made(self.epoch, bins, ends)
        return self._made

    def _cut(self, order: NDArray[np.int64]) -> Bins:
        sums = [(np.cumsum(counts[order]), most) for counts, most in self.budgets]
        start, cuts = 0, []
        while start < len(order):
            used = [int(total[start - 1]) if start else 0 for total, _ in sums]
            stops = [total.searchsorted(base + most, "right") for (total, most), base in zip(sums, used, strict=True)]
            start = int(min(stops))
            cuts.append(start)
        return np.split(order, cuts[:-1]) if cuts else []

    def _even(self, batches: Bins) -> Bins:
        """The same batches, as many for every rank."""
        whole = len(batches) // self.num_replicas * self.num_replicas
        rest = batches[whole:]
        if not rest or self.drop_last:
            return batches[:whole]
        spare = batches[0][:1]
        return batches[:whole] + self._spread(rest, spare)

    def _spread(self, batches: Bins, spare: NDArray[np.int64]) -> Bins:
        counts = self.budgets[0][0]
        heap = [(-int(counts[batch].sum()) if len(batch) > 1 else 0, number, batch) for number, batch in enumerate(batches)]
        heapq.heapify(heap)
        fresh = count(len(batches))
        while len(heap) < self.num_replicas and len(heap[0][2]) > 1:
            _, number, batch = heapq.heappop(heap)
            total = np.cumsum(counts[batch])
            half = min(max(int(total.searchsorted(total[-1] / 2, "right")), 1), len(batch) - 1)
            for new, part in ((number, batch[:half]), (next(fresh), batch[half:])):
                heapq.heappush(heap, (-int(counts[part].sum()) if len(part) > 1 else 0, new, part))
        spread = [batch for _, _, batch in sorted(heap, key=lambda item: item[1])]
        return spread + [spare] * (self.num_replicas - len(spread))
