"""Energy matching: a potential that carries noise to the data, and whose Boltzmann density is the data near them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nvalchemi.distributed import Manager, all_reduce, gather, members, single_process
from nvalchemi.ebm.conditions import repeated
from nvalchemi.ebm.couplings import Coupling
from nvalchemi.ebm.interpolants import Interpolant
from nvalchemi.ebm.losses.base import ScalarEnergyLoss, at_step, vectors
from nvalchemi.ebm.losses.contrastive import both_energies
from nvalchemi.ebm.losses.paths import Paths, mean_square
from nvalchemi.ebm.losses.times import Times, TimeWeight
from nvalchemi.ebm.samplers import LangevinDynamics
from nvalchemi.ebm.samples import normal_like
from nvalchemi.ebm.schedules import heat
from nvalchemi.ebm.scores import energy_gradient
from nvalchemi.errors import ConfigError
from nvalchemi.models.energy import EnergyModel
from nvalchemi.objective import Terms

Number = float | Callable[[int], float]


class EnergyMatching(ScalarEnergyLoss):
    """Energy matching.

    ::

        L = E w(t) |-∇E(x_t + σ z) - u_t|² / d + max(λ (E_data E(x) - E_chains E(x')), -cd_clamp)

    The flow term moves noise to the data along x_t with velocity u_t, and fades as w(t) = min(1, (1 - t) / (1 - flow_weight_cutoff)). The
    contrastive term makes exp(-E / ε_max) the density of the data: its chains are Langevin dynamics for ``n_langevin_steps`` steps of
    ``langevin_dt``, a part of them from noise with the temperature ε(t) rising at t = τ* from 0 to ε_max at t = 1, the others from data at
    ε_max; of the chains' energies the highest are left out (``cd_trim_fraction``). Balcerak et al., Energy matching, NeurIPS 2025.

    Samples begin at noise and follow Langevin dynamics with the ``noise_scale`` `nvalchemi.ebm.schedules.HeatingSchedule`.

    First train with ``lambda_cd=0``, where no chain is run, then with a positive one: set the attribute, or give a function of the step
    such as ``lambda step: 0.0 if step < 2000 else 2.0``, which alone is called with ``loss_fn(x, step=step)``.

    A call gives the loss, a scalar, in both phases; `negatives` gives ends of chains. Conditions, such as labels y, are told to the energy with
    the data and all along the chains: to a chain from data those of its beginning, to the chains from noise those of the rows that are
    left.

    Parameters
    ----------
    model
        The energy of vectors (batch, ...).
    sampler
        Langevin dynamics of the same energy in place of that with ``langevin_dt``; its temperature and noise scale are replaced.
    coupling, interpolant
        As in `FlowMatching`.
    t_sampler, t_p_mean, t_p_std, loss_weight_fn
        The law of the times and further weights of the flow term: see `nvalchemi.ebm.losses.times.Times`.
    sigma
        σ: a number or a function of the step.
    flow_weight_cutoff
        At 1 or more the flow term does not fade.
    lambda_cd
        λ: a number or a function of the step.
    epsilon_max, tau_star
        ε_max and τ*.
    n_langevin_steps, langevin_dt, noise_fraction
        Of the chains; ``noise_fraction`` of them begin at noise.
    cd_trim_fraction
        Part of the chains, those of the highest energies, that is left out.
    cd_clamp
        The contrastive term goes no lower than minus this; None for no bound.
    process_group
        Which chains are left out, and whether the bound holds, is a property of a batch: of the rank's own, or with a process group or
        manager of the ranks' together, which then all must call while the model is in training mode.
    """

    parts = ("flow", "contrastive")
    returns_samples = False  # a call would give one thing in one phase and two in the other

    def __init__(
        self,
        model: EnergyModel,
        sampler: LangevinDynamics | None = None,
        coupling: str | Coupling = "ot",
        interpolant: str | Interpolant = "linear",
        sigma: Number = 0.1,
        flow_weight_cutoff: float = 0.8,
        lambda_cd: Number = 2.0,
        epsilon_max: float = 0.15,
        tau_star: float = 0.8,
        n_langevin_steps: int = 200,
        langevin_dt: float = 0.01,
        noise_fraction: float = 0.5,
        cd_trim_fraction: float = 0.1,
        cd_clamp: float | None = 0.02,
        t_sampler: str | Callable[..., Tensor] = "uniform",
        t_p_mean: float = -1.2,
        t_p_std: float = 1.2,
        loss_weight_fn: TimeWeight | None = None,
        process_group: Any | Manager | None = None,
    ) -> None:
        super().__init__(model)
        good = epsilon_max >= 0 and 0 <= tau_star < 1 and n_langevin_steps >= 0 and langevin_dt > 0 and flow_weight_cutoff >= 0
        if not (good and 0 <= noise_fraction <= 1 and 0 <= cd_trim_fraction < 1 and (cd_clamp is None or cd_clamp >= 0)):
            raise ConfigError(
                "energy matching cannot be like this",
                found=f"epsilon_max={epsilon_max}, tau_star={tau_star}, n_langevin_steps={n_langevin_steps}, langevin_dt={langevin_dt}, "
                f"noise_fraction={noise_fraction}, cd_trim_fraction={cd_trim_fraction}, cd_clamp={cd_clamp}",
                needed="nothing below 0; tau_star and cd_trim_fraction below 1, noise_fraction at most 1, langevin_dt above 0",
            )
        given: Any = sampler
        if given is not None and (not isinstance(given, LangevinDynamics) or given.model is not model):
            raise ConfigError(
                "the sampler of energy matching is none of its energy",
                found=type(given).__name__,
                needed="LangevinDynamics of the same model",
            )
        self.sampler = LangevinDynamics(model, step_size=langevin_dt) if sampler is None else copy.copy(sampler)
        self.sampler.temperature = 1.0  # each chain's own comes with the noise
        self.paths = Paths(interpolant, coupling, Times(t_sampler, t_p_mean, t_p_std, loss_weight_fn=loss_weight_fn))
        self.sigma, self.flow_weight_cutoff, self.lambda_cd = sigma, flow_weight_cutoff, lambda_cd
        self.epsilon_max, self.tau_star, self.n_langevin_steps = epsilon_max, tau_star, n_langevin_steps
        self.noise_fraction, self.cd_trim_fraction, self.cd_clamp = noise_fraction, cd_trim_fraction, cd_clamp
        self.process_group = process_group

    def terms(
        self, model: Any, x: Any, *, generator: torch.Generator | None, step: int | None, conditions: Mapping[str, Any]
    ) -> Terms:
        vectors(x, self)
        weight = at_step("lambda_cd", self.lambda_cd, step)
        # The chains and their energies come before the flow term: sharded weights are let go by the latter's gradient.
        contrastive, negatives = None, None
        if weight:
            own = {name: value for name, value in conditions.items() if name != "x0"}
            negatives, told = self._chains(x, conditions.get("x0"), generator, own)
            contrastive = self._contrastive(*both_energies(model, x, negatives, own, told), weight)
        point = self.paths.draw(x, generator, conditions, together=self.model.training)
        at, sigma = point.x, at_step("sigma", self.sigma, step)
        if sigma:
            at = at.add(normal_like(at, generator), alpha=sigma)
        gradient = energy_gradient(model, at.detach(), create_graph=torch.is_grad_enabled(), **point.conditions)
        fading = self.flow_weight(point.t)
        weights = fading if point.weights is None else fading * point.weights
        return Terms({"flow": mean_square(gradient + point.velocity, weights), "contrastive": contrastive}, negatives)

    def flow_weight(self, t: Tensor) -> Tensor:
        """w(t), of the shape of ``t``."""
        if self.flow_weight_cutoff >= 1:
            return torch.ones_like(t)
        return ((1 - t) / (1 - self.flow_weight_cutoff)).clamp(0, 1)

    def temperature(self, t: float) -> float:
        """ε(t)."""
        return heat(t, self.epsilon_max, self.tau_star)

    def negatives(
        self,
        x: Tensor,
        x0: Tensor | None = None,
        generator: torch.Generator | None = None,
        conditions: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Give as many ends of chains as there is data: from noise (or some of ``x0``), then from data.

        Of conditions, (batch, ...) each, every row is told to one chain: to that which begins at the row's data, or else to one from noise.
        """
        return self._chains(x, x0, generator, conditions or {})[0]

    def _chains(
        self, x: Tensor, x0: Tensor | None, generator: torch.Generator | None, conditions: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Any]]:
        """The ends of the chains, and their conditions."""
        count = len(x)
        hot = round(count * self.noise_fraction)
        order = torch.randperm(count, generator=generator, device=x.device)
        told: dict[str, Any] = {name: value[order.to(value.device)] for name, value in repeated(conditions, count, 1).items()}
        noise = (
            normal_like(x[:hot], generator)
            if x0 is None
            else x0[torch.randperm(count, generator=generator, device=x.device)[:hot]]
        )
        table = x.new_full((max(self.n_langevin_steps, 1), count), self.epsilon_max)
        sweep = [self.temperature(step / self.n_langevin_steps) for step in range(self.n_langevin_steps)]
        table[: len(sweep), :hot] = x.new_tensor(sweep)[:, None]
        self.sampler.noise_scale = table.sqrt_().unbind().__getitem__  # a row of it at each step, a number a chain
        start = torch.cat([noise, x[order[hot:]]])
        return self.sampler.sample(x=start, n_steps=self.n_langevin_steps, generator=generator, **told), told

    def _contrastive(self, data: Tensor, chains: Tensor, weight: float) -> Tensor:
        """The contrastive term of each sample, (batch,)."""
        pooled = self.process_group is not None and self.model.training
        manager = members(self.process_group) if pooled else single_process(data.device)
        kept = self._kept(chains.detach(), manager)
        values = weight * (data - kept * chains)
        if self.cd_clamp is None:
            return values
        # what is left of the mean above the bound, times the number of samples
        left = all_reduce(values.detach().add(self.cd_clamp).sum(), manager)
        # where the bound holds the term is a constant; what is not finite stays
        return torch.where((left < 0) & (left > -math.inf), -self.cd_clamp, values)

    def _kept(self, energies: Tensor, manager: Manager) -> Tensor:
        """Weights of the chains with mean 1 over all of them: zero for those of the highest energies."""
        shares = gather(energies, manager)
        everything = torch.cat(shares)
        count = len(everything)
        left_out = int(self.cd_trim_fraction * count)
        if not left_out:
            return torch.ones_like(energies)
        weights = everything.new_full((count,), count / (count - left_out))
        weights.index_fill_(0, everything.argsort(stable=True)[count - left_out :], 0.0)
        start = sum(len(share) for share in shares[: manager.rank])
        return weights[start : start + len(energies)]
