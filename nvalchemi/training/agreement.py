"""What ranks decide together, once a step: that each has a batch, that none has failed to read one, that the run is over.

In one process nothing is asked and nothing is waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from nvalchemi.distributed import Manager
from nvalchemi.distributed.collectives import agree, gather
from nvalchemi.errors import TrainingError

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext

T = TypeVar("T")

logger = logging.getLogger("nvalchemi")


def groups(ctx: TrainContext, size: int) -> Iterator[list[Any]]:
    """Groups of ``size`` micro-batches, as long as every rank has one: where one rank's epoch ends, all ranks' do.

    Raises
    ------
    TrainingError
        Where another rank could not read its batch; that rank raises its own error.
    """
    own = ctx.cursor.groups(size)
    return _together(ctx, own) if ctx.manager.distributed else own


def _together(ctx: TrainContext, own: Iterator[list[Any]]) -> Iterator[list[Any]]:
    cursor, manager = ctx.cursor, ctx.manager
    while True:
        group: list[Any] | None = None
        error: Exception | None = None
        try:
            group = next(own, None)
        except Exception as raised:  # noqa: BLE001 - it is raised below, when the others know of it
            error = raised
        ready, ended, failed = agree([group is not None, cursor.at_end, error is not None], manager)
        if failed:
            raise_together(error, manager)
        everybody = int(ready) == manager.world_size
        if group is not None and not (everybody and cursor.at_end) and (ended or not everybody):
            logger.warning(
                "rank %d has batches left in epoch %d and another rank has none: they are left out",
                manager.rank,
                ctx.progress.epoch,
            )
        cursor.at_end = bool(ended) or not everybody
        if group is None or not everybody:
            return
        yield group
        if cursor.at_end:
            return


def raise_together(error: BaseException | None, manager: Manager) -> None:
    """Raise on every rank: one's own error, or that of the ranks that have one. All ranks must call."""
    texts = gather(None if error is None else f"{type(error).__name__}: {error}", manager)
    if error is not None:
        raise error
    said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None)
    raise TrainingError("another rank ended the run", found=said, fix="see that rank's own error")


def finished(ctx: TrainContext) -> bool:
    """Whether the run is over: on all ranks where any rank was told to stop, with the first one's reason."""
    if not ctx.manager.distributed:
        return ctx.finished
    if agree([ctx.stop_reason is not None], ctx.manager)[0]:
        ctx.stop_reason = next(reason for reason in gather(ctx.stop_reason, ctx.manager) if reason is not None)
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
