"""Hamiltonian Monte Carlo on a manifold: a mass that depends on the position."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nvalchemi.ebm.chains import Chains, DenseChains
from nvalchemi.ebm.integrators import GeneralisedLeapfrogIntegrator, generalised_integrator
from nvalchemi.ebm.samplers.adaptation import AdaptiveSampler, DualAveraging, Way
from nvalchemi.ebm.samplers.base import NOTHING, Run, check_start
from nvalchemi.ebm.settings import Setting, Value, checked, spread, value
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel
from nvalchemi.models.gradient import differentiable, input_gradient, leaf


class RiemannianManifoldHMC(AdaptiveSampler):
    """Hamiltonian Monte Carlo with a metric G(x) for a mass: H = E / T + pᵀ G⁻¹ p / 2 + log det G / 2.

    Draws exactly from exp(-E / T). The generalised leapfrog method keeps volumes and can be reversed, as long as its two implicit
    equations are solved; a chain for which they are not, after ``n_fixed_point_steps`` iterations, stays where it is. Girolami and
    Calderhead, Journal of the Royal Statistical Society B 73, 123 (2011).

    A leapfrog step costs up to 2 ``n_fixed_point_steps`` metrics and, for each of those of the momenta, their derivative. Diagnostics
    have ``"acceptance_rate"``, the share of the chains that moved, and ``"unsolved"``, the share that stayed for want of a solution.

    Parameters
    ----------
    model
        The energy of vectors (batch, dim).
    metric_fn
        From positions (batch, dim) to metrics (batch, dim, dim), symmetric and positive definite, differentiable by autograd.
    step_size
        The leapfrog step: a number, one number a chain (batch,), or a function of the step that gives either.
    n_leapfrog_steps
        Leapfrog steps a way.
    n_fixed_point_steps, tolerance
        Of the integrator, where it is given by name.
    temperature
        T: as ``step_size``.
    integrator
        ``"generalised_leapfrog"`` or a `nvalchemi.ebm.integrators.GeneralisedLeapfrogIntegrator`.
    """

    def __init__(
        self,
        model: EnergyModel,
        metric_fn: Callable[[Tensor], Tensor],
        step_size: Setting = 1e-1,
        n_leapfrog_steps: int = 5,
        n_fixed_point_steps: int = 8,
        tolerance: float | None = None,
        temperature: Setting = 1.0,
        integrator: str | GeneralisedLeapfrogIntegrator = "generalised_leapfrog",
    ) -> None:
        super().__init__(model, step_size)
        if n_leapfrog_steps < 1:
            raise ConfigError("no such way", found=f"n_leapfrog_steps={n_leapfrog_steps}", needed="at least 1")
        self.metric_fn, self.n_leapfrog_steps = metric_fn, n_leapfrog_steps
        self.integrator = generalised_integrator(integrator, n_fixed_point_steps=n_fixed_point_steps, tolerance=tolerance)
        self.temperature = checked("temperature", temperature, positive=True)

    @property
    def even_calls(self) -> bool:
        """See `Sampler.even_calls`."""
        return False

    def ways(self, run: Run, average: DualAveraging | None) -> Iterator[Way]:
        """See `AdaptiveSampler.ways`."""
        chains, x = run.chains, run.chains.start
        if x.ndim != 2 or not isinstance(chains, DenseChains):
            raise ConfigError(
                "a metric is one of vectors", found=f"{type(chains).__name__} {tuple(x.shape)}", needed="(batch, dim)"
            )
        check_start(chains.energy(self.energy, x), type(self).__name__)
        for step in range(run.n_steps):
            size = spread(value("step_size", self.step_size if average is None else average.current, step, chains), chains)
            h = _Hamiltonian(self, chains, value("temperature", self.temperature, step, chains, positive=True))
            with torch.autocast(x.device.type, enabled=False):  # which is for the energy
                p = (h.factor(x) @ run.normal(x).unsqueeze(2)).squeeze(2)
            before = h.hamiltonian(x, p)
            there, p, solved = self.integrator.way(h.slope, h.velocity, x, p, size, self.n_leapfrog_steps)
            log_ratio = torch.where(solved, before - h.hamiltonian(there, p), -torch.inf)
            accepted = (log_ratio > run.uniform().log_()) & (log_ratio < torch.inf)
            x = chains.choose(accepted, there, x)
            numbers = {"acceptance_rate": accepted.float().mean(), "unsolved": 1.0 - solved.float().mean()}
            yield x, log_ratio, numbers if run.diagnostics else NOTHING


class _Hamiltonian:
    """The Hamiltonian of all chains at a temperature."""

    def __init__(self, sampler: RiemannianManifoldHMC, chains: Chains, temperature: Value) -> None:
        self._sampler, self._chains, self._temperature = sampler, chains, temperature

    def factor(self, x: Tensor) -> Tensor:
        """The lower factor of the metric (batch, dim, dim); NaN where it is not positive definite."""
        metric = self._sampler.metric_fn(x)
        if metric.ndim != 3 or metric.shape[0] not in (1, len(x)) or metric.shape[1:] != (x.shape[1], x.shape[1]):
            raise ConfigError(
                "metric_fn gives not one matrix a chain",
                found=f"shape {tuple(metric.shape)}",
                needed=f"{(len(x), x.shape[1], x.shape[1])}",
                fix="metric.expand(len(x), -1, -1) where it is the same for all",
            )
        factor, failed = torch.linalg.cholesky_ex(metric)
        return torch.where((failed == 0)[:, None, None], factor, torch.nan)

    def hamiltonian(self, x: Tensor, p: Tensor) -> Tensor:
        """H (batch,)."""
        factor = self.factor(x)
        white = torch.linalg.solve_triangular(factor, p.unsqueeze(2), upper=False).squeeze(2)
        volume = factor.diagonal(dim1=1, dim2=2).log().sum(1)
        return self._chains.energy(self._sampler.model, x) / self._temperature + 0.5 * white.square().sum(1) + volume

    def slope(self, x: Tensor, p: Tensor) -> Tensor:
        """The derivative of H with respect to the positions."""
        with differentiable():
            at = leaf(x)
            return input_gradient(self.hamiltonian(at, p.detach()), at)

    def velocity(self, x: Tensor, p: Tensor) -> Tensor:
        """G⁻¹ p."""
        return torch.cholesky_solve(p.unsqueeze(2), self.factor(x)).squeeze(2)
