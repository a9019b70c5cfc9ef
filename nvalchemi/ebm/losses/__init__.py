"""Losses of energy-based models: each holds its model, and works alone and under a strategy."""

from nvalchemi.ebm.losses.base import ScalarEnergyLoss
from nvalchemi.ebm.losses.contrastive import ContrastiveDivergence
from nvalchemi.ebm.losses.denoising import DenoisingScoreMatching
from nvalchemi.ebm.losses.discrepancy import EnergyDiscrepancy
from nvalchemi.ebm.losses.noise_contrastive import GaussianNoise, NoiseContrastiveEstimation, NoiseDistribution
from nvalchemi.ebm.losses.score_matching import ScoreMatching, SlicedScoreMatching

__all__ = [
    "ContrastiveDivergence",
    "DenoisingScoreMatching",
    "EnergyDiscrepancy",
    "GaussianNoise",
    "NoiseContrastiveEstimation",
    "NoiseDistribution",
    "ScalarEnergyLoss",
    "ScoreMatching",
    "SlicedScoreMatching",
]
