"""What ranks decide together: that each has a batch, that none has failed to read one, that the run is over.

A step asks once and sends the counts of its labels along. In one process nothing is asked and nothing is waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from nvalchemi.distributed import Manager
from nvalchemi.distributed.collectives import agree, all_reduce, any_rank, gather
from nvalchemi.errors import TrainingError
from nvalchemi.objective import Count
from nvalchemi.training.filler import filled
from nvalchemi.training.totals import group_counts

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext

T = TypeVar("T")
Step = tuple[list[Any], Mapping[str, Count] | None]

SLOTS = 11  # counts that go with the question; a rank without a batch does not know how many there are, so their number is fixed

logger = logging.getLogger("nvalchemi")


def steps(ctx: TrainContext, size: int) -> Iterator[Step]:
    """Groups of ``size`` micro-batches with the counts of their labels, up to the end of the epoch or of the run.

    Where one rank's epoch ends, or one is told to stop, all ranks' do. The counts are those of all ranks; ``None`` where one micro-batch
    is the whole step.

    Raises
    ------
    TrainingError
        Where another rank could not read its batch; that rank raises its own error.
    """
    own = ctx.cursor.groups(size)
    return _together(ctx, own, size) if ctx.manager.distributed else _alone(ctx, own)


def _alone(ctx: TrainContext, own: Iterator[list[Any]]) -> Iterator[Step]:
    for group in own:
        ctx.cursor.at_end = ctx.cursor.read_all
        yield group, None if len(group) == 1 else group_counts(ctx.objective, group)
        if ctx.finished:
            return
    ctx.cursor.at_end = True


def _together(ctx: TrainContext, own: Iterator[list[Any]], size: int) -> Iterator[Step]:
    """The next group's question goes along with the loss of the step before, where that can be."""
    cursor, manager = ctx.cursor, ctx.manager
    ahead = cursor.by_position and not any_rank(ctx.hooks.stops_late, manager)
    question = Question(ctx, own)
    while (step := question.answered(ctx, size)) is not None:
        ctx.question = Question(ctx, own) if ahead and not (cursor.at_end or ctx.completes_next) else None
        yield step
        if cursor.at_end or ctx.complete or ctx.stop_agreed:
            return
        question = ctx.question or Question(ctx, own)


class Question:
    """Whether every rank has its next group, with the counts of its labels.

    A group that can be read ahead is asked for with the loss of the step before (:func:`nvalchemi.training.totals.tell`), and nothing waits for
    the answer. What a rank says of stopping comes with that loss; here it comes too, for what was said since.

    Attributes
    ----------
    numbers
        What this rank says: as many on every rank.
    sums
        All ranks' together, as soon as they are known.
    """

    def __init__(self, ctx: TrainContext, own: Iterator[list[Any]]) -> None:
        self.group: list[Any] | None = None
        self.counts: dict[str, Count] = {}
        self.error: Exception | None = None
        stop = ctx.stop_reason is not None  # read once: a signal may change it at any time
        try:
            if not stop:  # who is to stop reads no further
                self.group = next(own, None)
                self.counts = {} if self.group is None else group_counts(ctx.objective, self.group)
        except Exception as raised:  # noqa: BLE001 - it is raised in `answered`, when the others know of it
            self.error = raised
        self.at_end = ctx.cursor.read_all
        apart, slots = _in_slots(self.counts, ctx.manager)
        flags = [self.group is not None, self.at_end, self.error is not None, stop, apart]
        self.numbers: list[float] = [*flags, *slots]
        self.sums: list[float] | None = None

    def answered(self, ctx: TrainContext, size: int) -> Step | None:
        """Give this rank's group and all ranks' counts; ``None`` where the epoch or the run is over."""
        cursor, manager, group = ctx.cursor, ctx.manager, self.group
        if self.sums is None:
            self.sums = agree(self.numbers, manager)
        ready, ended, failed, stopping, any_apart, *sums = self.sums
        if failed:
            raise_together(self.error, manager)
        if stopping:
            cursor.at_end = False  # what was read is not trained on
            return None
        everybody = int(ready) == manager.world_size
        if group is not None and not (everybody and self.at_end) and (ended or not everybody):
            logger.warning(
                "rank %d has batches left in epoch %d and another rank has none: they are left out",
                manager.rank,
                ctx.progress.epoch,
            )
        cursor.at_end = bool(ended) or not everybody
        if group is None or not everybody:
            return None
        if ctx.calls_communicate and size > 1:
            group = filled(group, manager)
        return group, _sent_apart(self.counts, manager) if any_apart else dict(zip(self.counts, sums, strict=False))


def _in_slots(counts: Mapping[str, Count], manager: Manager) -> tuple[bool, list[float]]:
    """Whether counts have to be sent by themselves: they are many, or on an accelerator, which would be waited for; and the others."""
    apart = len(counts) > SLOTS or (manager.cuda and any(isinstance(count, Tensor) for count in counts.values()))
    numbers = [] if apart else [float(count) for count in counts.values()]
    return apart, numbers + [0.0] * (SLOTS - len(numbers))


def _sent_apart(counts: Mapping[str, Count], manager: Manager) -> dict[str, Count]:
    table = torch.stack([torch.as_tensor(count, dtype=torch.float64, device=manager.device) for count in counts.values()])
    return dict(zip(counts, all_reduce(table, manager).unbind(), strict=True))


def raise_together(error: BaseException | None, manager: Manager) -> None:
    """Raise on every rank: one's own error, or that of the ranks that have one. All ranks must call."""
    texts = gather(None if error is None else f"{type(error).__name__}: {error}", manager)
    if error is not None:
        raise error
    said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None)
    raise TrainingError("another rank ended the run", found=said, fix="see that rank's own error")


def finished(ctx: TrainContext) -> bool:
    """Whether the run is over: on all ranks where any rank was told to stop, with the first one's reason."""
    asked = ctx.interrupt_asked
    if ctx.manager.distributed:
        stops, interrupts = agree([ctx.stop_reason is not None, asked], ctx.manager)
        asked = bool(interrupts)
        if stops:
            ctx.stop_reason = next(reason for reason in gather(ctx.stop_reason, ctx.manager) if reason is not None)
    ctx.interrupted = ctx.interrupted or asked
    return ctx.finished


def together(action: Callable[[], T], manager: Manager) -> list[T]:
    """What ``action`` gives on each rank, in order, on all of them; where it fails on one, all raise."""
    if not manager.distributed:
        return [action()]
    result: Any = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:  # noqa: BLE001 - raised below
        error = raised
    if agree([error is not None], manager)[0]:
        raise_together(error, manager)
    return gather(result, manager)


def first_rank(action: Callable[[], T], manager: Manager) -> T:
    """What ``action`` gives on rank 0, which alone does it, on all ranks; where it fails, all raise."""
    return together(lambda: action() if manager.rank == 0 else None, manager)[0]  # type: ignore[return-value]
