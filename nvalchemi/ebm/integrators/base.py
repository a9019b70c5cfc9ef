"""What the integrators of x' = f(x, t) share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import ClassVar

from torch import Tensor

from nvalchemi.ebm.settings import Value
from nvalchemi.errors import ConfigError

Field = Callable[[Tensor, float], Tensor]
"""f(x, t), of the shape of x, at a time that is a number."""
Increment = Callable[[Tensor, float, float], Tensor]
"""The random increment of a step: (x, t, h) gives a tensor of the shape of x."""


class Integrator(ABC):
    """Solves x' = f(x, t) for a batch of states at once.

    Attributes
    ----------
    order
        The error over a fixed time is of this order in the step.
    stochastic
        Whether a random increment can be added to its steps.
    even_calls
        Whether it calls the field as often whatever the state is; see `nvalchemi.ebm.samplers.Sampler.even_calls`.
    """

    order: ClassVar[int]
    stochastic: ClassVar[bool] = False
    even_calls: ClassVar[bool] = True

    @abstractmethod
    def path(self, field: Field, x: Tensor, times: Sequence[float], increment: Increment | None = None) -> Iterator[Tensor]:
        """Yield the states at ``times[1:]``.

        Parameters
        ----------
        field
            f.
        x
            The state at ``times[0]``, (batch, ...); it is not changed.
        times
            Numbers that rise or fall. Between two of them there is one step, or, for an adaptive integrator, as many as are needed.
        increment
            The random increments of a stochastic equation.
        """

    def integrate(self, field: Field, x: Tensor, times: Sequence[float], increment: Increment | None = None) -> Tensor:
        """Give the state at ``times[-1]``; otherwise as `path`."""
        state = x
        for step in self.path(field, x, times, increment):
            state = step
        return state


class FixedStepIntegrator(Integrator):
    """One step from each time to the next."""

    @abstractmethod
    def step(self, field: Field, x: Tensor, t: float, h: Value, noise: Tensor | None = None) -> Tensor:
        """Give the state after a step of length ``h`` (a number, or a tensor that broadcasts against ``x``).

        ``noise``, of the shape of ``x``, is the random increment of this step; see `Integrator.stochastic`.
        """

    def path(self, field: Field, x: Tensor, times: Sequence[float], increment: Increment | None = None) -> Iterator[Tensor]:
        """See `Integrator.path`."""
        if increment is not None:
            check_stochastic(self)
        for start, stop in pairwise(times):
            noise = None if increment is None else increment(x, start, stop - start)
            x = self.step(field, x, start, stop - start, noise)
            yield x


def check_stochastic(integrator: Integrator) -> None:
    """Refuse an integrator that takes no random increments."""
    if not integrator.stochastic:
        raise ConfigError(
            f"{type(integrator).__name__} solves no stochastic equation",
            needed="'euler_maruyama', 'heun' or 'backward_euler_maruyama', or another that is stochastic",
        )
