"""What the ranks do in test_signals.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from nvalchemi.training import Every, Hook, OptimizerConfig, TrainingStage, ValidationConfig, interruption, layout, on
from nvalchemi.training.hooks import CheckpointHook, StopOnSignalHook
from tests.multiprocess.together_cases import batches, run

SHARE = 60  # batches that each rank validates on; the uninterrupted pass takes 1.2 s


class Send(Hook):
    """A signal to this process at a stage of the step after ``step``."""

    def __init__(self, number: int | None, stage: TrainingStage, step: int) -> None:
        self.number, self.stage, self.step = number, stage, step

    def send(self, ctx, stage) -> None:
        if self.number is not None and stage is self.stage and ctx.progress.step == self.step:
            os.kill(os.getpid(), self.number)
            self.number = None

    @on(TrainingStage.SETUP)
    def setup(self, ctx) -> None:
        self.send(ctx, TrainingStage.SETUP)

    @on(TrainingStage.LOSS_READY)
    def loss(self, ctx) -> None:
        self.send(ctx, TrainingStage.LOSS_READY)

    @on(TrainingStage.EPOCH_END)
    def epoch(self, ctx) -> None:
        self.send(ctx, TrainingStage.EPOCH_END)


class Validations(Hook):
    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    @on(TrainingStage.VALIDATED)
    def note(self, ctx) -> None:
        self.seen.append((ctx.progress.step, ctx.validation["loss"]))


def sitting(manager, folder, *hooks, callback=None, **settings):
    """Up to 8 steps in epochs of 4, a validation after every third; its result moves the learning rate."""
    import torch

    seen = Validations()
    config = ValidationConfig(
        validation_data=batches(2 * SHARE, 9, size=1) if callback else batches(6, 9), every_n_steps=3, batch_callback=callback
    )
    rates = OptimizerConfig(
        torch.optim.SGD,
        {"lr": 0.1},
        scheduler_cls=torch.optim.lr_scheduler.ReduceLROnPlateau,
        scheduler_kwargs={"patience": 0, "threshold": 1e9},
        scheduler_metric="loss",
    )
    hooks = (*hooks, seen, StopOnSignalHook(), CheckpointHook(folder, Every(steps=1000)))
    data = batches(4, manager.rank)
    report = run(
        manager, data, *hooks, validation_config=config, optimizer_configs=rates, num_epochs=2, resume_from="latest", **settings
    )
    return report | {"validations": seen.seen, "saved": [(c.step, c.path.name) for c in layout.list_checkpoints(Path(folder))]}


def signalled(manager, folder, number, stage, step, whom):
    """A run that the ranks ``whom`` are signalled in, one that goes on, and one that nobody disturbs."""
    number = number if manager.rank in whom else None
    broken = sitting(manager, f"{folder}/broken", Send(number, TrainingStage[stage], step))
    return broken, sitting(manager, f"{folder}/broken"), sitting(manager, f"{folder}/whole")


def in_validation(manager, folder, whom):
    """As above, in the midst of the first validation."""
    interruption.SELDOM = 0.1
    done = 0

    def slowly(batch, predictions, loss) -> None:
        nonlocal done
        done += 1
        time.sleep(0.02)
        if done == 5 and manager.rank in whom:
            os.kill(os.getpid(), signal.SIGTERM)

    def only_count(batch, predictions, loss) -> None: ...

    try:
        broken = sitting(manager, f"{folder}/broken", callback=slowly)
    finally:
        interruption.SELDOM = 0.5
    done_then = done
    rest = sitting(manager, f"{folder}/broken", callback=only_count)
    whole = sitting(manager, f"{folder}/whole", callback=only_count)
    return broken | {"batches": done_then}, rest, whole


def asked_to_save(manager, folder, whom):
    """A run of eight steps in which ranks ``whom`` are asked for a checkpoint in their second step; the steps that were saved."""
    send = Send(signal.SIGUSR2 if manager.rank in whom else None, TrainingStage.LOSS_READY, 1)
    hook = CheckpointHook(folder, Every(steps=1000), save_on_signal=signal.SIGUSR2)
    report = run(manager, batches(4, manager.rank), send, hook, num_epochs=2)
    return report["error"], report["steps"], [c.step for c in layout.list_checkpoints(Path(folder))]
