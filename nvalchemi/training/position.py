"""Where in its data a resumed run goes on: in the epoch as it was divided, in what is left of it divided anew, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nvalchemi.data.address import Where
from nvalchemi.data.datapipes.ahead import goes_on_in_workers
from nvalchemi.errors import CheckpointError

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext

logger = logging.getLogger("nvalchemi")


def described(ctx: TrainContext) -> dict[str, Any]:
    """What :func:`take_up` needs to know of the run that is saved, beside its progress: plain data."""
    return {**ctx.cursor.described(), "at_end": ctx.cursor.at_end}


def take_up(ctx: TrainContext, then: Mapping[str, Any], ranks: int, path: Where) -> None:
    """Have the run's loaded progress mean the same samples in this run's loader, on this run's number of ranks.

    The start of an epoch, and its end, are places in any loader. In its middle, the same loader on as many ranks goes on at its batch.
    Another number of ranks, or batches made in another way, divide anew what is left of the epoch, which needs an order that is the same
    on any number of ranks.

    Parameters
    ----------
    then
        What :func:`described` gave when the checkpoint was saved, on ``ranks`` ranks.
    path
        Of the checkpoint, for messages.

    Raises
    ------
    CheckpointError
        Where samples would be left out or seen twice, naming both sizes.
    """
    if ctx.progress.epoch > 0 and ctx.manager.rank == 0 and goes_on_in_workers(ctx.cursor.loader):
        logger.info(
            "workers that outlive an epoch are seeded once: random numbers that the data set draws in them are not those of the unbroken run "
            "(persistent_workers=False, or numbers drawn from seed, epoch and index, would be)"
        )
    progress, cursor, now = ctx.progress, ctx.cursor, ctx.cursor.described()
    order, division = then.get("order"), then.get("division")
    same_ranks = ranks == ctx.manager.world_size
    if progress.at_epoch_start or (same_ranks and order == now["order"] and division == now["division"]):
        return
    total, length = cursor.num_samples, cursor.num_batches
    if then.get("at_end") and total is not None:
        progress.batch, progress.divided_at = 0, total
    elif then.get("at_end") and length is not None:
        progress.batch, progress.divided_at = length, 0
    elif order and order == now["order"]:
        progress.batch, progress.divided_at = 0, progress.epoch_samples
        if ctx.manager.rank == 0:
            logger.info(
                "what is left of epoch %d, %d of %d samples, is divided anew: %s, saved with %s",
                progress.epoch, (total or 0) - progress.epoch_samples, total or 0, _words(now["division"]), _words(division or {}),
            )  # fmt: skip
    else:
        raise _refusal(ctx, then, ranks, path)


def _refusal(ctx: TrainContext, then: Mapping[str, Any], ranks: int, path: Where) -> CheckpointError:
    cursor = ctx.cursor
    if not then:
        return CheckpointError(
            f"{path} stands in the middle of an epoch, and its format is an earlier one, which did not say in what order",
            fix="finish the epoch with the version that began it, or take the weights alone with init_from",
        )
    before = {"processes": ranks, **(then.get("order") or {}), **(then.get("division") or {})}
    now = cursor.described()
    here = {"processes": ctx.manager.world_size, **now["order"], **now["division"]}
    other = [name for name in {**before, **here} if before.get(name) != here.get(name) and name != "ranks"]
    if then.get("order") and now["order"]:
        where, why = "of another loader", "resume with the data and the order as they were"
    elif ranks != ctx.manager.world_size:
        where = "on another number of processes, and its loader cannot tell what is left of the epoch"
        why = f"resume on {ranks}, or give the loader a sampler that can tell (nvalchemi.data.datapipes.Divisible)"
    else:
        where, why = "of another loader", "resume with the loader as it was"
    return CheckpointError(
        f"{path} stands in the middle of an epoch {where}: samples would be left out or seen twice",
        found=", ".join(f"{name} {here.get(name)}" for name in other),
        needed=", ".join(f"{name} {before.get(name)}" for name in other),
        fix=f"{why}, or from the end of an epoch; or take the weights alone with init_from",
    )


def _words(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
