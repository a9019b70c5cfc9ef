"""An energy divided between the processes and trained by denoising score matching, a loss of second order.

    python examples/intermediate/09_fsdp2_energy.py
    torchrun --standalone --nproc-per-node=2 examples/intermediate/09_fsdp2_energy.py
    uv run torchrun --standalone --nproc-per-node=2 examples/intermediate/09_fsdp2_energy.py

The network is built on the meta device, where it has no memory, and gets its first weights part by part: the same on any number of
processes. In the end chains follow the averaged energy from noise, with all weights gathered once.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn

from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.distributed import DistributedManager, gather, unsharded
from nvalchemi.ebm.losses import DenoisingScoreMatching
from nvalchemi.ebm.samplers import LangevinDynamics
from nvalchemi.models import EnergyModel
from nvalchemi.training import Every, Hook, OptimizerConfig, TrainingStage, TrainingStrategy, ValidationConfig, on
from nvalchemi.training.hooks import CheckpointHook, EMAHook, FSDP2Hook, GradientClipHook, ProgressHook

DIM, NOISE = 4, 0.4


class Block(nn.Module):
    """One part of the network: gathered, used and freed by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class DeepEnergy(EnergyModel):
    """An energy of vectors: everything learnable is in its ``net``, which is what is divided."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, width), *(Block(width) for _ in range(blocks)), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)


class Share(Hook):
    """How much of the model this process holds."""

    held = whole = 0

    @on(TrainingStage.TRAINING_START)
    def look(self, ctx) -> None:
        parameters = list(ctx.model.parameters())
        self.whole = sum(p.numel() for p in parameters)
        self.held = sum(p.to_local().numel() if ctx.manager.distributed else p.numel() for p in parameters)


def data(count: int, seed: int, device: torch.device) -> InMemoryDataset:
    """Vectors around two points, (1, 1, ...) and (-1, -1, ...)."""
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, (count, 1), generator=generator) * 2.0 - 1.0
    return InMemoryDataset(sign + 0.2 * torch.randn(count, DIM, generator=generator), device=device)


def main() -> None:
    """Train, and see whether samples lie around both points."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["auto", "gloo", "nccl"], default="auto", help="gloo computes on the CPU")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=3)
    args = parser.parse_args()
    DistributedManager.initialize(backend=args.backend)
    manager = DistributedManager()

    with torch.device("meta"):
        model = DeepEnergy(args.width, args.blocks)
    share, ema = Share(), EMAHook(0.98)
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.AdamW, {"lr": 5e-3}),
        loss_fn=DenoisingScoreMatching(model, noise_scale=NOISE),
        validation_config=ValidationConfig(validation_data=DataLoader(data(301, 2, manager.device), batch_size=64)),
        num_epochs=args.epochs,
        distributed_manager=manager,
        hooks=[
            FSDP2Hook(wrap=Block),
            ema,
            GradientClipHook(10.0),
            ProgressHook(),
            share,
            CheckpointHook("runs/fsdp2_energy", every=Every(epochs=4), keep_last=1),
        ],
    )
    loader = DataLoader(data(2048, 1, manager.device), batch_size=64 // manager.world_size, shuffle=True, seed=0)
    ctx = strategy.run(loader)

    with unsharded(model):  # every process draws samples of its own, without waiting for another
        generator = torch.Generator(manager.device).manual_seed(manager.rank)
        sampler = LangevinDynamics(model, step_size=0.005)
        samples = sampler.sample(dim=DIM, n_samples=256 // manager.world_size, n_steps=400, generator=generator)
    means = torch.cat([s.cpu() for s in gather(samples.mean(1), manager)])
    right = float((means > 0).float().mean())
    distance = float((means.abs() - 1.0).abs().mean())
    if manager.rank == 0:
        print(
            f"{manager.world_size} process(es) on {manager.device.type}, each with {share.held / share.whole:.0%} of {share.whole} parameters: "
            f"{ctx.progress.step} steps, validation loss {ctx.validation['loss']:.3f}; {right:.0%} of the samples around (1, ...), the others "
            f"around (-1, ...), {distance:.2f} off on average"
        )
    DistributedManager.cleanup()
    if not 0.2 < right < 0.8 or distance > 0.3:
        sys.exit("the samples are not those of the data")


if __name__ == "__main__":
    main()
