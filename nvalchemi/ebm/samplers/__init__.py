"""Samplers: many chains at once, by one call, from the energy of a model."""

from nvalchemi.ebm.samplers.base import Sampler
from nvalchemi.ebm.samplers.langevin import LangevinDynamics

__all__ = ["LangevinDynamics", "Sampler"]
