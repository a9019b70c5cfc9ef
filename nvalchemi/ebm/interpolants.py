"""Paths from noise to data: x_t = α(t) x_1 + σ(t) x_0, with x_0 noise at t = 0 and x_1 data at t = 1."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from nvalchemi.errors import ConfigError

Coefficients = tuple[Tensor, Tensor, Tensor, Tensor]
Prediction = Literal["velocity", "score", "noise", "data"]


class Interpolant(ABC):
    """A path between a noise sample and a data sample.

    Time runs from noise (t = 0) to data (t = 1). A subclass gives the coefficients; everything else follows from them.
    """

    @abstractmethod
    def coefficients(self, t: Tensor) -> Coefficients:
        """Give α(t), dα/dt, σ(t) and dσ/dt, each of the shape of ``t``."""

    def at(self, t: Tensor, x: Tensor) -> Coefficients:
        """The coefficients of one time a sample, (batch,), shaped so that they multiply ``x``, (batch, ...)."""
        if t.shape != x.shape[:1]:
            raise ConfigError(
                "the times do not fit the samples", found=tuple(t.shape), needed=f"({x.shape[0]},), one time a sample"
            )
        return self.coefficients(t.reshape(-1, *[1] * (x.ndim - 1)))

    def interpolate(self, x0: Tensor, x1: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Give the point x_t of the path and its velocity u_t = dx_t/dt.

        Parameters
        ----------
        x0, x1
            Noise and data, both (batch, ...).
        t
            (batch,), from 0 (noise) to 1 (data).

        Returns
        -------
        tuple
            ``x_t`` and ``u_t``, both (batch, ...).

        Raises
        ------
        ConfigError
            Where the shapes do not fit: nothing is broadcast.
        """
        check_alike(x0, x1)
        alpha, d_alpha, sigma, d_sigma = self.at(t, x1)
        return alpha * x1 + sigma * x0, d_alpha * x1 + d_sigma * x0

    def velocity(self, prediction: Tensor, x: Tensor, t: Tensor, kind: Prediction) -> Tensor:
        """Give the velocity that belongs to a prediction at the points ``x``, both (batch, ...), and times ``t``, (batch,).

        ``kind`` says what was predicted: ``"velocity"``; ``"score"``, ∇ log p_t(x); ``"noise"``, the mean of x_0 given x; or
        ``"data"``, the mean of x_1 given x. Score and noise need t > 0, data needs t < 1.
        """
        if kind == "velocity":
            return prediction
        alpha, d_alpha, sigma, d_sigma = self.at(t, x)
        if kind == "data":
            return d_sigma / sigma * x + (d_alpha - alpha * d_sigma / sigma) * prediction
        noise = -sigma * prediction if kind == "score" else prediction
        if kind not in ("score", "noise"):
            raise ConfigError("unknown prediction", found=repr(kind), needed="velocity, score, noise or data")
        return d_alpha / alpha * x + (d_sigma - sigma * d_alpha / alpha) * noise

    def score(self, velocity: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Give the score ∇ log p_t(x) that belongs to a velocity; t < 1, where there is noise left.

        The noise expected at x is (α v - α' x) / (α σ' - σ α'), and the score is minus that over σ.
        """
        alpha, d_alpha, sigma, d_sigma = self.at(t, x)
        return (d_alpha * x - alpha * velocity) / (sigma * (alpha * d_sigma - sigma * d_alpha))


def column(t: Tensor, x: Tensor) -> Tensor:
    """One time a sample, (batch,), shaped so that it multiplies ``x``, (batch, ...)."""
    if t.shape != x.shape[:1]:
        raise ConfigError("the times do not fit the samples", found=tuple(t.shape), needed=f"({x.shape[0]},), one time a sample")
    return t.reshape(-1, *[1] * (x.ndim - 1))


def check_alike(x0: Tensor, x1: Tensor) -> None:
    """Noise and data have one shape: nothing is broadcast."""
    if x0.shape != x1.shape:
        raise ConfigError("noise and data differ in shape", found=tuple(x0.shape), needed=tuple(x1.shape))


class LinearInterpolant(Interpolant):
    """The straight path: α = t, σ = 1 - t, u = x_1 - x_0.

    Lipman et al., Flow matching for generative modeling, ICLR 2023; Liu et al., Rectified flow, ICLR 2023.
    """

    def coefficients(self, t: Tensor) -> Coefficients:
        one = torch.ones_like(t)
        return t, one, 1 - t, -one

    def interpolate(self, x0: Tensor, x1: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """As `Interpolant.interpolate`, in one operation each."""
        check_alike(x0, x1)
        return torch.lerp(x0, x1, column(t, x1)), x1 - x0


class CosineInterpolant(Interpolant):
    """The quarter circle: α = sin(π t / 2), σ = cos(π t / 2), so that α² + σ² = 1.

    Albergo and Vanden-Eijnden, Building normalizing flows with stochastic interpolants, ICLR 2023.
    """

    def coefficients(self, t: Tensor) -> Coefficients:
        angle = 0.5 * math.pi * t
        sine, cosine = torch.sin(angle), torch.cos(angle)
        return sine, 0.5 * math.pi * cosine, cosine, -0.5 * math.pi * sine


class VariancePreservingInterpolant(Interpolant):
    """The path of denoising diffusion with a linear schedule: log α = -s² (σ_max - σ_min) / 4 - s σ_min / 2 with s = 1 - t, and σ² = 1 - α².

    At t = 0 some data is left (α ≈ 0.0066 with the defaults). The velocity grows without bound towards t = 1, where dσ/dt is
    infinite: losses keep away from there with ``train_eps``. Song et al., Score-based generative modeling through stochastic
    differential equations, ICLR 2021.

    Parameters
    ----------
    sigma_min, sigma_max
        Rate of the noise at the data and at the noise end.
    """

    def __init__(self, sigma_min: float = 0.1, sigma_max: float = 20.0) -> None:
        if not 0 < sigma_min <= sigma_max:
            raise ConfigError("no such schedule", found=f"{sigma_min}, {sigma_max}", needed="0 < sigma_min <= sigma_max")
        self.sigma_min, self.sigma_max = sigma_min, sigma_max

    def coefficients(self, t: Tensor) -> Coefficients:
        s = 1 - t
        log_alpha = -0.25 * s.square() * (self.sigma_max - self.sigma_min) - 0.5 * s * self.sigma_min
        rate = 0.5 * s * (self.sigma_max - self.sigma_min) + 0.5 * self.sigma_min
        alpha = torch.exp(log_alpha)
        sigma = torch.sqrt(-torch.expm1(2 * log_alpha))  # 1 - α² would round to nothing near the data
        return alpha, alpha * rate, sigma, -alpha.square() * rate / sigma


INTERPOLANTS: dict[str, type[Interpolant]] = {
    "linear": LinearInterpolant,
    "cosine": CosineInterpolant,
    "vp": VariancePreservingInterpolant,
}


def get_interpolant(interpolant: str | Interpolant) -> Interpolant:
    """The interpolant of a name (``"linear"``, ``"cosine"``, ``"vp"``); an instance stays itself."""
    if isinstance(interpolant, Interpolant):
        return interpolant
    if interpolant not in INTERPOLANTS:
        raise ConfigError("unknown interpolant", found=repr(interpolant), needed=f"{', '.join(INTERPOLANTS)} or an Interpolant")
    return INTERPOLANTS[interpolant]()
