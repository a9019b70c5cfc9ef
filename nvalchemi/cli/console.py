"""The two consoles of the command line: results on stdout, everything about the work on stderr.

Modules of the command line bring in rich where they print: importing it draws from Python's random numbers.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

from nvalchemi.errors import NvalchemiError

if TYPE_CHECKING:
    from rich.console import Console

_silent = False
_LAST_WORDS = (
    2.0  # seconds: a launcher ends all processes when the first has failed, and the one that speaks should be heard before
)


def silence() -> None:
    """Print nothing from here on: this process is one of several, and another speaks for all."""
    global _silent
    _silent = True
    logging.getLogger("nvalchemi").setLevel(logging.ERROR)


def out() -> Console:
    """The console for results (made at the call, so that a redirected stdout is honoured)."""
    from rich.console import Console

    return Console(highlight=False, quiet=_silent)


def err() -> Console:
    """The console for progress, warnings and errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, quiet=_silent)


def echo(text: str) -> None:
    """Print a line on stdout as it is, for programs to read."""
    if not _silent:
        sys.stdout.write(f"{text}\n")  # in one piece: stdout may be unbuffered and shared with other processes
        sys.stdout.flush()


def print_error(error: NvalchemiError) -> None:
    """Print what went wrong, what was found and needed, and what to do; no traceback."""
    if _silent:
        time.sleep(_LAST_WORDS)
        return
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
