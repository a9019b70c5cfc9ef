"""What an epoch leaves out or repeats, said once a run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from nvalchemi.training.hook import Hook, on
from nvalchemi.training.stages import TrainingStage

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext

logger = logging.getLogger("nvalchemi")


class DivisionReport(Hook):
    """Part of every run: the first epoch's samples that are not trained on, or twice so that all ranks have as many, are told in the log.

    More than a tenth of them is a warning.
    """

    agreed = True

    def __init__(self) -> None:
        self._said = False

    @on(TrainingStage.EPOCH_START)
    def tell(self, ctx: TrainContext) -> None:
        """Say it where there is something to say."""
        if self._said or ctx.manager.rank != 0:
            return
        self._said = True
        division, length = ctx.cursor.division, ctx.cursor.num_batches
        if division is None or length is None:
            return
        total, trained = division.remaining(), division.used(length)
        twice = division.dealt() - trained
        ranks = division.division_facts().get("ranks", 1)
        if trained < total:
            logger.log(
                _level(total - trained, total),
                "epoch %d leaves out %d of %d samples: the last ones of its order", ctx.progress.epoch, total - trained, total,
            )  # fmt: skip
        if twice > 0:
            logger.log(
                _level(twice, total),
                "epoch %d has %d of %d samples twice: %s ranks take as many each", ctx.progress.epoch, twice, total, ranks,
            )  # fmt: skip


def _level(samples: int, total: int) -> int:
    # some are left over wherever sizes do not divide; a tenth is another data set, and to be seen without any setting of the log
    return logging.WARNING if 10 * samples > total else logging.INFO
