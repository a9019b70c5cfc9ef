import pytest
import torch
from torch import nn

from nvalchemi.errors import ConfigError
from nvalchemi.training.update import ScaledUpdate, Update


def parts(update_cls=Update, **kwargs):
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    return parameter, update_cls({"main": torch.optim.SGD([parameter], lr=0.1)}, **kwargs)


def test_backward_adds_and_step_takes():
    parameter, update = parts()
    update.backward(parameter.sum(), last=False)
    update.backward(parameter.sum(), last=True)
    assert update.unscale()
    assert update.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.8, 1.8]))
    update.zero_grad()
    assert parameter.grad is None


def test_scaled_gradients_are_seen_at_their_true_size():
    parameter, update = parts(ScaledUpdate)
    update.backward(0.5 * parameter.sum(), last=True)
    assert parameter.grad[0] == 0.5 * 2**16
    assert update.unscale()
    assert torch.equal(parameter.grad, torch.tensor([0.5, 0.5]))


def test_the_scale_falls_on_overflow_and_rises_with_time():
    parameter, update = parts(ScaledUpdate, init_scale=8.0, growth_interval=2)
    for _ in range(2):
        update.zero_grad()
        update.backward(parameter.sum(), last=True)
        assert update.unscale()
        update.step()
    assert update.scale == 16.0
    update.backward(parameter.sum() * float("inf"), last=True)
    before = parameter.detach().clone()
    assert not update.unscale()
    assert not update.discard()
    assert (update.scale, update.steps_since_change) == (8.0, 0)
    assert torch.equal(parameter, before)
    _, other = parts(ScaledUpdate)
    other.load_state_dict(update.state_dict())
    assert other.scale == 8.0


def test_a_step_skipped_for_another_reason_leaves_the_scale():
    parameter, update = parts(ScaledUpdate, init_scale=8.0)
    update.backward(parameter.sum(), last=True)
    assert update.unscale()
    update.discard()
    assert update.scale == 8.0


def test_one_rank_with_an_overflow_stops_all():
    parameter, update = parts(ScaledUpdate, any_rank=lambda flag: True)
    update.backward(parameter.sum(), last=True)
    assert not update.unscale()


def test_impossible_scales():
    with pytest.raises(ConfigError, match="growth_factor > 1"):
        parts(ScaledUpdate, growth_factor=1.0)
