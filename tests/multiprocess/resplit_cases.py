"""What the ranks do in test_resplit.py; each function is also called in one process."""

from __future__ import annotations

import logging
import multiprocessing
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

from nvalchemi.data.datapipes import DataLoader, InMemoryDataset, MultiDataset
from nvalchemi.objective import LossOutput
from nvalchemi.training import Every, Hook, OptimizerConfig, TrainingStage, TrainingStrategy, on
from nvalchemi.training.hook import Scope
from nvalchemi.training.hooks import CheckpointHook, DDPHook, MetricsHook
from nvalchemi.training.objectives import PredictionObjective


def rows(start: int, stop: int) -> torch.Tensor:
    """(n, 4): three random numbers and the row's index."""
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(100, 3, generator=generator, dtype=torch.float64)
    return torch.cat([values, torch.arange(100, dtype=torch.float64)[:, None]], 1)[start:stop]


LOADERS: dict[str, Any] = {
    "one": lambda size: DataLoader(InMemoryDataset(rows(0, 40)), batch_size=size, shuffle=True, seed=3),
    "several": lambda size: DataLoader(
        MultiDataset(InMemoryDataset(rows(0, 27)), InMemoryDataset(rows(27, 40))), batch_size=size, shuffle=True, seed=3
    ),
    "torch's": lambda size: TorchLoader(TensorDataset(rows(0, 40)), batch_size=size, shuffle=True),
    # forked, as under torchrun: in a rank that was spawned itself, workers would by default be spawned too
    "workers": lambda size: TorchLoader(
        TensorDataset(rows(0, 20)), batch_size=size, shuffle=True, num_workers=2, multiprocessing_context="fork"
    ),
    "1": lambda size: DataLoader(InMemoryDataset(rows(0, 1)), batch_size=size, shuffle=True),
    "41": lambda size: DataLoader(InMemoryDataset(rows(0, 41)), batch_size=size, shuffle=True),
    "41, dropped": lambda size: DataLoader(InMemoryDataset(rows(0, 41)), batch_size=size, shuffle=True, drop_last=True),
}


class Look(Hook):
    """Which rows are in each step, by epoch, and a number from the rank's own stream and from torch's."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []
        self.noise: list[float] = []
        self.starts: list[int] = []

    @on(TrainingStage.EPOCH_START)
    def start(self, ctx: Any) -> None:
        self.starts.append(ctx.progress.epoch)

    @on(TrainingStage.STEP_START)
    def look(self, ctx: Any) -> None:
        batches = [batch[0] if isinstance(batch, list) else batch for batch in ctx.group]
        self.seen.append((ctx.progress.epoch, [int(i) for batch in batches for i in batch[:, 3]]))
        self.noise += [float(torch.rand((), generator=ctx.generator)), float(torch.rand(()))]


class Calls(Hook):
    """State of a rank's own: steps that this rank has taken."""

    scope = Scope.RANK_LOCAL

    def __init__(self) -> None:
        self.steps = 0

    @on(TrainingStage.STEP_END)
    def count(self, ctx: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class OwnLoss(PredictionObjective):
    """A loss with a state of each rank's own, as chains are: how often this rank has called it."""

    rank_local = True
    calls = 0

    def __call__(self, model: Any, batch: Any, **settings: Any) -> LossOutput:
        self.calls += 1
        return super().__call__(model, batch, **settings)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def predict(model: Any, batch: Any) -> torch.Tensor:
    return model((batch[0] if isinstance(batch, list) else batch)[:, :3]).squeeze(1)  # type: ignore[no-any-return]


def squared(prediction: torch.Tensor, batch: Any) -> torch.Tensor:
    return (prediction - (batch[0] if isinstance(batch, list) else batch)[:, 0].sin()).square().mean()


def train(
    manager: Any, folder: str, kind: str, size: int, steps: int, records: str | None = None, resume_from: str = "latest"
) -> Any:
    """Go on from a checkpoint, by default the newest of ``folder``, up to ``steps`` steps, and save each."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # so that a standing rank may have workers
    torch.manual_seed(1 + manager.rank)
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1, -0.2, 0.3]]))
        model.bias.zero_()
    look, calls, loss = Look(), Calls(), OwnLoss(squared, predict)
    hooks = [look, calls, CheckpointHook(folder, Every(steps=1), keep_last=None), DDPHook()]
    if records is not None:
        hooks.append(MetricsHook(records, Every(steps=4)))
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.Adam, {"lr": 0.01}),
        loss_fn=loss,
        num_steps=steps,
        distributed_manager=manager,
        resume_from=resume_from,
        hooks=hooks,
    )
    ctx = strategy.run(LOADERS[kind](size))
    return {
        "seen": look.seen,
        "noise": look.noise,
        "starts": look.starts,
        "calls": (calls.steps, loss.calls),
        "progress": ctx.progress.state_dict(),
        "weights": [p.detach() for p in model.parameters()],
    }


def logged(manager: Any, folder: str, kind: str) -> list[str]:
    """What a run of two epochs says of what it leaves out or repeats."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("nvalchemi")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        train(manager, folder, kind, 4, 12)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [line for line in said if " epoch " in line and ("twice" in line or "leaves out" in line)]
