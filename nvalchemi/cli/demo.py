"""``nvalchemi demo``."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from nvalchemi.cli.console import out
from nvalchemi.cli.run_dir import RunDir

DEFAULT_FOLDER = Path("runs/demo")


def command(
    minutes: Annotated[float, typer.Option("--minutes", help="Time for all of it; more time, better model.")] = 5.0,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Where everything goes; a new folder under runs/ otherwise.", show_default=False),
    ] = None,
    processes: Annotated[int, typer.Option("--processes", min=1, help="How many processes train.")] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of structures, weights and order.")] = 0,
) -> None:
    """Label molecules, train on them, evaluate and run dynamics, in a few minutes."""
    from nvalchemi.demo.labels import check_available
    from nvalchemi.demo.plan import Plan

    plan = Plan.of(minutes)
    check_available()

    from nvalchemi.cli.processes import alone  # torch comes in here: a mistake above is told at once

    alone("demo")
    run = RunDir.new(run_dir if run_dir is not None else unused(DEFAULT_FOLDER))

    from nvalchemi.demo.pipeline import Demonstration

    Demonstration(plan, run, seed, out(), processes)()


def unused(folder: Path) -> Path:
    """``folder``, or the first of ``folder-2``, ``folder-3``, ... that is not there yet."""
    names = (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in count(1))
    return next(path for path in names if not path.exists())
