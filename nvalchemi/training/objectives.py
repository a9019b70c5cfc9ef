"""From what a user gives as ``loss_fn`` and ``training_fn`` to an objective that the loop can call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.data import Batch
from nvalchemi.errors import ConfigError
from nvalchemi.models.energy import EnergyModel
from nvalchemi.objective import Count, LossOutput, LossPart, ModelLoss, Objective, SupervisedLoss, num_samples
from nvalchemi.training.signatures import misfit


def as_objective(loss_fn: Any, training_fn: Callable[..., Any] | None) -> Objective:
    """The objective for a loss.

    - an :class:`Objective` stays as it is;
    - a :class:`SupervisedLoss` compares what ``training_fn(model, batch)`` predicts (by default the model's own prediction of
      what the loss requires);
    - a :class:`ModelLoss`, as the energy-based ones are, holds its model and needs no ``training_fn``;
    - any other callable with a ``training_fn`` is called as ``loss_fn(training_fn(model, batch), batch)``;
    - any other callable alone holds its model as well: ``loss_fn(batch, generator=generator)``, giving a scalar or
      ``(scalar, samples)``.
    """
    if isinstance(loss_fn, Objective):
        if training_fn is not None:
            raise ConfigError("training_fn beside a loss_fn that is an objective already", fix="drop training_fn")
        return loss_fn
    if isinstance(loss_fn, SupervisedLoss):
        return SupervisedObjective(loss_fn, training_fn)
    if isinstance(loss_fn, ModelLoss):
        if training_fn is not None:
            raise ConfigError(
                f"training_fn beside {type(loss_fn).__name__}, which calls its model itself", fix="drop training_fn"
            )
        return ModelObjective(loss_fn)
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise ConfigError(
            "loss_fn is no loss", found=repr(loss_fn), fix="give EnergyMSELoss() + 10.0 * ForceMSELoss(), or a callable"
        )
    if training_fn is not None:
        return PredictionObjective(loss_fn, training_fn)
    check_takes_generator(loss_fn)
    return SelfContainedObjective(loss_fn)


def check_takes_generator(loss_fn: Callable[..., Any]) -> None:
    """A loss without a training_fn is called as ``loss_fn(batch, generator=generator)``; refuse one that cannot be.

    Raises
    ------
    ConfigError
        For a loss of predictions that lacks its training_fn, most often.
    """
    problem = misfit(loss_fn, None, generator=None)
    if problem is not None:
        raise ConfigError(
            "loss_fn has no training_fn beside it and cannot be called as loss_fn(batch, generator=...)",
            found=f"{loss_fn!r}: {problem}",
            fix="give training_fn(model, batch), and the loss is called as loss_fn(predictions, batch); a loss that holds its own "
            "model takes a generator",
        )


def only_model(models: Any) -> Any:
    """The model where there is one.

    Raises
    ------
    ConfigError
        Where there are several, so that somebody must say which predicts what.
    """
    if not isinstance(models, Mapping):
        return models
    if len(models) > 1:
        raise ConfigError(
            "several models and no training_fn",
            found=f"models {', '.join(models)}",
            fix="give training_fn(models, batch) that returns the predictions by name",
        )
    return next(iter(models.values()))


def default_training_fn(model: Any, batch: Any, requires: frozenset[str]) -> Mapping[str, Tensor]:
    """What ``model`` predicts of ``requires`` for ``batch``."""
    model = only_model(model)
    if isinstance(model, EnergyModel):
        return model.predict(batch, outputs=tuple(sorted(requires)))
    predictions = model(batch)
    if not isinstance(predictions, Mapping):
        raise ConfigError(
            f"{type(model).__name__} is no EnergyModel and its output is no mapping of predictions",
            found=type(predictions).__name__,
            needed=f"a dict with {', '.join(sorted(requires))}",
            fix="return a dict from forward, or give training_fn(model, batch)",
        )
    return predictions


class SupervisedObjective(Objective):
    """A supervised loss of a model's predictions."""

    def __init__(self, loss_fn: SupervisedLoss, training_fn: Callable[..., Any] | None = None) -> None:
        self.loss_fn, self.training_fn = loss_fn, training_fn
        self.requires, self.labels = loss_fn.requires, loss_fn.labels

    def predict(self, model: Any, batch: Any) -> Mapping[str, Tensor]:
        """The predictions that the loss compares."""
        if self.training_fn is None:
            return default_training_fn(model, batch, self.requires)
        return self.training_fn(model, batch)

    def __call__(self, model: Any, batch: Any, *, generator: torch.Generator, step: int) -> LossOutput:
        return self.loss_fn(self.predict(model, batch), batch, step)

    def counts(self, batch: Any) -> dict[str, Count]:
        return self.loss_fn.counts(batch)


class PredictionObjective(Objective):
    """A user's callable ``loss_fn(predictions, batch)`` giving a mean over samples, or a :class:`LossOutput`."""

    def __init__(self, loss_fn: Callable[..., Any], training_fn: Callable[..., Any]) -> None:
        self.loss_fn, self.training_fn = loss_fn, training_fn

    def __call__(self, model: Any, batch: Any, *, generator: torch.Generator, step: int) -> LossOutput:
        return as_output(self.loss_fn(self.training_fn(model, batch), batch), batch)


class ModelObjective(Objective):
    """A loss that holds its model: samples are counted, so that unequal micro-batches and ranks weigh by them."""

    def __init__(self, loss_fn: ModelLoss) -> None:
        self.loss_fn = loss_fn
        self.rank_local = loss_fn.rank_local

    def __call__(self, model: Any, batch: Any, *, generator: torch.Generator, step: int) -> LossOutput:
        x, conditions = samples_and_conditions(batch)
        terms = self.loss_fn.terms(held_model(self.loss_fn, model), x, generator=generator, step=step, conditions=conditions)
        count, means = num_samples(x), terms.means()
        off = (
            next(iter(means.values())).detach().new_zeros(())
        )  # of a term that is switched off: a step's parts are always the same
        parts = {name: LossPart(None, count, mean=means.get(name, off)) for name in terms.values}
        return LossOutput.from_parts(parts, count, extra=terms.samples)

    def counts(self, batch: Any) -> dict[str, Count]:
        return dict.fromkeys(self.loss_fn.parts, num_samples(batch))

    def state_dict(self) -> dict[str, Any]:
        return self.loss_fn.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss_fn.load_state_dict(state)

    @property
    def chains(self) -> Any:
        return self.loss_fn.chains

    def divide_anew(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> Mapping[str, Any] | None:
        return self.loss_fn.divide_anew(states, rank, world_size)


def samples_and_conditions(batch: Any) -> tuple[Any, dict[str, Any]]:
    """What a loss that holds its model takes, of what a loader gives.

    A tensor or a batch of structures is the samples; of named arrays ``"x"`` is, and the others are conditions of their names; of a
    list or tuple the first is, and a second one is the labels ``y``.

    Raises
    ------
    ConfigError
        For anything else.
    """
    if isinstance(batch, Mapping) and "x" in batch:
        return batch["x"], {name: value for name, value in batch.items() if name != "x"}
    if isinstance(batch, (list, tuple)) and len(batch) in (1, 2) and isinstance(batch[0], Tensor):
        return batch[0], {"y": batch[1]} if len(batch) == 2 else {}
    if isinstance(batch, (Tensor, Batch)):
        return batch, {}
    found = f"names {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    raise ConfigError(
        "the loss does not know which of the batch are its samples",
        found=found,
        needed="a tensor, a Batch, (x, y), or a dict with x",
    )


def held_model(loss_fn: ModelLoss, models: Any) -> nn.Module:
    """The loss's own model, or of the models of a run the one that wraps it: its forward is what sends gradients to other ranks.

    Raises
    ------
    ConfigError
        Where the loss holds a model that the run does not have.
    """
    own = loss_fn.model
    candidates = list(models.values()) if isinstance(models, Mapping) else [models]
    for model in candidates:
        if model is own:
            return own
    for model in candidates:
        if any(module is own for module in model.modules()):
            return model
    raise ConfigError(
        f"{type(loss_fn).__name__} holds another model than those of the strategy",
        found=type(own).__name__,
        fix="give the loss and the strategy the same object",
    )


class SelfContainedObjective(Objective):
    """A loss that holds its model and draws its noise from the given generator."""

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self.loss_fn = loss_fn

    def __call__(self, model: Any, batch: Any, *, generator: torch.Generator, step: int) -> LossOutput:
        return as_output(self.loss_fn(batch, generator=generator), batch)

    def state_dict(self) -> dict[str, Any]:
        # Where the loss is a module its buffers are what training changed; its model is saved with the models.
        return dict(self.loss_fn.state_dict()) if isinstance(self.loss_fn, nn.Module) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self.loss_fn, nn.Module):
            self.loss_fn.load_state_dict(state)


def as_output(result: Any, batch: Any) -> LossOutput:
    """A scalar mean, ``(scalar, extra)``, or a :class:`LossOutput`, as the last of these.

    Raises
    ------
    ConfigError
        For anything else, a tensor that is no scalar included.
    """
    if isinstance(result, LossOutput):
        return result
    extra = None
    if isinstance(result, tuple) and result:
        result, extra = result[0], result[1:] if len(result) > 2 else result[-1]
    if not isinstance(result, Tensor) or result.ndim != 0:
        found = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ConfigError("the loss is no scalar", found=found, needed="a 0-d tensor, (0-d tensor, samples) or a LossOutput")
    return LossOutput.from_mean(result, num_samples(batch), extra=extra)
