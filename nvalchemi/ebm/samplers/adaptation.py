"""Adapting a step size to a wanted acceptance."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from nvalchemi.ebm.record import Progress
from nvalchemi.ebm.samplers.base import NOTHING, EnergySampler, Run
from nvalchemi.errors import ConfigError

Way = tuple[Tensor, Tensor, Mapping[str, Tensor]]
"""Positions after a way, the logarithm of each chain's acceptance, and numbers for the diagnostics."""


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


class AdaptiveSampler(EnergySampler):
    """A sampler whose step size can be adapted to a wanted acceptance.

    Attributes
    ----------
    good_acceptance
        What `warm_up` aims at where nothing else is said.
    """

    good_acceptance: ClassVar[float] = 0.8

    @abstractmethod
    def ways(self, run: Run, average: DualAveraging | None) -> Iterator[Way]:
        """Yield after each way; with ``average`` the step size is its `DualAveraging.current`."""

    def moves(self, run: Run) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """See `Sampler.moves`."""
        for x, _, numbers in self.ways(run, None):
            yield x, numbers

    def warm_up(
        self,
        x: Any = None,
        dim: int | tuple[int, ...] | None = None,
        n_steps: int = 200,
        n_samples: int = 1,
        target_acceptance: float | None = None,
        *,
        generator: torch.Generator | None = None,
        progress: bool | Progress = False,
        **conditions: Any,
    ) -> Any:
        """Move the chains while the step size is adapted, and set `step_size` to the number found.

        Dual averaging of the mean acceptance probability of all chains: Hoffman and Gelman, JMLR 15, 1593 (2014). Draws made here are
        none of the target's.

        Parameters
        ----------
        x, dim, n_samples, generator, progress, **conditions
            As `sample` takes them.
        n_steps
            Ways.
        target_acceptance
            The mean acceptance probability that is wanted; `good_acceptance` if not given.

        Returns
        -------
        Tensor
            The last states: where `sample` should begin.

        Raises
        ------
        ConfigError
            Where `step_size` is not a number.
        """
        if isinstance(self.step_size, Tensor) or callable(self.step_size):
            raise ConfigError(
                "only a step size that is a number can be adapted", found=self.step_size, fix="give step_size a number"
            )
        target = self.good_acceptance if target_acceptance is None else target_acceptance
        warming = _WarmUp(self, DualAveraging(self.step_size, target))
        last = warming.sample(x, dim, n_steps, n_samples, generator=generator, progress=progress, **conditions)
        self.step_size = warming.average.final
        return last


class _WarmUp(EnergySampler):
    """The ways of another sampler, with the step size under adaptation."""

    def __init__(self, sampler: AdaptiveSampler, average: DualAveraging) -> None:
        super().__init__(sampler.model, sampler.step_size)
        self._sampler, self.average = sampler, average

    @property
    def even_calls(self) -> bool:
        """See `Sampler.even_calls`."""
        return self._sampler.even_calls

    def moves(self, run: Run) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """See `Sampler.moves`."""
        for x, log_acceptance, _ in self._sampler.ways(run, self.average):
            probability = log_acceptance.clamp(max=0.0).exp().nan_to_num(nan=0.0)
            self.average.update(float(probability.mean()))
            yield x, NOTHING
