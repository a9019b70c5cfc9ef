"""``nvalchemi plot DIR``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from zipfile import BadZipFile

import typer

from nvalchemi.cli.console import err, out
from nvalchemi.cli.run_dir import RunDir
from nvalchemi.errors import ConfigError


def command(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    evaluation: Annotated[
        str | None, typer.Option("--evaluation", help="Name of the evaluated store for the parity plots; the latest otherwise.")
    ] = None,
) -> None:
    """Draw the loss curves and parity plots of a run."""
    run = RunDir.existing(run_dir)

    from nvalchemi.cli.processes import alone  # torch comes in here: a mistake above is told at once

    alone("plot")
    for path in [*draw_curves(run), *draw_parity(run, evaluation)]:
        out().print(str(path), soft_wrap=True)


def draw_curves(run: RunDir) -> list[Path]:
    """``loss.png``, ``errors.png`` and ``learning_rate.png`` from the run's metrics."""
    from nvalchemi.cli import figures

    records = run.records()
    train = [r for r in records if r["kind"] == "train"]
    validation = [r for r in records if r["kind"] == "validation"]
    drawn = {
        "loss": figures.loss_figure(train, validation),
        "errors": figures.error_figure(validation),
        "learning_rate": figures.rate_figure(train),
    }
    return [figures.save(figure, run.plots / f"{name}.png") for name, figure in drawn.items() if figure is not None]


def draw_parity(run: RunDir, evaluation: str | None = None) -> list[Path]:
    """``parity_energy.png`` and ``parity_forces.png`` from an evaluation; of the validation set where there was none yet."""
    import numpy as np

    from nvalchemi.cli import figures

    found = evaluated(run, evaluation)
    if found is None:
        return []
    try:
        with np.load(found, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
    except (ValueError, EOFError, BadZipFile) as error:
        raise ConfigError(f"{found} is damaged", found=error, fix=f"nvalchemi evaluate {run.path} STORE makes it anew") from None
    paths = []
    if "energy" in arrays and len(arrays["energy"]):
        label, prediction, atoms = arrays["energy_label"], arrays["energy"], arrays["num_atoms"]
        if (atoms == atoms[0]).all():
            name, unit, small, shift = "energy − mean", "eV", "meV", label.mean()
            figure = figures.parity_figure(label - shift, prediction - shift, name, unit, small, found.stem)
        else:  # totals of structures of different sizes would only show the sizes
            figure = figures.parity_figure(label / atoms, prediction / atoms, "energy per atom", "eV", "meV", found.stem)
        paths.append(figures.save(figure, run.plots / "parity_energy.png"))
    if "forces" in arrays and len(arrays["forces"]):
        figure = figures.parity_figure(arrays["forces_label"], arrays["forces"], "force component", "eV/Å", "meV/Å", found.stem)
        paths.append(figures.save(figure, run.plots / "parity_forces.png"))
    return paths


def evaluated(run: RunDir, name: str | None) -> Path | None:
    """The predictions of an evaluated store: the named, the latest, or those of the validation set, made now."""
    there = sorted(run.evaluation.glob("*.npz"), key=lambda path: path.stat().st_mtime)
    if name is not None:
        named = [path for path in there if path.stem == name]
        if not named:
            found = ", ".join(path.stem for path in there) or "none yet"
            raise ConfigError("this store was not evaluated", found=found, fix=f"nvalchemi evaluate {run.path} STORE")
        return named[0]
    if there:
        return there[-1]
    store = run.config().data.validation
    if store is None:
        err().print(f"no parity plots: nothing was evaluated yet (nvalchemi evaluate {run.path} STORE)")
        return None
    from nvalchemi.cli.evaluate import measure

    measure(run, Path(store))
    return evaluated(run, None)
