"""What samplers of energies cost beside the least that a loop written by hand can do, in one run.

    python benchmarks/ebm_speed.py [--only langevin hmc compiled] [--seconds 6] [--threads 1] [--clock cpu]

Prints one JSON line a figure: the time of a step over that of the floor's step. The two take turns for ``--seconds`` each; the ratio is
that of the least times, which is the machine's speed, and ``median`` is that of the medians, which is what else was going on. A floor
is the loop as it stands in a text book: no checks, no settings, no generator of its own. Targets: 1.05 at dim 128 and batch 4096,
1.2 at dim 2 and batch 256.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from nvalchemi.ebm.samplers import HamiltonianMonteCarlo, LangevinDynamics
from nvalchemi.ebm.toy import GaussianModel
from nvalchemi.models import EnergyModel, MLPEnergy

SIZES = {"128x4096": (128, 4096, 10), "2x256": (2, 256, 40)}


def gradient(model: EnergyModel, x: Tensor) -> tuple[Tensor, Tensor]:
    """Energy and gradient, without a facade."""
    x = x.detach().requires_grad_()
    energy = model(x)
    return energy.detach(), torch.autograd.grad(energy.sum(), x)[0]


def langevin_floor(model: EnergyModel, x: Tensor, steps: int) -> Tensor:
    """Langevin dynamics as it is written by hand."""
    h = 0.01
    for _ in range(steps):
        x = x - h * gradient(model, x)[1] + math.sqrt(2 * h) * torch.randn_like(x)
    return x


def hmc_floor(model: EnergyModel, x: Tensor, steps: int, length: int = 5) -> Tensor:
    """Hamiltonian Monte Carlo as it is written by hand, with one gradient a leapfrog step."""
    h = 0.05
    energy, force = gradient(model, x)
    for _ in range(steps):
        p = torch.randn_like(x)
        before = energy + 0.5 * p.square().sum(1)
        y, new_force = x, force
        for _ in range(length):
            p = p - 0.5 * h * new_force
            y = y + h * p
            new_energy, new_force = gradient(model, y)
            p = p - 0.5 * h * new_force
        accepted = torch.rand(len(x)).log() < before - new_energy - 0.5 * p.square().sum(1)
        x = torch.where(accepted[:, None], y, x)
        force = torch.where(accepted[:, None], new_force, force)
        energy = torch.where(accepted, new_energy, energy)
    return x


def models(dim: int) -> Iterator[tuple[str, EnergyModel]]:
    """A network and the cheapest energy there is: what a loop costs shows at the latter."""
    torch.manual_seed(0)
    yield "mlp", MLPEnergy(dim, 128)
    yield "gaussian", GaussianModel(torch.zeros(dim), torch.eye(dim))


Pair = tuple[str, int, Callable[[], object], Callable[[], object]]
"""Label, steps a call, the floor and ours."""


def langevin() -> Iterator[Pair]:
    """One gradient a step."""
    for size, (dim, batch, steps) in SIZES.items():
        for kind, model in models(dim):
            x, ours = torch.randn(batch, dim), LangevinDynamics(model, 0.01)
            yield f"{kind} {size}", steps, partial(langevin_floor, model, x, steps), partial(ours.sample, x=x, n_steps=steps)


def hmc() -> Iterator[Pair]:
    """Five gradients a step."""
    for size, (dim, batch, steps) in SIZES.items():
        for kind, model in models(dim):
            x, few, ours = torch.randn(batch, dim), steps // 5, HamiltonianMonteCarlo(model, 0.05, 5)
            yield f"{kind} {size}", few, partial(hmc_floor, model, x, few), partial(ours.sample, x=x, n_steps=few)


def compiled() -> Iterator[Pair]:
    """Langevin dynamics whose energy and gradient are one compiled graph."""
    for label, steps, floor, ours in langevin():
        ours.func.__self__.compile()  # type: ignore[attr-defined]
        yield label, steps, floor, ours


PAIRS: dict[str, Callable[[], Iterator[Pair]]] = {"langevin": langevin, "hmc": hmc, "compiled": compiled}


def compare(
    floor: Callable[[], object], ours: Callable[[], object], seconds: float, clock: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Times of both, taking turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for call in (floor, ours):
        call()
    end = time.perf_counter() + 2 * seconds
    turn = 0
    while time.perf_counter() < end or turn < 5:
        for which in (turn % 2, 1 - turn % 2):  # who comes first changes, for the caches' sake
            start = clock()
            (floor, ours)[which]()
            times[which].append(clock() - start)
        turn += 1
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PAIRS, default=["langevin", "hmc"], help="compiled: takes minutes")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: where others use the machine; one thread, no GPU"
    )
    options = parser.parse_args()
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    torch.set_num_threads(options.threads)
    for name in options.only:
        for label, steps, floor, ours in PAIRS[name]():
            least, own = compare(floor, ours, options.seconds, clock)
            print(
                json.dumps(
                    {
                        "name": f"{name} {label} over the floor",
                        "value": round(min(own) / min(least), 3),
                        "median": round(statistics.median(own) / statistics.median(least), 3),
                        "floor_us": round(1e6 * min(least) / steps, 1),
                        "us": round(1e6 * min(own) / steps, 1),
                        "turns": len(own),
                        "threads": options.threads,
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
