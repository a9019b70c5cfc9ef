"""Losses of energy-based models: each holds its model, and works alone and under a strategy."""

from nvalchemi.ebm.losses.base import ScalarEnergyLoss
from nvalchemi.ebm.losses.denoising import DenoisingScoreMatching
from nvalchemi.ebm.losses.score_matching import ScoreMatching, SlicedScoreMatching

__all__ = [
    "DenoisingScoreMatching",
    "ScalarEnergyLoss",
    "ScoreMatching",
    "SlicedScoreMatching",
]
