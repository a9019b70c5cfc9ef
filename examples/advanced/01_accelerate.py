"""Hugging Face Accelerate around the network inside an energy; losses, samplers and averages stay outside, as they are.

    python examples/advanced/01_accelerate.py
    torchrun --nproc-per-node=2 examples/advanced/01_accelerate.py

``accelerator.prepare`` wraps ``model.net`` alone, so that the energy is the object it was: the loss below differentiates its score once more, and a sampler
draws from it. The last line is the same on any number of processes, to rounding: each takes its part of the same global batches.
"""

from __future__ import annotations

import argparse
import copy

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nvalchemi.ebm.losses import ScoreMatching
from nvalchemi.ebm.samplers import LangevinDynamics
from nvalchemi.models import EnergyModel
from nvalchemi.training.hooks import update_ema


class Energy(EnergyModel):
    """A quadratic bowl with a correction that is learnt: its samples stay near the data from the first step on."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1) + 0.5 * x.square().sum(-1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--cpu", action=argparse.BooleanOptionalAction, default=not torch.cuda.is_available())
    args = parser.parse_args()

    accelerator = Accelerator(cpu=args.cpu, dataloader_config=DataLoaderConfiguration(split_batches=True))
    accelerator.print(f"{accelerator.num_processes} process(es) on {accelerator.device}")
    torch.manual_seed(0)
    x = 0.6 * torch.randn(2048, 4) + 0.5
    loader = DataLoader(TensorDataset(x), batch_size=256)
    model = Energy(4, 32)
    plain = model.net  # sampling and averages use the network without its wrapper
    average = copy.deepcopy(plain)
    optimizer = torch.optim.Adam(plain.parameters(), lr=3e-2)

    model.net, optimizer, loader = accelerator.prepare(model.net, optimizer, loader)
    average.to(accelerator.device)
    loss_fn = ScoreMatching(model, hessian_method="exact")

    for epoch in range(args.epochs):
        for (batch,) in loader:
            optimizer.zero_grad()
            loss = loss_fn(batch)
            accelerator.backward(loss)
            optimizer.step()
            update_ema(average, plain, 0.9)
        mean = accelerator.reduce(loss.detach(), reduction="mean")
        accelerator.print(f"epoch {epoch + 1}: {mean.item():.4f}")

    model.net = average
    if accelerator.is_main_process:
        generator = torch.Generator(accelerator.device).manual_seed(1)
        start = torch.zeros(512, 4, device=accelerator.device)
        found = LangevinDynamics(model=model, step_size=0.01).sample(start, n_steps=300, generator=generator)
        print(f"samples: mean {found.mean().item():.2f} (0.5 in the data), spread {found.std(0).mean().item():.2f} (0.6)")
        print(f"weights: {sum(p.double().abs().sum().item() for p in average.parameters()):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
