"""The formats that can be converted: to add one, write a ``FrameSource`` and a line here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from nvalchemi.data.convert.frames import FrameSource
from nvalchemi.errors import DataError

#: file suffixes -> "module:class" of the source, imported when used
FORMATS: dict[tuple[str, ...], str] = {
    (".xyz", ".extxyz", ".xyz.gz", ".extxyz.gz"): "extxyz:ExtxyzSource",
    (".db",): "ase_files:AseDbSource",
    (".traj",): "ase_files:AseTrajSource",
    (".npz",): "npz:NpzSource",
}


def open_source(path: str | Path) -> FrameSource:
    """The source for a file, chosen by its suffix.

    Raises
    ------
    DataError
        If the file is missing, or no format has this suffix.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"there is no file {path}" if not path.exists() else f"{path} is no file")
    for suffixes, target in FORMATS.items():
        if path.name.lower().endswith(suffixes):
            module, name = target.split(":")
            source: type[FrameSource] = getattr(import_module(f"nvalchemi.data.convert.{module}"), name)
            return source(path)
    raise DataError(
        f"the format of {path.name} is not known",
        found=f"the suffix {path.suffix!r}",
        needed=", ".join(suffix for suffixes in FORMATS for suffix in suffixes),
    )
