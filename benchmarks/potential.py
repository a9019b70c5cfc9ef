"""What a training step of the built-in potential costs, by hand-written passes and by autograd, in one run.

    python benchmarks/potential.py [--molecules 5] [--threads 1] [--steps 200]

Prints one JSON line a figure, in milliseconds. A step is energies and forces of ethanol molecules, squared errors, backward, fused
AdamW; the two ways take turns. The least time is the machine's speed, the median what else was going on.

- ``painn_step_ms``: the step as it is trained;
- ``painn_autograd_step_ms``: the same derived twice by autograd;
- ``painn_evaluate_ms``: energies and forces without a graph, as in molecular dynamics.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from ase.build import molecule

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.neighbors import neighbor_list
from nvalchemi.models import InteratomicPotential, PaiNN


def ethanol(count: int) -> Batch:
    """Ethanol molecules, each shaken a little, with labels and neighbours."""
    generator = torch.Generator().manual_seed(0)
    atoms = molecule("CH3CH2OH")
    data = []
    for _ in range(count):
        positions = torch.tensor(atoms.positions, dtype=torch.float32) + 0.05 * torch.randn(9, 3, generator=generator)
        forces = torch.randn(9, 3, generator=generator)
        data.append(AtomicData(positions, atoms.numbers, energy=-4209.0, forces=forces))
    return neighbor_list(Batch.from_data_list(data), 5.0)


def training_step(batch: Batch, by_hand: bool) -> Callable[[], None]:
    """A function that takes one training step."""
    torch.manual_seed(0)
    model = InteratomicPotential(PaiNN(["H", "C", "O"]))
    model.fit_reference_energies(batch)
    model._gives_gradient = by_hand
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        out = model.predict(batch)
        loss = (out["energy"] - batch.energy).square().mean() + 100 * (out["forces"] - batch.forces).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def evaluation(batch: Batch) -> Callable[[], None]:
    """A function that predicts energies and forces."""
    model = InteratomicPotential(PaiNN(["H", "C", "O"])).eval()

    def step() -> None:
        model.predict(batch)

    return step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--molecules", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    batch = ethanol(options.molecules)
    ways = {
        "painn_step_ms": training_step(batch, by_hand=True),
        "painn_autograd_step_ms": training_step(batch, by_hand=False),
        "painn_evaluate_ms": evaluation(batch),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(options.steps + 10):
        for name, step in ways.items():
            start = time.perf_counter()
            step()
            if i >= 10:
                times[name].append(1e3 * (time.perf_counter() - start))
    for name, taken in times.items():
        print(
            json.dumps(
                {
                    "name": name,
                    "value": round(min(taken), 3),
                    "median": round(statistics.median(taken), 3),
                    "atoms": batch.num_nodes,
                    "edges": batch.num_edges,
                    "threads": options.threads,
                }
            )
        )


if __name__ == "__main__":
    main()
