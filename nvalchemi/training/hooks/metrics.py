"""Write the numbers of a run to files: JSON lines and CSV, without gaps or doubles over a resume."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvalchemi.training.hook import Every
from nvalchemi.training.records import RecordFiles, plain
from nvalchemi.training.reports import ReportingHook

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


class MetricsHook(ReportingHook):
    """Append a record every so many steps, and one after each validation, to ``metrics.jsonl`` and ``metrics.csv``.

    A record has ``kind`` (``"train"`` or ``"validation"``), ``step`` (optimizer steps taken), ``epoch`` (epochs completed) and
    ``time`` (seconds since the run's start, over resumes). A training record goes on with ``loss`` and ``loss/<part>`` (true, unscaled
    and unweighted parts), ``lr`` (``lr/<optimizer>`` where there are several), ``samples_per_s``, ``skipped`` (steps not taken so far)
    and whatever hooks put into ``ctx.metrics``; its values are means over the steps taken since the last record, on all ranks. A
    validation record goes on with the validation's metrics. Numbers that are not finite are the strings ``"nan"``, ``"inf"`` and
    ``"-inf"``, so that each line is valid JSON and ``float()`` reads it.

    After a resume the files go on exactly where the checkpoint was made; what a killed run wrote after that is cut off. A run that
    starts afresh puts an older file aside under another name.

    Parameters
    ----------
    directory
        Where the two files are.
    every
        How often a training record is written; what is left of a window is written when the run ends.
    """

    def __init__(self, directory: str | os.PathLike[str], every: Every | None = None) -> None:
        super().__init__(every)
        self.directory = Path(directory)
        self._records = 0
        self._start = 0.0
        self._writer: RecordFiles | None = None

    def open(self, ctx: TrainContext, resumed: bool) -> None:
        self._writer = RecordFiles(self.directory, self._records if resumed else None)
        self._records = self._writer.records
        self._start = time.perf_counter() - self._writer.elapsed

    def write(self, kind: str, values: Mapping[str, Any], ctx: TrainContext) -> None:
        assert self._writer is not None
        elapsed = round(time.perf_counter() - self._start, 3)
        place = {"kind": kind, "step": ctx.progress.step, "epoch": ctx.progress.epoch, "time": elapsed}
        self._writer.write({**place, **{k: plain(v) for k, v in values.items() if k not in place}})
        self._records = self._writer.records

    def sync(self) -> None:
        assert self._writer is not None
        self._writer.sync()

    def close(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._writer = None

    def reset(self, ctx: TrainContext) -> None:
        super().reset(ctx)
        self._records = 0

    def state_dict(self) -> dict[str, Any]:
        return {"records": self._records, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._records = int(state["records"])
