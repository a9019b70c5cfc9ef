"""What all losses share: arithmetic between them, and the masked sum and count of one term."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from nvalchemi.errors import ConfigError, DataError
from nvalchemi.objective import Count, LossOutput, LossPart, SupervisedLoss, num_samples
from nvalchemi.training.losses.weights import Weight

if TYPE_CHECKING:
    from nvalchemi.training.losses.compose import ComposedLoss


class Loss(SupervisedLoss):
    """A loss that can be added to others and weighted.

    ``EnergyMSELoss() + 10.0 * ForceMSELoss()`` is a loss; the weights are the literal coefficients, they are not normalised. A
    weight may be a function of the step (:mod:`nvalchemi.training.losses.weights`).

    Attributes
    ----------
    part_names
        Names of the parts that a call gives.
    targets
        Which batch field each prediction is compared with.
    """

    part_names: tuple[str, ...] = ()
    targets: Mapping[str, str] = {}

    @abstractmethod
    def parts(self, predictions: Mapping[str, Tensor], batch: Any, step: int = 0) -> dict[str, LossPart]:
        """Each part's sum, count and weight."""

    @abstractmethod
    def per_sample(self, predictions: Mapping[str, Tensor], batch: Any) -> dict[str, Tensor]:
        """Each part's unweighted mean over the labels of each structure, (B,) a part; NaN where there is no label."""

    def __call__(self, predictions: Mapping[str, Tensor], batch: Any, step: int = 0) -> LossOutput:
        """Compare.

        Parameters
        ----------
        predictions
            What the model gave, by name.
        batch
            The labels.
        step
            Optimizer steps taken, for weights that are functions of it.

        Raises
        ------
        ConfigError
            Where a prediction is missing or has not its label's shape.
        DataError
            Where the batch lacks a label altogether.
        """
        return LossOutput.from_parts(self.parts(predictions, batch, step), num_samples(batch))

    def weighted(self, weight: Weight) -> ComposedLoss:
        """The loss times ``weight``, a number or a function of the step."""
        from nvalchemi.training.losses.compose import ComposedLoss

        return ComposedLoss([(weight, self)])

    def __mul__(self, weight: Weight) -> ComposedLoss:
        return self.weighted(weight)

    __rmul__ = __mul__

    def __add__(self, other: SupervisedLoss) -> ComposedLoss:
        from nvalchemi.training.losses.compose import ComposedLoss

        return ComposedLoss([(1.0, self), (1.0, other)])

    def __radd__(self, other: SupervisedLoss | int) -> Loss:
        from nvalchemi.training.losses.compose import ComposedLoss

        if isinstance(other, int) and other == 0:  # sum([...]) starts from 0
            return self
        return ComposedLoss([(1.0, other), (1.0, self)])  # type: ignore[list-item]


class Term(Loss):
    """One prediction against one label, masked where there is no label.

    A label is absent where it is NaN, or where the batch says that the structure has none. Absent labels enter neither the sum nor
    the count, and the gradient with respect to their predictions is zero.

    Parameters
    ----------
    target_key
        Batch field compared with.
    prediction_key
        Prediction compared.
    name
        Name of the part in reports; the prediction's unless given.
    """

    key: ClassVar[str]
    per_row: ClassVar[bool] = False
    """Whether a label is a whole row (an atom's vector) rather than each number of it."""

    def __init__(self, *, target_key: str | None = None, prediction_key: str | None = None, name: str | None = None) -> None:
        self.target_key = target_key or self.key
        self.prediction_key = prediction_key or self.key
        self.name = name or self.prediction_key
        self.part_names = (self.name,)
        self.targets = {self.prediction_key: self.target_key}
        self.requires = frozenset({self.prediction_key})
        self.labels = frozenset({self.target_key})

    @abstractmethod
    def penalty(self, difference: Tensor) -> Tensor:
        """What a difference costs; 0 where it is 0. Same shape, or one value a row where :attr:`per_row`."""

    def scaled(self, difference: Tensor, batch: Any) -> Tensor:
        """The difference in the unit that is penalised."""
        return difference

    def parts(self, predictions: Mapping[str, Tensor], batch: Any, step: int = 0) -> dict[str, LossPart]:
        cost, absent = self._costs(predictions, batch)
        if absent is None:
            return {self.name: LossPart(None, cost.numel(), mean=cost.mean())}
        return {self.name: LossPart(cost.sum(), absent.numel() - absent.sum())}

    def counts(self, batch: Any) -> dict[str, Count]:
        label = self._label(batch)
        absent = self._absent(label, batch)
        if absent is None:
            return {self.name: label.numel() // label.shape[-1] if self.per_row else label.numel()}
        return {self.name: absent.numel() - absent.sum()}

    def per_sample(self, predictions: Mapping[str, Tensor], batch: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            cost, absent = self._costs(predictions, batch)
            cost, present = _by_row(cost), _by_row(torch.ones_like(cost) if absent is None else (~absent).to(cost.dtype))
            if self._is_atomic(batch):
                index = batch.batch_idx
                cost = cost.new_zeros(batch.num_graphs).index_add_(0, index, cost)
                present = present.new_zeros(batch.num_graphs).index_add_(0, index, present)
            return {self.name: cost / present}  # 0 / 0: no label, no value

    def _costs(self, predictions: Mapping[str, Tensor], batch: Any) -> tuple[Tensor, Tensor | None]:
        label = self._label(batch)
        if self.prediction_key not in predictions:
            raise ConfigError(
                f"{type(self).__name__} compares a prediction that the model did not give",
                found=sorted(predictions),
                needed=self.prediction_key,
                fix=f"let the model give '{self.prediction_key}', or name another with prediction_key=",
            )
        prediction = predictions[self.prediction_key]
        if prediction.shape != label.shape:  # would be broadcast, and the loss would be of all pairs
            raise ConfigError(
                f"{type(self).__name__} compares '{self.prediction_key}' with a label of another shape",
                found=f"prediction {tuple(prediction.shape)}, label '{self.target_key}' {tuple(label.shape)}",
                needed="equal shapes",
            )
        absent = self._absent(label, batch)
        if absent is None:
            return self.penalty(self.scaled(prediction - label, batch)), None
        # Masked before the penalty: a NaN that is masked after a square root or a power is a NaN in the gradient. A prediction may be
        # NaN where there is no label, as the stress of a structure that repeats nowhere is.
        mask = absent[..., None] if self.per_row else absent
        difference = self.scaled((prediction - label).masked_fill(mask, 0.0), batch)
        return self.penalty(difference), absent

    def _label(self, batch: Any) -> Tensor:
        if self.target_key not in batch:
            raise DataError(
                f"{type(self).__name__} compares with a label that the data do not hold",
                found=", ".join(sorted(batch.fields)),
                needed=self.target_key,
                fix="convert the data with this label, name another with target_key=, or leave the term out of the loss",
            )
        return batch[self.target_key]

    def _absent(self, label: Tensor, batch: Any) -> Tensor | None:
        """Where there is no label; ``None`` where every structure has its own, as far as that can be seen without waiting for a device."""
        has = batch.present.get(self.target_key)  # only fields that some structure lacks have an entry
        if has is None and label.numel() and label.device.type == "cpu" and math.isfinite(label.sum().item()):
            return None  # one look instead of masks in both directions: half the cost of a small batch's loss
        absent = label.isnan()
        if self.per_row:
            absent = absent.any(-1)
        if has is not None:
            lacking = ~has
            if self._is_atomic(batch):
                lacking = lacking[batch.batch_idx]
            absent = absent | lacking.view(-1, *[1] * (absent.dim() - 1))
        return absent

    def _is_atomic(self, batch: Any) -> bool:
        return batch.levels[self.target_key] == "atom"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.prediction_key!r} against {self.target_key!r})"


def _by_row(values: Tensor) -> Tensor:
    return values.flatten(1).sum(1) if values.dim() > 1 else values


class HuberTerm(Term):
    """A term that is quadratic up to a difference of ``delta`` and linear beyond.

    Parameters
    ----------
    delta
        Where the square ends, in the unit that is penalised; the cost is ``d**2 / 2`` up to it and ``delta * (|d| - delta / 2)``
        beyond (Huber 1964).
    """

    def __init__(
        self,
        delta: float = 0.01,
        *,
        target_key: str | None = None,
        prediction_key: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(target_key=target_key, prediction_key=prediction_key, name=name)
        if not delta > 0:
            raise ConfigError(f"{type(self).__name__} needs a positive delta", found=repr(delta))
        self.delta = float(delta)

    def penalty(self, difference: Tensor) -> Tensor:
        return torch.nn.functional.huber_loss(difference, torch.zeros_like(difference), reduction="none", delta=self.delta)
