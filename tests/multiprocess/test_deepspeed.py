"""DeepSpeedHook on two ranks against one process on the same global batch; on the CPU, through gloo."""

from __future__ import annotations

import importlib.util
import json
import logging
from types import SimpleNamespace

import pytest
import torch

from nvalchemi.distributed import single_process
from nvalchemi.errors import CheckpointError, ConfigError
from nvalchemi.training.engine import filled, read_config
from nvalchemi.training.hooks import DeepSpeedHook
from tests.multiprocess import deepspeed_cases as cases

CASES = "tests.multiprocess.deepspeed_cases:"
NEEDED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
LIMIT = 500.0  # the engine builds an extension the first time
SLOW = pytest.mark.timeout(600)


def assert_same(got, wanted):
    assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert got["rates"] == wanted["rates"]
    assert got["count"] == wanted["count"]
    assert got["validation"]["loss"] == pytest.approx(wanted["validation"]["loss"], rel=1e-4)
    for kind in ("weights", "average"):
        for key, value in got[kind].items():
            assert torch.allclose(value, wanted[kind][key], rtol=1e-4, atol=1e-6), key


@NEEDED
@SLOW
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("stage", "loss"), [(1, "energies"), (1, "scores"), (2, "energies"), (2, "scores"), (3, "energies")])
def test_steps_are_those_of_one_process(ranks, stage, loss, accumulate):
    """Unequal shares, schedulers, validation with averages, and losses of second order where the weights are whole."""
    wanted = cases.train(single_process("cpu"), {"stage": stage}, loss, accumulate)
    for got in ranks.call(CASES + "train", {"stage": stage}, loss, accumulate, limit=LIMIT):
        assert_same(got, wanted)


@NEEDED
@SLOW
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_skipped_step_leaves_nothing_behind(ranks, stage):
    wanted = cases.train(single_process("cpu"), {"stage": stage}, "energies", 2, 2)
    for got in ranks.call(CASES + "train", {"stage": stage}, "energies", 2, 2, limit=LIMIT):
        assert_same(got, wanted)


@NEEDED
@SLOW
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_engine_clips(ranks, stage, tmp_path):
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.1, "train_batch_size": "auto"}
    (tmp_path / "zero.json").write_text(json.dumps(config))
    wanted = cases.train(single_process("cpu"), {"config": config}, "energies", 1, None, 5, True)
    for got in ranks.call(CASES + "train", {"config": str(tmp_path / "zero.json")}, "energies", limit=LIMIT):
        assert_same(got, wanted)
    free = cases.train(single_process("cpu"), {"config": config}, "energies")
    assert free["losses"] != pytest.approx(wanted["losses"], rel=1e-4)


@NEEDED
@SLOW
def test_chains_and_their_sampler(ranks):
    first, second = ranks.call(CASES + "chains", 2, limit=LIMIT)
    assert first == second


@NEEDED
@SLOW
@pytest.mark.parametrize("stage", [1, 3])
def test_with_autocast_in_bf16(ranks, stage):
    wanted = cases.short(single_process("cpu"), stage)
    for got in ranks.call(CASES + "short", stage, limit=LIMIT):
        assert got == pytest.approx(wanted, rel=2e-2)
        assert got != pytest.approx(cases.train(single_process("cpu"), {"stage": 1})["losses"], rel=1e-6)


@NEEDED
@SLOW
@pytest.mark.parametrize("stage", [1, 2])
def test_it_resumes(ranks, stage, tmp_path):
    for found in ranks.call(CASES + "resumed", str(tmp_path), stage, limit=LIMIT):
        for key, value in found["whole"].items():
            assert torch.equal(value, found["again"][key]), key


REFUSED = {
    "clip": r"hooks need gradients.*gradient_clip.*gradient_clipping",
    "double": r"weights are not float32.*float64",
    "two models": r"the engine trains one model.*a, b.*FSDP2Hook",
    "scores at stage 3": r"at stage 3 the engine frees weights.*stage=2.*FSDP2Hook",
    "averages at stage 3": r"nothing to average.*FSDP2Hook",
    "checkpoints at stage 3": r"at stage 3 no rank has the weights.*stage=2.*FSDP2Hook",
}


@NEEDED
@SLOW
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused(ranks, what):
    for said in ranks.call(CASES + "refused", what, limit=LIMIT):
        with pytest.raises(ConfigError, match=REFUSED[what]):
            raise ConfigError(said) if said.startswith("ConfigError") else AssertionError(said)


def test_auto_values_are_the_strategys():
    own = filled(
        read_config({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "train_batch_size": "auto",
                     "bf16": {"enabled": "auto"}, "wall_clock_breakdown": False}, None),
        batch_size=8, accumulate=3, world_size=4,
    )  # fmt: skip
    assert own["train_batch_size"] == 96
    assert own["train_micro_batch_size_per_gpu"] == 8
    assert own["gradient_accumulation_steps"] == 3
    assert own["gradient_clipping"] == 0.0
    assert own["zero_optimization"] == {"stage": 2}
    assert own["wall_clock_breakdown"] is False and "bf16" not in own


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2}, "accumulates otherwise"),
        ({"zero_optimization": {"stage": 2}, "communication_data_type": "auto"}, "stand for 'auto'.*communication_data_type"),
    ],
)
def test_values_that_do_not_fit(config, match):
    with pytest.raises(ConfigError, match=match):
        filled(read_config(config, None), batch_size=1, accumulate=1, world_size=2)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "a configuration or a stage"),
        ({"config": {}, "stage": 1}, "a configuration or a stage"),
        ({"stage": 4}, "no such stage"),
        ({"config": {"train_batch_size": 4}}, "no such stage"),
        ({"config": "nowhere.json"}, "cannot read its configuration"),
        (
            {"config": {"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam"}}},
            "section 'optimizer'.*optimizer_configs",
        ),
        ({"config": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}}, "section 'bf16'.*MixedPrecisionHook"),
    ],
)
def test_configurations_that_are_none(settings, match):
    with pytest.raises(ConfigError, match=match):
        DeepSpeedHook(**settings)


def test_another_number_of_ranks_is_refused():
    with pytest.raises(CheckpointError, match=r"divided between the ranks that saved it.*3 ranks.*needed: 2.*init_from"):
        DeepSpeedHook(stage=1).divide_anew([{}, {}], 2, 3)


@pytest.mark.parametrize(("memory", "told"), [(1 << 30, True), (1 << 14, False)])
def test_weights_that_fit_many_times_need_no_dividing(memory, told, monkeypatch, caplog):
    """ZeRO 3 or full sharding of a small model costs time for nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
    ctx = SimpleNamespace(manager=SimpleNamespace(cuda=True, rank=0), models={"model": torch.nn.Linear(9, 10)}, device="cuda:0")
    with caplog.at_level(logging.WARNING, "nvalchemi"):
        DeepSpeedHook.say_if_it_fits(ctx, ["model"])
    assert ("DDPHook() would communicate less" in caplog.text) == told


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="the package is installed")
def test_without_the_package(ranks):
    for said in ranks.call(CASES + "refused", "nothing"):
        assert said.startswith("ConfigError: DeepSpeedHook needs the package deepspeed") and "nvalchemi[deepspeed]" in said
