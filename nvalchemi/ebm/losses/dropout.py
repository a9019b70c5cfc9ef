"""A part of the conditions left out, so that a model learns to do without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nvalchemi.ebm.conditions import repeated
from nvalchemi.ebm.guidance import Null, check_null, left_out
from nvalchemi.errors import ConfigError
from nvalchemi.objective import ModelLoss, Terms


class ConditionDropout(ModelLoss):
    """Another loss, in which a part of the samples has the null condition in place of its own, while the model is in training mode.

    The model then knows its energy or field with and without the condition, which is what classifier-free guidance needs
    (`nvalchemi.ebm.guidance.ClassifierFreeGuidance`): Ho and Salimans, arXiv:2207.12598.

    Parameters
    ----------
    loss
        Any loss that holds its model; its chains, terms and state are those of this one.
    chance
        With which each sample's condition is left out, by the generator of the call.
    null_condition
        What stands for no condition: a number, such as the number of classes; a tensor of the shape of one sample's condition; or a
        function ``(y, mask) -> y``.
    condition
        The name of the condition. A batch without it is an error.

    Examples
    --------
    >>> loss_fn = ConditionDropout(FlowMatching(field), chance=0.1, null_condition=10)
    >>> loss = loss_fn(x, y=labels)
    """

    def __init__(self, loss: ModelLoss, chance: float, null_condition: Null, condition: str = "y") -> None:
        given: Any = loss
        if not isinstance(given, ModelLoss):
            raise ConfigError(
                "conditions are left out in a loss", found=type(given).__name__, needed="a loss of nvalchemi.ebm.losses"
            )
        super().__init__(loss.model)
        if not 0 <= chance <= 1:
            raise ConfigError("no such chance", found=chance, needed="from 0 to 1")
        check_null(null_condition)
        self.loss, self.chance, self.null_condition, self.condition = loss, chance, null_condition, condition
        self.parts, self.rank_local, self.returns_samples = loss.parts, loss.rank_local, loss.returns_samples

    def terms(
        self, model: Any, x: Any, *, generator: torch.Generator | None, step: int | None, conditions: Mapping[str, Any]
    ) -> Terms:
        if self.condition not in conditions:
            raise ConfigError(
                f"the batch has no condition {self.condition!r} that could be left out",
                found=", ".join(conditions) or "none",
                fix=f"loss_fn(x, {self.condition}=...), or batches with it",
            )
        if self.chance and self.model.training:
            (y,) = repeated({self.condition: conditions[self.condition]}, len(x), 1).values()
            device = y.device if generator is None else generator.device
            mask = (torch.rand(len(y), device=device, generator=generator) < self.chance).to(y.device)
            conditions = {**conditions, self.condition: left_out(y, mask, self.null_condition)}
        return self.loss.terms(model, x, generator=generator, step=step, conditions=conditions)

    @property
    def chains(self) -> Any:
        return self.loss.chains

    def state_dict(self) -> dict[str, Any]:
        """That of the loss."""
        return self.loss.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """That of the loss."""
        self.loss.load_state_dict(state)

    def divide_anew(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> Mapping[str, Any] | None:
        """That of the loss."""
        return self.loss.divide_anew(states, rank, world_size)

    def __repr__(self) -> str:
        return f"{self.loss!r} without {self.condition} at a chance of {self.chance:g}"
