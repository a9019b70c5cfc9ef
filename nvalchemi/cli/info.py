"""``nvalchemi info STORE``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvalchemi.cli.console import err, out
from nvalchemi.cli.describe import print_summary, rows
from nvalchemi.cli.progress import counting

if TYPE_CHECKING:
    from rich.console import Console


def command(
    store: Annotated[Path, typer.Argument(help="A store written by convert or by AtomicDataZarrWriter.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every byte first.")] = False,
) -> None:
    """Say what is in a store: counts, elements, energies, forces, labels."""
    from nvalchemi.cli.processes import alone

    alone("info")
    from rich.text import Text

    from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader
    from nvalchemi.data.summary import Summary

    reader = AtomicDataZarrReader(store)
    if verify:
        reader.verify()
    with counting(err(), "reading") as progress:
        summary = Summary.of(reader, progress=lambda done: progress(done, len(reader)))
    metadata = reader.metadata
    if as_json:
        typer.echo(json.dumps({"store": str(store), **summary.as_dict(), "metadata": metadata}, allow_nan=False))
        return
    console = out()
    console.print(Text(str(store), style="bold green"))
    for conversion in metadata.get("conversions", []):
        _print_origin(console, conversion)
    console.print()
    print_summary(console, summary)


def _print_origin(console: Console, conversion: dict[str, Any]) -> None:
    """Files, keys and units of one conversion, from the store's metadata."""
    from rich.text import Text

    files = ", ".join(f"{file['name']} ({file['frames']:,} frames)" for file in conversion["files"])
    console.print(Text(f"  from {files}, by {conversion['created_by']}", style="dim"))
    table = rows()
    for label, keys in conversion["keys"].items():
        unit = conversion["units_as_read"][label]["unit"]
        table.add_row(Text(f"    {label}", style="dim"), Text(f"{', '.join(keys)} in {unit}", style="dim"))
    console.print(table)
