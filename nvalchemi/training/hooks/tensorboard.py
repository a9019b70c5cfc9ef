"""The numbers of a run for TensorBoard."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvalchemi.errors import ConfigError
from nvalchemi.training.hook import Every
from nvalchemi.training.records import unused
from nvalchemi.training.reports import ReportingHook

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext

logger = logging.getLogger("nvalchemi")


class TensorBoardHook(ReportingHook):
    """Write what `MetricsHook` writes as scalars of TensorBoard, over optimizer steps: ``train/loss``, ``validation/loss`` and so on.

    A run that is resumed goes on in the same place, and what a killed run wrote after its last checkpoint is no longer shown. A run that
    starts afresh moves the event files that are there to a folder ``old-1`` inside, which TensorBoard shows as a run of its own. It needs the
    extra ``tensorboard``; rank 0 writes.

    Parameters
    ----------
    directory
        Where the event files are: ``tensorboard --logdir DIRECTORY`` shows them.
    every
        How often the training's means are written.

    Raises
    ------
    ConfigError
        Where the package ``tensorboard`` is not installed, and at the start of a run where the folder cannot be written to.
    """

    name = "tensorboard"

    def __init__(self, directory: str | os.PathLike[str], every: Every | None = None) -> None:
        super().__init__(every)
        self.directory = Path(directory)
        self._writer: Any = None
        if find_spec("tensorboard") is None:
            raise ConfigError("TensorBoardHook needs the package tensorboard", fix='pip install "nvalchemi[tensorboard]"')

    def open(self, ctx: TrainContext, resumed: bool) -> None:
        from torch.utils.tensorboard import SummaryWriter

        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not resumed:
                put_events_aside(self.directory)
            self._writer = SummaryWriter(str(self.directory), purge_step=ctx.progress.step + 1 if resumed else None)
        except OSError as error:
            raise ConfigError(
                f"TensorBoard's files cannot be written to {self.directory}",
                found=str(error),
                fix="choose a folder that can be written to",
            ) from error

    def write(self, kind: str, values: Mapping[str, Any], ctx: TrainContext) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", float(value), ctx.progress.step)

    def sync(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
        self._writer = None


def put_events_aside(directory: Path) -> None:
    """Move the event files of an older run to a folder inside, so that nothing of it is lost or mixed with the new one."""
    events = sorted(directory.glob("events.out.tfevents.*"))
    if not events:
        return
    aside = unused(lambda number: directory / f"old-{number}")
    aside.mkdir()
    for path in events:
        path.rename(aside / path.name)
    logger.warning("%s has event files of another run; they are now in %s", directory, aside.name)
