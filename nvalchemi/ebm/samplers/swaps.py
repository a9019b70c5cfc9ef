"""Exchanges of species between the steps of another sampler."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from nvalchemi.ebm.samplers.base import EnergySampler, Run
from nvalchemi.ebm.settings import changes, value
from nvalchemi.ebm.structures import AtomChains
from nvalchemi.errors import ConfigError

SETTINGS = ("step_size", "noise_scale", "temperature", "friction")
"""What a sampler may have as a function of the step."""


class SpeciesSwaps(EnergySampler):
    """Another sampler of structures, and now and then an exchange of the species of two atoms.

    After every ``every`` steps of the other sampler each structure tries ``n_swaps`` times: two of its atoms of unlike species, drawn evenly
    from all such pairs, exchange their places, and stay there with the probability min(1, exp(-(E' - E) / T)) (Metropolis et al., J. Chem.
    Phys. 21, 1087 (1953)). There are as many such pairs afterwards as before, so the exchange leaves exp(-E / T) as it is. T is the other
    sampler's temperature. A structure of one species, or an energy that is not finite there, stays as it was.

    An exchange of species is one of positions: atoms keep their order, and what belongs to an atom goes along with it. Diagnostics are those of
    the other sampler and ``"swap_rate"``, the share of the structures tried last that exchanged (NaN before the first trial).

    Parameters
    ----------
    sampler
        What moves the atoms in between: any sampler of an energy whose settings are no functions of the step. Momenta are drawn anew after
        each exchange.
    every
        Its steps between the trials.
    n_swaps
        Trials in a row.

    Examples
    --------
    >>> sampler = SpeciesSwaps(MetropolisAdjustedLangevin(potential, step_size=1e-3, temperature=0.05), every=5)
    >>> loss_fn = ContrastiveDivergence(potential, sampler, k_steps=10)
    """

    def __init__(self, sampler: EnergySampler, every: int = 10, n_swaps: int = 1) -> None:
        given: Any = sampler
        if not isinstance(given, EnergySampler) or isinstance(given, SpeciesSwaps):
            raise ConfigError(
                "exchanges come between the steps of another sampler", found=type(given).__name__, needed="an EnergySampler"
            )
        super().__init__(sampler.model, sampler.step_size)
        if every < 1 or n_swaps < 1:
            raise ConfigError("no such exchanges", found=f"every={every}, n_swaps={n_swaps}", needed="both at least 1")
        if changes(*(getattr(sampler, name) for name in SETTINGS if hasattr(sampler, name))):
            raise ConfigError(
                "the settings of a sampler with exchanges do not change with the step",
                found=f"a {type(sampler).__name__} with a function of the step",
                fix="give it numbers, and change them between calls of sample()",
            )
        self.sampler, self.every, self.n_swaps = sampler, every, n_swaps

    @property
    def even_calls(self) -> bool:
        """See `Sampler.even_calls`."""
        return self.sampler.even_calls

    def step_named(self, step: int) -> object:
        """See `Sampler.step_named`."""
        return self.sampler.step_named(step)

    def compile(self, **options: Any) -> Self:
        """Refused: structures have no compiled energy."""
        raise ConfigError("a sampler of structures is not compiled", found=repr(type(self).__name__), fix="leave out compile()")

    def moves(self, run: Run) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """See `Sampler.moves`."""
        chains = run.chains
        if not isinstance(chains, AtomChains):
            raise ConfigError("only atoms have species", found="samples that are a tensor", needed="a nvalchemi.data.Batch")
        rate, left = chains.start.new_tensor(torch.nan), run.n_steps
        part = copy.copy(run)
        while left:
            part.n_steps = min(self.every, left)
            left -= part.n_steps
            for step, (x, numbers) in enumerate(self.sampler.moves(part), 1):
                if step == self.every:
                    x, rate = self._swapped(run, chains, x)
                    chains.start = x.clone()
                yield x, {**numbers, "swap_rate": rate} if run.diagnostics else numbers

    def _swapped(self, run: Run, chains: AtomChains, x: Tensor) -> tuple[Tensor, Tensor]:
        """Positions after the trials, and the share of the structures that exchanged in the last of them."""
        model = self.sampler.energy
        temperature = value("temperature", getattr(self.sampler, "temperature", 1.0), 0, chains)
        # the noise of Langevin dynamics has a scale of its own, which is a temperature too
        temperature = temperature * value("noise_scale", getattr(self.sampler, "noise_scale", 1.0), 0, chains) ** 2
        if not bool((torch.as_tensor(temperature) > 0).all()):
            raise ConfigError(
                "exchanges are accepted at a temperature", found="a temperature or noise scale of 0", needed="above 0"
            )
        energy, rate = chains.energy(model, x), x.new_tensor(torch.nan)
        for _ in range(self.n_swaps):
            first, second, there = chains.unlike_pair(run.uniform(), run.uniform())
            moved = x.clone()
            moved[first], moved[second] = x[second], x[first]
            after = chains.energy(model, moved)
            # NaN compares false; minus infinity is no place to stay
            log_ratio = (energy - after) / temperature
            accepted = (log_ratio > run.uniform().log_()) & (log_ratio < torch.inf)
            x = chains.choose(accepted, moved, x)
            energy = torch.where(accepted, after, energy)
            rate = (accepted & there).sum() / there.sum()
        return x, rate.to(x.dtype)
