"""A line on stderr that counts structures while they are read; nothing where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn


@contextmanager
def counting(console: Console, verb: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show how many structures are done; the value is a function of that number and the total, None if not known."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns: list[ProgressColumn] = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,}{task.fields[of]} structures"),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, console=console, transient=True, disable=console.quiet or not console.is_terminal) as progress:
        task = progress.add_task(verb, total=None, of="")
        yield lambda done, total: progress.update(task, completed=done, total=total, of="" if total is None else f" of {total:,}")
