"""Integrators by name."""

from __future__ import annotations

from typing import Any

from nvalchemi.ebm.integrators.adaptive import AdaptiveHeunIntegrator, Bosh3Integrator, Dopri5Integrator, Dopri8Integrator
from nvalchemi.ebm.integrators.base import Integrator
from nvalchemi.ebm.integrators.fixed import (
    EulerMaruyamaIntegrator,
    HeunIntegrator,
    MidpointIntegrator,
    RK4Integrator,
    RK438Integrator,
)
from nvalchemi.ebm.integrators.implicit import BackwardEulerMaruyamaIntegrator
from nvalchemi.errors import ConfigError

INTEGRATORS: dict[str, type[Integrator]] = {
    "euler": EulerMaruyamaIntegrator,
    "euler_maruyama": EulerMaruyamaIntegrator,
    "backward_euler_maruyama": BackwardEulerMaruyamaIntegrator,
    "heun": HeunIntegrator,
    "midpoint": MidpointIntegrator,
    "rk4": RK4Integrator,
    "rk4_38": RK438Integrator,
    "rk438": RK438Integrator,
    "adaptive_heun": AdaptiveHeunIntegrator,
    "bosh3": Bosh3Integrator,
    "dopri5": Dopri5Integrator,
    "dopri8": Dopri8Integrator,
}


def get_integrator(integrator: str | Integrator, **settings: Any) -> Integrator:
    """The integrator of a name, made with ``settings``; an instance stays itself.

    Raises
    ------
    ConfigError
        For a name that is not there.
    """
    if isinstance(integrator, Integrator):
        return integrator
    if integrator not in INTEGRATORS:
        raise ConfigError("unknown integrator", found=repr(integrator), needed=f"{', '.join(INTEGRATORS)} or an Integrator")
    return INTEGRATORS[integrator](**settings)
