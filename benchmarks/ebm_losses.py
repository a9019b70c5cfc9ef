"""What a training step of each energy-based loss costs beside the same step written by hand, in one run.

    python benchmarks/ebm_losses.py [--only denoising persistent] [--seconds 4] [--threads 1] [--clock cpu] [--size 2x256]

Prints one JSON line a figure: the time of a step (loss, backward, Adam) over that of the floor's step. The two take turns for ``--seconds``
each; ``value`` is the median of the turns' own ratios, ``least`` the ratio of the least times. A floor is the step as it stands in a paper: no checks, no generator of its own, nothing for several processes. Target: 1.05.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from nvalchemi.ebm import losses
from nvalchemi.ebm.samplers import LangevinDynamics
from nvalchemi.models import EnergyModel, MLPEnergy

SIZES = {"2x256": (2, 256), "64x1024": (64, 1024)}
STEPS, STEP_SIZE = 10, 0.01

Loss = Callable[[Tensor], Tensor]


def gradient(model: EnergyModel, x: Tensor, graph: bool = False) -> Tensor:
    """The gradient of an energy, without a facade."""
    return torch.autograd.grad(model(x).sum(), x, create_graph=graph)[0]


def langevin(model: EnergyModel, x: Tensor, steps: int, noise: float = 1.0) -> Tensor:
    """Langevin dynamics as it is written by hand."""
    x = x.detach()
    for _ in range(steps):
        force = gradient(model, x.requires_grad_())
        x = (x - STEP_SIZE * force + math.sqrt(2 * STEP_SIZE) * noise * torch.randn_like(x)).detach()
    return x


def score_matching(model: EnergyModel) -> tuple[Loss, Loss]:
    """Exact trace."""

    def floor(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        g = gradient(model, x, True)
        trace = sum(torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1]))
        return (0.5 * g.square().sum(1) - trace).mean()

    return floor, losses.ScoreMatching(model)


def hutchinson(model: EnergyModel) -> tuple[Loss, Loss]:
    """One random direction for the trace."""

    def floor(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        g = gradient(model, x, True)
        v = torch.randint_like(x, 0, 2) * 2 - 1
        trace = (torch.autograd.grad((g * v).sum(), x, create_graph=True)[0] * v).sum(1)
        return (0.5 * g.square().sum(1) - trace).mean()

    return floor, losses.ScoreMatching(model, "hutchinson")


def sliced(model: EnergyModel) -> tuple[Loss, Loss]:
    """Five directions."""

    def floor(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        g = gradient(model, x, True)
        total: Tensor | float = 0.0
        for _ in range(5):
            v = torch.randint_like(x, 0, 2) * 2 - 1
            along = (g * v).sum(1)
            total = total + 0.5 * along.square() - (torch.autograd.grad(along.sum(), x, create_graph=True)[0] * v).sum(1)
        return (total / 5).mean()  # type: ignore[union-attr]

    return floor, losses.SlicedScoreMatching(model, 5)


def denoising(model: EnergyModel) -> tuple[Loss, Loss]:
    """One noise scale."""

    def floor(x: Tensor) -> Tensor:
        z = torch.randn_like(x)
        g = gradient(model, (x + 0.1 * z).requires_grad_(), True)
        return 0.5 * (g - z / 0.1).square().sum(1).mean()

    return floor, losses.DenoisingScoreMatching(model, 0.1)


def contrastive(model: EnergyModel) -> tuple[Loss, Loss]:
    """Chains from the data."""

    def floor(x: Tensor) -> Tensor:
        negatives = langevin(model, x, STEPS)
        e, f = model(x), model(negatives)
        return e.mean() - f.mean() + 0.001 * (e.square().mean() + f.square().mean())

    loss_fn = losses.ContrastiveDivergence(model, LangevinDynamics(model, STEP_SIZE), k_steps=STEPS)
    return floor, lambda x: loss_fn(x)[0]


def persistent(model: EnergyModel) -> tuple[Loss, Loss]:
    """Chains that go on."""
    buffer: list[Tensor] = []

    def floor(x: Tensor) -> Tensor:
        if not buffer:
            buffer.append(torch.randn(10_000, x.shape[1]))
        slots = torch.randint(10_000, (len(x),))
        start = torch.where(torch.rand(len(x), 1) < 0.05, torch.randn_like(x), buffer[0][slots])
        negatives = langevin(model, start, STEPS)
        buffer[0][slots] = negatives
        e, f = model(x), model(negatives)
        return e.mean() - f.mean() + 0.001 * (e.square().mean() + f.square().mean())

    loss_fn = losses.ContrastiveDivergence(
        model, LangevinDynamics(model, STEP_SIZE), k_steps=STEPS, persistent=True, init_steps=0
    )
    return floor, lambda x: loss_fn(x)[0]


def noise_contrastive(model: EnergyModel) -> tuple[Loss, Loss]:
    """As much noise as data."""

    def log_noise(x: Tensor) -> Tensor:
        return -0.5 * x.square().sum(1) - 0.5 * x.shape[1] * math.log(2 * math.pi)

    def floor(x: Tensor) -> Tensor:
        y = torch.randn_like(x)
        return softplus(model(x) + log_noise(x)).mean() + softplus(-model(y) - log_noise(y)).mean()

    loss_fn = losses.NoiseContrastiveEstimation(model)
    return floor, lambda x: loss_fn(x)[0]


def discrepancy(model: EnergyModel) -> tuple[Loss, Loss]:
    """Four samples."""

    def floor(x: Tensor) -> Tensor:
        away = x + 0.5 * torch.randn_like(x)
        back = (away + 0.5 * torch.randn(4, *x.shape)).flatten(0, 1)
        logits = model(x) - model(back).reshape(4, len(x))
        return torch.logsumexp(torch.cat([logits, torch.zeros(1, len(x))]), 0).mean() - math.log(4)

    return floor, losses.EnergyDiscrepancy(model)


class Field(nn.Module):
    """A vector field as wide as the energies."""

    def __init__(self, dim: int, hidden: int = 128) -> None:
        super().__init__()
        blocks = [nn.Linear(dim + 1, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, dim)]
        self.net = nn.Sequential(*blocks)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """(batch, dim) at points (batch, dim) and times (batch,)."""
        return self.net(torch.cat([x, t[:, None]], 1))


def flow(model: Any) -> tuple[Loss, Loss]:
    """The velocity of straight paths."""

    def floor(x: Tensor) -> Tensor:
        x0, t = torch.randn_like(x), torch.rand(len(x))
        xt = t[:, None] * x + (1 - t[:, None]) * x0
        return (model(xt, t) - (x - x0)).square().mean()

    return floor, losses.FlowMatching(model)


def target(x: Tensor, x0: Tensor, t: Tensor) -> Tensor:
    """The target of equilibrium matching."""
    return 4 * ((1 - t[:, None]) / 0.2).clamp(max=1) * (x0 - x)


def equilibrium(model: Any) -> tuple[Loss, Loss]:
    """A field that is the gradient itself."""

    def floor(x: Tensor) -> Tensor:
        x0, t = torch.randn_like(x), torch.rand(len(x))
        xt = t[:, None] * x + (1 - t[:, None]) * x0
        return (model(xt, torch.zeros_like(t)) - target(x, x0, t)).square().mean()

    return floor, losses.EquilibriumMatching(model)


def equilibrium_dot(model: Any) -> tuple[Loss, Loss]:
    """The gradient of x·f(x)."""

    def floor(x: Tensor) -> Tensor:
        x0, t = torch.randn_like(x), torch.rand(len(x))
        xt = (t[:, None] * x + (1 - t[:, None]) * x0).requires_grad_()
        g = torch.autograd.grad((xt * model(xt, torch.zeros_like(t))).sum(), xt, create_graph=True)[0]
        return (g - target(x, x0, t)).square().mean()

    return floor, losses.EquilibriumMatching(model, energy_type="dot")


def equilibrium_energy(model: EnergyModel) -> tuple[Loss, Loss]:
    """The gradient of an energy."""

    def floor(x: Tensor) -> Tensor:
        x0, t = torch.randn_like(x), torch.rand(len(x))
        xt = t[:, None] * x + (1 - t[:, None]) * x0
        return (gradient(model, xt.requires_grad_(), True) - target(x, x0, t)).square().mean()

    return floor, losses.EquilibriumMatching(model)


def matching_flow(model: EnergyModel, x: Tensor) -> Tensor:
    """The flow term of energy matching."""
    x0, t = torch.randn_like(x), torch.rand(len(x))
    xt = t[:, None] * x + (1 - t[:, None]) * x0 + 0.1 * torch.randn_like(x)
    g = gradient(model, xt.requires_grad_(), True)
    return (((1 - t) / 0.2).clamp(0, 1) * (g + x - x0).square().mean(1)).mean()


def energy_matching_warm_up(model: EnergyModel) -> tuple[Loss, Loss]:
    """Without chains."""
    return lambda x: matching_flow(model, x), losses.EnergyMatching(model, coupling="independent", lambda_cd=0.0)


def energy_matching(model: EnergyModel) -> tuple[Loss, Loss]:
    """With chains."""
    steps = 50

    def floor(x: Tensor) -> Tensor:
        half = len(x) // 2
        noise = torch.full((steps, len(x), 1), math.sqrt(2 * 0.01 * 0.15))
        sweep = ((torch.arange(steps) / steps - 0.8) / 0.2).clamp(0, 1)
        noise[:, :half, 0] = torch.sqrt(2 * 0.01 * 0.15 * sweep)[:, None]
        y = torch.cat([torch.randn_like(x[:half]), x[torch.randperm(len(x))[half:]]])
        for step in range(steps):
            y = (y - 0.01 * gradient(model, y.requires_grad_()) + noise[step] * torch.randn_like(y)).detach()
        chains = model(y).sort().values[: len(x) - int(0.1 * len(x))]
        contrastive = (2.0 * (model(x).mean() - chains.mean())).clamp(min=-0.02)
        return matching_flow(model, x) + contrastive

    loss_fn = losses.EnergyMatching(model, coupling="independent", n_langevin_steps=steps)
    return floor, loss_fn


Make = Callable[[Any], tuple[Loss, Loss]]

ENERGIES: dict[str, Make] = {
    f.__name__: f
    for f in (
        score_matching,
        hutchinson,
        sliced,
        denoising,
        contrastive,
        persistent,
        noise_contrastive,
        discrepancy,
        equilibrium_energy,
        energy_matching_warm_up,
        energy_matching,
    )
}
FIELDS: dict[str, Make] = {f.__name__: f for f in (flow, equilibrium, equilibrium_dot)}
LOSSES = ENERGIES | FIELDS


def training_step(model: nn.Module, loss_fn: Loss, x: Tensor) -> Callable[[], None]:
    """Loss, backward, Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(x).backward()
        optimizer.step()

    return step


def compare(
    floor: Callable[[], None], ours: Callable[[], None], seconds: float, clock: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Times of both, taking turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for call in (floor, ours):
        for _ in range(3):
            call()
    end = time.perf_counter() + 2 * seconds
    turn = 0
    while time.perf_counter() < end or turn < 7:
        for which in (turn % 2, 1 - turn % 2):  # who comes first changes, for the caches' sake
            start = clock()
            (floor, ours)[which]()
            times[which].append(clock() - start)
        turn += 1
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--size", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: where others use the machine; one thread, no GPU"
    )
    options = parser.parse_args()
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    torch.set_num_threads(options.threads)
    for name in options.only:
        for size in options.size:
            if name == "score_matching" and size != "2x256":
                continue  # an exact trace is for few coordinates
            dim, batch = SIZES[size]
            steps = []
            for which in range(2):
                torch.manual_seed(0)
                model = MLPEnergy(dim, 128) if name in ENERGIES else Field(dim)
                steps.append(training_step(model, LOSSES[name](model)[which], torch.randn(batch, dim)))
            least, own = compare(*steps, options.seconds, clock)
            figure = {
                "name": f"{name} {size} over the floor",
                "value": round(statistics.median(o / f for f, o in zip(least, own, strict=True)), 3),
                "least": round(min(own) / min(least), 3),
                "floor_us": round(1e6 * min(least), 1),
                "us": round(1e6 * min(own), 1),
                "turns": len(own),
                "threads": options.threads,
            }
            print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
