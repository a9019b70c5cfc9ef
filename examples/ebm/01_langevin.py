"""Langevin 101: three samplers of a known energy, and what the step size does to what they draw.

    python examples/ebm/01_langevin.py
    torchrun --standalone --nproc-per-node=2 examples/ebm/01_langevin.py

The energy is that of a correlated Gaussian, whose stiff direction has the variance 0.2. Langevin dynamics of step h makes 0.2 / (1 - h / 0.4)
of it: exactly the error that is seen. The test of acceptance of MALA and Hamiltonian Monte Carlo removes it.
Every process moves its own share of the chains.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from nvalchemi.distributed import DistributedManager, gather
from nvalchemi.ebm.samplers import EnergySampler, HamiltonianMonteCarlo, LangevinDynamics, MetropolisAdjustedLangevin
from nvalchemi.ebm.toy import GaussianModel

COVARIANCE = torch.tensor([[1.0, 0.8], [0.8, 1.0]])  # variance 1.8 along (1, 1), 0.2 along (1, -1)
STIFF = 0.2
STEPS = [0.03, 0.08, 0.14, 0.2]
NAMES = {"Langevin": "tab:red", "MALA": "tab:blue", "HMC": "tab:green"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", type=int, default=1000, help="of all processes together")
    parser.add_argument("--steps", type=int, default=200, help="of each chain that are kept, after as many that are not")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder of the picture")
    return parser.parse_args()


def sampler(name: str, energy: GaussianModel, h: float) -> EnergySampler:
    """With comparable steps: a leapfrog step of length sqrt(2 h) is a Langevin step of size h."""
    if name == "Langevin":
        return LangevinDynamics(energy, step_size=h)
    if name == "MALA":
        return MetropolisAdjustedLangevin(energy, step_size=h)
    return HamiltonianMonteCarlo(energy, step_size=math.sqrt(2 * h), n_leapfrog_steps=3, jitter=0.2)


def stiff(samples: Tensor) -> Tensor:
    """The coordinate along (1, -1)."""
    return (samples[..., 0] - samples[..., 1]) / math.sqrt(2)


def variance(samples: Tensor) -> tuple[float, float]:
    """The stiff variance over its exact value, and the standard error of that: chains are independent, their states are not."""
    each = stiff(samples).square().mean(1) / STIFF
    return float(each.mean()), float(each.std() / math.sqrt(len(each)))


def draw(energy: GaussianModel, samples: dict[tuple[str, float], Tensor], path: Path) -> None:
    figure = Figure(figsize=(13, 4), layout="constrained")
    plane, density, bias = figure.subplots(1, 3)

    x = torch.linspace(-3.2, 3.2, 120)
    energies = energy(torch.cartesian_prod(x, x)).reshape(120, 120).T
    filled = plane.contourf(x, x, energies.clamp(max=8), levels=16, cmap="viridis")
    figure.colorbar(filled, ax=plane, label="energy / kT (clipped at 8)")
    some = samples["MALA", STEPS[-1]][:800, -1]
    plane.plot(*some.T, ".", color="white", markersize=2.5)
    plane.set(title=f"{len(some)} chains of MALA, last states", xlabel="$x_1$", ylabel="$x_2$", aspect="equal", xlim=(-3.2, 3.2))
    plane.set_ylim(-3.2, 3.2)

    h, y = STEPS[-1], torch.linspace(-2.2, 2.2, 300)
    exact = torch.exp(-0.5 * y.square() / STIFF) / math.sqrt(2 * math.pi * STIFF)
    density.fill_between(y, exact, color="0.85", label="exact")
    for name, color in NAMES.items():
        counts, edges = torch.histogram(stiff(samples[name, h]).flatten(), bins=60, range=(-2.2, 2.2), density=True)
        density.plot(0.5 * (edges[1:] + edges[:-1]), counts, color=color, label=name)
    density.set(title=f"stiff direction, step {h}", xlabel="$(x_1 - x_2) / \\sqrt{2}$", ylabel="density", ylim=(0, None))
    density.legend()

    fine = torch.linspace(0, STEPS[-1], 100)
    bias.plot(fine, 1 / (1 - fine / (2 * STIFF)), color="0.6", label="$1 / (1 - h / 0.4)$")
    bias.axhline(1, color="0.6", linestyle=":", label="exact")
    for shift, (name, color) in zip(
        (0, -0.002, 0.002), NAMES.items(), strict=True
    ):  # side by side where they would hide each other
        found = [variance(samples[name, h]) for h in STEPS]
        at, mean, error = [h + shift for h in STEPS], [m for m, _ in found], [2 * e for _, e in found]
        bias.errorbar(at, mean, yerr=error, fmt="o", markersize=4, color=color, label=name, capsize=3)
    bias.set(title="bias of the step (bars: two standard errors)", xlabel="step size h", ylabel="stiff variance / exact variance")
    bias.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Sample with each sampler at each step size, compare with what is known, and draw."""
    args = arguments()
    DistributedManager.initialize()
    manager = DistributedManager()
    generator = torch.Generator(manager.device).manual_seed(1 + manager.rank)  # every process has random numbers of its own
    energy = GaussianModel(torch.zeros(2), COVARIANCE).to(manager.device)

    samples = {}
    for name in NAMES:
        for h in STEPS:
            rule, chains = sampler(name, energy, h), max(1, args.chains // manager.world_size)
            start = rule.sample(dim=2, n_samples=chains, n_steps=args.steps, generator=generator)
            kept = rule.sample(x=start, n_steps=args.steps, thin=10, return_trajectory=True, generator=generator)
            samples[name, h] = torch.cat(gather(kept, manager)).cpu()

    if manager.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        draw(energy.cpu(), samples, args.out / "01_langevin.png")
        h = STEPS[-1]
        print(f"{manager.world_size} process(es): stiff variance over the exact one at step {h}, with its standard error")
        for name in NAMES:
            mean, error = variance(samples[name, h])
            print(
                f"  {name:9s} {mean:.3f} ± {error:.3f}   (expected {1 / (1 - h / (2 * STIFF)) if name == 'Langevin' else 1:.3f})"
            )
    DistributedManager.cleanup()


if __name__ == "__main__":
    main()
