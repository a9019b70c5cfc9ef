"""``nvalchemi evaluate DIR STORE``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvalchemi.cli.console import echo, err, out
from nvalchemi.cli.quantities import MILLI, QUANTITIES, maes
from nvalchemi.cli.run_dir import RunDir, write_whole
from nvalchemi.errors import DataError

if TYPE_CHECKING:
    from nvalchemi.cli.parity import Parity


def command(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    store: Annotated[Path, typer.Argument(help="A store with labels that the run did not see.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Take the trained weights rather than their average (EMA).")] = False,
    checkpoint: Annotated[str, typer.Option("--checkpoint", help="best, last, or the path of a checkpoint.")] = "best",
    batch_size: Annotated[int | None, typer.Option("--batch-size", min=1, help="Structures at a time.")] = None,
) -> None:
    """Measure the errors of a trained model on a store."""
    run = RunDir.existing(run_dir)
    report = measure(run, store, raw=raw, checkpoint=checkpoint, batch_size=batch_size)
    if as_json:
        echo(json.dumps(report, allow_nan=False))
    else:
        print_report(report)


def measure(
    run: RunDir, store: Path, *, raw: bool = False, checkpoint: str = "best", batch_size: int | None = None
) -> dict[str, Any]:
    """The errors on a store; they and the predictions are also written into the run's ``evaluation`` folder."""
    from nvalchemi.cli.parity import Parity
    from nvalchemi.cli.processes import joined
    from nvalchemi.cli.progress import counting
    from nvalchemi.cli.recipe import make_dataset
    from nvalchemi.cli.threads import cpu_threads
    from nvalchemi.cli.trained import find, load_trained
    from nvalchemi.data.datapipes import DataLoader
    from nvalchemi.data.datapipes.share import share_for_validation
    from nvalchemi.training import evaluate
    from nvalchemi.training.agreement import first_rank

    config = run.config()
    with joined() as manager:
        saved = first_rank(lambda: find(run, checkpoint).path, manager)
        trained = load_trained(run, raw=raw, which=str(saved))
        config.data.in_memory = False  # each structure is read once
        dataset = make_dataset(config, str(store), manager.device)
        loader = DataLoader(dataset, batch_size=batch_size or config.data.validation_batch_size)
        share = share_for_validation(loader, manager.rank, manager.world_size)
        parity = Parity()
        done = 0
        with cpu_threads(config.training.threads), counting(err(), "evaluating") as progress:

            def note(batch: Any, predictions: Any, loss: Any) -> None:
                nonlocal done
                parity(batch, predictions, loss)
                done += batch.num_graphs * manager.world_size  # the other processes are about as far
                progress(min(done, len(dataset)), len(dataset))

            metrics = evaluate(trained.model.to(manager.device), share, manager=manager, batch_callback=note)
        if not in_milli(metrics):
            raise DataError(
                f"{store} has no label to compare with",
                found=f"the fields {', '.join(dataset.field_names)}",
                needed="energy, forces or stress of some structure, not NaN",
            )
        report: dict[str, Any] = {
            **in_milli(metrics),
            "n": int(metrics["n"]),
            "n_atoms": int(dataset.num_atoms.sum()),
            "weights": trained.weights,
            "checkpoint": str(trained.checkpoint),
            "step": trained.step,
            "store": str(store),
        }
        parity.gather(manager)
        first_rank(lambda: keep(run, store, report, parity), manager)
    return report


def keep(run: RunDir, store: Path, report: Mapping[str, Any], parity: Parity) -> None:
    """Write the errors and the predictions on a store into the run's folder."""
    name = store.name.removesuffix(".zarr") or "store"
    parity.save(run.evaluation / f"{name}.npz")
    write_whole(run.evaluation / f"{name}.json", json.dumps(report, indent=1) + "\n")


def in_milli(metrics: Mapping[str, float]) -> dict[str, float]:
    """Errors in thousandths of eV, under names that say so: ``"forces_mae_meV_per_A"``."""
    return {
        quantity.key(kind): MILLI * metrics[f"{quantity.name}_{kind}"]
        for quantity, _ in maes(metrics)
        for kind in ("mae", "rmse")
    }


def print_report(report: Mapping[str, Any]) -> None:
    """The errors as a small table."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("", "MAE", "RMSE", ""):
        table.add_column(column, justify="left" if column == "" else "right")
    for quantity in QUANTITIES:
        if quantity.key("mae") in report:
            errors = (f"{report[quantity.key(kind)]:.3g}" for kind in ("mae", "rmse"))
            table.add_row(quantity.words, *errors, quantity.unit)
    console = out()
    console.print(table)
    weights = "averaged weights (EMA)" if report["weights"] == "ema" else "weights as trained"
    console.print(f"{report['n']} structures of {report['store']}; {weights} of step {report['step']}", soft_wrap=True)
