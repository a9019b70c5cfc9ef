"""Labels as they come: structures labelled with GFN2-xTB in a process beside this one."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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


def draw(sample: Sample, processes: int = 1) -> Iterator[AtomicData]:
    """Draw a sample's structures with their labels, each as soon as it is there.

    Parameters
    ----------
    sample
        What to draw.
    processes
        Among how many labelling processes the molecules are divided; the structures are the same for any number, their order is not.

    Raises
    ------
    DataError
        When a labelling process fails.
    """
    shares = [replace(sample, molecules=sample.molecules[k::processes]) for k in range(processes)]
    streams = [_structures({"sample": asdict(share)}) for share in shares if share.molecules]
    while streams:
        for stream in list(streams):
            try:
                yield next(stream)
            except StopIteration:
                streams.remove(stream)


def label(structures: list[Any]) -> list[AtomicData]:
    """Label ``ase.Atoms`` objects with GFN2-xTB.

    Raises
    ------
    DataError
        When the labelling process fails.
    """
    plain = [{"numbers": atoms.numbers.tolist(), "positions": atoms.positions.tolist()} for atoms in structures]
    return list(_structures({"structures": plain}))


def _structures(request: dict[str, Any]) -> Iterator[AtomicData]:
    """Ask the labelling process and hand on what it prints."""
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
                yield AtomicData(
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
