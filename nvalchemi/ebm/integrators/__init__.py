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
from nvalchemi.ebm.integrators.implicit import BackwardEulerMaruyamaIntegrator
from nvalchemi.ebm.integrators.names import get_integrator
from nvalchemi.ebm.integrators.symplectic import (
    GeneralisedLeapfrogIntegrator,
    LeapfrogIntegrator,
    SymplecticIntegrator,
    generalised_integrator,
    symplectic_integrator,
)

__all__ = [
    "AdaptiveHeunIntegrator",
    "AdaptiveIntegrator",
    "BackwardEulerMaruyamaIntegrator",
    "Bosh3Integrator",
    "Dopri5Integrator",
    "Dopri8Integrator",
    "EulerMaruyamaIntegrator",
    "FixedStepIntegrator",
    "GeneralisedLeapfrogIntegrator",
    "HeunIntegrator",
    "Integrator",
    "LeapfrogIntegrator",
    "MidpointIntegrator",
    "RK438Integrator",
    "RK4Integrator",
    "RungeKutta",
    "SymplecticIntegrator",
    "check_stochastic",
    "generalised_integrator",
    "get_integrator",
    "symplectic_integrator",
]
