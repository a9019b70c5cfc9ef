"""Losses between predictions and labels: energy, forces, stress, and their weighted sums."""

from __future__ import annotations

from nvalchemi.training.losses.base import Loss, Term
from nvalchemi.training.losses.compose import ComposedLoss
from nvalchemi.training.losses.energy import EnergyHuberLoss, EnergyMAELoss, EnergyMSELoss
from nvalchemi.training.losses.force import ForceHuberLoss, ForceL2NormLoss, ForceMAELoss, ForceMSELoss
from nvalchemi.training.losses.stress import StressHuberLoss, StressMAELoss, StressMSELoss
from nvalchemi.training.losses.weights import ConstantWeight, CosineWeight, LinearWeight, PiecewiseWeight

__all__ = [
    "ComposedLoss",
    "ConstantWeight",
    "CosineWeight",
    "EnergyHuberLoss",
    "EnergyMAELoss",
    "EnergyMSELoss",
    "ForceHuberLoss",
    "ForceL2NormLoss",
    "ForceMAELoss",
    "ForceMSELoss",
    "LinearWeight",
    "Loss",
    "PiecewiseWeight",
    "StressHuberLoss",
    "StressMAELoss",
    "StressMSELoss",
    "Term",
]
