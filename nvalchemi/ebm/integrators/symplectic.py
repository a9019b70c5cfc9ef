"""Ways through phase space that keep volumes and can be reversed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from nvalchemi.ebm.integrators.implicit import check_iterations, iterated, tolerance_of
from nvalchemi.errors import ConfigError

Partial = Callable[[Tensor, Tensor], Tensor]
"""A derivative of the Hamiltonian at positions and momenta, of their shape."""
Step = float | Tensor


class Phase(Protocol):
    """What such an integrator moves in: positions by momenta, momenta by forces."""

    def drift_(self, x: Tensor, step: Step, q: Tensor, /) -> None:
        """Move positions by momenta, in place."""

    def kick_(self, q: Tensor, step: Step, gradient: Tensor, /) -> None:
        """Change momenta by a gradient, in place."""

    def gradient(self, x: Tensor, /) -> Tensor:
        """The gradient of the energy."""

    def energy_and_gradient(self, x: Tensor, /) -> tuple[Tensor, Tensor]:
        """Energies and their gradient."""


class SymplecticIntegrator(ABC):
    """Solves Hamilton's equations of a separable Hamiltonian E(x) + |q|²/2."""

    @abstractmethod
    def way(self, phase: Phase, x: Tensor, q: Tensor, gradient: Tensor, step: Step, n_steps: int) -> tuple[Tensor, Tensor]:
        """Move ``x`` and ``q`` in place by ``n_steps`` steps.

        Parameters
        ----------
        phase
            The forces.
        x, q
            Positions and momenta.
        gradient
            That of the energy at ``x``; it is not changed.
        step
            The step of time, a number or a tensor that broadcasts against ``x``.
        n_steps
            How many steps.

        Returns
        -------
        tuple
            Energies and gradient at the end.
        """


class LeapfrogIntegrator(SymplecticIntegrator):
    """Half a kick, a drift, half a kick; the halves between two steps are one, so a step costs one gradient.

    Of second order. Verlet, Physical Review 159, 98 (1967).
    """

    def way(self, phase: Phase, x: Tensor, q: Tensor, gradient: Tensor, step: Step, n_steps: int) -> tuple[Tensor, Tensor]:
        """See `SymplecticIntegrator.way`."""
        phase.kick_(q, -0.5 * step, gradient)
        for _ in range(n_steps - 1):
            phase.drift_(x, step, q)
            phase.kick_(q, -step, phase.gradient(x))
        phase.drift_(x, step, q)
        energy, gradient = phase.energy_and_gradient(x)
        phase.kick_(q, -0.5 * step, gradient)
        return energy, gradient


class GeneralisedLeapfrogIntegrator:
    """Half an implicit kick, an implicit drift, half a kick: for Hamiltonians H(x, p) that do not separate.

    ::

        p' = p - h/2 ∂H/∂x(x, p'),    x' = x + h/2 (∂H/∂p(x, p') + ∂H/∂p(x', p')),    p'' = p' - h/2 ∂H/∂x(x', p')

    It keeps volumes and can be reversed, as long as its two equations are solved, and is of second order; where H separates it is
    `LeapfrogIntegrator`. Girolami and Calderhead, Journal of the Royal Statistical Society B 73, 123 (2011).

    Parameters
    ----------
    n_fixed_point_steps
        Iterations of an equation.
    tolerance
        The greatest change of a coordinate in the last iteration, over 1 + its size, at which the equation counts as solved; the square
        root of the dtype's resolution if not given.
    """

    def __init__(self, n_fixed_point_steps: int = 8, tolerance: float | None = None) -> None:
        check_iterations(n_fixed_point_steps, tolerance)
        self.n_fixed_point_steps, self.tolerance = n_fixed_point_steps, tolerance

    def way(
        self, slope: Partial, velocity: Partial, x: Tensor, p: Tensor, step: Step, n_steps: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Follow Hamilton's equations for ``n_steps`` steps.

        Parameters
        ----------
        slope, velocity
            ∂H/∂x and ∂H/∂p.
        x, p
            Positions and momenta (batch, ...); they are not changed.
        step
            The step of time, a number or a tensor that broadcasts against ``x``.
        n_steps
            How many steps.

        Returns
        -------
        tuple
            Positions and momenta at the end, and for which rows all equations were solved, (batch,) bool.
        """
        half, tolerance = 0.5 * step, tolerance_of(self.tolerance, x)
        solved = torch.ones(len(x), dtype=torch.bool, device=x.device)
        for _ in range(n_steps):
            p, kicked = iterated(partial(_kicked, slope, x, p, half), p, self.n_fixed_point_steps, tolerance)
            middle = x + half * velocity(x, p)
            x, drifted = iterated(partial(_drifted, velocity, middle, p, half), middle, self.n_fixed_point_steps, tolerance)
            p = _kicked(slope, x, p, half, p)
            solved &= kicked & drifted
        return x, p, solved


def _kicked(slope: Partial, x: Tensor, p: Tensor, half: Step, guess: Tensor) -> Tensor:
    """Momenta after half a kick, by forces that depend on momenta ``guess``."""
    return p - half * slope(x, guess)


def _drifted(velocity: Partial, middle: Tensor, p: Tensor, half: Step, guess: Tensor) -> Tensor:
    """Positions after the second half of a drift, by velocities at positions ``guess``."""
    return middle + half * velocity(guess, p)


GENERALISED = ("generalised_leapfrog", "generalized_leapfrog")


def generalised_integrator(integrator: str | GeneralisedLeapfrogIntegrator, **settings: Any) -> GeneralisedLeapfrogIntegrator:
    """The integrator of a name, made with ``settings``; an instance stays itself."""
    if isinstance(integrator, GeneralisedLeapfrogIntegrator):
        return integrator
    if integrator not in GENERALISED:
        raise ConfigError(
            "no such integrator of Hamiltonians that do not separate",
            found=repr(integrator),
            needed=f"{GENERALISED[0]} or a GeneralisedLeapfrogIntegrator",
        )
    return GeneralisedLeapfrogIntegrator(**settings)


SYMPLECTIC: dict[str, type[SymplecticIntegrator]] = {"leapfrog": LeapfrogIntegrator}


def symplectic_integrator(integrator: str | SymplecticIntegrator) -> SymplecticIntegrator:
    """The integrator of a name; an instance stays itself."""
    if isinstance(integrator, SymplecticIntegrator):
        return integrator
    if integrator not in SYMPLECTIC:
        raise ConfigError(
            "no such symplectic integrator", found=repr(integrator), needed=f"{', '.join(SYMPLECTIC)} or a SymplecticIntegrator"
        )
    return SYMPLECTIC[integrator]()
