"""A training script that is signalled, killed and started again by test_restarts.py: python restart_script.py FOLDER [what happens]."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.distributed import DistributedManager
from nvalchemi.training import Every, Hook, OptimizerConfig, TrainingStage, TrainingStrategy, on
from nvalchemi.training.hooks import CheckpointHook, DDPHook, StopOnSignalHook

STEPS, FATAL = 12, 7


class Fate(Hook):
    """What happens to a rank after a number of steps."""

    def __init__(self, folder: Path, what: str, rank: int) -> None:
        self.folder, self.what, self.rank = folder, what, rank
        self.first = 0

    @on(TrainingStage.TRAINING_START)
    def start(self, ctx: Any) -> None:
        self.first = ctx.progress.step

    @on(TrainingStage.STEP_END)
    def end(self, ctx: Any) -> None:
        step = ctx.progress.step
        (self.folder / f"at-{ctx.manager.rank}").write_text(f"{os.getpid()} {step}")
        if self.what in ("slow", "elastic"):
            time.sleep(0.05 if self.what == "slow" else 0.5)
        if self.what.startswith("SIG") and step == FATAL and ctx.manager.rank == self.rank and self.first == 0:
            os.kill(os.getpid(), signal.Signals[self.what])


def train(manager: Any, folder: Path, what: str = "", rank: int = 1, steps: int = STEPS) -> dict[str, Any]:
    """Train with dropout, a checkpoint every other step; gives what the test compares. An elastic run has none, and no hurry."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.0 if what == "elastic" else 0.3), nn.Linear(8, 1)).double()
    generator = torch.Generator().manual_seed(5)
    data = InMemoryDataset(torch.randn(48, 3, generator=generator, dtype=torch.float64))
    fate = Fate(folder, what, rank)
    ctx = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.Adam, {"lr": 0.01}),
        training_fn=lambda net, batch: net(batch[:, :2]).squeeze(1),
        loss_fn=lambda prediction, batch: (prediction - batch[:, 2]).square().mean(),
        num_steps=steps,
        distributed_manager=manager,
        resume_from="latest",
        hooks=[DDPHook(), StopOnSignalHook(), fate, CheckpointHook(folder / "runs", every=Every(steps=2), keep_last=None)],
    ).run(DataLoader(data, batch_size=12 // manager.world_size, shuffle=True))
    return {
        "world_size": manager.world_size,
        "first": fate.first,
        "last": ctx.progress.step,
        "samples": ctx.progress.samples,
        "interrupted": ctx.interrupted,
        "stop": ctx.stop_reason,
        "weights": [value.tolist() for value in model.state_dict().values()],
    }


def main(folder: str, what: str = "", rank: str = "1", steps: str = str(STEPS), timeout: str = "200") -> None:
    """Join, train, report."""
    DistributedManager.initialize(timeout=timedelta(seconds=float(timeout)))
    manager = DistributedManager()
    begun = time.monotonic()
    try:
        report = train(manager, Path(folder), what, int(rank), int(steps))
        (Path(folder) / f"{manager.rank}.json").write_text(json.dumps(report))
    finally:
        print(f"rank {manager.rank} was done after {time.monotonic() - begun:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
