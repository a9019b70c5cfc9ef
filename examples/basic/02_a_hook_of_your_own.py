"""Three hooks of one's own: an observer, a guard, and a span.

    python examples/basic/02_a_hook_of_your_own.py

A hook is a class with methods that say when they run. Its state, where it has one, is saved with every checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nvalchemi.training import (
    Every,
    Hook,
    OptimizerConfig,
    Order,
    PeriodicHook,
    TrainContext,
    TrainingSpan,
    TrainingStage,
    TrainingStrategy,
    around,
    on,
)


class PrintLoss(PeriodicHook):
    """Acts every so many steps; how often is the base class's business."""

    def act(self, ctx: TrainContext) -> None:
        print(f"step {ctx.progress.step:3d}  loss {ctx.loss.total.item():.4f}")


class SkipLargeLosses(Hook):
    """A guard: it runs before anything changes the gradients, and decides by a number that is the same on every rank."""

    order = Order.GUARD

    def __init__(self, limit: float) -> None:
        self.limit, self.skipped = limit, 0

    @on(TrainingStage.GRADIENTS_READY)
    def look(self, ctx: TrainContext) -> None:
        if not ctx.loss.total.item() < self.limit:  # also where it is not a number
            ctx.skip_step(f"a loss of {ctx.loss.total.item():.1f}")
            self.skipped += 1

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["skipped"]


class ForwardTime(Hook):
    """An interval is one generator: what is before ``yield`` runs on entry, what is after it on the way out, also on an error."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @around(TrainingSpan.FORWARD)
    def measure(self, ctx: TrainContext) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


@on(TrainingStage.TRAINING_END)
def say_goodbye(ctx: TrainContext) -> None:
    """A bare function may stand in the list too."""
    print(f"done after {ctx.progress.step} steps, {ctx.progress.skipped} more were skipped")


def main() -> None:
    """Fit a line to points, one of which is no point of that line at all."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    y = 3 * x + 0.1 * torch.randn(64, 1)
    y[5] = 1e4
    guard, clock = SkipLargeLosses(limit=100.0), ForwardTime()
    strategy = TrainingStrategy(
        models=nn.Linear(1, 1),
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 0.2}),
        training_fn=lambda model, batch: model(batch[0]),
        loss_fn=lambda prediction, batch: (prediction - batch[1]).square().mean(),
        num_epochs=5,
        hooks=[PrintLoss(Every(steps=10)), guard, clock, say_goodbye],
    )
    ctx = strategy.run(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
    print(f"{guard.skipped} skips, {1e3 * clock.seconds:.1f} ms in forward, slope {ctx.model.weight.item():.2f}")
    if guard.skipped != 5 or abs(ctx.model.weight.item() - 3) > 0.3:
        raise SystemExit("the guard or the fit is broken")


if __name__ == "__main__":
    main()
