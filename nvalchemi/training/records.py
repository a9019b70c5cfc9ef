"""Records of a run on disk: JSON lines, and the same as a table."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import IO, Any

from nvalchemi.errors import ConfigError

logger = logging.getLogger("nvalchemi")


class RecordFiles:
    """``metrics.jsonl``, the record, and ``metrics.csv``, the same as a table, which is made anew from it where columns are added.

    Parameters
    ----------
    directory
        Made where there is none.
    keep
        How many records of an existing file are the run's: the rest is cut off. ``None`` starts afresh.
    """

    def __init__(self, directory: Path, keep: int | None) -> None:
        self.path, self.table = directory / "metrics.jsonl", directory / "metrics.csv"
        self.records, self.elapsed = 0, 0.0
        self._columns: list[str] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if keep is None:
                put_aside(self.path)
                self.path.write_bytes(b"")
            self._cut(keep or 0)
            self._lines: IO[str] = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"the metrics cannot be written to {directory}", found=str(error), fix="choose a folder that can be written to"
            ) from error
        self._csv: IO[str] | None = None
        self._remake_table()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record to both files; it is out of this process when this returns."""
        if os.fstat(self._lines.fileno()).st_nlink == 0:
            self._begin_again()
        self._lines.write(json.dumps(record, allow_nan=False) + "\n")
        self._lines.flush()
        self.records += 1
        new = [key for key in record if key not in self._columns]
        if new:
            self._columns += new
            self._remake_table()
        else:
            self._row(record)

    def sync(self) -> None:
        """Bring the record to the disk."""
        self._lines.flush()
        os.fsync(self._lines.fileno())

    def close(self) -> None:
        """Close both files."""
        self._lines.close()
        if self._csv is not None:
            self._csv.close()

    def _cut(self, keep: int) -> None:
        """Keep the first ``keep`` whole lines, and know their columns and the last one's time."""
        self.path.touch()
        with self.path.open("rb+") as file:
            end = 0
            for line in file:
                record = _parsed(line)
                if self.records == keep or record is None:
                    break
                end += len(line)
                self.records += 1
                self.elapsed = float(record.get("time", self.elapsed))
                self._columns += [key for key in record if key not in self._columns]
            file.truncate(end)
        if self.records < keep:
            logger.warning("%s holds %d records, the checkpoint knows of %d: the others are lost", self.path, self.records, keep)

    def _begin_again(self) -> None:
        """Somebody has removed the file, or its folder: what it held is gone, what comes is not."""
        logger.warning(
            "%s was removed while the run wrote to it: its %d records are lost, and a new one begins", self.path, self.records
        )
        self._lines.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = self.path.open("a", encoding="utf-8")
        self._remake_table()

    def _remake_table(self) -> None:
        if self._csv is not None:
            self._csv.close()
        temporary = self.table.with_suffix(".csv.tmp")
        with temporary.open("w", encoding="utf-8", newline="") as file, self.path.open("rb") as lines:
            writer = csv.DictWriter(file, self._columns, restval="")
            if self._columns:
                writer.writeheader()
            writer.writerows(record for line in lines if (record := _parsed(line)) is not None)
        os.replace(temporary, self.table)
        self._csv = self.table.open("a", encoding="utf-8", newline="")
        self._rows = csv.DictWriter(self._csv, self._columns, restval="")

    def _row(self, record: Mapping[str, Any]) -> None:
        assert self._csv is not None
        self._rows.writerow(record)
        self._csv.flush()


def plain(value: Any) -> Any:
    """A number as JSON has it; what is not finite as a string that ``float()`` reads."""
    number = value if isinstance(value, (int, str)) else float(value)
    return str(number) if isinstance(number, float) and not math.isfinite(number) else number


def put_aside(path: Path) -> None:
    """Rename an older file that holds something, so that nothing of it is lost."""
    if not path.exists() or path.stat().st_size == 0:
        return
    aside = unused(lambda number: path.with_name(f"{path.stem}.old-{number}{path.suffix}"))
    path.rename(aside)
    logger.warning("%s was there already; it is now %s", path, aside.name)


def unused(named: Callable[[int], Path]) -> Path:
    """The first path, of those with the numbers 1, 2, ..., where nothing is."""
    return next(path for path in map(named, count(1)) if not path.exists())


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a line, or ``None`` where it was torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
