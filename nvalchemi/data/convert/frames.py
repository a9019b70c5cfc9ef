"""What every format hands over: frames with all their keys, nothing chosen and nothing converted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nvalchemi.errors import DataError, NvalchemiError


@dataclass
class Frame:
    """One structure as its file has it, in the file's units.

    Parameters
    ----------
    numbers, positions
        Atomic numbers (n,) and positions (n, 3).
    cell, pbc
        Lattice vectors as rows, or None; periodicity (3,) bool.
    system, atom
        Everything else by its key: values of the whole structure, and arrays whose first axis runs over atoms.
    fixed
        (n,) bool: atoms that a constraint held in place, where the file says so.
    """

    numbers: np.ndarray
    positions: np.ndarray
    cell: np.ndarray | None = None
    pbc: np.ndarray = field(default_factory=lambda: np.zeros(3, dtype=bool))
    system: dict[str, Any] = field(default_factory=dict)
    atom: dict[str, np.ndarray] = field(default_factory=dict)
    fixed: np.ndarray | None = None


class FrameSource(ABC):
    """A file of one format. A new format is a subclass and a line in ``formats.FORMATS``.

    Attributes
    ----------
    format
        Name of the format in messages.
    standard
        Label -> keys that mean this label in this format, the preferred one first.
    """

    format: str = ""
    standard: Mapping[str, tuple[str, ...]] = {
        "energy": ("energy",),
        "forces": ("forces", "force"),
        "stress": ("stress",),
        "virial": ("virial", "virials"),
    }

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The file's name without its folder, as it is kept in the store."""
        return self.path.name

    def total(self) -> int | None:
        """Number of frames in the file, where that is known without reading it."""
        return None

    @abstractmethod
    def frames(self, select: Selection) -> Iterator[tuple[int, Frame]]:
        """Index in the file and frame of every selected frame, one at a time."""

    def read(self, select: Selection) -> Iterator[tuple[int, Frame]]:
        """``frames``, where whatever a damaged file makes its library raise becomes a DataError that names the file."""
        last = None
        try:
            for last, frame in self.frames(select):
                yield last, frame
        except NvalchemiError:
            raise
        except Exception as error:
            where = "" if last is None else f" after frame {last}"
            raise DataError(f"{self.name} cannot be read{where} as {self.format}: {_words(error)}") from error

    def count(self) -> int | None:
        """``total``, with errors likewise."""
        try:
            return self.total()
        except NvalchemiError:
            raise
        except Exception as error:
            raise DataError(f"{self.name} cannot be read as {self.format}: {_words(error)}") from error

    def broken(self, index: int, reason: object) -> DataError:
        """The error for a frame that cannot be read."""
        return DataError(f"{self.name}: frame {index} cannot be read: {_words(reason)}")


def _words(reason: object) -> str:
    """An error's text, or its kind where it has none."""
    return str(reason) or type(reason).__name__


@dataclass(frozen=True)
class Selection:
    """``START:STOP:STEP`` of the frames of a file, with no negative numbers, so that it works on a stream."""

    start: int = 0
    stop: int | None = None
    step: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Selection:
        """Read ``"0:950"``, ``"::10"``, ``"5"`` (one frame) or None (all)."""
        if text is None:
            return cls()
        try:
            parts = [int(part) if part.strip() else None for part in text.split(":")]
            if len(parts) == 1 and parts[0] is not None:
                selection = cls(parts[0], parts[0] + 1)
            else:
                start, stop, step = (parts + [None] * (3 - len(parts))) if 2 <= len(parts) <= 3 else (0, 0, 0)
                selection = cls(start or 0, stop, 1 if step is None else step)
        except ValueError:
            selection = cls(-1)
        if selection.start < 0 or selection.step < 1 or (selection.stop is not None and selection.stop <= selection.start):
            raise DataError(
                f"the selection {text!r} selects nothing",
                needed="START:STOP or START:STOP:STEP, not negative, with STOP after START; frames count from 0",
            )
        return selection

    def takes(self, index: int) -> bool:
        """Whether the frame of this index is selected."""
        return index >= self.start and not self.is_past(index) and (index - self.start) % self.step == 0

    def is_past(self, index: int) -> bool:
        """Whether no frame from this index on is selected."""
        return self.stop is not None and index >= self.stop

    def indices(self, total: int) -> range:
        """The selected indices of a file with ``total`` frames."""
        return range(self.start, total if self.stop is None else min(self.stop, total), self.step)

    def __str__(self) -> str:
        if self == Selection():
            return "all"
        return f"{self.start}:{'' if self.stop is None else self.stop}" + (f":{self.step}" if self.step != 1 else "")
