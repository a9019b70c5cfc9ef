"""The labelling process: draws structures by dynamics under GFN2-xTB and prints each, labelled, as a line of JSON.

It is a program of its own (``python -m nvalchemi.demo.xtb``, one request on standard input), because tblite takes its number of
threads from the environment it is loaded in: on such small molecules a second thread makes it slower, and much slower beside torch's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from nvalchemi.demo.dynamics import thermalise
from nvalchemi.demo.molecules import Sample


def frames(sample: Sample) -> Iterator[dict[str, Any]]:
    """Draw labelled structures one by one: numbers, positions (Å), energy (eV), forces (eV/Å) and the molecule's name."""
    import numpy as np
    from ase.build import molecule
    from tblite.ase import TBLite

    for name in sample.molecules:
        # the name, not its place in the list, chooses the random numbers: adding a molecule leaves the others as they were
        rng = np.random.default_rng([sample.seed, *name.encode()])
        atoms = molecule(name)
        atoms.calc = TBLite(method="GFN2-xTB", verbosity=0)
        thermalise(atoms, sample.temperature, rng)
        langevin(atoms, sample.warmup, sample.temperature, rng)
        for _ in range(sample.frames):
            langevin(atoms, sample.stride, sample.temperature, rng)
            yield labelled(name, atoms)


def langevin(atoms: Any, steps: int, temperature: float, rng: Any, friction: float = 0.02) -> None:
    """Move atoms for some femtoseconds in a bath, by the BAOAB splitting (Leimkuhler and Matthews 2013, doi:10.1093/amrx/abs010).

    ASE's own integrator spends more time on comparing structures than xTB takes for molecules so small.

    Parameters
    ----------
    atoms
        ``ase.Atoms`` with momenta and a calculator; moved.
    steps
        Of one femtosecond.
    temperature
        K.
    rng
        NumPy generator.
    friction
        1/fs.
    """
    import numpy as np
    from ase import units

    dt = units.fs
    masses = atoms.get_masses()[:, None]
    keep = np.exp(-friction)
    kick = np.sqrt(units.kB * temperature * masses * (1.0 - keep**2))
    momenta, positions, forces = atoms.get_momenta(), atoms.get_positions(), atoms.get_forces()
    for _ in range(steps):
        momenta += 0.5 * dt * forces
        positions += 0.5 * dt * momenta / masses
        momenta = keep * momenta + kick * rng.normal(size=momenta.shape)
        positions += 0.5 * dt * momenta / masses
        atoms.set_positions(positions)
        atoms.calc.calculate(atoms, ["energy", "forces"], ["positions"])
        forces = atoms.calc.results["forces"]
        momenta += 0.5 * dt * forces
    atoms.set_momenta(momenta)


def labelled(name: str, atoms: Any) -> dict[str, Any]:
    """One structure and its labels in plain Python."""
    return {
        "name": name,
        "numbers": atoms.numbers.tolist(),
        "positions": atoms.positions.tolist(),
        "energy": float(atoms.get_potential_energy()),
        "forces": atoms.get_forces().tolist(),
    }


def relabel(structures: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Label given structures."""
    from ase import Atoms
    from tblite.ase import TBLite

    for structure in structures:
        atoms = Atoms(structure["numbers"], structure["positions"], calculator=TBLite(method="GFN2-xTB", verbosity=0))
        yield labelled(structure.get("name", ""), atoms)


def answers(request: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
    """Answer ``{"samples": [...]}``, with a mark after each sample, or ``{"structures": [...]}``."""
    for sample in request.get("samples", ()):
        yield from frames(Sample(**sample))
        yield None
    yield from relabel(request.get("structures", ()))


def main() -> None:
    """Answer the request on standard input, one line an answer."""
    for answer in answers(json.load(sys.stdin)):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
