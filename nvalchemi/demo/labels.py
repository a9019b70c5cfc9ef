"""Labels as they come: structures labelled with GFN2-xTB in a process beside this one."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from nvalchemi.data import AtomicData
from nvalchemi.demo.molecules import Sample
from nvalchemi.distributed.manager import child_environment
from nvalchemi.errors import ConfigError, DataError


def check_available() -> None:
    """Refuse to begin without tblite.

    Raises
    ------
    ConfigError
        When it is not installed.
    """
    if find_spec("tblite") is None:
        raise ConfigError(
            "the demonstration labels molecules with tblite, which is not installed",
            fix="uv run --extra demo nvalchemi demo, or pip install 'nvalchemi[demo]'",
        )


def draw(samples: Sequence[Sample], processes: int = 1) -> Generator[Iterator[AtomicData]]:
    """Draw samples, each structure with its labels and as soon as it is there.

    Parameters
    ----------
    samples
        What to draw, one after the other.
    processes
        Among how many labelling processes the molecules are divided; the structures are the same for any number, their order is not.

    Yields
    ------
    Iterator of AtomicData
        The structures of a sample; each has to be exhausted before the next sample is asked for.

    Raises
    ------
    DataError
        When a labelling process fails.
    """
    shares = [[replace(sample, molecules=sample.molecules[k::processes]) for sample in samples] for k in range(processes)]
    with ExitStack() as open_streams:
        streams = [open_streams.enter_context(closing(_answers({"samples": [asdict(s) for s in share]}))) for share in shares]
        for _ in samples:
            yield _in_turn(streams)


def _in_turn(streams: list[Generator[AtomicData | None]]) -> Iterator[AtomicData]:
    """One structure of each stream in turn, up to the mark that ends a sample in all of them."""
    going = list(streams)
    while going:
        for stream in list(going):
            data = next(stream)
            if data is None:
                going.remove(stream)
            else:
                yield data


def label(structures: list[Any]) -> list[AtomicData]:
    """Label ``ase.Atoms`` objects with GFN2-xTB.

    Raises
    ------
    DataError
        When the labelling process fails.
    """
    plain = [{"numbers": atoms.numbers.tolist(), "positions": atoms.positions.tolist()} for atoms in structures]
    return [data for data in _answers({"structures": plain}) if data is not None]


def _answers(request: dict[str, Any]) -> Generator[AtomicData | None]:
    """Ask a labelling process and hand on what it prints: structures, and none for the mark at the end of a sample."""
    check_available()
    command = [sys.executable, "-m", "nvalchemi.demo.xtb"]
    # errors go to a file: a pipe that nobody reads could fill up and stop the process
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=child_environment(OMP_NUM_THREADS="1"),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request))
            process.stdin.close()
            for line in process.stdout:
                answer = json.loads(line)
                yield answer and AtomicData(
                    positions=np.array(answer["positions"], dtype=np.float64),
                    atomic_numbers=np.array(answer["numbers"], dtype=np.int64),
                    energy=answer["energy"],
                    forces=np.array(answer["forces"], dtype=np.float64),
                )
            status = process.wait()
            if status != 0:
                errors.seek(0)
                raise DataError(
                    "the labelling process failed", found=f"exit status {status}: {errors.read().strip()[-500:] or 'no message'}"
                )
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
