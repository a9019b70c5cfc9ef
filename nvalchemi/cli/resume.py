"""``nvalchemi resume DIR``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nvalchemi.cli.config import apply_override, check_config, read_yaml
from nvalchemi.cli.run_dir import RunDir, has_checkpoints
from nvalchemi.cli.train import tell_outcome
from nvalchemi.errors import ConfigError


def command(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change from here on, such as training.epochs=200."),
    ] = None,
    max_time: Annotated[
        str | None,
        typer.Option("--max-time", help="A new time budget for the run as a whole, earlier sittings with one included."),
    ] = None,
) -> None:
    """Go on with a run from its last checkpoint."""
    run = RunDir.existing(run_dir)
    raw = read_yaml(run.config_file)
    for override in [*(overrides or []), *([] if max_time is None else [f"training.max_time={max_time}"])]:
        apply_override(raw, override)
    config = check_config(raw, str(run.config_file))
    run.check_model_stays(config)
    if not has_checkpoints(run.checkpoints_of(config)):
        raise ConfigError(
            f"{run_dir} has no checkpoint to go on from",
            fix=f"begin again: nvalchemi train {run.config_file} --run-dir {run_dir}",
        )

    from nvalchemi.cli import recipe

    tell_outcome(recipe.train(recipe.absolute(config), run, resume=True), run)
