"""Losses of energy-based models: each holds its model, and works alone and under a strategy."""

from nvalchemi.ebm.losses.base import ScalarEnergyLoss, ScoreLoss
from nvalchemi.ebm.losses.contrastive import ContrastiveDivergence
from nvalchemi.ebm.losses.denoising import DenoisingScoreMatching
from nvalchemi.ebm.losses.discrepancy import EnergyDiscrepancy
from nvalchemi.ebm.losses.dropout import ConditionDropout
from nvalchemi.ebm.losses.energy_matching import EnergyMatching
from nvalchemi.ebm.losses.equilibrium import EquilibriumMatching
from nvalchemi.ebm.losses.flow import FlowMatching
from nvalchemi.ebm.losses.noise_contrastive import GaussianNoise, NoiseContrastiveEstimation, NoiseDistribution
from nvalchemi.ebm.losses.score_matching import ScoreMatching, SlicedScoreMatching

__all__ = [
    "ConditionDropout",
    "ContrastiveDivergence",
    "DenoisingScoreMatching",
    "EnergyDiscrepancy",
    "EnergyMatching",
    "EquilibriumMatching",
    "FlowMatching",
    "GaussianNoise",
    "NoiseContrastiveEstimation",
    "NoiseDistribution",
    "ScalarEnergyLoss",
    "ScoreLoss",
    "ScoreMatching",
    "SlicedScoreMatching",
]
