"""A training script, run by test_ddp_script.py under python and under torchrun: python ddp_script.py FOLDER [how it fails]."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.distributed import DistributedManager
from nvalchemi.training import OptimizerConfig, TrainingStrategy, ValidationConfig
from nvalchemi.training.hooks import DDPHook


def main(folder: str, fault: str = "") -> None:
    """Train a line; the last batches of rank 1 may fail in the forward."""
    DistributedManager.initialize()
    manager = DistributedManager()
    torch.manual_seed(manager.rank)  # replicas begin with rank 0's weights all the same
    model = nn.Linear(2, 1).double()
    calls = 0

    def predict(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if fault and manager.rank == 1 and calls == 3:
            raise ValueError("a forward that fails")
        return net(batch[:, :2]).squeeze(1)

    generator = torch.Generator().manual_seed(5)
    data = InMemoryDataset(torch.randn(40, 3, generator=generator, dtype=torch.float64))
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 0.1}),
        training_fn=predict,
        loss_fn=lambda prediction, batch: (prediction - batch[:, 2]).square().mean(),
        validation_config=ValidationConfig(validation_data=DataLoader(data, batch_size=7)),
        num_epochs=2,
        distributed_manager=manager,
        hooks=[DDPHook()],
    )
    report = {"rank": manager.rank, "world_size": manager.world_size}
    begun = time.monotonic()
    try:
        ctx = strategy.run(DataLoader(data, batch_size=8 // manager.world_size, shuffle=True))
        report |= {"validation": ctx.validation, "samples": ctx.progress.samples, "weights": model.weight.tolist()}
        report |= {"hooks": [hook.name for hook in ctx.hooks]}
    except Exception as error:
        report |= {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - begun}
        if fault != "caught":
            raise
    finally:
        (Path(folder) / f"{manager.rank}.json").write_text(json.dumps(report))
    if fault == "caught":
        time.sleep(8)  # the process lives on


if __name__ == "__main__":
    main(*sys.argv[1:])
