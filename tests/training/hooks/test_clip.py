import pytest
import torch

from nvalchemi.distributed.tensors import total_norm
from nvalchemi.errors import ConfigError
from nvalchemi.training import TrainingStage, on
from nvalchemi.training.hooks import GradientClipHook, MixedPrecisionHook
from tests.training.hooks.runs import SGD, linear, rows, strategy, weight_row


def product(model, batch):
    # No matrix product: autocast leaves it alone, and a gradient of 65536 does not overflow.
    return (model.weight * batch[0]).sum(-1, keepdim=True)


def gradients_seen(hooks, data, **kwargs):
    seen = []

    @on(TrainingStage.GRADIENTS_READY)
    def look(ctx):
        norm = ctx.metrics.get("grad_norm")
        seen.append((ctx.model.weight.grad.clone(), None if norm is None else norm.item()))

    settings = {"optimizer_configs": SGD, "loss_fn": linear, "training_fn": product, "num_epochs": 1, **kwargs}
    strategy(weight_row(0.0, 0.0), [*hooks, look], **settings).run(data)
    return seen


def fp16():
    return MixedPrecisionHook("fp16", init_scale=65536.0)


def test_b46_the_limit_acts_on_the_true_norm_under_loss_scaling():
    (small, small_norm), (large, large_norm) = gradients_seen([fp16(), GradientClipHook(1.0)], rows((0.3, 0.4), (0.0, 4.0)))
    torch.testing.assert_close(small, torch.tensor([[0.3, 0.4]]), rtol=1e-6, atol=0)
    assert small_norm == pytest.approx(0.5, rel=1e-6)
    torch.testing.assert_close(large, torch.tensor([[0.0, 1.0]]), rtol=1e-6, atol=0)
    assert large_norm == pytest.approx(4.0, rel=1e-6)


def test_b46_once_a_window():
    calls = []

    class Counting(GradientClipHook):
        def clip(self, ctx):
            calls.append(1)
            super().clip(ctx)

    ((gradient, norm),) = gradients_seen([fp16(), Counting(1.0)], rows((0.5, 0.0), (0.5, 0.0)), accumulate=2)
    assert calls == [1]
    torch.testing.assert_close(gradient, torch.tensor([[0.5, 0.0]]), rtol=1e-6, atol=0)
    assert norm == pytest.approx(0.5, rel=1e-6)


def test_below_the_limit_not_a_bit_changes():
    without = gradients_seen([], rows((0.3, 0.1), (0.0, 0.0)))
    with_it = gradients_seen([GradientClipHook(1.0)], rows((0.3, 0.1), (0.0, 0.0)))
    for (a, _), (b, _) in zip(without, with_it, strict=True):
        assert torch.equal(a, b)
    assert with_it[1][1] == 0.0


@pytest.mark.parametrize(("norm_type", "norm"), [(1.0, 7.0), (2.0, 5.0), (float("inf"), 4.0)])
def test_any_norm(norm_type, norm):
    ((gradient, seen),) = gradients_seen([GradientClipHook(2.0, norm_type)], rows((3.0, 4.0)))
    assert seen == pytest.approx(norm)
    torch.testing.assert_close(gradient, torch.tensor([[3.0, 4.0]]) * 2.0 / norm)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_parameters_without_entries_have_no_part_in_it(norm_type):
    assert total_norm([torch.ones(0, 3), torch.tensor([3.0])], norm_type).item() == 3.0
    assert total_norm([torch.ones(0, 3)], norm_type).item() == 0.0


def test_all_parameters_together():
    model = torch.nn.Sequential(weight_row(0.0), weight_row(2.0))  # y = 2 * (0 * x): gradients 2x and 0
    ctx = strategy(model, [GradientClipHook(1.0)], optimizer_configs=SGD, loss_fn=linear, num_steps=1).run(rows((3.0,)))
    assert ctx.metrics["grad_norm"].item() == pytest.approx(6.0)
    assert model[0].weight.item() == pytest.approx(-1.0)


def test_a_nan_stays_a_nan():
    hook, seen = GradientClipHook(1.0), []

    @on(TrainingStage.GRADIENTS_READY)
    def see(ctx):
        hook.clip(ctx)
        seen.extend([ctx.metrics["grad_norm"], *ctx.update.gradients()])
        ctx.skip_step("for the test")

    strategy(weight_row(0.0, 0.0), [see], optimizer_configs=SGD, loss_fn=linear, num_epochs=1).run(rows((float("nan"), 1.0)))
    assert all(value.isnan().all() for value in seen)


@pytest.mark.parametrize("arguments", [(0.0,), (-1.0,), (float("nan"),), (float("inf"),), (1.0, 0.0)])
def test_impossible_limits(arguments):
    with pytest.raises(ConfigError, match="max_norm"):
        GradientClipHook(*arguments)
