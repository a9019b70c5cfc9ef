"""Energies made of a vector field, as equilibrium matching trains them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.ebm.samples import total
from nvalchemi.errors import ConfigError
from nvalchemi.models.energy import EnergyModel

ENERGY_TYPES = ("dot", "l2", "mean")


def values_of(given: Any) -> Any:
    """What a model gives, of a tuple of that and activations too."""
    return given[0] if isinstance(given, tuple) else given


def output_of(given: Any, x: Tensor) -> Tensor:
    """The field's values at ``x``, of what a field gives: these, or a tuple of these and activations.

    Raises
    ------
    ConfigError
        For a field of another shape than the points: nothing is broadcast.
    """
    output = values_of(given)
    if not isinstance(output, Tensor) or output.shape != x.shape:
        raise ConfigError(
            "a field and its points differ in shape",
            found=tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__,
            needed=tuple(x.shape),
        )
    return output


def explicit_energy(output: Tensor, x: Tensor, energy_type: str) -> Tensor:
    """Energies (batch,) of the field's values at ``x``, both (batch, ...).

    ``"dot"`` and ``"mean"`` are x·f(x), ``"l2"`` is -|f(x)|²/2: Wang and Du, Equilibrium matching, 2025.
    """
    return total(energy_terms(output, x, energy_type), x)


def energy_terms(output: Tensor, x: Tensor, energy_type: str) -> Tensor:
    """The terms that the coordinates add to the energies, (batch, ...); see `explicit_energy`.

    Raises
    ------
    ConfigError
        For a field of another shape than the points: nothing is broadcast.
    """
    output = output_of(output, x)
    return -0.5 * output.square() if energy_type == "l2" else x * output


class EqMEnergy(EnergyModel):
    """The energy of a field that equilibrium matching trained, for samplers.

    Parameters
    ----------
    field
        Called ``field(x, t, **conditions)`` with times zero; its output may come in a tuple with activations.
    energy_type
        ``"dot"``, ``"l2"`` or ``"mean"``, as in `nvalchemi.ebm.losses.EquilibriumMatching`; ``"none"`` for a field that is the gradient
        itself: it has no energy, and `gradient` is all that there is.
    """

    def __init__(self, field: nn.Module, energy_type: str = "dot") -> None:
        super().__init__()
        if energy_type not in ("none", *ENERGY_TYPES):
            raise ConfigError("unknown energy_type", found=repr(energy_type), needed=f"none, {', '.join(ENERGY_TYPES)}")
        self.net, self.energy_type = field, energy_type
        self.has_energy = energy_type != "none"

    def forward(self, x: Tensor, **conditions: Any) -> Tensor:
        """Energies (batch,)."""
        if self.energy_type == "none":
            raise ConfigError("a field of energy_type none has a gradient and no energy", fix="train with energy_type='dot'")
        return explicit_energy(self._field(x, **conditions), x, self.energy_type)

    def gradient(self, x: Tensor, create_graph: bool = False, **conditions: Any) -> Tensor:
        """See `EnergyModel.gradient`."""
        if self.energy_type != "none":
            return super().gradient(x, create_graph=create_graph, **conditions)
        with torch.set_grad_enabled(create_graph):
            return self._field(x, **conditions)

    def _field(self, x: Tensor, **conditions: Any) -> Tensor:
        return output_of(self.net(x, x.new_zeros(len(x)), **conditions), x)
