"""Output of VASP, every ionic step of it: ``vasprun.xml`` and ``OUTCAR``, read by ASE."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import ClassVar

from nvalchemi.data.convert.frames import Frame, FrameSource, Selection
from nvalchemi.data.convert.from_ase import frame_from_atoms
from nvalchemi.errors import DataError

_TAIL = 8192  # bytes at the end of a file that tell whether the run came to its end


class _VaspSource(FrameSource):
    """One file of a run. ``energy`` is extrapolated to no smearing; the forces are those of ``free_energy``.

    A run that was killed leaves a file that ends anywhere: an error says which steps are whole, and a selection of those is taken.
    """

    ase_format: ClassVar[str]
    ending: ClassVar[bytes]

    def frames(self, select: Selection) -> Iterator[tuple[int, Frame]]:
        from ase.io import iread

        whole, cause = 0, None
        try:
            for index, atoms in enumerate(iread(self.path, index=":", format=self.ase_format)):
                if atoms.calc is None:
                    break  # what ASE makes of a run that was killed before its first step was over
                whole = index + 1
                if select.takes(index):
                    yield index, frame_from_atoms(atoms)
                if select.is_past(whole):
                    return
        except Exception as error:  # noqa: BLE001 - whatever a file that is cut makes ASE raise; raised below
            cause = error
        if not self._is_complete():
            raise DataError(
                f"{self.name} ends in the middle of the run",
                found=f"{whole} whole ionic steps",
                needed="a run that came to its end",
                fix=f"--select 0:{whole} takes the steps that are whole" if whole else None,
            ) from cause
        if cause is not None:
            raise cause

    def _is_complete(self) -> bool:
        if self.path.suffix == ".gz":
            with gzip.open(self.path) as file:
                tail = b""
                while block := file.read(1 << 20):
                    tail = (tail + block)[-_TAIL:]
        else:
            with self.path.open("rb") as file:
                file.seek(max(0, self.path.stat().st_size - _TAIL))
                tail = file.read()
        return self.ending in tail


class VasprunSource(_VaspSource):
    """``vasprun.xml``."""

    format, ase_format, ending = "VASP vasprun.xml", "vasp-xml", b"</modeling>"


class OutcarSource(_VaspSource):
    """``OUTCAR``."""

    format, ase_format, ending = "VASP OUTCAR", "vasp-out", b"Total CPU time used"
