"""What the couplings cost beside POT's and scipy's solvers, in one run.

    python benchmarks/ebm_couplings.py [--rounds 5] [--sizes 128 512 2048]

Needs POT (``uv sync --group benchmarks``, or ``pip install pot``). Prints one JSON line a figure; all times are of one thread, and of the processor rather than the wall. The solvers take turns on the same numbers, so
that a machine whose speed drifts does not favour one of them; a ratio is the median over the rounds of our time over theirs.

- ``sinkhorn``: the plan from a cost matrix at ``reg`` (in units of the largest cost), ours in float32, against the fastest of POT's
  methods that is right there. POT may stop at an error as large as ours (``ratio``); ``ratio_default`` is against its own default, 1e-9.
  Where POT is not right after its last iteration, its time is a lower bound, and ``right`` says so.
- ``ratio_coupling``: the whole of ``SinkhornCoupling`` against the same by hand with that method of POT's: distances, plan, draws, pairs.
- ``exact``: the whole of ``ExactOTCoupling`` against ``scipy.optimize.linear_sum_assignment`` with the distances before it and the pairs
  after it; ``ratio_solver`` is against the solver alone, on a cost that is there.
- ``greedy``: milliseconds.
- ``energy_matching``: a training step without chains at 256 points, by coupling, over that of independent pairs (target: 3).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from nvalchemi.ebm.couplings import ExactOTCoupling, GreedyCoupling, SinkhornCoupling
from nvalchemi.ebm.couplings.base import squared_distances
from nvalchemi.ebm.couplings.potentials import TOLERANCE, potentials
from nvalchemi.ebm.datasets import eight_gaussians
from nvalchemi.ebm.losses import EnergyMatching
from nvalchemi.models import MLPEnergy

RIGHT = 1e-2
"""Largest relative error of a row or column sum of a plan that passes for right."""


def samples(kind: str, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if kind == "eight":
        angle = torch.randint(8, (n,), generator=generator) * (math.pi / 4)
        x0, x1 = torch.randn(n, 2, generator=generator), 0.2 * torch.randn(n, 2, generator=generator)
        return x0, x1 + 4 * torch.stack([angle.cos(), angle.sin()], 1)
    return torch.randn(n, 32, generator=generator), torch.randn(n, 32, generator=generator) * torch.linspace(0.1, 2, 32)


def error(plan: Any) -> float:
    """Largest relative error of a row or column sum."""
    plan = np.asarray(plan, dtype=np.float64)
    n, m = plan.shape
    return float(max(np.abs(plan.sum(0) * m - 1).max(), np.abs(plan.sum(1) * n - 1).max()))


def in_turns(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each way in each round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.process_time()
            way()
            times[name].append(1e3 * (time.process_time() - start))
    return times


def ratio(times: dict[str, list[float]], ours: str, theirs: str) -> float:
    return round(statistics.median(a / b for a, b in zip(times[ours], times[theirs], strict=True)), 3)


def pot_methods(cost: torch.Tensor, reg: float, most: int) -> dict[str, Callable[[], Any]]:
    """POT's methods by name, on NumPy's and torch's numbers, at our error and at the default."""
    import ot

    n, m = cost.shape
    stop = TOLERANCE / math.sqrt(m)  # POT measures the Euclidean norm of the column sums' errors
    numbers = {"numpy64": cost.double().numpy(), "numpy32": cost.numpy(), "torch32": cost}
    ways: dict[str, Callable[[], Any]] = {}
    for name, matrix in numbers.items():
        a, b = (matrix.sum(axis) * 0 + 1 / size for axis, size in ((1, n), (0, m)))
        methods = ["sinkhorn", "sinkhorn_stabilized"] if reg >= 0.02 else ["sinkhorn_log", "sinkhorn_stabilized"]
        for method in methods:
            if method == "sinkhorn_stabilized" and name != "numpy64":
                continue
            ways[f"{method}/{name}"] = lambda a=a, b=b, matrix=matrix, method=method: ot.sinkhorn(
                a, b, matrix, reg, method=method, numItermax=most, stopThr=stop
            )
        if reg >= 0.02 and name == "numpy64":
            ways["sinkhorn/default"] = lambda a=a, b=b, matrix=matrix: ot.sinkhorn(a, b, matrix, reg, numItermax=most)
    return ways


def pot_coupling(x0: torch.Tensor, x1: torch.Tensor, reg: float, name: str, most: int) -> torch.Tensor:
    """Targets for the sources, by hand around a method of POT's."""
    import ot

    method, numbers = name.split("/")
    cost = torch.cdist(x0, x1).square_()
    cost /= cost.max()
    matrix = {"numpy64": lambda: cost.double().numpy(), "numpy32": cost.numpy, "torch32": lambda: cost}[numbers]()
    n, m = matrix.shape
    a, b = (matrix.sum(axis) * 0 + 1 / size for axis, size in ((1, n), (0, m)))
    plan = ot.sinkhorn(a, b, matrix, reg, method=method, numItermax=most, stopThr=TOLERANCE / math.sqrt(m))
    rows = torch.as_tensor(plan).cumsum(1)
    points = torch.rand(n, 1, dtype=rows.dtype) * rows[:, -1:]
    return x1[torch.searchsorted(rows, points).clamp_(max=m - 1).squeeze(1)]


def sinkhorn(kind: str, n: int, reg: float, rounds: int, most: int) -> None:
    x0, x1 = samples(kind, n)
    cost = squared_distances(x0, x1)
    coupling, generator = SinkhornCoupling(reg=reg), torch.Generator().manual_seed(0)
    ours: dict[str, Callable[[], Any]] = {
        "ours": lambda: potentials(cost, reg).matrix(),
        "coupling": lambda: coupling(x0, x1, generator=generator),
    }
    theirs = pot_methods(cost, reg, most)
    errors = {name: error(way()) for name, way in {"ours": ours["ours"], **theirs}.items()}
    times = in_turns({"ours": ours["ours"], **theirs}, rounds)
    middle = {name: statistics.median(values) for name, values in times.items()}
    rivals = [name for name in theirs if name != "sinkhorn/default"]
    right = [name for name in rivals if errors[name] <= RIGHT]
    fastest = min(right or rivals, key=middle.__getitem__)
    wholes = {"coupling": ours["coupling"], "by_hand": lambda: pot_coupling(x0, x1, reg, fastest, most)}
    times |= in_turns(wholes, rounds)
    middle |= {name: statistics.median(times[name]) for name in wholes}
    figure = {
        "figure": "sinkhorn",
        "points": kind,
        "n": n,
        "reg": reg,
        "ratio": ratio(times, "ours", fastest),
        "ratio_coupling": ratio(times, "coupling", "by_hand"),
        "against": fastest,
        "right": bool(right),
        "error_ours": float(f"{errors['ours']:.1e}"),
        "error_theirs": float(f"{errors[fastest]:.1e}"),
        "ms": {name: round(value, 2) for name, value in middle.items()},
    }
    if "sinkhorn/default" in theirs:
        figure["ratio_default"] = ratio(times, "ours", "sinkhorn/default")
    print(json.dumps(figure), flush=True)


def exact(kind: str, n: int, rounds: int) -> None:
    x0, x1 = samples(kind, n)
    matrix = squared_distances(x0, x1).double().numpy()
    coupling, greedy = ExactOTCoupling(), GreedyCoupling()

    def by_hand() -> torch.Tensor:
        return x1[torch.from_numpy(linear_sum_assignment(torch.cdist(x0, x1).square_().numpy())[1])]

    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: coupling(x0, x1),
        "by_hand": by_hand,
        "solver": lambda: linear_sum_assignment(matrix),
        "greedy": lambda: greedy(x0, x1),
    }
    times = in_turns(ways, rounds)
    least = matrix[linear_sum_assignment(matrix)].sum()
    pairs = coupling(x0, x1, conditions=torch.arange(n))
    excess = float(matrix[np.arange(n), pairs.conditions.numpy()].sum() / least - 1)
    print(
        json.dumps(
            {
                "figure": "exact",
                "points": kind,
                "n": n,
                "ratio": ratio(times, "ours", "by_hand"),
                "ratio_solver": ratio(times, "ours", "solver"),
                "excess_cost": excess,
                "ms": {name: round(statistics.median(values), 2) for name, values in times.items()},
            }
        ),
        flush=True,
    )


def energy_matching(kind: str, rounds: int) -> None:
    steps: dict[str, Callable[[], Any]] = {}
    generator = torch.Generator().manual_seed(0)
    far = torch.tensor([10.0, 0.0])
    x = eight_gaussians(256, generator) if kind == "eight" else far + torch.randn(256, 2, generator=generator)
    for name in ("independent", "ot", "sinkhorn", "greedy"):
        model = MLPEnergy(2, 128)
        loss_fn = EnergyMatching(model, coupling=name, lambda_cd=0.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

        def step(loss_fn: EnergyMatching = loss_fn, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            loss_fn(x).backward()
            optimizer.step()

        steps[name] = step
        step()
    times = in_turns(steps, 10 * rounds)
    figure: dict[str, Any] = {"figure": "energy_matching", "points": kind, "n": len(x)}
    figure |= {name: ratio(times, name, "independent") for name in steps}
    print(json.dumps(figure), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--points", nargs="+", default=["eight", "normal32"])
    parser.add_argument("--most-small", type=int, default=1000, help="POT's most iterations at 1e-3, up to 256 points; 50 beyond")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # POT warns where it is not right; the figures say so
    for kind in ("eight", "far"):
        energy_matching(kind, arguments.rounds)
    for n in arguments.sizes:
        for kind in arguments.points:
            sinkhorn(kind, n, 0.05, arguments.rounds, 1000)
            sinkhorn(kind, n, 1e-3, arguments.rounds, arguments.most_small if n <= 256 else 50)
            exact(kind, n, arguments.rounds)


if __name__ == "__main__":
    main()
