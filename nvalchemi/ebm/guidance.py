"""Classifier-free guidance: a model with and without its condition, and the way from one to the other prolonged.

Ho and Salimans, arXiv:2207.12598. A model learns both where a part of its labels is left out in training
(`nvalchemi.ebm.losses.ConditionDropout`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.data import Batch
from nvalchemi.ebm.fields import values_of
from nvalchemi.errors import ConfigError, DataError
from nvalchemi.models.energy import EnergyModel

Null = float | int | Tensor | Callable[[Tensor, Tensor], Tensor]
"""What stands for no condition: a number, a tensor of the shape of one sample's condition, or a function of conditions and mask."""


def left_out(y: Tensor, mask: Tensor, null_condition: Null) -> Tensor:
    """Conditions ``y`` (batch, ...), those where ``mask`` (batch,) is true replaced by the null condition."""
    if callable(null_condition):
        found: Any = null_condition(y, mask)
        if not isinstance(found, Tensor) or found.shape != y.shape:
            raise ConfigError(
                "null_condition gives conditions of another shape",
                found=tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__,
                needed=tuple(y.shape),
            )
        return found
    null = torch.as_tensor(null_condition, device=y.device)
    if null.ndim and null.shape != y.shape[1:]:
        raise ConfigError("null_condition is no condition of one sample", found=tuple(null.shape), needed=tuple(y.shape[1:]))
    if null.is_floating_point() and not y.is_floating_point() and not bool((null == null.to(y.dtype)).all()):
        raise ConfigError("null_condition is no value of the condition", found=null_condition, needed=f"values of {y.dtype}")
    return torch.where(mask.reshape(-1, *[1] * (y.ndim - 1)), null.to(y.dtype), y)


def check_null(null_condition: Any) -> None:
    """Refuse what cannot stand for no condition."""
    if isinstance(null_condition, bool) or not (isinstance(null_condition, int | float | Tensor) or callable(null_condition)):
        raise ConfigError(
            "null_condition cannot be that",
            found=repr(null_condition),
            needed="a number, a tensor of the shape of one sample's condition, or a function (y, mask) -> y",
        )


class ClassifierFreeGuidance(nn.Module):
    """A model guided to its condition.

    ::

        u + w (c - u)

    with c what the model gives with the condition y, and u what it gives with the null condition, by one call of twice the batch. w = 1 is
    the model itself, w = 0 the model without conditions, and larger ones follow the condition more than the data do.

    Of an `EnergyModel` it is an `EnergyModel`, for any sampler: the energy u + w (c - u), whose density is that of the data without
    conditions times the w-th power of p(y | x). Of a field, called ``model(x, t, y=y)``, it is a field, for `FlowSampler`. Without y it is
    the model as it is.

    Parameters
    ----------
    model
        Takes ``y``.
    guidance_scale
        w.
    null_condition
        What stands for no condition: a number, such as the number of classes; a tensor of the shape of one sample's condition; or a
        function ``(y, mask) -> y``.
    guide_channels
        Of a field: guide only the first of its channels, dimension 1, and leave the others as they are without condition.

    Examples
    --------
    >>> guided = ClassifierFreeGuidance(model, guidance_scale=2.0, null_condition=10)
    >>> x = LangevinDynamics(guided, step_size=0.01).sample(dim=2, n_samples=64, y=torch.full((64,), 3))
    """

    def __new__(cls, model: Any = None, *args: Any, **settings: Any) -> ClassifierFreeGuidance:
        """An energy of an energy, a field of a field."""
        guided = GuidedEnergy if cls is ClassifierFreeGuidance and isinstance(model, EnergyModel) else cls
        return super().__new__(guided)

    def __init__(self, model: nn.Module, guidance_scale: float, null_condition: Null, guide_channels: int | None = None) -> None:
        super().__init__()
        if not math.isfinite(guidance_scale) or (guide_channels is not None and guide_channels < 1):
            raise ConfigError(
                "no such guidance",
                found=f"guidance_scale={guidance_scale}, guide_channels={guide_channels}",
                needed="finite; at least 1",
            )
        check_null(null_condition)
        if guide_channels is not None and isinstance(model, EnergyModel):
            raise ConfigError("an energy has no channels", found=f"guide_channels={guide_channels}", fix="leave it out")
        self.model, self.guidance_scale = model, float(guidance_scale)
        self.null_condition, self.guide_channels = null_condition, guide_channels

    def forward(self, x: Any, t: Tensor | None = None, y: Tensor | None = None, **conditions: Any) -> Tensor:
        """Energies (batch,), or a field of the shape of ``x``.

        Parameters
        ----------
        x
            (batch, ...); of an energy a `nvalchemi.data.Batch` as well.
        t
            (batch,), of a field.
        y
            (batch, ...).
        **conditions
            Others, which are not left out: handed on by name, twice where they have a row for each sample.
        """
        times = () if t is None else (t,)
        if y is None:
            return values_of(self.model(x, *times, **conditions))
        if len(y) != len(x):
            raise DataError(
                "the condition 'y' does not fit the samples", found=tuple(y.shape), needed=f"a tensor ({len(x)}, ...)"
            )
        w = self.guidance_scale
        null = left_out(y, torch.ones(len(y), dtype=torch.bool, device=y.device), self.null_condition)
        if w == 0.0:
            return values_of(self.model(x, *times, y=null, **conditions))
        if isinstance(x, Batch):
            given, free = (values_of(self.model(x, y=told, **conditions)) for told in (y, null))
        else:
            twice = {name: _doubled(value, len(x)) for name, value in conditions.items()}
            both = self.model(torch.cat([x, x]), *(torch.cat([t, t]) for t in times), y=torch.cat([y, null]), **twice)
            given, free = values_of(both).chunk(2)
        guided = torch.lerp(free, given, w)
        if self.guide_channels is None:
            return guided
        return torch.cat([guided[:, : self.guide_channels], free[:, self.guide_channels :]], 1)

    def extra_repr(self) -> str:
        """The settings."""
        return f"guidance_scale={self.guidance_scale}, null_condition={self.null_condition}, guide_channels={self.guide_channels}"


class GuidedEnergy(ClassifierFreeGuidance, EnergyModel):
    """`ClassifierFreeGuidance` of an energy."""


def _doubled(value: Any, count: int) -> Any:
    return torch.cat([value, value]) if isinstance(value, Tensor) and value.ndim and len(value) == count else value
