"""Positions and momenta: what samplers with a momentum share.

Momenta are kept in units in which the mass is one: with mass M = L Lᵀ they are q = L⁻¹ p, normal with variance T, the kinetic energy is
|q|²/2, and both halves of a leapfrog step take L⁻¹. A mass that is a number or diagonal then costs nothing but another step size.
"""

from __future__ import annotations

import math
from copy import copy
from typing import TypeAlias

import torch
from torch import Tensor

from nvalchemi.ebm.chains import Chains
from nvalchemi.ebm.settings import Value, add_, spread
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel

Mass: TypeAlias = float | Tensor | str | None


class Mechanics:
    """The forces on the chains, and how positions and momenta move each other.

    Parameters
    ----------
    model, chains
        The energy and what moves in it.
    mass
        A number, 1 where there is none; one number a coordinate (the shape of one chain), or a positive definite matrix (D, D) of the D coordinates of a chain.
        Of the atoms of a batch: a number, one number an atom (N,), or ``"atomic"``, the masses of the elements in u.
    """

    def __init__(self, model: EnergyModel, chains: Chains, mass: Mass) -> None:
        self.model, self.chains = model, chains
        self._scale: Value = 1.0
        self._whiten: Tensor | None = None
        mass = 1.0 if mass is None else mass
        if not isinstance(mass, (str, float, int, Tensor)):
            mass = torch.as_tensor(mass)  # of lists and arrays
        if isinstance(mass, str):
            self._scale = chains.masses(mass).rsqrt()
        elif isinstance(mass, Tensor) and mass.ndim == 2 and mass.shape != chains.start.shape[1:]:
            self._whiten = _inverse_factor(mass, chains)
        elif isinstance(mass, Tensor) and mass.ndim:
            if not bool((mass > 0).all()):
                raise ConfigError("masses are positive", found=mass.min().item())
            self._scale = chains.coordinates(mass).rsqrt()
        else:
            if not 0.0 < float(mass) < math.inf:
                raise ConfigError("a mass is positive", found=float(mass))
            self._scale = 1.0 / math.sqrt(float(mass))

    def subset(self, index: Tensor) -> Mechanics:
        """The same for the chains ``index`` alone."""
        other = copy(self)
        other.chains = self.chains.subset(index)
        if isinstance(self._scale, Tensor):
            other._scale = self.chains.narrowed(self._scale, index)
        return other

    def scaled(self, step: Value) -> Value:
        """A step of time as `drift_` and `kick_` take it."""
        step = spread(step, self.chains)
        return step if isinstance(self._scale, float) and self._scale == 1.0 else step * self._scale

    def drift_(self, x: Tensor, step: Value, q: Tensor) -> None:
        """Move positions by momenta, in place."""
        add_(x, step, q if self._whiten is None else self._times(q, self._whiten))

    def kick_(self, q: Tensor, step: Value, gradient: Tensor) -> None:
        """Change momenta by forces, in place; ``step`` is negative where ``gradient`` is that of the energy."""
        add_(q, step, gradient if self._whiten is None else self._times(gradient, self._whiten.mT))

    @staticmethod
    def _times(rows: Tensor, matrix: Tensor) -> Tensor:
        """Each chain times a matrix; autocast, which is for the energy, would round the ways so that they cannot be reversed."""
        with torch.autocast(rows.device.type, enabled=False):
            return (rows.flatten(1) @ matrix).view_as(rows)

    def gradient(self, x: Tensor) -> Tensor:
        """The gradient of the energy."""
        return self.chains.gradient(self.model, x)

    def energy_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Energies (size,) and their gradient."""
        return self.chains.energy_and_gradient(self.model, x)

    def kinetic(self, q: Tensor) -> Tensor:
        """Kinetic energies (size,)."""
        return 0.5 * self.chains.total(q * q)


def _inverse_factor(mass: Tensor, chains: Chains) -> Tensor:
    """L⁻¹ of a mass matrix L Lᵀ."""
    count = chains.start[0].numel()
    if mass.shape != (count, count):
        raise ConfigError(
            "a mass matrix does not fit the chains", found=f"shape {tuple(mass.shape)}", needed=f"({count}, {count})"
        )
    factor, failed = torch.linalg.cholesky_ex(mass.double())
    if failed.any() or not torch.allclose(mass, mass.mT):
        raise ConfigError("a mass matrix is symmetric and positive definite", found=f"shape {tuple(mass.shape)}")
    identity = torch.eye(count, dtype=torch.float64, device=mass.device)
    return torch.linalg.solve_triangular(factor, identity, upper=False).to(chains.start)
