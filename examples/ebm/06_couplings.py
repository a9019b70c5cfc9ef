"""How noise is paired with data: independent, Sinkhorn and exact couplings under flow matching.

    python examples/ebm/06_couplings.py --steps 4000
    torchrun --standalone --nproc-per-node=2 examples/ebm/06_couplings.py

Pairs that are near each other make paths that do not cross; the velocity then hardly changes along them, and few steps of an integrator
suffice. The bend of the paths is the mean square of their velocity's difference from that of the straight way, over the latter's square.
The price is the time of the coupling, which grows with the square of the batch or faster.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.distributed import DistributedManager
from nvalchemi.ebm.couplings import Coupling, ExactOTCoupling, IndependentCoupling, SinkhornCoupling
from nvalchemi.ebm.datasets import gaussian_mixture
from nvalchemi.ebm.losses import FlowMatching
from nvalchemi.ebm.samplers import FlowSampler
from nvalchemi.training import OptimizerConfig, TrainingStrategy
from nvalchemi.training.hooks import DDPHook, EMAHook


class Velocity(nn.Module):
    """A small network of position and time."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 2)
        )  # fmt: skip

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat([x, t[:, None]], 1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of each of the three runs")
    parser.add_argument("--batch-size", type=int, default=128, help="of all processes together")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder of the picture")
    return parser.parse_args()


def train(coupling: Coupling, points: Tensor, manager: DistributedManager, args: argparse.Namespace) -> Velocity:
    """The averaged network of one run; all runs begin alike."""
    torch.manual_seed(0)
    model, average = Velocity(), EMAHook(0.98)
    TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.Adam, {"lr": 5e-3}),
        loss_fn=FlowMatching(model, coupling=coupling),
        num_steps=args.steps,
        distributed_manager=manager,
        hooks=[DDPHook(), average],
    ).run(
        DataLoader(
            InMemoryDataset(points, device=manager.device), batch_size=args.batch_size // manager.world_size, shuffle=True, seed=0
        )
    )
    trained = Velocity()
    average.copy_to(trained)
    return trained


def price(coupling: Coupling, noise: Tensor, data: Tensor) -> tuple[float, float]:
    """Mean squared distance of a pair, and seconds a call."""
    coupling(noise, data, generator=torch.Generator().manual_seed(4))  # once to warm up
    start = time.perf_counter()
    for _ in range(5):
        x0, x1 = coupling(noise, data, generator=torch.Generator().manual_seed(4))
    return float((x0 - x1).square().sum(1).mean()), (time.perf_counter() - start) / 5


def sliced_wasserstein(a: Tensor, b: Tensor, n_directions: int = 100) -> float:
    """Root mean square over directions of the distance that mass travels between the projections of two sets of as many points."""
    angle = (torch.arange(n_directions) + 0.5) * torch.pi / n_directions
    directions = torch.stack([angle.cos(), angle.sin()])
    return float(((a @ directions).sort(0)[0] - (b @ directions).sort(0)[0]).square().mean().sqrt())


def main() -> None:
    """One run for each coupling, then paths, straightness and samples in two steps."""
    args = arguments()
    DistributedManager.initialize()
    manager = DistributedManager()
    points = gaussian_mixture(20_000, torch.Generator().manual_seed(0), n_components=5, radius=2.0, noise=0.2)
    unseen = gaussian_mixture(2000, torch.Generator().manual_seed(1), n_components=5, radius=2.0, noise=0.2)
    noise = torch.randn(2000, 2, generator=torch.Generator().manual_seed(2))
    couplings = {"independent": IndependentCoupling(), "Sinkhorn, reg 0.05": SinkhornCoupling(0.05), "exact": ExactOTCoupling()}

    figure = Figure(figsize=(13, 4.6), layout="constrained")
    lines = [
        f"{'coupling':20s} {'cost of a pair':>14s} {'ms a call':>10s} {'bend':>8s} {'distance, 2 steps':>18s} {'100 steps':>10s}"
    ]
    for panel, (name, coupling) in zip(figure.subplots(1, 3, sharex=True, sharey=True), couplings.items(), strict=True):
        model = train(coupling, points, manager, args)
        ways = FlowSampler(model, integrator="euler").sample(noise, n_steps=100, return_trajectory=True)
        ways = torch.cat([noise[:, None], ways], 1)
        velocities = ways.diff(dim=1) * 100
        along = ways[:, -1] - noise  # the velocity of the straight way
        bend = float((velocities - along[:, None]).square().sum(2).mean() / along.square().sum(1).mean())
        quick = FlowSampler(model, integrator="euler").sample(noise, n_steps=2)
        cost, seconds = price(coupling, noise[:256], unseen[:256])
        lines.append(
            f"{name:20s} {cost:14.2f} {1e3 * seconds:10.2f} {bend:8.4f} {sliced_wasserstein(quick, unseen):18.3f} "
            f"{sliced_wasserstein(ways[:, -1], unseen):10.3f}"
        )
        panel.plot(ways[:150, :, 0].T, ways[:150, :, 1].T, color="tab:blue", linewidth=0.6, alpha=0.6)
        panel.plot(*noise[:150].T, ".", color="0.4", markersize=4, label="noise")
        panel.plot(*quick[:600].T, ".", color="tab:orange", markersize=3, label="two Euler steps")
        panel.plot(*ways[:600, -1].T, ".", color="tab:red", markersize=3, label="100 Euler steps")
        panel.set(
            title=f"{name}: bend {bend:.3f}", xlabel="$x_1$", ylabel="$x_2$", aspect="equal", xlim=(-3.2, 3.2), ylim=(-3.2, 3.8)
        )
    panel.legend(loc="upper right", fontsize="small")
    if manager.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.out / "06_couplings.png", dpi=110)
        print(
            f"{manager.world_size} process(es): {args.steps} steps for each coupling; sliced Wasserstein distances to unseen points"
        )
        print("\n".join(lines))
    DistributedManager.cleanup()


if __name__ == "__main__":
    main()
