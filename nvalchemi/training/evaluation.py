"""One exact pass over labelled data: errors and loss, with nothing outside changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nvalchemi.data import Batch
from nvalchemi.distributed import Manager, single_process
from nvalchemi.errors import ConfigError, DataError
from nvalchemi.models.energy import EnergyModel
from nvalchemi.objective import LossOutput, Objective, num_samples
from nvalchemi.training.cursor import to_device
from nvalchemi.training.filler import Filler
from nvalchemi.training.losses import Loss
from nvalchemi.training.measures import OUTPUTS, Totals
from nvalchemi.training.objectives import SupervisedObjective, as_objective, default_training_fn
from nvalchemi.training.seeds import derive_seed

BatchCallback = Callable[[Any, Mapping[str, Tensor], LossOutput | None], None]


def evaluate(
    model: Any,
    loader: Iterable[Any],
    loss_fn: Any = None,
    *,
    training_fn: Callable[..., Any] | None = None,
    outputs: Iterable[str] | None = None,
    manager: Manager | None = None,
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
        ``None`` means every one that the model predicts (`EnergyModel.outputs`) and the data have a label for.
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
    ConfigError
        Where a named output is none that errors are measured of, or none that the model predicts.
    DataError
        Where there is no batch, or a label that the loss or ``outputs`` needs is not in the data.
    """
    manager = single_process() if manager is None else manager
    objective = None if loss_fn is None else as_objective(loss_fn, training_fn)
    if objective is None and training_fn is not None:
        raise ConfigError("evaluate has a training_fn and no loss_fn", fix="give loss_fn as well")
    wanted = None if outputs is None else checked_outputs(outputs)
    totals = Totals(manager.device)
    generator = torch.Generator(manager.device).manual_seed(derive_seed(0, "validation", manager.rank))
    with _left_as_it_was(model, objective, manager.device):
        for item in loader:
            filler = isinstance(item, Filler)
            batch = to_device(item.batch if filler else item, manager.device)
            predictions, loss = _one_batch(model, batch, objective, wanted, generator, step)
            if filler:
                continue
            totals.add_samples(num_samples(batch))
            if loss is not None:
                totals.add_loss(loss)
            if predictions:
                totals.add_errors(predictions, batch, _targets(objective))
            if batch_callback is not None:
                batch_callback(batch, predictions, loss)
    metrics = totals.metrics(manager)
    unmeasured = [name for name in wanted or () if f"{name}_mae" not in metrics]
    if unmeasured:
        raise DataError(
            "no label to measure errors by", found=f"no labelled {', '.join(unmeasured)}", fix="leave that out of outputs"
        )
    return metrics


def checked_outputs(outputs: Iterable[str]) -> tuple[str, ...]:
    """The names as a tuple, where errors are measured of each."""
    names = tuple(outputs)
    unknown = [name for name in names if name not in OUTPUTS]
    if isinstance(outputs, str) or unknown:
        raise ConfigError(
            "errors are not measured of that", found=repr(outputs), needed=f"a tuple with some of {', '.join(OUTPUTS)}"
        )
    return names


def _one_batch(
    model: Any, batch: Any, objective: Objective | None, wanted: tuple[str, ...] | None, generator: torch.Generator, step: int
) -> tuple[Mapping[str, Tensor], LossOutput | None]:
    if objective is not None and not isinstance(objective, SupervisedObjective):
        with torch.enable_grad():  # scores are gradients, and a user's callable may take some
            output = objective(model, batch, generator=generator, step=step)
        return {}, output.detached()
    custom = objective is not None and objective.training_fn is not None
    alone = next(iter(model.values())) if isinstance(model, Mapping) and len(model) == 1 else model
    # Our own model makes gradients for forces wherever it is called; anything else may need them switched on.
    with torch.set_grad_enabled(custom or not isinstance(alone, EnergyModel)):
        if objective is not None and custom:
            predictions: Mapping[str, Any] = objective.predict(model, batch)
        else:
            requires = frozenset[str]() if objective is None else objective.requires
            predictions = default_training_fn(model, batch, requires | _measured(alone, batch, objective, wanted))
        loss = None if objective is None else objective.loss_fn(predictions, batch, step).detached()
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in predictions.items()}, loss


def _measured(model: Any, batch: Any, objective: Objective | None, wanted: tuple[str, ...] | None) -> frozenset[str]:
    """Predictions to make for the sake of their errors: the wanted, or all that are labelled and that the model knows."""
    if not isinstance(batch, Batch):
        return frozenset()
    if wanted is not None:
        return frozenset(wanted)
    labelled = {name for name, label in _targets(objective).items() if name in OUTPUTS and label in batch}
    return frozenset(labelled.intersection(model.outputs) if isinstance(model, EnergyModel) else labelled)


def _targets(objective: Objective | None) -> dict[str, str]:
    """Which label each prediction is compared with."""
    targets = {name: name for name in OUTPUTS}
    if isinstance(objective, SupervisedObjective) and isinstance(objective.loss_fn, Loss):
        targets.update(objective.loss_fn.targets)
    return targets


@contextmanager
def _left_as_it_was(model: Any, objective: Objective | None, device: torch.device) -> Iterator[None]:
    """Eval mode and no gradients inside; modes, random streams and the objective's state put back after."""
    models = [m for m in (model.values() if isinstance(model, Mapping) else [model]) if isinstance(m, nn.Module)]
    modes = [(module, module.training) for m in models for module in m.modules()]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global stream is what must be kept
    chains = copy.deepcopy(objective.state_dict()) if objective else {}
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
