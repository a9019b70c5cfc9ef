"""The processes of a command: a launcher such as torchrun may have started several, which then do one thing and speak with one voice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nvalchemi.cli import console
from nvalchemi.distributed import Manager, failures, join, launched_as
from nvalchemi.errors import ConfigError

_ENDING = -1  # where ranks tell why a command fails; runs of a strategy are numbered from 0


@contextmanager
def joined() -> Iterator[Manager]:
    """All processes of the command as one: they end together, also by an error of one, and only rank 0 prints."""
    manager = join()
    if manager.rank > 0:
        console.silence()
    try:
        yield manager
    except BaseException as error:
        failures.tell(error, _ENDING, manager)
        raise


def alone(command: str) -> None:
    """Refuse to run a command in several processes, which would all do the same and write over each other."""
    place = launched_as()
    if place is None:
        return
    rank, world_size = place
    if rank > 0:
        console.silence()
    raise ConfigError(
        f"nvalchemi {command} works in one process",
        found=f"{world_size} of them, started by a launcher",
        fix="start it without torchrun, srun or mpirun; train, resume and evaluate work in several processes",
    )
