"""``nvalchemi train CONFIG --run-dir DIR``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from nvalchemi.cli.config import load_config
from nvalchemi.cli.console import err
from nvalchemi.cli.quantities import MILLI, maes
from nvalchemi.cli.run_dir import RunDir

if TYPE_CHECKING:
    from nvalchemi.training import TrainContext

INTERRUPTED = 75  # sysexits.h: a failure that is temporary, so that a batch script or a launcher starts the command again


def command(
    config: Annotated[Path, typer.Argument(help="A YAML file; examples/configs has some.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings in place of the file's, such as optimizer.lr=1e-3."),
    ] = None,
    run_dir: Annotated[Path, typer.Option("--run-dir", help="The folder of the run: made where there is none.")] = Path("run"),
    max_time: Annotated[
        str | None,
        typer.Option("--max-time", help="Train for so long (90s, 10m, 1h30m): the run and its learning rate end together."),
    ] = None,
) -> None:
    """Train a potential as a YAML file says."""
    given = list(overrides or [])
    if max_time is not None:
        given.append(f"training.max_time={max_time}")
    checked = load_config(config, given)
    run = RunDir(run_dir)
    restarted = run.was_begun_by_this_launch()  # a launcher types the same command again, and means the same run
    if restarted:
        run.check_model_stays(checked)
        say_started_again(run)
    else:
        run = RunDir.new(run_dir, checked)

    from nvalchemi.cli import recipe  # torch comes in here: a mistake above is told at once

    tell_outcome(recipe.train(recipe.absolute(checked), run, resume=restarted), run)


def say_started_again(run: RunDir) -> None:
    """The first process says that this is no new run."""
    from nvalchemi.distributed import launched_as

    place = launched_as()
    if place is None or place[0] == 0:
        err().print(Text(f"started again: the run in {run.path} goes on"), soft_wrap=True)


def tell_outcome(ctx: TrainContext, run: RunDir) -> None:
    """Say what the run reached and what can be done next.

    Raises
    ------
    typer.Exit
        With status 75, where a signal has ended the run before its time: it is not done, and has saved.
    """
    console = err()
    lines = [f"{ctx.progress.step:,} steps, {ctx.progress.epoch:,} epochs, {ctx.progress.samples:,} structures"]
    if ctx.validation is not None:
        lines.append(f"validation: {in_words(ctx.validation)}")
    if ctx.interrupted:
        lines.append(f"the run is in {run.path} and not done; go on with it: nvalchemi resume {run.path}")
    else:
        lines.append(f"the run is in {run.path}; next: nvalchemi evaluate {run.path} STORE, nvalchemi plot {run.path}")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    if ctx.interrupted:
        raise typer.Exit(INTERRUPTED)


def in_words(metrics: Mapping[str, float]) -> str:
    """Errors in meV and Å."""
    words = {q.name: f"{q.short} MAE {_milli(metrics[metric])} {q.unit}" for q, metric in maes(metrics)}
    if "energy_per_atom" in words:  # said beside the energy's own
        words["energy"] += f" ({words.pop('energy_per_atom').removeprefix('energy MAE ')})"
    return ", ".join(words.values()) or f"loss {metrics['loss']:.4g}"


def _milli(value: float) -> str:
    return f"{MILLI * value:.0f}" if value > 1 else f"{MILLI * value:.3g}"
