"""Energies without parameters whose statistics are known: what samplers and losses are measured against."""

from nvalchemi.ebm.toy.base import Statistics, ToyEnergy
from nvalchemi.ebm.toy.gaussians import FunnelModel, GaussianMixtureModel, GaussianModel, HarmonicModel
from nvalchemi.ebm.toy.landscapes import AckleyModel, DoubleWellModel, MuellerBrownModel, RastriginModel, RosenbrockModel

__all__ = [
    "AckleyModel",
    "DoubleWellModel",
    "FunnelModel",
    "GaussianMixtureModel",
    "GaussianModel",
    "HarmonicModel",
    "MuellerBrownModel",
    "RastriginModel",
    "RosenbrockModel",
    "Statistics",
    "ToyEnergy",
]
