"""Samples along a learned flow: from noise to data by an ordinary or a stochastic differential equation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nvalchemi.ebm.chains import DenseChains
from nvalchemi.ebm.fields import output_of
from nvalchemi.ebm.integrators import AdaptiveIntegrator, Integrator, check_stochastic, get_integrator
from nvalchemi.ebm.interpolants import Interpolant, Prediction, get_interpolant
from nvalchemi.ebm.record import Progress
from nvalchemi.ebm.samplers.base import NOTHING, Run, Sampler
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel

Mode = Literal["ode", "sde"]
LastStep = Literal["mean", "euler", "tweedie"]

DIFFUSIONS: dict[str, Callable[[float, tuple[float, float, float, float], float], float]] = {
    "constant": lambda t, c, norm: norm,
    "sigma": lambda t, c, norm: norm * c[2],
    "SBDM": lambda t, c, norm: norm * (c[1] / c[0] * c[2] ** 2 - c[2] * c[3]),
    "linear": lambda t, c, norm: norm * (1.0 - t),
    "decreasing": lambda t, c, norm: 0.25 * (norm * math.cos(math.pi * t) + 1.0) ** 2,
    "increasing-decreasing": lambda t, c, norm: norm * math.sin(math.pi * t) ** 2,
}
"""D(t), given t, the interpolant's (α, α', σ, σ') there, and the norm. Ma et al., SiT, arXiv:2401.08740, section 3.4."""

EDGE = 1e-3
"""How far from an end of [0, 1] a flow stays where what it needs is infinite there, unless told otherwise."""


class FlowSampler(Sampler):
    """Follows a flow from noise (t = 0) to data (t = 1).

    By the probability flow x' = v(x, t), or, with the same distribution at every time, by the stochastic equation::

        dx = (v(x, t) + D(t) s(x, t)) dt + sqrt(2 D(t)) dW,        s the score of x at time t

    Velocity and score come from what the model predicts, by way of the interpolant. Song et al., ICLR 2021; Albergo et al.,
    arXiv:2303.08797; Ma et al., arXiv:2401.08740.

    Parameters
    ----------
    model
        A module called as ``model(x, t, **conditions)`` with x (batch, ...) and t (batch,), which gives a tensor of the shape of x, or a
        tuple that begins with it. An `EnergyModel` takes no time, and stands for minus its gradient.
    mode
        ``"ode"`` or ``"sde"``.
    interpolant
        ``"linear"``, ``"cosine"``, ``"vp"``, or a `nvalchemi.ebm.interpolants.Interpolant`: the path that the model was trained on.
    prediction
        What the model gives: ``"velocity"``, ``"score"``, ``"noise"`` (the mean of x_0 given x) or ``"data"`` (that of x_1).
    integrator
        A name or object of `nvalchemi.ebm.integrators`; ``"dopri5"`` or, for the stochastic equation, ``"heun"`` if not given.
    diffusion_form, diffusion_norm
        D(t) of the stochastic equation and its scale, one of `DIFFUSIONS`.
    last_step, last_step_size
        The stochastic equation ends this much before t = 1, where its score has no bound, with one step without noise: ``"mean"`` along
        its drift, ``"euler"`` along v, ``"tweedie"`` to the mean of the data given x; or None. ``"mean"`` goes by D and has no noise, so it
        leaves samples too near each other where D does not vanish at t = 1: not for ``diffusion_form="constant"``.
    sample_eps
        How far from t = 0 and t = 1 to stay. If not given, `EDGE` at an end where the model's prediction gives no finite velocity or
        score, and 0 at the others.
    negate_velocity
        The model predicts minus the velocity, as equilibrium matching does.
    time_invariant
        Tell the model t = 0 always, as `nvalchemi.ebm.losses.EquilibriumMatching` does when it trains. If not given, where
        ``negate_velocity``: a field that `nvalchemi.ebm.losses.FlowMatching` trained with ``negate_velocity`` knows times, and needs False.
    rtol, atol
        Of an adaptive integrator given by name.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        mode: Mode = "ode",
        interpolant: str | Interpolant = "linear",
        prediction: Prediction = "velocity",
        integrator: str | Integrator | None = None,
        diffusion_form: str = "sigma",
        diffusion_norm: float = 1.0,
        last_step: LastStep | None = "mean",
        last_step_size: float = 0.04,
        sample_eps: float | None = None,
        negate_velocity: bool = False,
        time_invariant: bool | None = None,
        rtol: float = 1e-3,
        atol: float = 1e-6,
    ) -> None:
        super().__init__(model)
        for name, found, allowed in (
            ("mode", mode, get_args(Mode)),
            ("prediction", prediction, get_args(Prediction)),
            ("diffusion_form", diffusion_form, tuple(DIFFUSIONS)),
            ("last_step", last_step, (*get_args(LastStep), None)),
        ):
            if found not in allowed:
                raise ConfigError(f"unknown {name}", found=repr(found), needed=", ".join(map(str, allowed)))
        if not (0.0 < last_step_size < 1.0 and diffusion_norm >= 0.0 and (sample_eps is None or 0.0 <= sample_eps < 0.5)):
            raise ConfigError(
                "no such flow", found=f"last_step_size={last_step_size}, diffusion_norm={diffusion_norm}, sample_eps={sample_eps}"
            )
        scheme = integrator if integrator is not None else ("dopri5" if mode == "ode" else "heun")
        adaptive = scheme in ("adaptive_heun", "bosh3", "dopri5", "dopri8")
        self.integrator = get_integrator(scheme, **({"rtol": rtol, "atol": atol} if adaptive else {}))
        if mode == "sde":
            check_stochastic(self.integrator)
        self.mode, self.interpolant, self.prediction = mode, get_interpolant(interpolant), prediction
        self.diffusion_form, self.diffusion_norm = diffusion_form, float(diffusion_norm)
        self.last_step, self.last_step_size = last_step, float(last_step_size)
        self.sample_eps, self.negate_velocity = sample_eps, negate_velocity
        self.time_invariant = negate_velocity if time_invariant is None else time_invariant

    @property
    def even_calls(self) -> bool:
        """See `Sampler.even_calls`; an adaptive integrator chooses its steps."""
        return self.integrator.even_calls

    @property
    def energy_model(self) -> EnergyModel | None:
        """See `Sampler.energy_model`; a flow has no energy at its times."""
        return None

    def sample(
        self,
        x: Any = None,
        dim: int | tuple[int, ...] | None = None,
        n_steps: int = 50,
        n_samples: int = 1,
        thin: int = 1,
        return_trajectory: bool = False,
        return_diagnostics: bool = False,
        *,
        generator: torch.Generator | None = None,
        progress: bool | Progress = False,
        reverse: bool = False,
        **conditions: Any,
    ) -> Any:
        """Follow the flow.

        Parameters
        ----------
        x, dim, n_samples
            Where it begins: noise, or data where ``reverse``; standard normal numbers if ``x`` is not given.
        n_steps
            Steps of equal length in time. An adaptive integrator takes its own, and keeps to these only where states on the way are
            wanted.
        thin, return_trajectory, return_diagnostics, generator, progress
            As in `Sampler.sample`; the generator serves the stochastic equation.
        reverse
            From data to noise, by the ordinary equation.
        **conditions
            Handed to the model.

        Returns
        -------
        Tensor or (Tensor, dict)
            As `Sampler.sample` gives it.
        """
        if reverse and self.mode == "sde":
            raise ConfigError(
                "only the ordinary equation can be followed backwards", found="mode='sde'", fix="FlowSampler(mode='ode')"
            )
        return self._sample(
            x,
            dim,
            n_steps,
            n_samples,
            thin,
            return_trajectory,
            return_diagnostics,
            generator=generator,
            progress=progress,
            conditions=conditions,
            options={"reverse": reverse},
        )

    def prior_logp(self, z: Tensor) -> Tensor:
        """The logarithm of the density of noise ``z`` (batch, ...), standard normal, (batch,)."""
        flat = z.flatten(1)
        return -0.5 * (flat.square().sum(1) + flat.shape[1] * math.log(2 * math.pi))

    def interval(self) -> tuple[float, float]:
        """Where in [0, 1] the flow begins and ends, the last step without noise not counted."""
        alpha, _, sigma, _ = self._coefficients(0.0)
        velocity = self.prediction == "velocity"
        start = alpha == 0.0 and (self.prediction in ("score", "noise") or (self.mode == "sde" and self.diffusion_form == "SBDM"))
        alpha, d_alpha, sigma, d_sigma = self._coefficients(1.0)
        end = (sigma == 0.0 and (not velocity or self.mode == "sde")) or not (math.isfinite(d_alpha) and math.isfinite(d_sigma))
        edge = EDGE if self.sample_eps is None else self.sample_eps
        free = 0.0 if self.sample_eps is None else self.sample_eps
        last = edge if end else free
        if self.mode == "sde" and self.last_step is not None:
            last = max(last, self.last_step_size)
        return (edge if start else free), 1.0 - last

    def step_named(self, step: int) -> object:
        """See `Sampler.step_named`."""
        return f"of {type(self.integrator).__name__} from t = {self.interval()[0]:g} to {self.interval()[1]:g}"

    def moves(self, run: Run) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """See `Sampler.moves`."""
        if not isinstance(run.chains, DenseChains):
            raise ConfigError("a flow carries tensors", found=type(run.chains).__name__, needed="samples (batch, ...)")
        if not run.n_steps:
            return
        conditions, (start, stop) = run.chains.conditions, self.interval()
        if run.options["reverse"]:
            start, stop = stop, start
        last = self.mode == "sde" and self.last_step is not None
        if last and run.n_steps < 2:
            raise ConfigError(
                "no step is left beside the last one", found=f"n_steps={run.n_steps}", fix="n_steps=2, or last_step=None"
            )
        count = 1 if isinstance(self.integrator, AdaptiveIntegrator) and not run.watched else run.n_steps - last
        times = [start + (stop - start) * i / count for i in range(count)] + [stop]

        def drift(x: Tensor, t: float) -> Tensor:
            velocity, given = self._velocity(x, t, conditions)
            return velocity if self.mode == "ode" else self._with_score(x, t, velocity, given)

        def increment(x: Tensor, t: float, h: float) -> Tensor:
            return run.normal(x).mul_(math.sqrt(2.0 * self._diffusion(t + 0.5 * h) * h))

        x = run.chains.start
        for state in self.integrator.path(drift, x, times, increment if self.mode == "sde" else None):
            x = state
            if not last or run.watched:
                yield x, NOTHING
        if last:
            velocity, given = self._velocity(x, stop, conditions)
            if self.last_step == "tweedie":
                alpha, d_alpha, sigma, d_sigma = self._coefficients(stop)
                x = (d_sigma * x - sigma * velocity) / (alpha * d_sigma - sigma * d_alpha)
            else:
                slope = velocity if self.last_step == "euler" else self._with_score(x, stop, velocity, given)
                x = x.add(slope, alpha=1.0 - stop)
            yield x, NOTHING

    def _coefficients(self, t: float) -> tuple[float, float, float, float]:
        """(α, α', σ, σ') at one time."""
        alpha, d_alpha, sigma, d_sigma = (float(c) for c in self.interpolant.coefficients(torch.tensor(t, dtype=torch.float64)))
        return alpha, d_alpha, sigma, d_sigma

    def _velocity(self, x: Tensor, t: float, conditions: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The velocity, and what the model gave."""
        times = x.new_full((x.shape[0],), t)
        if isinstance(self.model, EnergyModel):
            given = -self.model.gradient(x, **conditions)
        else:
            given = output_of(self.model(x, torch.zeros_like(times) if self.time_invariant else times, **conditions), x)
        if self.negate_velocity:
            given = -given
        return self.interpolant.velocity(given, x, times, self.prediction), given

    def _with_score(self, x: Tensor, t: float, velocity: Tensor, given: Tensor) -> Tensor:
        """The drift of the stochastic equation."""
        diffusion = self._diffusion(t)
        if self.prediction == "score":
            return velocity + diffusion * given
        if self.prediction == "noise":
            return velocity - diffusion / self._coefficients(t)[2] * given
        return velocity + diffusion * self.interpolant.score(velocity, x, x.new_full((x.shape[0],), t))

    def _diffusion(self, t: float) -> float:
        return DIFFUSIONS[self.diffusion_form](t, self._coefficients(t), self.diffusion_norm)
