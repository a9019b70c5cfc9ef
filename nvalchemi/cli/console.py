"""The two consoles of the command line: results on stdout, everything about the work on stderr.

Modules of the command line bring in rich where they print: importing it draws from Python's random numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvalchemi.errors import NvalchemiError

if TYPE_CHECKING:
    from rich.console import Console


def out() -> Console:
    """The console for results (made at the call, so that a redirected stdout is honoured)."""
    from rich.console import Console

    return Console(highlight=False)


def err() -> Console:
    """The console for progress, warnings and errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_error(error: NvalchemiError) -> None:
    """Print what went wrong, what was found and needed, and what to do; no traceback."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(Text("error:", style="bold red"), Text(error.message, style="red"))
    for label, value in (("found", error.found), ("needed", error.needed), ("do this", error.fix)):
        if value is not None:
            table.add_row(Text(f"{label}:", style="bold"), Text(str(value)))
    err().print(table)
