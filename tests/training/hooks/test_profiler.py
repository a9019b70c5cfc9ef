"""The traces that are written, and that the run is the same with them."""

import copy
import json

import pytest
import torch

from nvalchemi.errors import ConfigError
from nvalchemi.training import TrainingStage, ValidationConfig, on
from nvalchemi.training.hooks import ProfilerHook
from tests.training.hooks.runs import batches, network, strategy


def names(path):
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "user_annotation"]


def test_the_steps_that_were_asked_for(tmp_path):
    config = ValidationConfig(validation_data=batches(1), every_n_steps=4)
    hook = ProfilerHook(tmp_path, wait=1, warmup=1, active=2, repeat=2, rows=40)
    strategy(network(), [hook], validation_config=config, num_steps=10, accumulate=2).run(batches())
    assert sorted(p.name for p in tmp_path.glob("*.json")) == ["steps-3-4.rank0.json", "steps-7-8.rank0.json"]
    found = names(tmp_path / "steps-3-4.rank0.json")
    assert found.count("nvalchemi::microbatch") == found.count("nvalchemi::forward") == 4  # two steps of two
    assert found.count("nvalchemi::validation") == 1
    table = (tmp_path / "steps-3-4.rank0.txt").read_text()
    assert "Self CPU" in table and "aten::" in table


def test_the_run_is_the_same(tmp_path):
    plain = network()
    profiled = copy.deepcopy(plain)
    torch.manual_seed(1)
    strategy(plain, num_steps=6).run(batches())
    torch.manual_seed(1)
    strategy(profiled, [ProfilerHook(tmp_path, wait=0, warmup=1, active=3)], num_steps=6).run(batches())
    for a, b in zip(plain.parameters(), profiled.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_that_ends_early_writes_what_there_is(tmp_path):
    strategy(network(), [ProfilerHook(tmp_path, wait=1, warmup=1, active=5)], num_steps=4).run(batches())
    assert [p.name for p in tmp_path.glob("*.json")] == ["steps-3-4.rank0.json"]


def test_an_error_leaves_no_profiler_behind(tmp_path):
    @on(TrainingStage.STEP_END)
    def fail(ctx):
        if ctx.progress.step == 3:
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        strategy(network(), [fail, ProfilerHook(tmp_path, wait=0, warmup=1, active=9)], num_steps=6).run(batches())
    assert not torch.autograd.profiler._is_profiler_enabled
    with torch.profiler.profile() as other:  # another one can begin
        torch.ones(2).sum()
    assert other.key_averages()


@pytest.mark.parametrize("settings", [{"active": 0}, {"wait": -1}, {"repeat": 0}, {"warmup": 0}])
def test_counts_that_make_no_schedule(tmp_path, settings):
    with pytest.raises(ConfigError, match="the profile has no schedule"):
        ProfilerHook(tmp_path, **settings)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the profile cannot be written to"):
        strategy(network(), [ProfilerHook(tmp_path / "file" / "a")], num_steps=1).run(batches())
