"""ASE databases (``.db``) and trajectories (``.traj``), row by row."""

from __future__ import annotations

from collections.abc import Iterator

from nvalchemi.data.convert.frames import Frame, FrameSource, Selection
from nvalchemi.data.convert.from_ase import frame_from_atoms


class AseDbSource(FrameSource):
    """An ASE sqlite database; frames count from 0 in the order of the rows' ids. Key-value pairs and data are keys too."""

    format = "ASE database"

    def total(self) -> int | None:
        with self._connect() as database:
            return int(database.count())

    def frames(self, select: Selection) -> Iterator[tuple[int, Frame]]:
        with self._connect() as database:
            rows = database.select(offset=select.start, limit=None if select.stop is None else select.stop - select.start)
            for index, row in enumerate(rows, start=select.start):
                if not select.takes(index):
                    continue
                try:
                    frame = frame_from_atoms(row.toatoms(), {**row.key_value_pairs, **row.data})
                except Exception as error:  # whatever a damaged row makes ASE raise
                    raise self.broken(index, error) from error
                yield index, frame

    def _connect(self):  # type: ignore[no-untyped-def]  # ase.db has no types
        from ase.db import connect

        return connect(self.path, append=True, use_lock_file=False, type="db")


class AseTrajSource(FrameSource):
    """An ASE binary trajectory. Its constraints are not applied to the forces."""

    format = "ASE trajectory"

    def total(self) -> int | None:
        with self._open() as trajectory:
            return len(trajectory)

    def frames(self, select: Selection) -> Iterator[tuple[int, Frame]]:
        with self._open() as trajectory:
            for index in select.indices(len(trajectory)):
                try:
                    frame = frame_from_atoms(trajectory[index])
                except Exception as error:  # whatever a damaged file makes ASE raise
                    raise self.broken(index, error) from error
                yield index, frame

    def _open(self):  # type: ignore[no-untyped-def]  # ase.io.trajectory has no types
        from ase.io.trajectory import TrajectoryReader

        return TrajectoryReader(str(self.path))
