"""Validation: one exact pass over the validation data, and the hook that makes it from time to time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nvalchemi.data import Batch
from nvalchemi.distributed import single_process
from nvalchemi.distributed.collectives import all_reduce, gather
from nvalchemi.errors import ConfigError, DataError
from nvalchemi.models.energy import EnergyModel
from nvalchemi.objective import LossOutput, Objective, num_samples
from nvalchemi.training.context import TrainContext
from nvalchemi.training.cursor import to_device
from nvalchemi.training.hook import Every, Hook, PeriodicHook, on
from nvalchemi.training.losses import Loss
from nvalchemi.training.objectives import SupervisedObjective, as_objective, default_training_fn
from nvalchemi.training.seeds import derive_seed
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage

BatchCallback = Callable[[Any, Mapping[str, Tensor], LossOutput | None], None]

OUTPUTS = ("energy", "forces", "stress")
"""What errors are reported of."""


@dataclass(kw_only=True)
class ValidationConfig:
    """What to validate on, and how often.

    Parameters
    ----------
    validation_data
        A loader, or a list of batches: anything that can be iterated over again and again.
    every_n_epochs, every_n_steps
        One of the two at most; every epoch where neither is given. The last state of a run is validated in any case.
    at_start
        Validate before the first step as well.
    outputs
        Predictions to report errors of, beside those that the loss requires.
    batch_callback
        ``batch_callback(batch, predictions, loss)`` is called for each batch; predictions and loss have no graph.
    """

    validation_data: Iterable[Any]
    every_n_epochs: int | None = None
    every_n_steps: int | None = None
    at_start: bool = False
    outputs: tuple[str, ...] = ()
    batch_callback: BatchCallback | None = None

    def __post_init__(self) -> None:
        check_repeatable(self.validation_data)
        if self.every_n_epochs is not None and self.every_n_steps is not None:
            raise ConfigError(
                "ValidationConfig takes one frequency",
                found=f"every_n_epochs={self.every_n_epochs}, every_n_steps={self.every_n_steps}",
                needed="one of the two",
            )

    @property
    def every(self) -> Every:
        """How often."""
        if self.every_n_steps is not None:
            return Every(steps=self.every_n_steps)
        return Every(epochs=1 if self.every_n_epochs is None else self.every_n_epochs)


class Validator(PeriodicHook):
    """Validate every so many steps or epochs, and at the end of training where the last state was not yet.

    The metrics go to ``ctx.validation``, then the schedulers that read one move, then VALIDATED fires.
    """

    order = Order.TRANSFORM  # before whatever reports, stops or saves by the result
    name = "validation"

    def __init__(self, config: ValidationConfig) -> None:
        super().__init__(config.every)
        self.config = config
        self.step: int | None = None  # of the last state validated

    @on(TrainingStage.TRAINING_START)
    def _first(self, ctx: TrainContext) -> None:
        if self.config.at_start and ctx.progress.step == 0:
            self.act(ctx)

    def act(self, ctx: TrainContext) -> None:
        """Validate now."""
        with ctx.hooks.around(TrainingSpan.VALIDATION, ctx):
            metrics = evaluate(
                ctx.callee,
                self.config.validation_data,
                ctx.objective,
                outputs=self.config.outputs,
                manager=ctx.manager,
                step=ctx.progress.step,
                batch_callback=self.config.batch_callback,
            )
        self.step = ctx.progress.step
        ctx.validation = metrics
        ctx.step_metric_schedulers(metrics)
        ctx.hooks.fire(TrainingStage.VALIDATED, ctx)

    @on(TrainingStage.TRAINING_END)
    def _last(self, ctx: TrainContext) -> None:
        if self.step != ctx.progress.step:
            self.act(ctx)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.step is None else {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def validation_hooks(config: ValidationConfig | None) -> list[Hook]:
    """The hook of a config, or none."""
    return [] if config is None else [Validator(config)]


def evaluate(
    model: Any,
    loader: Iterable[Any],
    loss_fn: Any = None,
    *,
    training_fn: Callable[..., Any] | None = None,
    outputs: Iterable[str] | None = None,
    manager: Any = None,
    step: int = 0,
    batch_callback: BatchCallback | None = None,
) -> dict[str, float]:
    """Errors and loss of ``model`` over all of ``loader``, exact whatever the sizes of the batches.

    Energies and stresses weigh by structures, forces by components; each sum is divided once, at the end. Nothing outside is
    changed: modules' modes, parameters' gradients and the random streams of torch, numpy and Python are left as they were, and
    an objective that draws noise is given the same noise every time.

    Parameters
    ----------
    model
        The model, or a dict of them where the objective takes one.
    loader
        Batches.
    loss_fn, training_fn
        As in :class:`~nvalchemi.training.strategy.TrainingStrategy`; without a loss only errors are measured.
    outputs
        Predictions to measure the errors of (``"energy"``, ``"forces"``, ``"stress"``), beside those that the loss requires.
        ``None`` means every one that the data have a label for.
    manager
        The distributed manager; sums are taken over the ranks. ``None`` means one process.
    step
        Optimizer steps taken, for weights that are functions of it.
    batch_callback
        Called as ``batch_callback(batch, predictions, loss)`` for each batch.

    Returns
    -------
    dict
        ``"loss"`` and ``"loss/<part>"`` (unweighted means); for each labelled output ``"energy_mae"``, ``"energy_rmse"`` (eV),
        ``"energy_per_atom_mae"``, ``"energy_per_atom_rmse"`` (eV an atom), ``"forces_mae"``, ``"forces_rmse"`` (eV/Å, over
        components), ``"stress_mae"``, ``"stress_rmse"`` (eV/Å³, over components); ``"n"`` structures, and ``"n_energy"``,
        ``"n_forces"``, ``"n_stress"`` labels.

    Raises
    ------
    DataError
        Where there is no batch, or a label that the loss needs is not in the data.
    """
    manager = single_process() if manager is None else manager
    objective = None if loss_fn is None else as_objective(loss_fn, training_fn)
    if objective is None and training_fn is not None:
        raise ConfigError("evaluate has a training_fn and no loss_fn", fix="give loss_fn as well")
    wanted = None if outputs is None else tuple(outputs)
    totals = Totals(manager.device)
    generator = torch.Generator(manager.device).manual_seed(derive_seed(0, "validation", manager.rank))
    with _left_as_it_was(model, objective, manager.device):
        for item in loader:
            batch = to_device(item, manager.device)
            predictions, loss = _one_batch(model, batch, objective, wanted, generator, step)
            totals.add_samples(num_samples(batch))
            if loss is not None:
                totals.add_loss(loss)
            if predictions:
                totals.add_errors(predictions, batch, _targets(objective))
            if batch_callback is not None:
                batch_callback(batch, predictions, loss)
    return totals.metrics(manager)


def check_repeatable(data: Any) -> None:
    """Refuse what can be iterated over once only, or not at all."""
    if not isinstance(data, Iterable) or isinstance(data, str):
        raise ConfigError(
            "validation_data cannot be iterated over", found=repr(data), fix="give a DataLoader or a list of batches"
        )
    if isinstance(data, Iterator):
        raise ConfigError(
            "validation_data can be iterated over only once", found=type(data).__name__, fix="give the loader itself, or a list"
        )


def _one_batch(
    model: Any, batch: Any, objective: Objective | None, wanted: tuple[str, ...] | None, generator: torch.Generator, step: int
) -> tuple[Mapping[str, Tensor], LossOutput | None]:
    if objective is not None and not isinstance(objective, SupervisedObjective):
        with torch.enable_grad():  # scores are gradients, and a user's callable may take some
            output = objective(model, batch, generator=generator, step=step)
        return {}, output.detached()
    requires = frozenset[str]() if objective is None else objective.requires
    if isinstance(batch, Batch):
        labelled = _targets(objective)
        requires |= {k for k in OUTPUTS if (k in wanted if wanted is not None else labelled[k] in batch)}
    alone = next(iter(model.values())) if isinstance(model, Mapping) and len(model) == 1 else model
    custom = objective is not None and objective.training_fn is not None
    # Our own model makes gradients for forces wherever it is called; anything else may need them switched on.
    with torch.set_grad_enabled(custom or not isinstance(alone, EnergyModel)):
        if objective is not None and objective.training_fn is not None:
            predictions: Mapping[str, Any] = objective.predict(model, batch)
        else:
            predictions = default_training_fn(model, batch, requires)
        loss = None if objective is None else objective.loss_fn(predictions, batch, step).detached()
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in predictions.items()}, loss


def _targets(objective: Objective | None) -> dict[str, str]:
    """Which label each prediction is compared with."""
    targets = {name: name for name in OUTPUTS}
    if isinstance(objective, SupervisedObjective) and isinstance(objective.loss_fn, Loss):
        targets.update(objective.loss_fn.targets)
    return targets


class Totals:
    """Sums and counts over batches, kept as tensors on the device and read once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sums: dict[str, Tensor] = {}
        self.weights: dict[str, float] = {}
        self.samples = 0

    def add_samples(self, count: int) -> None:
        """A batch of ``count`` samples."""
        self.samples += count

    def add_loss(self, loss: LossOutput) -> None:
        """A batch's loss parts, each by its own count."""
        for name, part in loss.parts.items():
            self.weights[name] = part.weight
            self._add(f"loss/{name}", part.sum, part.count)

    def add_errors(self, predictions: Mapping[str, Tensor], batch: Any, targets: Mapping[str, str]) -> None:
        """A batch's absolute and squared errors of whatever is both predicted and labelled."""
        for name in OUTPUTS:
            label = batch[targets[name]] if name in predictions and targets[name] in batch else None
            if label is None:
                continue
            absent = label.isnan()
            error = (predictions[name].double() - label.double()).masked_fill(absent, 0.0)
            count = absent.numel() - absent.sum()
            self._add(name, error.abs().sum(), count, error.square().sum())
            if name == "energy":
                error = error / batch.num_nodes_per_graph
                self._add("energy_per_atom", error.abs().sum(), count, error.square().sum())

    def metrics(self, manager: Any) -> dict[str, float]:
        """The means, over all ranks.

        Raises
        ------
        DataError
            Where no rank had any batch.
        """
        sums = self._over_ranks(manager)
        samples = int(sums.pop("samples")[0])
        if samples == 0:
            raise DataError("the validation data gave no batch", fix="check the size of the data set, batch_size and drop_last")
        result: dict[str, float] = {}
        parts = {name: sums[f"loss/{name}"] for name in self.weights}
        if parts:
            result["loss"] = sum(self.weights[name] * total / max(count, 1.0) for name, (total, count, _) in parts.items())
        if list(parts) != ["loss"]:
            result |= {f"loss/{name}": total / count for name, (total, count, _) in parts.items() if count}
        for name in ("energy", "energy_per_atom", "forces", "stress"):
            total, count, square = sums.get(name, (0.0, 0.0, 0.0))
            if count:
                result[f"{name}_mae"], result[f"{name}_rmse"] = total / count, (square / count) ** 0.5
                if name in OUTPUTS:
                    result[f"n_{name}"] = int(count)
        result["n"] = samples
        return result

    def _add(self, name: str, total: Tensor, count: Any, square: Any = 0.0) -> None:
        row = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in (total, count, square)])
        self.sums[name] = self.sums[name] + row if name in self.sums else row

    def _over_ranks(self, manager: Any) -> dict[str, list[float]]:
        """Sum, count and sum of squares by name; the one place where ranks meet, and where the device is waited for."""
        self._add("samples", torch.tensor(float(self.samples)), 0)
        names: dict[str, None] = {}
        for theirs, weights in gather((list(self.sums), self.weights), manager):  # a rank without a batch knows no names
            names |= dict.fromkeys(theirs)
            self.weights |= weights
        nothing = torch.zeros(3, dtype=torch.float64, device=self.device)
        table = torch.stack([self.sums.get(name, nothing) for name in names])
        return dict(zip(names, all_reduce(table, manager).tolist(), strict=True))


@contextmanager
def _left_as_it_was(model: Any, objective: Objective | None, device: torch.device) -> Iterator[None]:
    """Eval mode and no gradients inside; modes, random streams and the objective's state put back after."""
    models = [m for m in (model.values() if isinstance(model, Mapping) else [model]) if isinstance(m, nn.Module)]
    modes = [(module, module.training) for m in models for module in m.modules()]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global stream is what must be kept
    chains = {k: v.clone() if isinstance(v, Tensor) else v for k, v in objective.state_dict().items()} if objective else {}
    devices = [device] if device.type != "cpu" else []
    try:
        for m in models:
            m.eval()
        with (
            torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            yield
    finally:
        for module, training in modes:
            module.training = training
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        if objective is not None and chains:
            objective.load_state_dict(chains)
