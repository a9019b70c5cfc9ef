"""Extended XYZ, read frame by frame: the text is cut here, each piece is read by ASE."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from io import StringIO
from typing import TextIO

from nvalchemi.data.convert.frames import Frame, FrameSource, Selection
from nvalchemi.data.convert.from_ase import frame_from_atoms


class ExtxyzSource(FrameSource):
    """``.xyz`` and ``.extxyz``, also with ``.gz``. Frames that are not selected are skipped without being parsed."""

    format = "extended XYZ"

    def frames(self, select: Selection) -> Iterator[tuple[int, Frame]]:
        from ase.io.extxyz import read_extxyz

        with self._open() as file:
            for index, text in enumerate(self._pieces(file)):
                if select.is_past(index):
                    return
                if not select.takes(index):
                    continue
                try:
                    atoms = next(iter(read_extxyz(StringIO(text), index=slice(0, 1))))
                except Exception as error:  # ASE raises what its parsing meets: ValueError, KeyError, XYZError, ...
                    raise self.broken(index, error) from error
                yield index, frame_from_atoms(atoms)

    def _open(self) -> TextIO:
        if self.path.suffix == ".gz":
            return gzip.open(self.path, "rt", encoding="utf-8", errors="replace")
        return self.path.open(encoding="utf-8", errors="replace")

    def _pieces(self, file: TextIO) -> Iterator[str]:
        """The text of each frame: number of atoms, comment, one line an atom."""
        index, header = 0, self._next_header(file, 0)
        while header is not None:
            count = int(header)
            lines = [header, file.readline(), *(file.readline() for _ in range(count))]
            if not lines[-1].strip():
                raise self.broken(index, f"it says {count} atoms, but the file ends or has an empty line before them")
            index += 1
            yield "".join(lines)
            header = self._next_header(file, index)

    def _next_header(self, file: TextIO, index: int) -> str | None:
        while line := file.readline():
            if line.strip():
                if not line.strip().isdecimal():
                    raise self.broken(index, f"its first line should be the number of atoms, but is {line.strip()[:60]!r}")
                return line
        return None
