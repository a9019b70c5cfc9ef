"""Adapting a step size to a wanted acceptance."""

from __future__ import annotations

import math

from nvalchemi.errors import ConfigError


class DualAveraging:
    """Nesterov's dual averaging of the logarithm of a step size, as Hoffman and Gelman set it up (JMLR 15, 1593 (2014), section 3.2).

    First the step is doubled or halved until the acceptance crosses one half; the averaging begins from there.

    Parameters
    ----------
    step_size
        Where to begin.
    target
        The acceptance probability that is wanted, between 0 and 1.
    """

    def __init__(self, step_size: float, target: float) -> None:
        if not (step_size > 0.0 and 0.0 < target < 1.0):
            raise ConfigError(
                "nothing to adapt",
                found=f"step_size={step_size}, target={target}",
                needed="a positive step and a target in (0, 1)",
            )
        self.current = float(step_size)
        self._target = target
        self._search = 0  # 1 and -1: doubling, halving; 2: found
        self._begin()

    def _begin(self) -> None:
        self._center = math.log(10.0 * self.current)  # the averaging leans to longer steps, which cost less
        self._error, self._log_mean, self._count = 0.0, math.log(self.current), 0

    @property
    def final(self) -> float:
        """The weighted mean of the steps tried: what to go on with."""
        return math.exp(self._log_mean)

    def update(self, acceptance: float) -> None:
        """Take in the mean acceptance probability of a way, and choose the next `current`."""
        if self._search != 2:
            side = 1 if acceptance > 0.5 else -1
            if self._search in (0, side):
                self._search = side
                self.current *= 2.0**side
                self._begin()
                return
            self._search = 2
        self._count += 1
        self._error += (self._target - acceptance - self._error) / (self._count + 10)
        log_step = self._center - math.sqrt(self._count) / 0.05 * self._error
        self._log_mean += self._count**-0.75 * (log_step - self._log_mean)
        self.current = math.exp(log_step)
