"""The hook's settings and checks in one process; ranks are in tests/multiprocess."""

import pytest
import torch

from nvalchemi.ebm.buffer import ReplayBuffer
from nvalchemi.ebm.losses import ContrastiveDivergence
from nvalchemi.ebm.samplers import LangevinDynamics
from nvalchemi.errors import CheckpointError, ConfigError
from nvalchemi.models import MLPEnergy
from nvalchemi.training import OptimizerConfig, TrainingStrategy
from nvalchemi.training.hooks import CheckpointHook, PCDCheckpointHook
from tests.training.hooks.runs import batches, network, strategy


def chains(hooks, **settings):
    torch.manual_seed(1)
    model = MLPEnergy(dim=2, hidden=8)
    loss = ContrastiveDivergence(
        model, LangevinDynamics(model, step_size=0.01), k_steps=2, buffer_size=6, init_steps=3, **settings
    )
    optimizer = OptimizerConfig(torch.optim.Adam, {"lr": 1e-3})
    return TrainingStrategy(models=model, optimizer_configs=optimizer, loss_fn=loss, num_steps=4, hooks=hooks)


DATA = [torch.randn(4, 2, generator=torch.Generator().manual_seed(0)) for _ in range(4)]


@pytest.mark.parametrize(
    "settings", [{"mix_every": 0}, {"mix_every": 2.0}, {"mix_every": True}, {"on_world_size_change": "keep"}]
)
def test_settings_that_are_none(settings):
    with pytest.raises(ConfigError, match=f"{next(iter(settings))} is wrong"):
        PCDCheckpointHook(**settings)


def test_there_must_be_chains_and_somebody_who_saves_them(tmp_path):
    with pytest.raises(ConfigError, match="'pcd_checkpoint' keeps persistent chains, and the loss has none"):
        chains([PCDCheckpointHook(), CheckpointHook(tmp_path)]).run(DATA)
    with pytest.raises(ConfigError, match="and the loss has none"):
        strategy(network(), [PCDCheckpointHook(), CheckpointHook(tmp_path)]).run(batches())
    with pytest.raises(ConfigError, match=r"and nothing saves them.*add CheckpointHook"):
        chains([PCDCheckpointHook()], persistent=True).run(DATA)


def test_mixing_in_one_process_changes_nothing(tmp_path):
    plain = chains([CheckpointHook(tmp_path / "a")], persistent=True)
    mixed = chains([CheckpointHook(tmp_path / "b"), PCDCheckpointHook(mix_every=1)], persistent=True)
    plain.run(DATA), mixed.run(DATA)
    assert torch.equal(plain.loss_fn.replay_buffer.samples, mixed.loss_fn.replay_buffer.samples)


def test_fewer_chains_than_ranks_and_other_declarations_are_refused():
    buffer = ReplayBuffer(2)
    buffer.initialize(torch.zeros(2, 1))
    with pytest.raises(CheckpointError, match="fewer chains than ranks; found: 2 chains; needed: 3"):
        ReplayBuffer.dealt([buffer.state_dict()], 0, 3)
    with pytest.raises(CheckpointError, match="of another number; found: 2; needed: 3"):
        ReplayBuffer(3).load_state_dict(ReplayBuffer.dealt([buffer.state_dict()] * 3, 0, 2))


def test_what_has_no_chains_yet_is_dealt_out_as_such():
    states = [ReplayBuffer(4).state_dict()] * 2
    buffer = ReplayBuffer(4)
    buffer.load_state_dict(ReplayBuffer.dealt(states, 0, 1))
    assert len(buffer) == 4 and not buffer.is_initialized


def test_cleared_chains_are_as_declared():
    buffer = ReplayBuffer(4)
    buffer.initialize(torch.zeros(4, 1))
    buffer.load_state_dict(ReplayBuffer.dealt([buffer.state_dict()] * 2, 0, 1))
    assert len(buffer) == 8
    buffer.clear()
    assert len(buffer) == 4 and not buffer.is_initialized
