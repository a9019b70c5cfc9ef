"""A summary on the terminal: the same for ``convert`` and ``info``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from nvalchemi.data.summary import Summary

_SYMBOLS_WITH_COUNTS = 10


def rows() -> Table:
    """A borderless table of a name and what is said of it; long texts wrap under themselves."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True, min_width=10)
    table.add_column(overflow="fold")
    return table


def print_summary(console: Console, summary: Summary) -> None:
    """Counts, elements, and the range of every label."""
    from rich.text import Text

    data = summary.as_dict()
    sizes = data["atoms_per_structure"]
    each = (
        f"{sizes['min']} each" if sizes["min"] == sizes["max"] else f"{sizes['min']} to {sizes['max']}, mean {sizes['mean']:.1f}"
    )
    table = rows()
    table.add_row("structures", f"{data['structures']:,} with {data['atoms']:,} atoms ({each})")
    table.add_row("elements", _elements(data["elements"]))
    table.add_row("periodic", _share(data["periodic"], data["structures"]))
    for name in dict.fromkeys(["energy", "forces", "stress", *data["fields"]]):
        table.add_row(name, _field(name, data["fields"].get(name), data["structures"]))
    if data["unlabelled"]:
        table.add_row("unlabelled", Text(f"{_share(data['unlabelled'], data['structures'])} have no label at all", "yellow"))
    if data["duplicates"]:
        first = f", the first is structure {summary.first_duplicate}"
        table.add_row("duplicates", Text(f"{data['duplicates']:,} repeat the geometry of an earlier one{first}", "yellow"))
    console.print(table)


def _elements(counts: dict[str, int]) -> str:
    by_count = sorted(counts, key=lambda symbol: -counts[symbol])
    if len(by_count) <= _SYMBOLS_WITH_COUNTS:
        return ", ".join(f"{symbol} {counts[symbol]:,}" for symbol in counts)
    return f"{len(by_count)}, the commonest first: {' '.join(by_count)}"


def _share(count: int, total: int) -> str:
    return "none" if count == 0 else "all" if count == total else f"{count:,} of {total:,}"


def _field(name: str, field: dict[str, object] | None, total: int) -> str | Text:
    from rich.text import Text

    if field is None or not field["structures"]:
        return Text("none", style="dim")
    count = field["structures"]
    assert isinstance(count, int)
    share = "" if count == total else f"  on {count:,} of {total:,}"
    if "min" not in field:
        return f"on {count:,}"
    low, high, mean, rms = (float(str(field[key])) for key in ("min", "max", "mean", "rms"))
    unit = str(field["unit"]).replace("angstrom", "Å").replace("^3", "³").replace("/atom", " per atom")
    if name == "energy":
        return f"{low:.6g} … {high:.6g} {unit}, mean {mean:.6g}{share}"
    if name == "forces":
        return f"rms {rms:.5g} {unit}, largest component {max(-low, high):.5g}{share}"
    if name == "stress":
        return f"rms {rms:.5g} {unit}, {low:.5g} … {high:.5g} (tension positive){share}"
    return f"{low:.5g} … {high:.5g} {unit}".rstrip() + share
