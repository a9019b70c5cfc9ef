"""Contrastive divergence with persistent chains, on two moons.

    python examples/ebm/02_pcd_two_moons.py
    torchrun --standalone --nproc-per-node=2 examples/ebm/02_pcd_two_moons.py

The points come from a zarr store. Every process keeps chains of its own, which are saved with everything else: started again with more
``--steps``, the program goes on from its last checkpoint. In the plane an energy can be normalised on a grid, so the likelihood of points
that were never seen is known, for the network and for the distribution that made the points.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from nvalchemi.data.datapipes import ArrayZarrReader, DataLoader, InMemoryDataset
from nvalchemi.distributed import DistributedManager, barrier
from nvalchemi.ebm.datasets import two_moons, write_points
from nvalchemi.ebm.losses import ContrastiveDivergence
from nvalchemi.ebm.samplers import LangevinDynamics
from nvalchemi.ebm.toy import GaussianMixtureModel
from nvalchemi.models import MLPEnergy
from nvalchemi.training import Every, OptimizerConfig, TrainingStrategy
from nvalchemi.training.hooks import CheckpointHook, DDPHook, EMAHook, GradientClipHook, PCDCheckpointHook, ProgressHook

NOISE = 0.12
BOX = torch.linspace(-2.5, 3.5, 120)  # both axes of the grid


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch-size", type=int, default=128, help="of all processes together")
    parser.add_argument("--runs", type=Path, default=Path("runs/pcd_two_moons"), help="folder of store and checkpoints")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder of the picture")
    return parser.parse_args()


def exact_energy() -> GaussianMixtureModel:
    """Minus the logarithm of the density of the points: many small Gaussians along both half circles."""
    angle = (torch.arange(100) + 0.5) * math.pi / 100
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    return GaussianMixtureModel(torch.cat([upper, torch.tensor([1.0, 0.5]) - upper]), NOISE**2)


def log_likelihood(energy, points: Tensor) -> tuple[float, Tensor]:
    """Mean log-density of points in nats, and the normalised energies on the grid."""
    with torch.no_grad():
        on_grid = energy(torch.cartesian_prod(BOX, BOX))
        log_z = torch.logsumexp(-on_grid, 0) + 2 * (BOX[1] - BOX[0]).log()
        return float((-energy(points) - log_z).mean()), (on_grid + log_z).reshape(len(BOX), len(BOX)).T


def draw(learned: Tensor, exact: Tensor, chains: Tensor, points: Tensor, path: Path) -> None:
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    low = exact.min()
    for panel, energies, title in ((panels[0], learned, "learned energy"), (panels[1], exact, "exact energy")):
        filled = panel.contourf(BOX, BOX, (energies - low).clamp(0, 12), levels=torch.linspace(0, 12, 25), cmap="viridis")
        panel.set(title=title)
    figure.colorbar(filled, ax=panels[:2], label="normalised energy / kT (clipped at 12)", shrink=0.7)
    panels[2].plot(*points.T, ".", color="0.75", markersize=3, label="held-out points")
    panels[2].plot(*chains.T, ".", color="tab:red", markersize=3, label="persistent chains")
    panels[2].set(title=f"{len(chains)} of each")
    panels[2].legend(loc="upper right")
    for panel in panels:
        panel.set(xlabel="$x_1$", ylabel="$x_2$", aspect="equal", xlim=(-2, 3), ylim=(-1.7, 2.2))
    figure.savefig(path, dpi=110)


def main() -> None:
    """Write the store once, train, and compare with what is exact."""
    args = arguments()
    DistributedManager.initialize()
    manager = DistributedManager()
    store = args.runs / "points.zarr"
    if manager.rank == 0 and not store.exists():
        write_points(store, "two_moons", 20_000, seed=0, noise=NOISE)
    barrier(manager)
    data = InMemoryDataset(ArrayZarrReader(store), device=manager.device)

    torch.manual_seed(0)
    model = MLPEnergy(2, hidden=64, layers=3)
    loss_fn = ContrastiveDivergence(
        model,
        LangevinDynamics(model, step_size=0.005),
        k_steps=10,
        persistent=True,
        buffer_size=1024 // manager.world_size,
        new_sample_ratio=0.02,
        energy_reg_weight=0.005,
    )
    average = EMAHook(0.99)
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.Adam, {"lr": 3e-3}),
        loss_fn=loss_fn,
        num_steps=args.steps,
        distributed_manager=manager,
        hooks=[
            DDPHook(),
            ProgressHook(),
            GradientClipHook(10.0),
            average,
            CheckpointHook(args.runs, every=Every(steps=200)),
            PCDCheckpointHook(),
        ],
        resume_from="latest",  # starts afresh where there is nothing yet
    )
    ctx = strategy.run(DataLoader(data, batch_size=args.batch_size // manager.world_size, shuffle=True, seed=0))

    if manager.rank == 0:
        model = MLPEnergy(2, hidden=64, layers=3)
        average.copy_to(model)
        points = two_moons(4000, torch.Generator().manual_seed(1), noise=NOISE)  # never trained on
        (found, learned), (best, exact) = log_likelihood(model, points), log_likelihood(exact_energy(), points)
        args.out.mkdir(parents=True, exist_ok=True)
        chains = loss_fn.replay_buffer.samples[:1000].cpu()
        draw(learned, exact, chains, points[:1000], args.out / "02_pcd_two_moons.png")
        print(f"{manager.world_size} process(es): {ctx.progress.step} steps")
        print(f"log-likelihood of {len(points)} unseen points: {found:.3f} nats each; of the exact density {best:.3f}")
    DistributedManager.cleanup()


if __name__ == "__main__":
    main()
