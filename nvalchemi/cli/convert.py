"""``nvalchemi convert IN... OUT.zarr``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nvalchemi.cli.console import err, out
from nvalchemi.cli.describe import print_summary, rows
from nvalchemi.cli.progress import counting
from nvalchemi.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from nvalchemi.data.convert import Conversion
    from nvalchemi.data.convert.labels import KeyUse

_FILES_SHOWN = 20
_KEYS, _UNITS, _STORE = "Where the labels are", "Units", "Frames and store"


def command(
    paths: Annotated[list[Path], typer.Argument(metavar="IN... OUT.zarr", help="Files to read, and the store to write.")],
    energy_key: Annotated[str | None, typer.Option(help="Key of the total energy.", rich_help_panel=_KEYS)] = None,
    forces_key: Annotated[str | None, typer.Option(help="Key of the forces.", rich_help_panel=_KEYS)] = None,
    stress_key: Annotated[str | None, typer.Option(help="Key of the stress.", rich_help_panel=_KEYS)] = None,
    virial_key: Annotated[
        str | None, typer.Option(help="Key of the virial, minus stress times volume.", rich_help_panel=_KEYS)
    ] = None,
    units: Annotated[
        list[str] | None,
        typer.Option(
            help="Units of the files: kcal/mol, or energy=Ha,length=bohr,stress=GPa. Without it: eV and Å.",
            rich_help_panel=_UNITS,
        ),
    ] = None,
    stress_sign: Annotated[
        str | None,
        typer.Option(
            help="What a positive value means: tension (default of a stress) or compression (default of a virial).",
            rich_help_panel=_UNITS,
        ),
    ] = None,
    trust_units: Annotated[
        bool, typer.Option("--trust-units", help="Go on although the numbers contradict the units.", rich_help_panel=_UNITS)
    ] = False,
    mask_fixed: Annotated[
        bool,
        typer.Option(
            "--mask-fixed", help="Zero forces of atoms held by a constraint are absent, not labels.", rich_help_panel=_KEYS
        ),
    ] = False,
    select: Annotated[
        str | None, typer.Option(help="START:STOP:STEP of the frames of each file.", rich_help_panel=_STORE)
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float64 or float32; energies are always float64.", rich_help_panel=_STORE)
    ] = "float64",
    append: Annotated[bool, typer.Option("--append", help="Add to a store that exists.", rich_help_panel=_STORE)] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a store that exists.", rich_help_panel=_STORE)] = False,
    allow_unlabelled: Annotated[
        bool, typer.Option("--allow-unlabelled", help="Keep frames without labels.", rich_help_panel=_STORE)
    ] = False,
    skip_unlabelled: Annotated[
        bool, typer.Option("--skip-unlabelled", help="Leave frames without any label out.", rich_help_panel=_STORE)
    ] = False,
) -> None:
    """Convert labelled structures (extended XYZ, ASE .db and .traj, npz, VASP, DeePMD, HDF5) to a zarr
    store.

    Labels are looked for under the standard keys and never guessed: the summary says which key became which label, which
    keys were left out, and what the numbers say about the units.
    """
    from nvalchemi.cli.processes import alone

    alone("convert")
    from nvalchemi.data.convert import convert

    if allow_unlabelled and skip_unlabelled:
        raise ConfigError("--allow-unlabelled and --skip-unlabelled exclude each other")
    *inputs, output = paths
    with counting(err(), "reading") as progress:
        conversion = convert(
            inputs,
            output,
            energy_key=energy_key,
            forces_key=forces_key,
            stress_key=stress_key,
            virial_key=virial_key,
            units=units or (),
            stress_sign=stress_sign,  # type: ignore[arg-type]  # checked by convert
            select=select,
            dtype=dtype,
            append=append,
            overwrite=overwrite,
            unlabelled="keep" if allow_unlabelled else "skip" if skip_unlabelled else "refuse",
            mask_fixed=mask_fixed,
            trust_units=trust_units,
            progress=progress,
        )
    report(out(), conversion, output, appended=append)


def report(console: Console, conversion: Conversion, output: Path, *, appended: bool = False) -> None:
    """What was read, what it is, which keys it came from, and what the checks say."""
    from rich.text import Text

    count = conversion.summary.structures
    console.print(Text.assemble((str(output), "bold green"), f": {count:,} structures {'added' if appended else 'written'}"))
    for file in conversion.files[:_FILES_SHOWN]:
        of = f" of {file.total:,}" if file.total is not None and file.total != file.frames else ""
        console.print(Text(f"  from {file.name} ({file.format}), {file.frames:,}{of} frames", style="dim"))
        if file.unlabelled_count:
            what = "left out" if conversion.unlabelled == "skip" else "kept without labels"
            console.print(
                Text(f"  {file.unlabelled_count:,} of them have no label and were {what}: {file.where()}", style="yellow")
            )
    console.print()
    print_summary(console, conversion.summary)
    console.print()
    _print_labels(console, conversion)
    table = rows()
    for finding in conversion.findings:
        if finding.level == "fine":
            table.add_row(Text("agrees", style="green"), finding.text)
        else:
            table.add_row(Text("warning", style="bold yellow"), Text(f"{finding.text} ({finding.fix})", style="yellow"))
    console.print(table)


def _print_labels(console: Console, conversion: Conversion) -> None:
    from rich.text import Text

    labels, table = conversion.labels, rows()
    for label, keys in labels.used.items():
        for key, count in keys.items():
            unit = labels.units[label]
            text = f"from key {key!r} on {count:,} frames, in {unit}" + (
                "" if unit.factor == 1 else f" (times {unit.factor:.7g})"
            )
            if label in ("stress", "virial"):
                text += f", positive under {labels.positive(label)}"
            table.add_row(label, text)
    for label, left in labels.left.items():
        for key, use in left.items():
            table.add_row(label, Text(_left_out(label, key, use, bool(labels.used[label])), style="yellow"))
    others = conversion.other_keys()
    if conversion.extra:
        table.add_row("also kept", ", ".join(sorted(conversion.extra)))
    if others:
        table.add_row(
            "not kept", Text(", ".join(others[:12]) + (f" and {len(others) - 12} more" if len(others) > 12 else ""), "dim")
        )
    console.print(table)


def _left_out(label: str, key: str, use: KeyUse, taken: bool) -> str:
    text = f"left out: key {key!r} on {use.frames:,} frames"
    if use.difference is not None:
        unit = "eV per atom" if label == "energy" else "eV/Å"
        return f"{text}, " + ("the same numbers" if use.difference < 1e-9 else f"other by up to {use.difference:.3g} {unit}")
    return text + ("" if taken else f", which looks like the {label}; --{label}-key {key} takes it")
