"""The loader: batches of a data set in an order that depends on the seed and the epoch alone, made ahead of time in a thread."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch

from nvalchemi.data.datapipes.block_shuffle import BlockShuffleSampler
from nvalchemi.data.datapipes.multi_samplers import ShuffledMixture
from nvalchemi.data.datapipes.multidataset import MultiDataset
from nvalchemi.data.datapipes.pipeline import Samples, sample_seeds
from nvalchemi.data.datapipes.prefetch import Prefetcher, in_bursts
from nvalchemi.data.datapipes.reader import Indices
from nvalchemi.data.datapipes.samplers import (
    BatchSampler,
    IndexSampler,
    RandomSampler,
    SequentialSampler,
    check_integer,
    check_sampler,
    seek,
    tell_epoch,
)
from nvalchemi.data.datapipes.transfer import Received, SideStream, moved, pinned
from nvalchemi.data.transforms import Transform, name_of
from nvalchemi.errors import ConfigError, DataError

#: Batches made at a time of a data set that is ready in memory.
BURST = 8


@runtime_checkable
class ReadsBatches(Protocol):
    """What a loader needs of a data set."""

    device: torch.device

    def __len__(self) -> int: ...

    def read_many(self, indices: Indices, *, epoch: int = 0) -> Any: ...


def _own_sampler(dataset: Sized, shuffle: bool | str, seed: int) -> IndexSampler:
    if isinstance(shuffle, str):
        if shuffle != "blocks":
            raise ConfigError("shuffle is no such word", found=repr(shuffle), needed='True, False or "blocks"')
        return BlockShuffleSampler(dataset, seed=seed)
    return RandomSampler(dataset, seed) if shuffle else SequentialSampler(dataset)


class DataLoader:
    """Batches of a data set, on the data set's device.

    The order depends on ``(seed, epoch)`` alone, and any batch of it is sought by index (`iter_from`): nothing is read again on resuming.
    Every iterator has a thread of its own (but see ``prefetch_factor``) that keeps up to ``prefetch_factor`` batches ready; it ends with the iterator, at an early
    ``break`` too. An error of the thread is raised where the batch is asked for.

    Parameters
    ----------
    dataset
        `Dataset`, `InMemoryDataset` or `MultiDataset`.
    batch_size
        Samples a batch.
    shuffle
        A new order every epoch; `set_epoch` goes to that of an epoch. ``"blocks"`` is for stores larger than memory: blocks of
        neighbours in random order, and mixed, so that each is read about once an epoch; see `BlockShuffleSampler`. With True, batches
        of a `MultiDataset` hold its data sets in proportion to their sizes, as they do on many ranks.
    drop_last
        Leave out a last batch that is not full.
    sampler
        In place of ``shuffle``: anything that gives indices.
    batch_sampler
        In place of ``batch_size``, ``shuffle``, ``drop_last`` and ``sampler``: anything that gives lists of indices.
    prefetch_factor
        Batches kept ready; 0 makes each when it is asked for, in the caller's thread. On the CPU an `InMemoryDataset` without random
        transforms is not read in a thread, as cutting out a batch costs less than the switch: a few batches are made at a time.
    pin_memory
        Make batches in page-locked memory, so that copies to a GPU overlap its work. Does nothing where there is no accelerator.
    seed
        Of the shuffled order, and of random ``batch_transforms``.
    batch_transforms
        Callables from `Batch` to `Batch` (or `Transform`, for random numbers), applied on the CPU in the prefetch thread.

    Raises
    ------
    ConfigError
        Arguments that contradict each other or that do not fit the data set.
    DataError
        An empty data set.
    """

    def __init__(
        self,
        dataset: ReadsBatches,
        batch_size: int = 1,
        shuffle: bool | Literal["blocks"] = False,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        seed: int = 0,
        batch_transforms: Sequence[Callable[..., Any]] = (),
    ) -> None:
        if not isinstance(dataset, ReadsBatches):
            raise ConfigError(
                "this loader reads many samples at once, which the data set cannot",
                found=type(dataset).__name__,
                needed="Dataset, InMemoryDataset or MultiDataset",
                fix="Dataset(reader); InMemoryDataset(...) for structures or tensors; torch.utils.data.DataLoader for torch's data sets",
            )
        if len(dataset) == 0:
            raise DataError(f"the data set {getattr(dataset, 'name', '')} is empty", needed="at least one sample")
        check_integer("prefetch_factor", prefetch_factor, 0)
        if callable(batch_transforms) or not all(callable(transform) for transform in batch_transforms):
            raise ConfigError(
                "batch_transforms is a sequence of callables", found=repr(batch_transforms), fix="batch_transforms=[...]"
            )
        if batch_sampler is None and sampler is None and shuffle is True and isinstance(dataset, MultiDataset):
            batch_sampler = ShuffledMixture(dataset, batch_size, seed=seed, drop_last=drop_last)
        elif batch_sampler is None:
            if sampler is None:
                sampler = _own_sampler(dataset, shuffle, seed)
            elif shuffle:
                raise ConfigError("a sampler decides the order", fix="leave out shuffle, or leave out sampler")
            batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        elif batch_size != 1 or shuffle or drop_last or sampler is not None:
            raise ConfigError(
                "batch_sampler decides all about the batches", fix="leave out batch_size, shuffle, drop_last and sampler"
            )
        check_sampler(batch_sampler)
        self.dataset, self.batch_sampler = dataset, batch_sampler
        self.prefetch_factor, self.pin_memory, self.seed = prefetch_factor, pin_memory, seed
        self.batch_transforms = tuple(batch_transforms)
        self.shuffle = shuffle
        self.epoch = 0

    @property
    def sampler(self) -> Any:
        """The sampler inside the batch sampler, or None where it has none."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def batch_size(self) -> int | None:
        """Samples a batch, or None where the batch sampler does not say."""
        return getattr(self.batch_sampler, "batch_size", None)

    @property
    def drop_last(self) -> bool:
        """Whether a last batch that is not full is left out."""
        return bool(getattr(self.batch_sampler, "drop_last", False))

    @property
    def device(self) -> torch.device:
        """Where the batches are delivered."""
        return self.dataset.device

    @property
    def field_names(self) -> tuple[str, ...]:
        """Names of the data set's fields."""
        return tuple(getattr(self.dataset, "field_names", ()))

    def with_batch_sampler(self, batch_sampler: Iterable[Sequence[int]]) -> DataLoader:
        """The same loader with other batches: what dividing the data between ranks needs."""
        check_sampler(batch_sampler)
        loader = copy.copy(self)
        loader.batch_sampler = batch_sampler
        loader.set_epoch(self.epoch)
        return loader

    def __len__(self) -> int:
        """Batches in an epoch."""
        if not isinstance(self.batch_sampler, Sized):
            raise ConfigError(f"{type(self.batch_sampler).__name__} does not say how many batches there are", needed="__len__")
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Go to the order, and to the random numbers of transforms, of ``epoch``. Iterators already begun keep theirs."""
        self.epoch = int(epoch)
        tell_epoch(self.batch_sampler, self.epoch)

    def __iter__(self) -> Iterator[Any]:
        return self.iter_from(0)

    def iter_from(self, batch: int) -> Iterator[Any]:
        """Batches of the current epoch from number ``batch`` on; the ones before are neither read nor drawn.

        The iterator has ``close()``, which ends its thread; leaving it to the garbage collector does the same.
        """
        batches = self._batches(seek(self.batch_sampler, batch), self.epoch, batch)
        if not self.prefetch_factor:
            return self._delivered(batches)
        if self._immediate():
            return in_bursts(batches, BURST)
        if self.device.type != "cuda":
            return Prefetcher(self._delivered(batches), self.prefetch_factor)
        side = SideStream(self.device)
        return Received(Prefetcher(map(side.send, batches), self.prefetch_factor), side)

    def _immediate(self) -> bool:
        """Whether reading ahead would cost more than it hides: the two threads share one interpreter lock, and a switch takes longer."""
        return getattr(self.dataset, "immediate", False) and self.device.type == "cpu" and not self.batch_transforms

    def _delivered(self, batches: Iterator[Samples]) -> Iterator[Samples]:
        if self.device.type == "cpu":
            return batches
        return (moved(batch, self.device, non_blocking=self.pin_memory) for batch in batches)

    def _batches(self, index_lists: Iterator[Sequence[int]], epoch: int, first: int) -> Iterator[Samples]:
        for number, indices in enumerate(index_lists, first):
            try:
                samples = self.dataset.read_many(indices, epoch=epoch)
                for transform in self.batch_transforms:
                    samples = self._transformed(transform, samples, indices, epoch, number)
                if self.pin_memory:
                    samples = pinned(samples)
            except Exception as error:
                error.add_note(f"while making batch {number} of epoch {epoch} from {self.dataset!r}")
                raise
            yield samples
            del samples  # the consumer's now: the last batch must not live on while the next is made

    def _transformed(self, transform: Any, samples: Samples, indices: Sequence[int], epoch: int, number: int) -> Samples:
        if isinstance(transform, Transform):
            # Ranks read different samples under the same number, and should not draw the same noise.
            (seed,) = sample_seeds(np.asarray(indices[:1]), (self.seed, epoch, number))
            out: Any = transform(samples, torch.Generator().manual_seed(seed))  # type: ignore[arg-type]
        else:
            out = transform(samples)
        if not isinstance(out, type(samples)):
            raise DataError(
                f"the batch transform {name_of(transform)} gave no batch", found=type(out).__name__, needed=type(samples).__name__
            )
        return out  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        order = self.sampler if type(self.batch_sampler) is BatchSampler else self.batch_sampler
        return f"DataLoader({self.dataset!r}, batch_size={self.batch_size}, sampler={type(order).__name__})"
