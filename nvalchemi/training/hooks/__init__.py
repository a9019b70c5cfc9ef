"""The hooks: one a file, each with its state and a test that it resumes."""

from nvalchemi.training.hooks.activation_checkpoint import ActivationCheckpointHook
from nvalchemi.training.hooks.checkpoint import CheckpointHook
from nvalchemi.training.hooks.clip import GradientClipHook
from nvalchemi.training.hooks.compile import CompileHook
from nvalchemi.training.hooks.ddp import DDPHook
from nvalchemi.training.hooks.deepspeed import DeepSpeedHook
from nvalchemi.training.hooks.early_stop import EarlyStopHook
from nvalchemi.training.hooks.ema import EMAHook, update_ema
from nvalchemi.training.hooks.fsdp2 import FSDP2Hook
from nvalchemi.training.hooks.metrics import MetricsHook
from nvalchemi.training.hooks.pcd_checkpoint import PCDCheckpointHook
from nvalchemi.training.hooks.precision import MixedPrecisionHook
from nvalchemi.training.hooks.profiler import ProfilerHook
from nvalchemi.training.hooks.progress import ProgressHook
from nvalchemi.training.hooks.signals import StopOnSignalHook
from nvalchemi.training.hooks.spike import SpikeHook
from nvalchemi.training.hooks.tensorboard import TensorBoardHook
from nvalchemi.training.hooks.time_budget import TimeBudgetHook

__all__ = [
    "ActivationCheckpointHook",
    "CheckpointHook",
    "CompileHook",
    "DDPHook",
    "DeepSpeedHook",
    "EMAHook",
    "EarlyStopHook",
    "FSDP2Hook",
    "GradientClipHook",
    "MetricsHook",
    "MixedPrecisionHook",
    "PCDCheckpointHook",
    "ProfilerHook",
    "ProgressHook",
    "SpikeHook",
    "StopOnSignalHook",
    "TensorBoardHook",
    "TimeBudgetHook",
    "update_ema",
]
