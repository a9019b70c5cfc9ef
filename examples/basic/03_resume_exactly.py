"""A run in two sittings ends with the same bits as a run in one.

    python examples/basic/03_resume_exactly.py

Dropout, a shuffled loader, a moving average and a schedule: all that is random or remembered is in the checkpoint.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nvalchemi.training import Every, OptimizerConfig, TrainContext, TrainingStage, TrainingStrategy, on
from nvalchemi.training.hooks import CheckpointHook, EMAHook


def strategy(directory: str, *more_hooks) -> tuple[TrainingStrategy, EMAHook]:
    """The same declaration each time: this is the script that a user would start again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    average = EMAHook(0.9)
    recipe = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(
            torch.optim.Adam, {"lr": 1e-2}, torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": 60}
        ),
        training_fn=lambda model, batch: model(batch[0]),
        loss_fn=lambda prediction, batch: (prediction - batch[1]).square().mean(),
        num_steps=60,
        hooks=[average, CheckpointHook(directory, every=Every(steps=7)), *more_hooks],
        resume_from="latest",  # starts afresh where there is nothing yet
    )
    return recipe, average


def loader() -> DataLoader:
    """Sixteen batches an epoch, in an order of their own each epoch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(128, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=8, shuffle=True)


@on(TrainingStage.STEP_END)
def power_cut(ctx: TrainContext) -> None:
    """In the middle of the second epoch, two steps after a checkpoint."""
    if ctx.progress.step == 23:
        raise KeyboardInterrupt


def main() -> None:
    """Once without a break; once with a break and a second sitting."""
    recipe, average = strategy("runs/unbroken")
    unbroken, unbroken_average = recipe.run(loader()), average

    recipe, _ = strategy("runs/broken", power_cut)
    try:
        recipe.run(loader())
    except KeyboardInterrupt:
        print("the power went out at step 23")
    recipe, average = strategy("runs/broken")
    resumed = recipe.run(loader())

    same = all(torch.equal(a, b) for a, b in zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True))
    averages = (unbroken_average.weights(), average.weights())
    same = same and all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])
    print(f"{resumed.progress.step} steps in {resumed.progress.epoch} epochs; weights and averages equal bit for bit: {same}")
    if not same:
        raise SystemExit("the runs differ")


if __name__ == "__main__":
    main()
