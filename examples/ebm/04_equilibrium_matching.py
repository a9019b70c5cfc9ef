"""Equilibrium matching: an energy whose minima are the data, reached by plain descent.

    python examples/ebm/04_equilibrium_matching.py --steps 5000
    torchrun --standalone --nproc-per-node=2 examples/ebm/04_equilibrium_matching.py

The gradient of the energy leads from noise to data at all times alike and vanishes at the data; there is no noise and no time in sampling.
The energy is no log-density: descent ends at its minima, so the samples lie closer together than the data. How near they are to
the data is measured by the sliced Wasserstein distance, beside that of two sets of data points, below which nothing can be told apart.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.distributed import DistributedManager
from nvalchemi.ebm.datasets import gaussian_mixture
from nvalchemi.ebm.losses import EquilibriumMatching
from nvalchemi.ebm.samplers import NesterovSampler
from nvalchemi.models import MLPEnergy
from nvalchemi.training import OptimizerConfig, TrainingStrategy
from nvalchemi.training.hooks import DDPHook, EMAHook, ProgressHook

BOX = torch.linspace(-3, 3, 120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=128, help="of all processes together")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder of the picture")
    return parser.parse_args()


def points(count: int, seed: int) -> Tensor:
    return gaussian_mixture(count, torch.Generator().manual_seed(seed), n_components=5, radius=2.0, noise=0.15)


def sliced_wasserstein(a: Tensor, b: Tensor, n_directions: int = 100) -> float:
    """Root mean square over directions of the distance that mass travels between the projections of two sets of as many points."""
    angle = (torch.arange(n_directions) + 0.5) * torch.pi / n_directions
    directions = torch.stack([angle.cos(), angle.sin()])
    return float(((a @ directions).sort(0)[0] - (b @ directions).sort(0)[0]).square().mean().sqrt())


def draw(model: MLPEnergy, paths: Tensor, unseen: Tensor, path: Path) -> None:
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    landscape, ways, ends = figure.subplots(1, 3, sharex=True, sharey=True)
    with torch.no_grad():
        energy = model(torch.cartesian_prod(BOX, BOX)).reshape(len(BOX), len(BOX)).T
    energy = energy - energy.min()
    filled = landscape.contourf(BOX, BOX, energy, levels=40, cmap="viridis")
    figure.colorbar(filled, ax=landscape, label="energy above its lowest")
    landscape.set(title="learned energy")
    ways.plot(paths[:60, :, 0].T, paths[:60, :, 1].T, color="tab:blue", linewidth=0.7, alpha=0.7)
    ways.plot(*paths[:60, 0].T, ".", color="0.4", label="noise")
    ways.plot(*paths[:60, -1].T, ".", color="tab:red", label="end")
    ways.set(title="60 ways down")
    ends.plot(*unseen[:1500].T, ".", color="0.75", markersize=3, label="held-out points")
    ends.plot(*paths[:1500, -1].T, ".", color="tab:red", markersize=3, label="ends of descent")
    ends.set(title="1500 of each")
    for panel in (landscape, ways, ends):
        panel.set(xlabel="$x_1$", ylabel="$x_2$", aspect="equal", xlim=(-3, 3), ylim=(-3, 3))
    for panel in (ways, ends):
        panel.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, descend from noise, measure, and draw."""
    args = arguments()
    DistributedManager.initialize()
    manager = DistributedManager()

    torch.manual_seed(0)
    model = MLPEnergy(2, hidden=64, layers=3)
    average = EMAHook(0.99)
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(
            torch.optim.Adam, {"lr": 5e-3}, torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": args.steps}
        ),
        loss_fn=EquilibriumMatching(model, coupling="ot"),
        num_steps=args.steps,
        distributed_manager=manager,
        hooks=[DDPHook(), average, ProgressHook()],
    )
    data = InMemoryDataset(points(20_000, seed=0), device=manager.device)
    ctx = strategy.run(DataLoader(data, batch_size=args.batch_size // manager.world_size, shuffle=True, seed=0))

    if manager.rank == 0:
        model = MLPEnergy(2, hidden=64, layers=3)
        average.copy_to(model)
        noise = torch.randn(2000, 2, generator=torch.Generator().manual_seed(2))
        sampler = NesterovSampler(model, step_size=0.01, momentum=0.35)
        paths = torch.cat([noise[:, None], sampler.sample(noise, n_steps=150, thin=2, return_trajectory=True)], 1)
        unseen, others = points(2000, seed=1), points(2000, seed=3)
        args.out.mkdir(parents=True, exist_ok=True)
        draw(model, paths, unseen, args.out / "04_equilibrium_matching.png")
        print(f"{manager.world_size} process(es): {ctx.progress.step} steps")
        print(
            f"sliced Wasserstein distance to 2000 unseen points: of noise {sliced_wasserstein(noise, unseen):.3f}, "
            f"of samples {sliced_wasserstein(paths[:, -1], unseen):.3f}, of other points {sliced_wasserstein(others, unseen):.3f}"
        )
    DistributedManager.cleanup()


if __name__ == "__main__":
    main()
