"""Methods whose steps are solutions of equations."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from nvalchemi.ebm.integrators.base import Field, FixedStepIntegrator
from nvalchemi.ebm.settings import Value, add_
from nvalchemi.errors import ConfigError, TrainingError

Equation = Callable[[Tensor], Tensor]
MEMORY = 10
"""Iterations that the acceleration looks back."""


class BackwardEulerMaruyamaIntegrator(FixedStepIntegrator):
    """x' = x + h f(x', t + h) + noise: of first order, and stable where the explicit method is not; the backward Euler method without noise.

    For Langevin dynamics in E = a x²/2 the variance is 1 / (a (1 + h a / 2)) for every h, where the explicit method's 1 / (a (1 - h a / 2))
    ends at h a = 2: directions that are stiff come to rest, and soft ones can be followed by long steps.

    The equation is solved for each row of x by fixed-point iterations with Anderson's acceleration (J. ACM 12, 547 (1965)), which for a
    linear f finds it as GMRES would (Walker and Ni, SIAM J. Numer. Anal. 49, 1715 (2011)), also where plain iterations diverge, h |f'| > 1. A
    step costs as many calls of f as iterations. Where f bends much over a step the iterations may end without a solution, which is an
    error: there the step must be shorter.

    Parameters
    ----------
    n_iterations
        At most so many iterations a step.
    tolerance
        The greatest change of a coordinate in an iteration, over 1 + its size, at which the equation counts as solved; the square root of
        the dtype's resolution if not given.

    Raises
    ------
    TrainingError
        From a step whose equation is not solved then.
    """

    order: ClassVar[int] = 1
    stochastic: ClassVar[bool] = True
    even_calls: ClassVar[bool] = False

    def __init__(self, n_iterations: int = 50, tolerance: float | None = None) -> None:
        check_iterations(n_iterations, tolerance)
        self.n_iterations, self.tolerance = n_iterations, tolerance

    def step(self, field: Field, x: Tensor, t: float, h: Value, noise: Tensor | None = None) -> Tensor:
        """See `FixedStepIntegrator.step`."""
        base = x if noise is None else x + noise
        at = t + (h if isinstance(h, float) else 0.0)  # steps of unlike lengths have no common time; the field then has none
        found, solved = accelerated(
            lambda y: add_(base.clone(), h, field(y, at)), base, self.n_iterations, tolerance_of(self.tolerance, x)
        )
        if not solved.all():
            raise TrainingError(
                f"the equation of a step of {type(self).__name__} was not solved in {self.n_iterations} iterations",
                found=f"{int((~solved).sum())} of {len(solved)} rows at step size {h if isinstance(h, float) else float(h.max())}",
                fix="take a smaller step, or raise n_iterations or tolerance",
            )
        return found


def check_iterations(n_iterations: int, tolerance: float | None) -> None:
    """Refuse settings with which nothing can be solved."""
    if n_iterations < 1 or not (tolerance is None or tolerance > 0.0):
        raise ConfigError(
            "no equation can be solved so",
            found=f"{n_iterations} iterations, tolerance={tolerance}",
            needed="at least one, and a positive tolerance",
        )


def tolerance_of(tolerance: float | None, x: Tensor) -> float:
    """The tolerance, or the square root of the dtype's resolution."""
    return torch.finfo(x.dtype).eps ** 0.5 if tolerance is None else tolerance


def apart(new: Tensor, old: Tensor) -> Tensor:
    """The greatest change of a coordinate in each row, over 1 + its size, (rows,)."""
    if not new[:1].numel():
        return new.new_zeros(len(new))
    return ((new - old).abs() / (1.0 + new.abs())).flatten(1).amax(1)


def iterated(equation: Equation, start: Tensor, n_iterations: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """The solution of ``y = equation(y)`` after that many plain iterations, and for which rows it is one."""
    old, new = start, equation(start)
    for _ in range(n_iterations - 1):
        old, new = new, equation(new)
    return new, apart(new, old) <= tolerance  # NaN compares false


def accelerated(equation: Equation, start: Tensor, n_iterations: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """The solution of ``y = equation(y)`` by accelerated iterations, row by row, and which rows are solved; it ends when all are."""
    rows, y = len(start), start
    images: list[Tensor] = []
    errors: list[Tensor] = []
    image, solved = start, torch.zeros(rows, dtype=torch.bool, device=start.device)
    for _ in range(n_iterations):
        image = equation(y)
        solved = apart(image, y) <= tolerance
        if solved.all():
            break
        # in double: differences of near numbers are what the next guess is made of
        images = [*images[-MEMORY:], image.double().reshape(rows, -1)]
        errors = [*errors[-MEMORY:], (image - y).double().reshape(rows, -1)]
        y = image
        if len(errors) > 1:
            steps = torch.stack(errors, 2).diff(dim=2)
            size = steps.norm(dim=1, keepdim=True).clamp(min=torch.finfo(steps.dtype).tiny)
            steps = steps / size
            square = steps.mT @ steps + 1e-12 * torch.eye(steps.shape[2], dtype=steps.dtype, device=steps.device)
            # NaN of one row is no other row's: solve_ex tells of no failure
            weights = torch.linalg.solve_ex(square, steps.mT @ errors[-1].unsqueeze(2))[0] / size.mT
            y = (images[-1] - (torch.stack(images, 2).diff(dim=2) @ weights).squeeze(2)).to(start).view_as(start)
    return image, solved
