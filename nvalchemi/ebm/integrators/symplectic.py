"""Ways through phase space that keep volumes and can be reversed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from nvalchemi.errors import ConfigError

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
