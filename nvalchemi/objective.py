"""What a loss gives back, and how an objective is called.

A step's gradient is the gradient of the mean over all samples (or atoms) of the step, whatever the sizes of its
micro-batches and ranks. So every part of a loss is kept as a *sum* and a *count*, and the division waits until the
counts of the whole step are known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nvalchemi.errors import CheckpointError, ConfigError

Count = float | int | Tensor


def _at_least_one(count: Count) -> Count:
    # A term without any label has sum 0; dividing by one keeps it 0 with a usable graph.
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


class LossPart:
    """One named part of a loss.

    Parameters
    ----------
    sum
        Scalar tensor, differentiable: the part summed over its labels.
    count
        How many labels were summed; depends on the batch alone.
    weight
        The part's weight in the total at this step.
    """

    __slots__ = ("_mean", "_sum", "count", "weight")

    def __init__(self, sum: Tensor | None, count: Count, weight: float = 1.0, *, mean: Tensor | None = None) -> None:
        # A loss known as a mean is multiplied out only if somebody asks for its sum: most steps never do.
        self._sum, self._mean, self.count, self.weight = sum, mean, count, weight

    @property
    def sum(self) -> Tensor:
        """The part summed over its labels, a scalar tensor."""
        if self._sum is None:
            assert self._mean is not None
            self._sum = self._mean * self.count
        return self._sum

    @property
    def value(self) -> Tensor:
        """The unweighted mean over the labels, a scalar tensor; 0 where there is no label."""
        if self._mean is None:
            assert self._sum is not None
            self._mean = self._sum / _at_least_one(self.count)
        return self._mean

    def detached(self) -> LossPart:
        """The same numbers without their graph."""
        count = self.count.detach() if isinstance(self.count, Tensor) else self.count
        total = None if self._sum is None else self._sum.detach()
        return LossPart(total, count, self.weight, mean=None if self._mean is None else self._mean.detach())


@dataclass(slots=True)
class LossOutput:
    """The loss of a micro-batch or of a step.

    Parameters
    ----------
    total
        Scalar tensor, the weighted sum of the parts' means.
    parts
        The named parts.
    samples
        How many samples (structures, vectors) the batch holds.
    extra
        Whatever else a loss returns, such as the negatives of contrastive divergence.
    """

    total: Tensor
    parts: dict[str, LossPart]
    samples: int
    extra: Any = None

    @classmethod
    def from_parts(cls, parts: dict[str, LossPart], samples: int, extra: Any = None) -> LossOutput:
        """Build the total from the parts: the sum of weight times mean."""
        if not parts:
            raise ConfigError("a loss has no part", needed="at least one named LossPart")
        total: Tensor | None = None
        for part in parts.values():
            term = part.value if part.weight == 1.0 else part.weight * part.value
            total = term if total is None else total + term
        assert total is not None
        return cls(total, parts, samples, extra)

    @classmethod
    def from_mean(cls, mean: Tensor, samples: int, name: str = "loss", extra: Any = None) -> LossOutput:
        """A loss known only as a mean over its samples."""
        return cls(mean, {name: LossPart(None, samples, mean=mean)}, samples, extra)

    def over(self, counts: Mapping[str, Count] | None, ranks: int = 1) -> Tensor:
        """Give this micro-batch's share of the step's loss, a scalar tensor: each part's sum over the step's count.

        ``None`` says that the micro-batch is the whole step. Gradients are averaged over the ranks; times ``ranks`` they add up.
        """
        if counts is None:
            return self.total
        if not self.parts.keys() <= counts.keys():
            raise ConfigError(
                "a loss has parts whose labels nobody counts, so micro-batches cannot be put together",
                found=f"parts {', '.join(self.parts)} and counts of {', '.join(counts)}",
                fix="derive the loss from nvalchemi.objective.Objective or SupervisedLoss and give it counts(batch)",
            )
        share: Tensor | None = None
        for name, part in self.parts.items():
            # Sum first: a number over a tensor of integers would be rounded to float32.
            term = part.sum / _at_least_one(counts[name]) * (part.weight * ranks)
            share = term if share is None else share + term
        assert share is not None
        return share

    def detached(self) -> LossOutput:
        """The same numbers without their graph."""
        parts = {name: part.detached() for name, part in self.parts.items()}
        return LossOutput(self.total.detach(), parts, self.samples, self.extra)

    def emptied(self) -> LossOutput:
        """The same parts with no label in them: zero, but with a graph to every parameter."""
        parts = {name: LossPart(part.sum * 0.0, 0, part.weight) for name, part in self.parts.items()}
        return LossOutput.from_parts(parts, 0)

    def merged(self, other: LossOutput) -> LossOutput:
        """Put two batches' losses together (detached values)."""
        if self.parts.keys() != other.parts.keys():
            raise ConfigError(
                "the micro-batches of a step have losses of different parts",
                found=f"{', '.join(self.parts)} and {', '.join(other.parts)}",
                fix="give every part for every batch, with sum 0 and count 0 where it has no label",
            )
        parts = {
            name: LossPart(p.sum + other.parts[name].sum, p.count + other.parts[name].count, p.weight)
            for name, p in self.parts.items()
        }
        return LossOutput.from_parts(parts, self.samples + other.samples, other.extra)


def num_samples(batch: Any) -> int:
    """How many samples a batch holds: structures of an atomic batch, rows of a tensor, of a tuple's or dict's first."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, (tuple, list)):
        return num_samples(batch[0])
    if isinstance(batch, dict):
        return num_samples(next(iter(batch.values())))
    return len(batch)


class SupervisedLoss(ABC):
    """A loss between predictions and the labels of a batch.

    Attributes
    ----------
    requires
        Names of the predictions that are needed (``"energy"``, ``"forces"``, ``"stress"``, ...).
    labels
        Names of the batch fields that are compared with.
    """

    requires: frozenset[str] = frozenset()
    labels: frozenset[str] = frozenset()

    @abstractmethod
    def __call__(self, predictions: Mapping[str, Tensor], batch: Any, step: int = 0) -> LossOutput:
        """Compare; ``step`` is the number of optimizer steps taken, for weights that are functions of it."""

    @abstractmethod
    def counts(self, batch: Any) -> dict[str, Count]:
        """Labels present for each part, from the batch alone."""


class Terms(NamedTuple):
    """What a loss makes of a batch.

    Attributes
    ----------
    values
        By name, one number a sample, (batch,), or equally many, (batch, ...), whose mean it is; the loss is the sum of the means.
        None where a term is switched off: it is zero, and costs nothing. One at least is there.
    samples
        What was drawn on the way, such as the negatives of contrastive divergence; None where that is of no use.
    """

    values: Mapping[str, Tensor | None]
    samples: Any = None

    def means(self) -> dict[str, Tensor]:
        """By name, the mean of each term that is there, a scalar."""
        return {name: value.mean() for name, value in self.values.items() if value is not None}


class RankLocal:
    """What may have a state of its own on each rank."""

    def divide_anew(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> Mapping[str, Any] | None:
        """The state of this rank, where each has one of its own, in a run that goes on with another number of ranks.

        By default a rank that was there before keeps its own, and one that is new begins afresh, which ``None`` says.

        Parameters
        ----------
        states
            What `state_dict` gave on each rank of the run that was saved, in order.
        rank, world_size
            Of this run.
        """
        return states[rank] if rank < len(states) else None


def by_name(conditions: Mapping[str, Any]) -> None:
    """Refuse conditions in a mapping, as other libraries take them: a model that takes anything would not notice.

    Raises
    ------
    ConfigError
        For these.
    """
    if "model_kwargs" in conditions:
        raise ConfigError("conditions are given by their own names", found="model_kwargs={...}", fix="(x, ..., **model_kwargs)")


class ModelLoss(RankLocal, ABC):
    """A loss that holds its model.

    It works alone, ``loss_fn(x, generator=generator)``, and as the ``loss_fn`` of a
    :class:`~nvalchemi.training.strategy.TrainingStrategy`, which gives each rank a generator of its own and puts together samples, not
    means, of unequal micro-batches and ranks. It is no module: the model is trained, moved and saved by whoever owns it, and
    `state_dict` holds nothing but what training changed in the loss. A value that is not finite stays so.

    Parameters
    ----------
    model
        What is trained.

    Attributes
    ----------
    parts
        Names of the terms.
    rank_local
        Whether each rank has a state of its own, such as its chains.
    returns_samples
        Whether a call gives the samples that were drawn beside the loss.
    chains
        The persistent chains of this rank, a `nvalchemi.ebm.buffer.ReplayBuffer`, in a loss that keeps some; none in all others.
    """

    parts: tuple[str, ...] = ("loss",)
    rank_local: bool = False
    returns_samples: bool = True

    @property
    def chains(self) -> Any:
        return None

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{type(self).__name__} needs a model", found=type(model).__name__, needed="a torch module")
        self.model = model

    def __call__(
        self, x: Any, *, generator: torch.Generator | None = None, step: int | None = None, **conditions: Any
    ) -> Tensor | tuple[Tensor, Any]:
        """Give the loss, a scalar, or ``(loss, samples)`` where samples are drawn that a user may want to see.

        Parameters
        ----------
        x
            Data, (batch, ...) or, where the loss says so, a `nvalchemi.data.Batch`.
        generator
            Where noise and times come from, on the device of ``x``; None for torch's own.
        step
            Optimizer steps taken, for settings that are functions of it.
        **conditions
            Handed to the model by name, such as labels ``y``, one a sample.
        """
        by_name(conditions)
        terms = self.terms(self.model, x, generator=generator, step=step, conditions=conditions)
        first, *others = terms.means().values()
        loss = sum(others, first)
        return (loss, terms.samples) if self.returns_samples and terms.samples is not None else loss

    @abstractmethod
    def terms(
        self, model: Any, x: Any, *, generator: torch.Generator | None, step: int | None, conditions: Mapping[str, Any]
    ) -> Terms:
        """Give the terms of each sample by ``model``, which is ``self.model`` or what a wrapper of it has made of it."""

    def state_dict(self) -> dict[str, Any]:
        """What training changed in the loss, the model aside; plain data and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        if state:
            raise CheckpointError(f"{type(self).__name__} has no state", found=", ".join(state))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.model).__name__})"


class Objective(RankLocal, ABC):
    """What the loop minimises: ``objective(model, batch, generator=..., step=...)`` gives a :class:`LossOutput`.

    Attributes
    ----------
    requires, labels
        As of a :class:`SupervisedLoss`.
    rank_local
        Whether :meth:`state_dict` is each rank's own, as chains are; otherwise it is the same on all.
    chains
        As of a :class:`ModelLoss`.
    """

    requires: frozenset[str] = frozenset()
    labels: frozenset[str] = frozenset()
    rank_local: bool = False

    @property
    def chains(self) -> Any:
        return None

    @abstractmethod
    def __call__(self, model: Any, batch: Any, *, generator: torch.Generator, step: int) -> LossOutput:
        """The loss of one micro-batch; ``model`` is one module, or the dict of them where several were declared."""

    def counts(self, batch: Any) -> dict[str, Count]:
        """Labels of each part in ``batch``; without parts of its own, an objective counts samples."""
        return {"loss": num_samples(batch)}

    def state_dict(self) -> dict[str, Any]:
        """What training changed in the loss (chains, schedules); plain data and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
