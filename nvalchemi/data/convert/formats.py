"""The formats that can be converted: to add one, write a ``FrameSource`` and a line here."""

from __future__ import annotations

from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

from nvalchemi.data.convert.frames import FrameSource
from nvalchemi.errors import DataError

#: names of files, in lower case -> "module:class" of the source, imported when used
FORMATS: dict[tuple[str, ...], str] = {
    ("*.xyz", "*.extxyz", "*.xyz.gz", "*.extxyz.gz"): "extxyz:ExtxyzSource",
    ("*.db",): "ase_files:AseDbSource",
    ("*.traj",): "ase_files:AseTrajSource",
    ("*.npz",): "npz:NpzSource",
    ("*vasprun*.xml", "*vasprun*.xml.gz"): "vasp:VasprunSource",
    ("outcar*", "*.outcar", "*.outcar.gz"): "vasp:OutcarSource",
    ("*.h5", "*.hdf5"): "hdf5:Hdf5Source",
}
#: of a folder, the file that tells its format
FOLDERS: dict[str, str] = {"type.raw": "deepmd:DeepmdSource"}

_REFUSED = {"*.lmdb": "its values are pickled as a rule, and reading those runs code of the file"}


def open_source(path: str | Path) -> FrameSource:
    """The source for a file or a folder, chosen by its name or by what is in it.

    Raises
    ------
    DataError
        If it is missing, or its format is not known.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"there is no file {path}")
    if path.is_dir():
        return _open_folder(path)
    name = path.name.lower()
    for patterns, target in FORMATS.items():
        if any(fnmatch(name, pattern) for pattern in patterns):
            return _opened(target, path)
    for pattern, reason in _REFUSED.items():
        if fnmatch(name, pattern):
            raise DataError(
                f"{path.name} is not read", found=reason, fix="write extended XYZ or an ASE .db with the program it came from"
            )
    known = ", ".join(pattern for patterns in FORMATS for pattern in patterns)
    raise DataError(
        f"the format of {path.name} is not known",
        found=f"the suffix {path.suffix!r}",
        needed=f"{known}, or a DeePMD folder with {', '.join(FOLDERS)}",
    )


def _opened(target: str, path: Path) -> FrameSource:
    module, name = target.split(":")
    source: type[FrameSource] = getattr(import_module(f"nvalchemi.data.convert.{module}"), name)
    return source(path)


def _open_folder(path: Path) -> FrameSource:
    for file, target in FOLDERS.items():
        if (path / file).is_file():
            return _opened(target, path)
    inside = sorted(str(file.parent) for name in FOLDERS for file in path.glob(f"*/{name}"))
    names = sorted(file.name for file in path.iterdir())
    raise DataError(
        f"{path} is a folder of no known format",
        found=f"{len(inside)} DeePMD systems in it" if inside else ", ".join(names[:10]) or "an empty folder",
        needed=f"a file, or a DeePMD system with {', '.join(FOLDERS)} in it",
        fix=f"give each system by itself: {' '.join(inside[:10])}" if inside else None,
    )
