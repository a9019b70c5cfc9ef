"""Integrators of ordinary and stochastic differential equations, by name or as objects."""

from nvalchemi.ebm.integrators.symplectic import LeapfrogIntegrator, SymplecticIntegrator, symplectic_integrator

__all__ = ["LeapfrogIntegrator", "SymplecticIntegrator", "symplectic_integrator"]
