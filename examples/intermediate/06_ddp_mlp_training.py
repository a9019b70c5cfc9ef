"""Data-parallel training of a small network on dense vectors, on one process or many.

    python examples/intermediate/06_ddp_mlp_training.py --backend auto
    torchrun --standalone --nproc-per-node=2 examples/intermediate/06_ddp_mlp_training.py --backend auto
    uv run torchrun --standalone --nproc-per-node=2 examples/intermediate/06_ddp_mlp_training.py

``--batch-size`` is that of all processes together, so the result does not depend on how many there are. Started again, the program
goes on from its last checkpoint; sent SIGUSR1 (as SLURM does before a job's time is over) it saves, stops, and exits with status 75.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.distributed import DistributedManager
from nvalchemi.training import Every, OptimizerConfig, TrainingStrategy, ValidationConfig
from nvalchemi.training.hooks import CheckpointHook, DDPHook, EMAHook, ProgressHook, StopOnSignalHook

DIM = 16
STOPPED = 75  # the exit status for "not done yet, start me again"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["auto", "gloo", "nccl"], default="auto", help="gloo computes on the CPU")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    parser.add_argument("--directory", default="runs/ddp_mlp", help="of the checkpoints; all processes must see it")
    return parser.parse_args()


def vectors(count: int, seed: int, device: torch.device) -> InMemoryDataset:
    """Vectors and a smooth function of them: the same on every process, which then trains on its own share."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, DIM, generator=generator)
    y = torch.sin(x[:, :4]).sum(1) + 0.5 * x[:, 4] * x[:, 5]
    return InMemoryDataset({"x": x, "y": y}, device=device)


def predict(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).squeeze(1)


def squared_error(prediction: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (prediction - batch["y"]).square().mean()


def main() -> None:
    """Train, validate with averaged weights, and say once what was done."""
    args = arguments()
    DistributedManager.initialize(backend=args.backend)  # torchrun, SLURM, Open MPI, or one plain process: the same line
    manager = DistributedManager()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    train, valid = vectors(4096, 1, manager.device), vectors(501, 2, manager.device)
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.AdamW, {"lr": 5e-3}),
        training_fn=predict,
        loss_fn=squared_error,
        validation_config=ValidationConfig(validation_data=DataLoader(valid, batch_size=128), every_n_epochs=1),
        num_epochs=args.epochs,
        distributed_manager=manager,
        hooks=[
            DDPHook(),
            EMAHook(0.98),
            ProgressHook(),
            StopOnSignalHook(),
            CheckpointHook(args.directory, every=Every(epochs=1), keep_last=2, keep_best=1),
        ],
        resume_from="latest",  # starts afresh where there is nothing yet
    )
    ctx = strategy.run(DataLoader(train, batch_size=max(1, args.batch_size // manager.world_size), shuffle=True, seed=0))

    if manager.rank == 0:
        result = ctx.validation  # an interrupted run may not have come to one
        print(
            f"{manager.world_size} process(es) on {manager.device.type}: {ctx.progress.step} steps, {ctx.progress.samples} samples, "
            f"{ctx.progress.epoch} epochs"
            + (f"; validation loss {result['loss']:.5f} over {result['n']:.0f} vectors" if result else "")
            + (f"; {ctx.stop_reason}" if ctx.stop_reason else "")
        )
    DistributedManager.cleanup()
    if ctx.interrupted:
        sys.exit(STOPPED)
    if ctx.validation is None or ctx.validation["loss"] > 0.5:  # without learning it is about 2, the variance of the labels
        sys.exit("the network did not learn")


if __name__ == "__main__":
    main()
