"""The command line: ``nvalchemi convert | info | train | resume | evaluate | export | plot | demo``.

One file a command. A command is a module of this package with a function ``command(...)`` annotated for typer, and a line
in ``COMMANDS``; the module is imported only when the command is used, so that ``nvalchemi --help`` needs no torch.
"""

from __future__ import annotations

import errno
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from nvalchemi.errors import NvalchemiError

#: name of a command (and of its module) -> its line in the help; equal to the first line of the function's docstring
COMMANDS = {
    "convert": "Convert labelled structures (extended XYZ, ASE .db and .traj, npz, VASP, DeePMD, HDF5) to a zarr store.",
    "info": "Say what is in a store: counts, elements, energies, forces, labels.",
    "train": "Train a potential as a YAML file says.",
    "resume": "Go on with a run from its last checkpoint.",
    "evaluate": "Measure the errors of a trained model on a store.",
    "export": "Write the trained model into one file, from which it is loaded without the run.",
    "plot": "Draw the loss curves and parity plots of a run.",
    "demo": "Label molecules, train on them, evaluate and run dynamics, in a few minutes.",
}


class LazyCommand(TyperCommand):
    """A command known by its name and one line until it is used."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent=parent, **extra)

    def load(self) -> Any:
        """The real command, made from the module's ``command`` function."""
        module = import_module(f"{__name__}.{self.name}")
        app = typer.Typer(add_completion=False, rich_markup_mode="rich")
        app.command(name=self.name)(module.command)
        return typer.main.get_command(app)


class LazyGroup(TyperGroup):
    """The commands of ``COMMANDS``, imported when used; an error of ours is told in plain words, without a traceback."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, line in COMMANDS.items():
            self.add_command(LazyCommand(name=name, help=line, rich_markup_mode="rich"))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--debug" in args:  # wherever it was typed
            args = ["--debug", *(arg for arg in args if arg != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except NvalchemiError as error:
            if ctx.params.get("debug"):
                raise
            from nvalchemi.cli.console import print_error

            print_error(error)
            raise typer.Exit(2) from None
        except OSError as error:
            if ctx.params.get("debug") or error.errno == errno.EPIPE:  # a closed pipe is no error of the command
                raise
            from nvalchemi.cli.console import print_error

            print_error(NvalchemiError("a file cannot be read or written", found=error, fix="--debug shows where"))
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from nvalchemi import __version__

        typer.echo(f"nvalchemi {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train interatomic potentials and energy-based models."""


def main() -> None:
    """Entry point of the ``nvalchemi`` program."""
    app()
