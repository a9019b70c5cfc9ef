"""The state of a run: the only thing that a run changes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nvalchemi.distributed import Manager
from nvalchemi.objective import Count, LossOutput, Objective
from nvalchemi.training.filler import Filler

if TYPE_CHECKING:
    from nvalchemi.training.agreement import Question
    from nvalchemi.training.cursor import Cursor
    from nvalchemi.training.optimizers import Scheduler
    from nvalchemi.training.rates import ScaledRates
    from nvalchemi.training.table import HookTable
    from nvalchemi.training.update import Update


@dataclass(slots=True)
class Progress:
    """How far a run is: a few integers, saved with every checkpoint.

    Attributes
    ----------
    epoch
        Epochs completed.
    batch
        Batches consumed of the current epoch, by each rank, since it was divided between ranks; only batches that were trained on count.
    step
        Optimizer steps taken.
    samples
        Samples consumed since the start of the run, all ranks together.
    epoch_samples
        Samples consumed of the current epoch, all ranks together: where the sampler can tell (see
        :class:`~nvalchemi.data.datapipes.samplers.Divisible`) the position in its order, so that repeats do not count, else as ``samples``.
    divided_at
        Samples of the current epoch that had been consumed when what was left of it was divided anew: not 0 only where the run was resumed
        on another number of ranks, or with other batches, in the middle of this epoch.
    skipped
        Steps whose update was skipped, all in all.
    consecutive_skips
        Steps skipped since the last one that was taken.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    epoch_samples: int = 0
    divided_at: int = 0
    skipped: int = 0
    consecutive_skips: int = 0

    @property
    def at_epoch_start(self) -> bool:
        """Whether nothing of the current epoch was consumed yet."""
        return self.batch == 0 and self.divided_at == 0

    def advance(self, batches: int, samples: int, taken: bool, position: int | None = None) -> None:
        """One step is over: ``batches`` consumed holding ``samples`` samples, up to ``position``; its update taken or skipped."""
        self.batch += batches
        self.samples += samples
        self.epoch_samples = self.epoch_samples + samples if position is None else position
        if taken:
            self.step += 1
            self.consecutive_skips = 0
        else:
            self.skipped += 1
            self.consecutive_skips += 1

    def end_epoch(self) -> None:
        """The current epoch is over."""
        self.epoch += 1
        self.batch = self.epoch_samples = self.divided_at = 0

    def state_dict(self) -> dict[str, int]:
        """The integers by name."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take back what :meth:`state_dict` gave."""
        for f in fields(self):
            setattr(self, f.name, int(state[f.name]))


@dataclass(slots=True, eq=False)
class TrainContext:
    """The run, not a copy of it: hooks read and change what they need here.

    Attributes
    ----------
    manager
        The distributed manager: ``rank``, ``world_size``, ``device``, ``distributed``.
    models
        The models by name, as wrapped by hooks.
    main
        Name of the model that is trained first and foremost; :attr:`model` is that one.
    objective
        What is minimised.
    progress
        The counters.
    several_models
        Whether a dict of models was declared; the objective is then given the dict.
    num_epochs, num_steps
        Where the run ends, as declared.
    accumulate
        Micro-batches of a full step, as declared.
    generator
        This rank's random generator on the run's device.
    sitting
        Something that no other call of ``run`` has; rank 0's is in the checkpoints that it saves.
    cursor, hooks, optimizers, schedulers, update
        The loader's position, the hook table, what was built from the optimizer configs, and the owner of backward and step.
    scaled_rates
        By optimizer name, what ``lr_scaling`` did to the rates; nothing where they are as declared.
    group
        The micro-batches of the current step; :attr:`batch` is the current one, and :attr:`is_last_microbatch` says whether it
        completes the step.
    counts
        Labels of each loss part over the whole step on all ranks, or ``None`` where one micro-batch is the step.
    loss
        At LOSS_READY the micro-batch's, with its graph; from GRADIENTS_READY on the whole step's on all ranks, detached.
    step_taken
        Whether the last step's update was taken.
    skip_reason
        Why the current step's update is skipped, on all ranks.
    skip_request
        Why this rank wants the current step's update to be skipped, as long as the ranks have not agreed on it.
    stop_reason
        Why the run ends.
    stop_agreed
        Whether all ranks know that it does.
    interrupted
        Whether the run ends because its process is wanted away, on all ranks: there is time to save and for nothing else.
    interrupt_asked
        Whether this rank was told so, as long as the ranks have not agreed on it.
    save_asked
        Whether this rank was asked for a checkpoint, as long as the ranks have not agreed on it.
    save_due
        Whether a checkpoint is wanted at the end of the current step, on all ranks.
    metrics
        Numbers for reporters, by name; tensors stay tensors until a reporter asks.
    validation
        The last validation's metrics, or ``None``.
    validation_data
        What is validated on: this rank's share of it.
    calls_communicate
        Whether each call of a model waits for the other ranks' calls, as with sharded parameters.
    question
        What the ranks ask each other about the next batches along with this step's loss, where those were read ahead.
    is_filler
        Whether the present micro-batch is one of a rank that has fewer than the others and does not count.
    trained
        Names of the models that have optimizers, each with its optimizers' names.
    flags_before
        The models' modes and flags as they were before the run.
    """

    manager: Manager
    models: dict[str, nn.Module]
    main: str
    objective: Objective
    progress: Progress
    generator: torch.Generator
    sitting: str = field(default_factory=lambda: uuid.uuid4().hex)
    several_models: bool = False
    num_epochs: int | None = None
    num_steps: int | None = None
    accumulate: int = 1
    cursor: Cursor = None  # type: ignore[assignment]
    hooks: HookTable = None  # type: ignore[assignment]
    update: Update = None  # type: ignore[assignment]
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    schedulers: dict[str, Scheduler] = field(default_factory=dict)
    scaled_rates: dict[str, ScaledRates] = field(default_factory=dict)
    group: list[Any] = field(default_factory=list)
    batch: Any = None
    counts: Mapping[str, Count] | None = None
    loss: LossOutput | None = None
    is_last_microbatch: bool = True
    step_taken: bool = False
    skip_reason: str | None = None
    skip_request: str | None = None
    stop_reason: str | None = None
    stop_agreed: bool = False
    interrupted: bool = False
    interrupt_asked: bool = False
    save_asked: bool = False
    save_due: bool = False
    metrics: dict[str, Tensor | float] = field(default_factory=dict)
    validation: dict[str, float] | None = None
    validation_data: Any = None
    calls_communicate: bool = False
    question: Question | None = None
    is_filler: bool = False
    trained: dict[str, list[str]] = field(default_factory=dict)
    flags_before: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        """The main model."""
        return self.models[self.main]

    def model_of(self, optimizer: str) -> nn.Module:
        """The model whose parameters an optimizer changes."""
        return next(self.models[model] for model, optimizers in self.trained.items() if optimizer in optimizers)

    @property
    def callee(self) -> Any:
        """What the objective is given: the model, or the dict of models where a dict was declared."""
        return self.models if self.several_models else self.models[self.main]

    @property
    def device(self) -> torch.device:
        """The device of the run on this rank."""
        return self.manager.device

    @property
    def complete(self) -> bool:
        """Whether the run is over by steps or by epochs: the same on every rank."""
        return (self.num_steps is not None and self.progress.step >= self.num_steps) or (
            self.num_epochs is not None and self.progress.epoch >= self.num_epochs
        )

    @property
    def completes_next(self) -> bool:
        """Whether the next step that is taken is the run's last."""
        return self.num_steps is not None and self.progress.step + 1 >= self.num_steps

    @property
    def finished(self) -> bool:
        """Whether the run is over: it is complete, or somebody said :meth:`stop`."""
        return self.stop_reason is not None or self.complete

    @property
    def fraction_done(self) -> float | None:
        """How much of the run is done by steps or epochs, from 0 to 1, whichever ends it first; ``None`` where that is not known."""
        parts: list[float] = []
        if self.num_steps:
            parts.append(self.progress.step / self.num_steps)
        if self.num_epochs:
            done, length = self.progress.batch, self.cursor.num_batches
            if self.progress.divided_at:
                done, length = self.progress.epoch_samples, self.cursor.num_samples
            parts.append((self.progress.epoch + (done / length if length else 0.0)) / self.num_epochs)
        return min(max(parts), 1.0) if parts else None

    @property
    def learning_rates(self) -> dict[str, float]:
        """The present rate of each optimizer's first parameter group, by the optimizer's name."""
        return {name: float(optimizer.param_groups[0]["lr"]) for name, optimizer in self.optimizers.items()}

    def stop(self, reason: str, *, agreed: bool = False) -> None:
        """End the run after this step, on all ranks where one says so; the first reason given is kept.

        Parameters
        ----------
        reason
            Why.
        agreed
            Every rank says the same, from numbers that are the same on all of them, so they need not ask each other.
        """
        if self.stop_reason is None:
            self.stop_reason = reason
        self.stop_agreed = self.stop_agreed or agreed

    def interrupt(self, reason: str) -> None:
        """As :meth:`stop`, where time is short: a validation is cut short and made up for by the run that resumes."""
        self.interrupt_asked = True
        self.stop(reason)

    def save_soon(self) -> None:
        """Save a checkpoint at the end of this step, or of the next where the backward has begun, on all ranks where one says so, and go on."""
        self.save_asked = True

    def take_save_request(self) -> bool:
        """Whether somebody said :meth:`save_soon` since the last time."""
        if self.save_asked:  # a signal that comes from here on is the same request
            self.save_asked = False
            return True
        return False

    def skip_step(self, reason: str, *, agreed: bool = False) -> None:
        """Do not take this step's update: all ranks skip it where one says so, and the first reason given is kept.

        Parameters
        ----------
        reason
            Why.
        agreed
            Every rank says the same, from numbers that are the same on all of them. Then it holds at once. Otherwise, with several ranks, it
            holds when they have told each other: with the loss, or before the update where it is said at GRADIENTS_READY.
        """
        if agreed or not self.manager.distributed:
            self.skip_reason = self.skip_reason or reason
        else:
            self.skip_request = self.skip_request or reason

    def begin_step(self, group: list[Any], counts: Mapping[str, Count] | None) -> None:
        """A new step over the micro-batches ``group``, whose labels add up to ``counts``."""
        self.group, self.counts = [batch for batch in group if not isinstance(batch, Filler)], counts
        self.loss = self.skip_reason = self.skip_request = None
        self.step_taken = False

    def begin_microbatch(self, batch: Any, last: bool) -> None:
        """A new micro-batch of the step."""
        self.is_filler = isinstance(batch, Filler)
        self.batch, self.is_last_microbatch = batch.batch if self.is_filler else batch, last

    def counted(self, loss: LossOutput) -> LossOutput:
        """The loss of the present micro-batch, which is nothing where that stands there only for other ranks."""
        return loss.emptied() if self.is_filler else loss

    def loss_after(self, before: LossOutput | None) -> LossOutput:
        """The step's loss with this micro-batch's, without its graph; ``before`` is what it was so far."""
        assert self.loss is not None
        loss = self.loss.detached()
        return loss if before is None else before.merged(loss)

    def end_epoch(self) -> None:
        """The current epoch is over: its schedulers move, its counters start again."""
        self.progress.end_epoch()
        for scheduler in self.schedulers.values():
            scheduler.after_epoch()

    def step_schedulers(self) -> None:
        """One optimizer step was taken."""
        for scheduler in self.schedulers.values():
            scheduler.after_step()

    def step_metric_schedulers(self, metrics: Mapping[str, float]) -> None:
        """A validation gave ``metrics``."""
        for scheduler in self.schedulers.values():
            scheduler.after_validation(metrics)
