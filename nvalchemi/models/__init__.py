"""Energies: the facade, interatomic potentials, and how models are built from plain data."""

from nvalchemi.models.build import build_model, build_net, check_model, register_model, register_net
from nvalchemi.models.energy import EnergyModel
from nvalchemi.models.exported import load_model
from nvalchemi.models.mlp import MLPEnergy
from nvalchemi.models.painn import PaiNN
from nvalchemi.models.potential import InteratomicPotential, PotentialNet

__all__ = [
    "EnergyModel",
    "InteratomicPotential",
    "MLPEnergy",
    "PaiNN",
    "PotentialNet",
    "build_model",
    "build_net",
    "check_model",
    "load_model",
    "register_model",
    "register_net",
]
