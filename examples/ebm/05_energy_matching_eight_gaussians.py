"""Energy matching: one energy that carries noise to eight Gaussians, and whose Boltzmann density is theirs.

    python examples/ebm/05_energy_matching_eight_gaussians.py
    torchrun --standalone --nproc-per-node=2 examples/ebm/05_energy_matching_eight_gaussians.py

Four fifths of the steps learn the flow alone; the rest run chains as well, which makes exp(-E / 0.15) the density of the points. Samples
begin as noise and follow Langevin dynamics whose temperature rises from 0 to 0.15 only at the end.
The flow finds the ring on which the Gaussians lie, and then the Gaussians; what is still blurred, the divergence says.
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
from nvalchemi.ebm.datasets import eight_gaussians
from nvalchemi.ebm.losses import EnergyMatching
from nvalchemi.ebm.samplers import LangevinDynamics
from nvalchemi.ebm.toy import GaussianMixtureModel
from nvalchemi.models import MLPEnergy
from nvalchemi.training import OptimizerConfig, TrainingStrategy
from nvalchemi.training.hooks import DDPHook, EMAHook, GradientClipHook, ProgressHook

NOISE = 0.2
TEMPERATURE = 0.15
BOX = torch.linspace(-3.2, 3.2, 120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=128, help="of all processes together")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder of the picture")
    return parser.parse_args()


def exact_energy() -> GaussianMixtureModel:
    angle = torch.arange(8) * (2 * math.pi / 8)
    return GaussianMixtureModel(2 * torch.stack([angle.cos(), angle.sin()], 1), NOISE**2)


def sample(model: MLPEnergy, start: Tensor, n_steps: int = 200) -> Tensor:
    """The way of each sample, (batch, states, 2): down the energy at temperature 0, then with noise."""
    dynamics = LangevinDynamics(
        model, step_size=0.02, temperature=lambda step: TEMPERATURE * min(1.0, max(0.0, 4 * step / n_steps - 1))
    )
    ways = dynamics.sample(start, n_steps=n_steps, thin=2, return_trajectory=True, generator=torch.Generator().manual_seed(3))
    return torch.cat([start[:, None], ways], 1)


def draw(energies: list[Tensor], ways: Tensor, path: Path) -> None:
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    for panel, energy, title in zip(panels, energies, ("learned energy / 0.15", "exact energy"), strict=False):
        shown = (energy - energy.min()).clamp(max=15).reshape(len(BOX), len(BOX)).T
        filled = panel.contourf(BOX, BOX, shown, levels=torch.linspace(0, 15, 31), cmap="viridis")
        panel.set(title=title)
    figure.colorbar(filled, ax=panels[:2], label="energy / kT above its lowest (clipped at 15)")
    panels[2].plot(ways[:60, :, 0].T, ways[:60, :, 1].T, color="tab:blue", linewidth=0.5, alpha=0.6)
    panels[2].plot(*ways[:, 0].T, ".", color="0.75", markersize=2, label="noise")
    panels[2].plot(*ways[:, -1].T, ".", color="tab:red", markersize=2, label="samples")
    panels[2].set(title=f"{len(ways)} samples, 60 ways")
    panels[2].legend(loc="upper right", fontsize="small", markerscale=3)
    for panel in panels:
        panel.set(xlabel="$x_1$", ylabel="$x_2$", aspect="equal", xlim=(-3.2, 3.2), ylim=(-3.2, 3.2))
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, sample, count what each mode got, and draw."""
    args = arguments()
    DistributedManager.initialize()
    manager = DistributedManager()
    points = eight_gaussians(20_000, torch.Generator().manual_seed(0), noise=NOISE)

    torch.manual_seed(0)
    model = MLPEnergy(2, hidden=64, layers=3)
    warm_up, average = 4 * args.steps // 5, EMAHook(0.99)
    loss_fn = EnergyMatching(
        model,
        lambda_cd=lambda step: 0.0 if step < warm_up else 1.0,
        epsilon_max=TEMPERATURE,
        n_langevin_steps=20,
        langevin_dt=0.02,
        cd_trim_fraction=0.0,
        cd_clamp=None,
        process_group=manager,
    )
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(
            torch.optim.Adam, {"lr": 1e-2}, torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": args.steps}
        ),
        loss_fn=loss_fn,
        num_steps=args.steps,
        distributed_manager=manager,
        hooks=[DDPHook(), GradientClipHook(10.0), average, ProgressHook()],
    )
    data = InMemoryDataset(points, device=manager.device)
    ctx = strategy.run(DataLoader(data, batch_size=args.batch_size // manager.world_size, shuffle=True, seed=0))

    if manager.rank == 0:
        model = MLPEnergy(2, hidden=64, layers=3)
        average.copy_to(model)
        exact = exact_energy()
        ways = sample(model, torch.randn(2000, 2, generator=torch.Generator().manual_seed(2)))
        ends = ways[:, -1]
        shares = torch.bincount(exact.component(ends), minlength=8) / len(ends)
        grid = torch.cartesian_prod(BOX, BOX)
        with torch.no_grad():
            energies = [model(grid) / TEMPERATURE, exact(grid)]
            log_z = torch.logsumexp(-energies[0], 0) + 2 * (BOX[1] - BOX[0]).log()
            unseen = exact.draw(4000, generator=torch.Generator().manual_seed(1)).float()
            divergence = float((model(unseen) / TEMPERATURE + log_z - exact(unseen)).mean())
        args.out.mkdir(parents=True, exist_ok=True)
        draw(energies, ways, args.out / "05_energy_matching_eight_gaussians.png")
        print(f"{manager.world_size} process(es): {ctx.progress.step} steps")
        print(
            f"share of the samples in each mode (exact: 0.125): {shares.min():.3f} to {shares.max():.3f}; divergence of the Boltzmann "
            f"density from that of the points: {divergence:.3f} nats"
        )
    DistributedManager.cleanup()


if __name__ == "__main__":
    main()
