"""What people have (extended XYZ, ASE .db and .traj, npz, VASP, DeePMD, HDF5) to a zarr store, with nothing guessed in silence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nvalchemi.data.convert.frames import Selection
from nvalchemi.data.convert.labels import LabelReader, StressSign
from nvalchemi.data.convert.pipeline import Conversion, FileReport, Unlabelled
from nvalchemi.data.convert.plausible import Finding
from nvalchemi.data.units import Units
from nvalchemi.errors import ConfigError, DataError

__all__ = ["Conversion", "FileReport", "Finding", "convert"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def convert(
    inputs: Sequence[str | Path],
    output: str | Path,
    *,
    energy_key: str | None = None,
    forces_key: str | None = None,
    stress_key: str | None = None,
    virial_key: str | None = None,
    units: Sequence[str] = (),
    stress_sign: StressSign | None = None,
    select: str | None = None,
    dtype: str = "float64",
    append: bool = False,
    overwrite: bool = False,
    unlabelled: Unlabelled = "refuse",
    mask_fixed: bool = False,
    trust_units: bool = False,
    progress: Callable[[int, int | None], None] | None = None,
) -> Conversion:
    """Convert files of labelled structures to a store, in one pass and bounded memory.

    Parameters
    ----------
    inputs
        Files: ``.xyz``, ``.extxyz`` (also ``.gz``), ``.db``, ``.traj``, ``.npz``, ``vasprun.xml``, ``OUTCAR``, ``.h5``, ``.hdf5``; folders of
        DeePMD systems (``type.raw`` and ``set.*/*.npy``).
    output
        The store, a path that ends in ``.zarr``.
    energy_key, forces_key, stress_key, virial_key
        Where the labels are; without them under the standard names (calculator results, ``energy``, ``forces`` or ``force``,
        ``stress``, ``virial``; ``energies``, ``E``, ``F`` in npz). A stress is 3x3, 9 or 6 numbers (xx yy zz yz xz xy).
    units
        Of the file: ``["kcal/mol"]``, or by quantity ``["energy=Hartree,length=bohr"]``; eV and Å without it.
    stress_sign
        What a positive stress or virial means: ``"tension"`` (the usual stress, as in ASE) or ``"compression"`` (the usual
        virial, and pressure).
    select
        ``START:STOP:STEP`` of the frames of each file.
    dtype
        ``"float64"`` or ``"float32"``, of all floating fields but the energy, which is always float64.
    append, overwrite
        What to do if the store exists; it is an error without one of them.
    unlabelled
        ``"refuse"`` frames without any label, ``"keep"`` or ``"skip"`` them.
    mask_fixed
        Take forces that are exactly zero on atoms held by a constraint for absent (NaN), not for labels.
    trust_units
        Go on although the numbers contradict the units.
    progress
        Called with the number of frames read and that of all frames, None if it is not known.

    Returns
    -------
    Conversion
        The report: files, keys used and left, findings, summary.

    Raises
    ------
    DataError
        Files that cannot be read, keys that are not there, unlabelled frames, units that the numbers contradict. Nothing is
        committed then: a new store does not come to be, an old one keeps what it had.
    """
    from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader
    from nvalchemi.data.datapipes.zarr_writer import AtomicDataZarrWriter

    output = Path(output)
    if output.suffix != ".zarr":
        raise ConfigError("the last path is the store to write", found=str(output), needed="a name that ends in .zarr")
    if not inputs:
        raise ConfigError("there is no input file", needed="nvalchemi convert IN... OUT.zarr")
    if append and overwrite:
        raise ConfigError("append and overwrite exclude each other")
    if stress_key is not None and virial_key is not None:
        raise ConfigError("a stress key and a virial key are given", needed="one of them, both are the same label")
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known", needed=" or ".join(_DTYPES))
    if stress_sign not in (None, "tension", "compression"):
        raise ConfigError(f"stress sign {stress_sign!r} is not known", needed="tension or compression")
    keys = {"energy": energy_key, "forces": forces_key, "stress": stress_key, "virial": virial_key}
    conversion = Conversion(
        inputs=[Path(path) for path in inputs],
        labels=LabelReader(
            {label: key for label, key in keys.items() if key is not None}, Units.parse(units), stress_sign, mask_fixed
        ),
        select=Selection.parse(select),
        dtype=_DTYPES[dtype],
        unlabelled=unlabelled,
        trust_units=trust_units,
        progress=progress,
    )
    there = (
        output / "zarr.json"
    ).exists()  # whatever else is in its place, debris of a failed conversion or not, is the writer's to judge
    if there and not (append or overwrite):
        raise DataError(f"{output} exists", fix="--append adds to it, --overwrite replaces it; or write elsewhere")
    # what earlier conversions appended to the store stays on record
    earlier = AtomicDataZarrReader(output).metadata.get("conversions", []) if append and there else []
    writer = AtomicDataZarrWriter(
        output, overwrite=overwrite, metadata=lambda: {"conversions": [*earlier, conversion.metadata()]}
    )
    (writer.append if append else writer.write)(conversion.batches())
    return conversion
