"""The two consoles of the command line: results on stdout, everything about the work on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from nvalchemi.errors import NvalchemiError


def out() -> Console:
    """The console for results (made at the call, so that a redirected stdout is honoured)."""
    return Console(highlight=False)


def err() -> Console:
    """The console for progress, warnings and errors."""
    return Console(stderr=True, highlight=False)


def print_error(error: NvalchemiError) -> None:
    """Print what went wrong, what was found and needed, and what to do; no traceback."""
    console = err()
    console.print(Text.assemble(("error: ", "bold red"), (error.message, "red")), soft_wrap=False)
    for label, value in (
        ("found", error.found),
        ("needed", error.needed),
        ("do this", error.fix),
    ):
        if value is not None:
            console.print(Text.assemble((f"  {label}: ", "bold"), str(value)))
