"""No hook lands without a resume test: one entry here for every hook of the package."""

import importlib
import inspect
import pkgutil

import pytest
import torch

from nvalchemi.testing import assert_resumes
from nvalchemi.training import Every, Hook, OptimizerConfig, ValidationConfig, hooks
from nvalchemi.training.hooks import (
    ActivationCheckpointHook,
    CheckpointHook,
    CompileHook,
    DDPHook,
    DeepSpeedHook,
    EarlyStopHook,
    EMAHook,
    FSDP2Hook,
    GradientClipHook,
    MetricsHook,
    MixedPrecisionHook,
    PCDCheckpointHook,
    ProfilerHook,
    ProgressHook,
    SpikeHook,
    StopOnSignalHook,
    TensorBoardHook,
    TimeBudgetHook,
)
from tests.training.hooks.runs import batches, network, strategy
from tests.training.hooks.test_pcd_checkpoint import DATA, chains

MODULES = [importlib.import_module(f"{hooks.__name__}.{module.name}") for module in pkgutil.iter_modules(hooks.__path__)]
EVERY_HOOK = {
    value
    for module in MODULES
    for value in vars(module).values()
    if inspect.isclass(value) and issubclass(value, Hook) and value.__module__ == module.__name__
}
CLOCKS = ("hooks.time_budget.elapsed",)

#: hook -> the hook lists (of a folder) with which a run must resume bit for bit
CASES = {
    ActivationCheckpointHook: [lambda folder: [ActivationCheckpointHook(torch.nn.Linear)]],
    CheckpointHook: [
        lambda folder: [CheckpointHook(folder / "checkpoints", Every(steps=3), keep_last=2, keep_best=1)],
        lambda folder: [CheckpointHook(folder / "checkpoints", Every(steps=2), keep_last=2, async_save=True)],
    ],
    CompileHook: [lambda folder: [CompileHook(backend="eager")]],
    DDPHook: [lambda folder: [DDPHook()]],  # in one process; of two ranks: tests/multiprocess
    FSDP2Hook: [lambda folder: [FSDP2Hook()]],
    DeepSpeedHook: [lambda folder: [DeepSpeedHook(stage=2)]],  # in one process; of two ranks: tests/multiprocess
    EMAHook: [
        lambda folder: [EMAHook(0.9)],
        lambda folder: [EMAHook(0.99, bias_corrected=True), EMAHook(0.5, use_for_validation=False, name="fast")],
        lambda folder: [EMAHook([0.5, 0.99], warmup=True, validation_decay=0.99)],
    ],
    EarlyStopHook: [lambda folder: [EarlyStopHook(patience=100, min_delta=1e-6)]],
    GradientClipHook: [lambda folder: [GradientClipHook(0.1)]],
    MetricsHook: [lambda folder: [MetricsHook(folder, Every(steps=4))]],
    MixedPrecisionHook: [
        lambda folder: [MixedPrecisionHook("bf16")],
        lambda folder: [MixedPrecisionHook("fp16", init_scale=2.0**24, growth_interval=2)],
    ],
    ProfilerHook: [lambda folder: [ProfilerHook(folder / "profile", wait=1, warmup=1, active=2)]],
    ProgressHook: [lambda folder: [ProgressHook()]],
    SpikeHook: [lambda folder: [SpikeHook(factor=1.2, window=6, max_consecutive=50)]],
    StopOnSignalHook: [lambda folder: [StopOnSignalHook()]],
    TensorBoardHook: [lambda folder: [TensorBoardHook(folder / "events", Every(steps=4))]],
    TimeBudgetHook: [lambda folder: [TimeBudgetHook(1e6)]],  # with a shape the clock sets the rate, and no two runs are equal
}

#: hooks that need a run of another kind, with the test in which they resume
ELSEWHERE = {PCDCheckpointHook: "test_chains_resume"}


def test_every_hook_is_here():
    missing = sorted(hook.__name__ for hook in EVERY_HOOK - CASES.keys() - ELSEWHERE.keys())
    assert all(callable(globals()[test]) for test in ELSEWHERE.values())
    assert not missing, f"no resume test for {', '.join(missing)}: add an entry to CASES"


def test_every_hook_is_exported():
    assert {hook.__name__ for hook in EVERY_HOOK} <= set(hooks.__all__)


def factory(make):
    def build(folder):
        config = OptimizerConfig(torch.optim.AdamW, {"lr": 1e-2}, torch.optim.lr_scheduler.StepLR, {"step_size": 4})
        validation = ValidationConfig(validation_data=batches(2, seed=7), every_n_steps=3)
        return strategy(network(), make(folder), optimizer_configs=config, validation_config=validation), batches(5)

    return build


@pytest.mark.parametrize("stop_at", [4, 6])
@pytest.mark.parametrize(
    "make", [pytest.param(make, id=f"{hook.__name__}-{i}") for hook, makes in CASES.items() for i, make in enumerate(makes)]
)
def test_it_resumes(make, stop_at):
    assert_resumes(factory(make), steps=12, stop_at=stop_at, ignore=CLOCKS)


def test_all_of_them_together_resume():
    def everything(folder):
        # of the two that are data parallel one
        return [hook for kind, makes in CASES.items() if kind is not FSDP2Hook for hook in makes[0](folder)]

    assert_resumes(factory(everything), steps=13, stop_at=7, overrun=3, ignore=CLOCKS)


def test_with_accumulation():
    def build(folder):
        return strategy(network(), [EMAHook(0.9), MetricsHook(folder, Every(steps=2))], accumulate=3), batches(7)

    assert_resumes(build, steps=9, stop_at=4)


@pytest.mark.parametrize("mix", [None, 2])
def test_chains_resume(mix):
    def build(folder):
        strategy = chains([PCDCheckpointHook(mix_every=mix), CheckpointHook(folder / "checkpoints")], persistent=True)
        return strategy, DATA

    assert_resumes(build, steps=9, stop_at=4)
