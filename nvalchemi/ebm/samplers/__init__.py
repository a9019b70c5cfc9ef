"""Samplers: many chains at once, by one call, from the energy of a model."""

from nvalchemi.ebm.samplers.adaptation import AdaptiveSampler
from nvalchemi.ebm.samplers.base import EnergySampler, Sampler
from nvalchemi.ebm.samplers.descent import GradientDescentSampler, NesterovSampler
from nvalchemi.ebm.samplers.flow import FlowSampler
from nvalchemi.ebm.samplers.hmc import HamiltonianMonteCarlo, MetropolisAdjustedLangevin
from nvalchemi.ebm.samplers.langevin import LangevinDynamics
from nvalchemi.ebm.samplers.nuts import NoUTurnSampler
from nvalchemi.ebm.samplers.riemannian import RiemannianManifoldHMC
from nvalchemi.ebm.samplers.swaps import SpeciesSwaps
from nvalchemi.ebm.samplers.underdamped import UnderdampedLangevin

__all__ = [
    "AdaptiveSampler",
    "EnergySampler",
    "FlowSampler",
    "GradientDescentSampler",
    "HamiltonianMonteCarlo",
    "LangevinDynamics",
    "MetropolisAdjustedLangevin",
    "NesterovSampler",
    "NoUTurnSampler",
    "RiemannianManifoldHMC",
    "Sampler",
    "SpeciesSwaps",
    "UnderdampedLangevin",
]
