"""Where a run stands in its loader: any loader, sought by position, handed out in groups of micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from nvalchemi.data.datapipes.ahead import draws_nothing
from nvalchemi.data.datapipes.divisible import Divisible
from nvalchemi.data.datapipes.rest import division_of, rest_of
from nvalchemi.errors import ConfigError, TrainingError
from nvalchemi.training.context import Progress
from nvalchemi.training.seeds import derive_seed


@runtime_checkable
class EpochAware(Protocol):
    """Something whose order depends on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next."""


@runtime_checkable
class Seekable(EpochAware, Protocol):
    """A loader that starts at any batch of an epoch without reading those before it."""

    def iter_from(self, batch: int) -> Iterator[Any]:
        """The epoch's batches from number ``batch`` on."""


class Cursor:
    """The position in a loader.

    A loader of this package is sought by index. A list of batches is, too. Any other iterable is replayed up to the position,
    with torch's random stream set from (seed, epoch) where it makes its order, so that the order is the same on a resume. Where the
    loader's sampler can be divided anew (:class:`~nvalchemi.data.datapipes.samplers.Divisible`), so can an epoch that was begun on
    another number of ranks.

    Parameters
    ----------
    loader
        Anything that can be iterated over once an epoch.
    device
        Where the batches go.
    seed
        Of the run.

    Attributes
    ----------
    at_end
        Whether the epoch is over with the group that is trained on; kept by whoever trains.
    read_all
        Whether it is over with the group that was read last.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device, seed: int = 0) -> None:
        if isinstance(loader, (str, bytes, Mapping)) or not isinstance(loader, Iterable):
            raise ConfigError(
                "the loader cannot be iterated over", found=repr(loader), fix="give a DataLoader or a list of batches"
            )
        self.loader, self.device, self.seed = loader, device, seed
        self.at_end = self.read_all = False
        self._moves = device.type != "cpu"  # loaders hand out host memory
        self._iterator: Iterator[Any] = iter(())
        self._position = 0
        self._current: Iterable[Any] = loader  # of this epoch: the loader, or what is left of the epoch
        self._division = division_of(loader)
        # A torch loader's own generator keeps the user's seed; each epoch's order is derived from it.
        self._own_generator = loader.generator if isinstance(loader, torch.utils.data.DataLoader) else None
        self._own_seed = self._own_generator.initial_seed() if self._own_generator is not None else seed

    def __len__(self) -> int:
        """Batches an epoch; raises TypeError where the loader does not know."""
        return len(self.loader)  # type: ignore[arg-type]

    @property
    def num_batches(self) -> int | None:
        """Batches an epoch, or ``None`` where the loader does not know."""
        return _length(self.loader)

    @property
    def by_position(self) -> bool:
        """Whether a batch is the same whenever it is read, so that one may be read before it is wanted."""
        if isinstance(self._current, Seekable):  # one of ours may be told to make each batch when it is asked for
            return getattr(self._current, "prefetch_factor", None) != 0
        return draws_nothing(self._current)

    @property
    def division(self) -> Divisible | None:
        """How the current epoch, or what was left of it, is divided; ``None`` where the sampler cannot tell."""
        return self._division

    @property
    def num_samples(self) -> int | None:
        """Samples an epoch, all ranks together, or ``None`` where the sampler cannot tell."""
        division = division_of(self.loader)
        return None if division is None else division.remaining()

    def samples_used(self, batch: int) -> int | None:
        """The position in the epoch's order when each rank has had ``batch`` batches; ``None`` where the sampler cannot tell."""
        return None if self._division is None else self._division.used(batch)

    def described(self) -> dict[str, Any]:
        """What a position in an epoch depends on, as far as the loader says: plain data.

        ``order`` is the same on any number of ranks, and empty where the sampler cannot be divided anew; ``division`` is the rest.
        """
        division = division_of(self.loader)
        if division is not None:
            return {"order": division.order_facts(), "division": division.division_facts()}
        data, sampler = getattr(self.loader, "dataset", None), getattr(self.loader, "sampler", None)
        facts = {name: getattr(self.loader, name, None) for name in ("batch_size", "drop_last", "seed")}
        facts |= {"batches": self.num_batches, "samples": len(data) if isinstance(data, Sized) else None}
        facts["order"] = None if sampler is None else type(sampler).__name__
        return {"order": {}, "division": {name: value for name, value in facts.items() if isinstance(value, bool | int | str)}}

    def seek(self, progress: Progress) -> None:
        """Go to ``progress``: its epoch's order, its division between ranks, its batch."""
        self.close()
        self.at_end = self.read_all = False
        self._position = progress.batch
        self._set_epoch(progress.epoch)
        self._current = rest_of(self.loader, progress.divided_at) if progress.divided_at else self.loader
        self._division = division_of(self._current)
        length = _length(self._current)
        if length is not None and (length > 0 or progress.divided_at) and progress.batch >= length:
            self.at_end = self.read_all = True  # a checkpoint of an epoch's last step: what is left of the epoch is its end
        elif isinstance(self._current, Seekable):
            self._iterator = self._current.iter_from(progress.batch)
        elif isinstance(self._current, Sequence):
            self._iterator = iter(islice(self._current, progress.batch, None))
        else:
            self._iterator = self._replay(progress)

    def groups(self, size: int) -> Iterator[list[Any]]:
        """Groups of ``size`` micro-batches on the device, the epoch's last one maybe shorter.

        Raises
        ------
        TrainingError
            Where the epoch has no batch at all.
        """
        length = _length(self._current)
        while not self.read_all:
            group = list(islice(self._iterator, size))
            if self._moves:
                group = [to_device(batch, self.device) for batch in group]
            self._position += len(group)
            self.read_all = len(group) < size or (length is not None and self._position >= length)
            if group:
                yield group
            elif self._position == 0:
                raise TrainingError(
                    "the loader gave no batch in this epoch",
                    found=f"{type(self.loader).__name__}" + (f" of length {length}" if length is not None else ""),
                    fix="check the dataset's size, drop_last, and that the loader can be iterated over once an epoch",
                )

    def close(self) -> None:
        """Let go of the loader's iterator: its threads and processes end now."""
        closable, self._iterator = self._iterator, iter(())
        if isinstance(closable, _Closable):
            closable.close()

    def _set_epoch(self, epoch: int) -> None:
        holders: list[Any] = [self.loader]
        if isinstance(self.loader, torch.utils.data.DataLoader):
            batches = self.loader.batch_sampler
            inner = batches.sampler if isinstance(batches, torch.utils.data.BatchSampler) else None
            # A data set is told too: its random transforms follow the epoch, also in worker processes.
            holders += [batches, self.loader.sampler, inner, self.loader.dataset]
        for holder in holders:
            if isinstance(holder, EpochAware):
                holder.set_epoch(epoch)

    def _replay(self, progress: Progress) -> Iterator[Any]:
        # Workers of the rest of an epoch do not draw what those of its start have drawn.
        stream = ("order", progress.epoch, progress.divided_at) if progress.divided_at else ("order", progress.epoch)
        own = self._own_generator
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.seed, *stream))
            if own is not None:
                own.manual_seed(derive_seed(self._own_seed, *stream))
            iterator = iter(self._current)
            first = list(islice(iterator, 1))  # samplers draw their order when the first index is asked for
        skip = progress.batch
        if skip and first:
            skip, first = skip - 1, []
        skipped = sum(1 for _ in islice(iterator, skip))
        if skipped < skip:
            raise TrainingError(
                "the loader is shorter than the position to go on from",
                found=f"{skipped + 1} batches",
                needed=f"{progress.batch}",
            )
        return chain(first, iterator)


def _length(loader: Iterable[Any]) -> int | None:
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except TypeError:  # torch's DataLoader over an iterable dataset has __len__ and no length
        return None


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> None: ...


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch on ``device``: a tensor, an atomic batch, or a tuple, list or mapping of them."""
    if isinstance(batch, Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple takes its fields one by one
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(value, device) for value in batch)
    # Whatever cannot be moved (numbers, strings, arrays, a user's own class) is the objective's to deal with.
    return batch.to(device, non_blocking=True) if hasattr(batch, "to") else batch
