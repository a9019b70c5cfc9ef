"""The no-U-turn sampler, for many chains at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nvalchemi.ebm.chains import Chains
from nvalchemi.ebm.samplers.adaptation import AdaptiveSampler, DualAveraging, Way
from nvalchemi.ebm.samplers.base import NOTHING, Run, check_start
from nvalchemi.ebm.samplers.mechanics import Mass, Mechanics
from nvalchemi.ebm.settings import Setting, Value, checked, root, spread, value
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel


class NoUTurnSampler(AdaptiveSampler):
    """Hamiltonian Monte Carlo whose ways end by themselves, where they begin to turn back.

    Draws exactly from exp(-E / T). A way is a tree of leapfrog steps that doubles forwards or backwards in time until its ends approach
    each other; the next state is one of its states, chosen by weight, later halves preferred (Hoffman and Gelman, JMLR 15, 1593 (2014);
    Betancourt, arXiv:1701.02434, appendix A). Momenta, not positions, say when ends approach, so that a mass counts.

    The chains take their steps together, and those whose trees have ended are left out of the next doubling. The tree is built without
    recursion: of a subtree only the momenta that later tests need are kept, one a level (Phan, Pradhan and Jankowiak,
    arXiv:1912.11554).

    Diagnostics, all means over the chains: ``"acceptance_rate"``, the mean of min(1, weight) over the states of a tree, which is what
    `warm_up` adapts; ``"n_leapfrog_steps"``, the gradients a way; ``"divergent"``, the share of the trees that ended where the energy
    error passed ``max_energy_error`` or was not finite.

    Parameters
    ----------
    model
        The energy.
    step_size
        The leapfrog step: a number, one number a chain (batch,), or a function of the step that gives either.
    max_tree_depth
        Doublings after which a way ends: at most 2 ** max_tree_depth - 1 gradients.
    mass
        As `HamiltonianMonteCarlo` takes it.
    temperature
        T: as ``step_size``.
    max_energy_error
        Energy error, in units of T, beyond which a way is given up.
    """

    def __init__(
        self,
        model: EnergyModel,
        step_size: Setting = 1e-1,
        max_tree_depth: int = 10,
        mass: Mass = 1.0,
        temperature: Setting = 1.0,
        max_energy_error: float = 1000.0,
    ) -> None:
        super().__init__(model, step_size)
        if max_tree_depth < 1 or not max_energy_error > 0.0:
            raise ConfigError(
                "no such tree",
                found=f"max_tree_depth={max_tree_depth}, max_energy_error={max_energy_error}",
                needed="max_tree_depth at least 1, max_energy_error positive",
            )
        self.max_tree_depth, self.mass, self.max_energy_error = max_tree_depth, mass, float(max_energy_error)
        self.temperature = checked("temperature", temperature, positive=True)

    @property
    def even_calls(self) -> bool:
        """See `Sampler.even_calls`."""
        return False

    def ways(self, run: Run, average: DualAveraging | None) -> Iterator[Way]:
        """See `AdaptiveSampler.ways`."""
        chains, x = run.chains, run.chains.start
        mechanics = Mechanics(self.energy, chains, self.mass)
        energy, gradient = mechanics.energy_and_gradient(x)
        check_start(energy, type(self).__name__)
        for step in range(run.n_steps):
            size = value("step_size", self.step_size if average is None else average.current, step, chains)
            temperature = value("temperature", self.temperature, step, chains, positive=True)
            x, energy, gradient, acceptance, numbers = self._grow(run, mechanics, _Point(x, energy, gradient), size, temperature)
            yield x, acceptance.log(), numbers if run.diagnostics else NOTHING

    def _grow(
        self, run: Run, mechanics: Mechanics, start: _Point, size: Value, temperature: Value
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Mapping[str, Tensor]]:
        """One tree a chain: the state chosen, its energy and gradient, the mean acceptance of each chain, and diagnostics."""
        chains = run.chains
        q = run.normal(start.x).mul_(spread(root(temperature), chains))
        level = start.energy + mechanics.kinetic(q)
        left = _End(start.x.clone(), q, start.gradient.clone())
        right = _End(start.x.clone(), q.clone(), start.gradient.clone())
        chosen = _Point(start.x.clone(), start.energy.clone(), start.gradient.clone())
        total, log_weight = q.clone(), torch.zeros_like(level)
        likely, leaves = torch.zeros_like(level), torch.zeros_like(level)
        diverged = torch.zeros_like(level, dtype=torch.bool)
        alive = torch.arange(chains.size, device=start.x.device)
        for depth in range(self.max_tree_depth):
            some = mechanics.subset(alive)
            forwards = run.uniform(len(alive)) < 0.5
            sign = torch.where(forwards, 1.0, -1.0).to(start.x.dtype)
            begin = right.take(chains, alive).chosen(some.chains, forwards, left.take(chains, alive))
            hot = _of(temperature, alive)
            tree = self._subtree(run, some, begin, some.scaled(sign * _of(size, alive)), 2**depth, level[alive], hot)
            likely.index_add_(0, alive, tree.likely)
            leaves.index_add_(0, alive, tree.leaves)
            diverged[alive] |= tree.diverged
            old = log_weight[alive]
            taken = tree.whole & (tree.log_weight - old > run.uniform(len(alive)).log_())
            chosen.put_(chains, alive[taken], tree.chosen.take(some.chains, taken.nonzero().squeeze(1)))
            for end, which in ((right, forwards), (left, ~forwards)):
                end.put_(chains, alive[which], tree.end.take(some.chains, which.nonzero().squeeze(1)))
            log_weight[alive] = torch.logaddexp(old, tree.log_weight)
            summed = chains.take(total, alive) + tree.total
            chains.put_(total, alive, summed)
            turned = _turning(some.chains, chains.take(left.q, alive), chains.take(right.q, alive), summed)
            alive = alive[tree.whole & ~turned]
            if not len(alive):
                break
        acceptance = likely / leaves
        numbers = (
            {"acceptance_rate": acceptance.mean(), "n_leapfrog_steps": leaves.mean(), "divergent": diverged.float().mean()}
            if run.diagnostics
            else NOTHING
        )
        return chosen.x, chosen.energy, chosen.gradient, acceptance, numbers

    def _subtree(
        self, run: Run, mechanics: Mechanics, end: _End, step: Value, count: int, level: Tensor, temperature: Value
    ) -> _Tree:
        """``count`` leapfrog steps on from ``end``, which is moved along."""
        chains = mechanics.chains
        x, q, gradient = end.x, end.q, end.gradient
        chosen = _Point(x.clone(), torch.zeros_like(level), gradient.clone())
        total, log_weight = torch.zeros_like(q), torch.full_like(level, -torch.inf)
        likely, leaves = torch.zeros_like(level), torch.zeros_like(level)
        going, diverged = torch.ones_like(level, dtype=torch.bool), torch.zeros_like(level, dtype=torch.bool)
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        for leaf in range(count):
            mechanics.kick_(q, -0.5 * step, gradient)
            mechanics.drift_(x, step, q)
            energy, gradient = mechanics.energy_and_gradient(x)
            mechanics.kick_(q, -0.5 * step, gradient)
            log_new = (level - energy - mechanics.kinetic(q)) / temperature
            # NaN compares false: what is not a number is as far off as what is too high.
            near = (log_new > -self.max_energy_error) & (log_new < torch.inf)
            likely += torch.where(going & near, log_new.clamp(max=0.0).exp(), 0.0)
            leaves += going
            diverged |= going & ~near
            going = going & near
            both = torch.logaddexp(log_weight, log_new)
            pick = going & (log_new - both > run.uniform(len(level)).log_())
            chosen = chosen.replaced(chains, pick, x, energy, gradient)
            log_weight = torch.where(going, both, log_weight)
            total = total + q
            if leaf % 2 == 0:
                kept[(leaf >> 1).bit_count()] = (q.clone(), total)
            else:
                # Leaf 0b...0111 ends one subtree for each 1 at its end; their first leaves are the last ones kept.
                newest = (leaf >> 1).bit_count()
                ended = (~leaf & (leaf + 1)).bit_length() - 1
                for place in range(newest, newest - ended, -1):
                    first, before = kept[place]
                    going = going & ~_turning(chains, first, q, total - before + first)
                if not going.any():
                    break
        return _Tree(_End(x, q, gradient), chosen, log_weight, total, likely, leaves, going, diverged)


@dataclass(slots=True)
class _Point:
    """A state of each chain."""

    x: Tensor
    energy: Tensor
    gradient: Tensor

    def take(self, chains: Chains, index: Tensor) -> _Point:
        return _Point(chains.take(self.x, index), self.energy[index], chains.take(self.gradient, index))

    def put_(self, chains: Chains, index: Tensor, other: _Point) -> None:
        chains.put_(self.x, index, other.x)
        chains.put_(self.gradient, index, other.gradient)
        self.energy[index] = other.energy

    def replaced(self, chains: Chains, which: Tensor, x: Tensor, energy: Tensor, gradient: Tensor) -> _Point:
        return _Point(
            chains.choose(which, x, self.x),
            torch.where(which, energy, self.energy),
            chains.choose(which, gradient, self.gradient),
        )


@dataclass(slots=True)
class _End:
    """An end of each chain's tree: positions, momenta and gradient."""

    x: Tensor
    q: Tensor
    gradient: Tensor

    def take(self, chains: Chains, index: Tensor) -> _End:
        return _End(chains.take(self.x, index), chains.take(self.q, index), chains.take(self.gradient, index))

    def put_(self, chains: Chains, index: Tensor, other: _End) -> None:
        for own, new in ((self.x, other.x), (self.q, other.q), (self.gradient, other.gradient)):
            chains.put_(own, index, new)

    def chosen(self, chains: Chains, which: Tensor, other: _End) -> _End:
        return _End(
            chains.choose(which, self.x, other.x),
            chains.choose(which, self.q, other.q),
            chains.choose(which, self.gradient, other.gradient),
        )


@dataclass(slots=True)
class _Tree:
    """A subtree of each chain: its far end, the state chosen, the logarithm of its weight, and the sum of its momenta.

    ``likely`` and ``leaves`` are the sum of min(1, weight) over its states and their number; it is ``whole`` where it neither turned nor
    diverged.
    """

    end: _End
    chosen: _Point
    log_weight: Tensor
    total: Tensor
    likely: Tensor
    leaves: Tensor
    whole: Tensor
    diverged: Tensor


def _of(setting: Value, index: Tensor) -> Value:
    """The values of the chains ``index``."""
    return setting[index] if isinstance(setting, Tensor) and setting.ndim else setting


def _turning(chains: Chains, first: Tensor, last: Tensor, total: Tensor) -> Tensor:
    """Whether a way with these momenta at its ends, and this sum of all, has begun to turn back, (size,)."""
    along = total - 0.5 * (first + last)  # the trapezoid rule: the way from end to end
    return (chains.total(first * along) <= 0) | (chains.total(last * along) <= 0)
