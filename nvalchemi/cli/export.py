"""``nvalchemi export DIR FILE``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from nvalchemi.cli.console import echo, out
from nvalchemi.cli.run_dir import RunDir
from nvalchemi.errors import ConfigError


def command(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    file: Annotated[str, typer.Argument(help="The file to write, such as model.safetensors, or its address.")],
    raw: Annotated[bool, typer.Option("--raw", help="Take the trained weights rather than their average (EMA).")] = False,
    checkpoint: Annotated[str, typer.Option("--checkpoint", help="best, last, or the path of a checkpoint.")] = "best",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Write the trained model into one file, from which it is loaded without the run."""
    from nvalchemi.cli.processes import alone

    alone("export")
    run = RunDir.existing(run_dir)

    from nvalchemi.data.address import Address, file_size, where

    target = where(file)
    if file_size(target) is not None if isinstance(target, Address) else target.exists():
        raise ConfigError(f"{file} is there already", fix="give another name, or delete it")
    if not isinstance(target, Address) and not target.absolute().parent.is_dir():
        raise ConfigError(f"{target.absolute().parent} is no folder", fix="make it, or give another name")

    from nvalchemi.cli.trained import find
    from nvalchemi.training.export import export

    facts = export(find(run, checkpoint), target, run.model_config(), run.config().data.dtype, raw=raw)
    report = {"file": str(file), "bytes": file_size(target)} | {key: facts[key] for key in ("weights", "step", "checkpoint")}
    if as_json:
        echo(json.dumps(report | {"step": int(facts["step"])}))
        return
    kind = "averaged (EMA)" if facts["weights"] == "ema" else "trained (raw)"
    out().print(f"{file}: the {kind} weights of {facts['checkpoint']}, {report['bytes']:,} bytes", soft_wrap=True)
    out().print(f"nvalchemi.models.load_model({str(file)!r}) gives the model", style="dim", soft_wrap=True)
