"""Integrators of ordinary and stochastic differential equations, by name or as objects."""

from nvalchemi.ebm.integrators.adaptive import (
    AdaptiveHeunIntegrator,
    AdaptiveIntegrator,
    Bosh3Integrator,
    Dopri5Integrator,
    Dopri8Integrator,
)
from nvalchemi.ebm.integrators.base import FixedStepIntegrator, Integrator, check_stochastic
from nvalchemi.ebm.integrators.fixed import (
    EulerMaruyamaIntegrator,
    HeunIntegrator,
    MidpointIntegrator,
    RK4Integrator,
    RK438Integrator,
    RungeKutta,
)
from nvalchemi.ebm.integrators.names import get_integrator
from nvalchemi.ebm.integrators.symplectic import LeapfrogIntegrator, SymplecticIntegrator, symplectic_integrator

__all__ = [
    "AdaptiveHeunIntegrator",
    "AdaptiveIntegrator",
    "Bosh3Integrator",
    "Dopri5Integrator",
    "Dopri8Integrator",
    "EulerMaruyamaIntegrator",
    "FixedStepIntegrator",
    "HeunIntegrator",
    "Integrator",
    "LeapfrogIntegrator",
    "MidpointIntegrator",
    "RK438Integrator",
    "RK4Integrator",
    "RungeKutta",
    "SymplecticIntegrator",
    "check_stochastic",
    "get_integrator",
    "symplectic_integrator",
]
