"""Lightning Fabric around the network inside an energy; losses, samplers and averages stay outside, as they are.

    python examples/advanced/02_fabric.py
    torchrun --nproc-per-node=2 examples/advanced/02_fabric.py

``fabric.setup`` wraps ``model.net`` alone, so that the energy is the object it was: the loss below differentiates its score once more, and a sampler
draws from it. The last line is the same on any number of processes, to rounding: each takes its part of the same global batches.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
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

    processes, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))  # as torchrun says
    fabric = Fabric(
        accelerator="cpu" if args.cpu else "auto",
        strategy="ddp" if processes > 1 else "auto",
        devices=here,
        num_nodes=processes // here,
    )
    fabric.launch()
    say = print if fabric.is_global_zero else (lambda *_: None)
    say(f"{fabric.world_size} process(es) on {fabric.device}")
    torch.manual_seed(0)
    x = 0.6 * torch.randn(2048, 4) + 0.5
    loader = DataLoader(TensorDataset(x), batch_size=256 // fabric.world_size)
    model = Energy(4, 32)
    plain = model.net  # sampling and averages use the network without its wrapper
    average = copy.deepcopy(plain)
    optimizer = torch.optim.Adam(plain.parameters(), lr=3e-2)

    model.net, optimizer = fabric.setup(model.net, optimizer)
    loader = fabric.setup_dataloaders(loader)
    average.to(fabric.device)
    loss_fn = ScoreMatching(model, hessian_method="exact")

    for epoch in range(args.epochs):
        for (batch,) in loader:
            optimizer.zero_grad()
            loss = loss_fn(batch)
            fabric.backward(loss)
            optimizer.step()
            update_ema(average, plain, 0.9)
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        say(f"epoch {epoch + 1}: {mean.item():.4f}")

    model.net = average
    if fabric.is_global_zero:
        generator = torch.Generator(fabric.device).manual_seed(1)
        start = torch.zeros(512, 4, device=fabric.device)
        found = LangevinDynamics(model=model, step_size=0.01).sample(start, n_steps=300, generator=generator)
        print(f"samples: mean {found.mean().item():.2f} (0.5 in the data), spread {found.std(0).mean().item():.2f} (0.6)")
        print(f"weights: {sum(p.double().abs().sum().item() for p in average.parameters()):.4f}")
    if dist.is_initialized():  # Fabric leaves its gloo group to the interpreter's end, where torch aborts now and then
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
