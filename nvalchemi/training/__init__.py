"""Training: a strategy, its hooks, its losses."""

from nvalchemi.training.context import Progress, TrainContext
from nvalchemi.training.evaluation import evaluate
from nvalchemi.training.hook import Every, Hook, PeriodicHook, Scope, around, on
from nvalchemi.training.losses import (
    ConstantWeight,
    CosineWeight,
    EnergyHuberLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceHuberLoss,
    ForceL2NormLoss,
    ForceMAELoss,
    ForceMSELoss,
    LinearWeight,
    PiecewiseWeight,
    StressHuberLoss,
    StressMAELoss,
    StressMSELoss,
)
from nvalchemi.training.optimizers import OptimizerConfig
from nvalchemi.training.schedules import warmup, warmup_cosine
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage
from nvalchemi.training.strategy import TrainingStrategy
from nvalchemi.training.update import ScaledUpdate, Update
from nvalchemi.training.validation import ValidationConfig

__all__ = [
    "ConstantWeight",
    "CosineWeight",
    "EnergyHuberLoss",
    "EnergyMAELoss",
    "EnergyMSELoss",
    "Every",
    "ForceHuberLoss",
    "ForceL2NormLoss",
    "ForceMAELoss",
    "ForceMSELoss",
    "Hook",
    "LinearWeight",
    "OptimizerConfig",
    "Order",
    "PeriodicHook",
    "PiecewiseWeight",
    "Progress",
    "ScaledUpdate",
    "Scope",
    "StressHuberLoss",
    "StressMAELoss",
    "StressMSELoss",
    "TrainContext",
    "TrainingSpan",
    "TrainingStage",
    "TrainingStrategy",
    "Update",
    "ValidationConfig",
    "around",
    "evaluate",
    "on",
    "warmup",
    "warmup_cosine",
]
