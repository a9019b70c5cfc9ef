"""Denoising score matching: the energy of a spiral, learnt without any sampler.

    python examples/ebm/03_denoising_score_matching.py --steps 5000
    torchrun --standalone --nproc-per-node=2 examples/ebm/03_denoising_score_matching.py

What is learnt is the score of the points with the noise of the loss, and this density is known: so the error of the learnt score is the true
one, and the points are drawn from the energy by MALA, which is exact.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.distributed import DistributedManager
from nvalchemi.ebm.datasets import swiss_roll
from nvalchemi.ebm.losses import DenoisingScoreMatching
from nvalchemi.ebm.samplers import MetropolisAdjustedLangevin
from nvalchemi.ebm.toy import GaussianMixtureModel
from nvalchemi.models import MLPEnergy
from nvalchemi.training import OptimizerConfig, TrainingStrategy
from nvalchemi.training.hooks import DDPHook, EMAHook, ProgressHook

SIGMA = 0.15  # of the loss
NOISE = 0.02  # of the points
FIRST, LAST = 1.5 * math.pi, 4.5 * math.pi  # angles at which the spiral begins and ends
BOX = torch.linspace(-2.7, 2.7, 120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch-size", type=int, default=256, help="of all processes together")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder of the picture")
    return parser.parse_args()


def exact_energy() -> GaussianMixtureModel:
    """Of the points and their noise: many Gaussians along the spiral."""
    t = torch.linspace(FIRST, LAST, 200)
    size = math.sqrt((FIRST**2 + FIRST * LAST + LAST**2) / 6)
    return GaussianMixtureModel(torch.stack([t * t.cos(), t * t.sin()], 1) / size, SIGMA**2 + NOISE**2)


def draw(energies: list[Tensor], samples: Tensor, points: Tensor, model: MLPEnergy, path: Path) -> None:
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    for panel, energy, title in zip(panels, energies, ("learned energy and score", "exact energy"), strict=False):
        shown = (energy - energy.min()).clamp(max=8).reshape(len(BOX), len(BOX)).T
        filled = panel.contourf(BOX, BOX, shown, levels=torch.linspace(0, 8, 25), cmap="viridis")
        panel.set(title=title)
    figure.colorbar(filled, ax=panels[:2], label="energy / kT above its lowest (clipped at 8)")
    at = torch.cartesian_prod(BOX[::7], BOX[::7])
    score = -model.gradient(at)
    length = score.norm(dim=1, keepdim=True)
    panels[0].quiver(*at.T, *(score / length.clamp(min=1) * length.clamp(max=1).sqrt()).T, color="white", width=0.004, scale=25)
    panels[2].plot(*points.T, ".", color="0.75", markersize=3, label="held-out points with noise")
    panels[2].plot(*samples.T, ".", color="tab:red", markersize=3, label="MALA of the learned energy")
    panels[2].set(title=f"{len(samples)} of each")
    panels[2].legend(loc="lower right", fontsize="small")
    for panel in panels:
        panel.set(xlabel="$x_1$", ylabel="$x_2$", aspect="equal", xlim=(-2.7, 2.7), ylim=(-2.7, 2.7))
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, compare the scores, sample, and draw."""
    args = arguments()
    DistributedManager.initialize()
    manager = DistributedManager()
    points = swiss_roll(20_000, torch.Generator().manual_seed(0), noise=NOISE)

    torch.manual_seed(0)
    model = MLPEnergy(2, hidden=64, layers=3)
    average = EMAHook(0.99)
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(
            torch.optim.Adam, {"lr": 5e-3}, torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": args.steps}
        ),
        loss_fn=DenoisingScoreMatching(model, noise_scale=SIGMA),
        num_steps=args.steps,
        distributed_manager=manager,
        hooks=[DDPHook(), average, ProgressHook()],
    )
    data = InMemoryDataset(points, device=manager.device)
    ctx = strategy.run(DataLoader(data, batch_size=args.batch_size // manager.world_size, shuffle=True, seed=0))

    if manager.rank == 0:
        model = MLPEnergy(2, hidden=64, layers=3)
        average.copy_to(model)
        exact, generator = exact_energy(), torch.Generator().manual_seed(1)
        unseen = swiss_roll(4000, generator, noise=NOISE)
        unseen += SIGMA * torch.randn(unseen.shape, generator=generator)
        true, learned = exact.gradient(unseen), model.gradient(unseen)
        error = float((true - learned).square().sum() / true.square().sum())

        samples = MetropolisAdjustedLangevin(model, step_size=0.02).sample(unseen[:1000], n_steps=100, generator=generator)
        grid = torch.cartesian_prod(BOX, BOX)
        with torch.no_grad():
            energies = [model(grid), exact(grid)]
            log_z = torch.logsumexp(-energies[0], 0) + 2 * (BOX[1] - BOX[0]).log()
            divergence = float((model(unseen) + log_z - exact(unseen)).mean())  # estimated with the unseen points
        args.out.mkdir(parents=True, exist_ok=True)
        draw(energies, samples, unseen[:1000], model, args.out / "03_denoising_score_matching.png")
        print(f"{manager.world_size} process(es): {ctx.progress.step} steps")
        print(f"squared error of the score, relative: {error:.3f}; divergence of the learned density: {divergence:.3f} nats")
    DistributedManager.cleanup()


if __name__ == "__main__":
    main()
