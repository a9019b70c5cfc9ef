"""What an energy is told beside its samples, such as labels, where a loss draws further samples for the same labels."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nvalchemi.ebm.samplers import EnergySampler, NoUTurnSampler, Sampler, SpeciesSwaps
from nvalchemi.errors import ConfigError, DataError
from nvalchemi.models.energy import EnergyModel


class ConditionedEnergy(EnergyModel):
    """The energy of a model that is told always the same: one value a sample, by name."""

    def __init__(self, model: EnergyModel, conditions: Mapping[str, Any]) -> None:
        super().__init__()
        self.told = model  # not `net`, which wrappers replace: this object lives for one call
        self.conditions = dict(conditions)

    def forward(self, x: Any) -> Tensor:
        """See `EnergyModel.forward`."""
        return self.told(x, **self.conditions)

    def energy_and_gradient(
        self, x: Any, create_graph: bool = False, *, anchored: bool = True, **conditions: Any
    ) -> tuple[Tensor, Tensor]:
        """See `EnergyModel.energy_and_gradient`."""
        model: EnergyModel = self.told
        return model.energy_and_gradient(x, create_graph, anchored=anchored, **self.conditions, **conditions)


def conditioned(sampler: Sampler, conditions: Mapping[str, Any]) -> Sampler:
    """The same sampler, whose chain i has the condition of row i.

    Raises
    ------
    ConfigError
        For a sampler that cannot: one that is compiled, or moves some of the chains alone.
    """
    if not conditions:
        return sampler
    given: Any = sampler
    if not isinstance(given, EnergySampler) or isinstance(given, NoUTurnSampler) or given.energy is not given.model:
        raise ConfigError(
            "the sampler cannot tell the energy a condition of each chain",
            found=f"{type(given).__name__} with {', '.join(conditions)}",
            needed="a sampler that moves all chains alike (any but NoUTurnSampler) and is not compiled",
        )
    other = copy.copy(given)
    if isinstance(other, SpeciesSwaps):
        other.sampler = conditioned(other.sampler, conditions)  # type: ignore[assignment]
    other.model = ConditionedEnergy(given.model, conditions)
    return other


def repeated(conditions: Mapping[str, Any], count: int, times: int) -> dict[str, Tensor]:
    """Conditions (count, ...) for ``times`` sets of as many samples, one after the other.

    Raises
    ------
    DataError
        For a condition that is not one value a sample.
    """
    for name, value in conditions.items():
        if not isinstance(value, Tensor) or value.ndim < 1 or len(value) != count:
            raise DataError(
                f"the condition {name!r} does not fit the samples",
                found=tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__,
                needed=f"a tensor ({count}, ...)",
            )
    return {name: torch.cat([value] * times) for name, value in conditions.items()}
