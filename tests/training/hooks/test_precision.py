import logging

import pytest
import torch
from torch import nn

from nvalchemi.ebm.losses import DenoisingScoreMatching
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel
from nvalchemi.training import OptimizerConfig, ScaledUpdate, TrainingStage, TrainingStrategy, Update, on
from nvalchemi.training.hooks import EMAHook, MixedPrecisionHook, SpikeHook, precision
from tests.training.hooks import test_with_a_potential as potentials
from tests.training.hooks.runs import ADAM, SGD, batches, linear, network, rows, strategy, weight_row


def seen_in_forward(dtype):
    seen = []

    def forward(model, batch):
        seen.append((torch.is_autocast_enabled("cpu"), model(batch[0]).dtype))
        return model(batch[0])

    ctx = strategy(network(), [MixedPrecisionHook(dtype, init_scale=256.0)], training_fn=forward, num_steps=2).run(batches())
    return ctx, seen


@pytest.mark.parametrize("name", ["bf16", torch.bfloat16])
def test_bf16_autocasts_the_forward_and_keeps_the_update(name):
    ctx, seen = seen_in_forward(name)
    assert seen == [(True, torch.bfloat16)] * 2
    assert type(ctx.update) is Update
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in ctx.model.parameters())
    assert not torch.is_autocast_enabled("cpu")


def test_fp16_scales_the_update():
    ctx, seen = seen_in_forward("fp16")
    assert seen == [(True, torch.float16)] * 2
    assert isinstance(ctx.update, ScaledUpdate)
    assert ctx.metrics["loss_scale"] == 256.0


def test_autocast_is_left_after_an_error():
    def fail(model, batch):
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        strategy(network(), [MixedPrecisionHook()], training_fn=fail).run(batches())
    assert not torch.is_autocast_enabled("cpu")


def product(model, batch):
    return (model.weight * batch[0]).sum(-1, keepdim=True)


def test_b44_schedulers_move_once_an_optimizer_step():
    config = OptimizerConfig(torch.optim.SGD, {"lr": 1.0}, torch.optim.lr_scheduler.StepLR, {"step_size": 1, "gamma": 0.5})
    ctx = strategy(weight_row(0.0), [MixedPrecisionHook("fp16")], optimizer_configs=config, loss_fn=linear, training_fn=product,
                   accumulate=4, num_epochs=1).run(rows(*[(1.0,)] * 8))  # fmt: skip
    assert ctx.progress.step == 2
    assert ctx.optimizers["model"].param_groups[0]["lr"] == 0.25
    assert ctx.model.weight.item() == -1.5


def test_b44_an_overflow_leaves_scheduler_ema_and_step_alone_and_is_logged(caplog):
    config = OptimizerConfig(torch.optim.SGD, {"lr": 1.0}, torch.optim.lr_scheduler.StepLR, {"step_size": 1, "gamma": 0.5})
    ema, at_skip = EMAHook(0.5), []

    @on(TrainingStage.OPTIMIZER_SKIPPED)
    def look(ctx):
        rate = ctx.optimizers["model"].param_groups[0]["lr"]
        at_skip.append((ctx.progress.step, rate, ema.count, ctx.model.weight.item(), ctx.update.scale))

    with caplog.at_level(logging.WARNING, "nvalchemi"):
        ctx = strategy(weight_row(0.0), [ema, MixedPrecisionHook("fp16"), look], optimizer_configs=config, loss_fn=linear,
                       training_fn=product, accumulate=2, num_epochs=1).run(
            rows((1.0,), (1.0,), (float("inf"),), (1.0,), (1.0,), (1.0,))
        )  # fmt: skip
    assert at_skip == [(1, 0.5, 1, -1.0, 32768.0)]
    assert (ctx.progress.step, ctx.progress.skipped, ema.count) == (2, 1, 2)
    assert ctx.model.weight.item() == -1.5
    assert "step after 1 skipped: the gradients overflowed" in caplog.text and "loss scale now 32768" in caplog.text


def test_fp16_saves_what_would_vanish():
    """A gradient of 1e-8 is zero in fp16; with the scaled loss it arrives."""

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = weight_row(0.0)

        def forward(self, x):
            return self.inner(x) * 1e-8

    def tiny(hooks):
        model = Tiny()
        strategy(model, hooks, optimizer_configs=SGD, loss_fn=linear, num_steps=1).run(rows((1.0,)))
        return model.inner.weight.item()

    assert tiny([MixedPrecisionHook("fp16", init_scale=1.0)]) == 0.0
    assert tiny([MixedPrecisionHook("fp16")]) == pytest.approx(-1e-8, rel=1e-2)


class Pair(nn.Module):
    """Energies of points from a small net of their squared norms, and the forces on them by a derivative inside the forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
        self.register_buffer("shift", torch.tensor(-1000.0, dtype=torch.float64))

    def forward(self, x):
        from torch import autograd

        x = x.clone().requires_grad_()
        energy = self.net(x.square().sum(-1, keepdim=True)).squeeze(-1).double() + self.shift
        (slope,) = autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -slope


def force_and_energy(prediction, batch):
    energy, forces = prediction
    target = batch[0].square().sum(-1) / 2 - 1000.0
    return (forces + batch[0]).square().mean() + (energy - target).square().mean()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_forces_by_a_second_derivative_train_under_autocast(dtype):
    losses, kinds = [], set()

    def forward(model, batch):
        energy, forces = model(batch[0])
        kinds.add((energy.dtype, forces.dtype))
        return energy, forces

    @on(TrainingStage.STEP_END)
    def keep(ctx):
        losses.append(ctx.loss.total.item())

    data = batches(4, size=16)
    config = OptimizerConfig(torch.optim.Adam, {"lr": 1e-2})
    ctx = strategy(Pair(), [MixedPrecisionHook(dtype), SpikeHook(), keep], optimizer_configs=config, training_fn=forward,
                   loss_fn=force_and_energy, num_steps=120).run(data)  # fmt: skip
    assert kinds == {(torch.float64, torch.float32)}
    assert sum(losses[-4:]) < 0.1 * sum(losses[:4])
    assert all(p.grad.isfinite().all() for p in ctx.model.parameters() if p.grad is not None)


def test_forces_under_bf16_are_close_to_the_true_ones():
    model, x = Pair(), batches(1, size=16)[0][0]
    _, exact = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        energy, rough = model(x)
    assert energy.dtype == torch.float64
    assert ((rough - exact).norm() / exact.norm()).item() < 0.03


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_forces_are_as_of_float32_where_asked_for(dtype):
    """Those of a potential in training, with the energies of the same calls; the model's own setting comes back."""
    found, kinds = {}, []

    def forward(model, batch):
        result = model.predict(batch, ("energy", "forces"))
        kinds.append(torch.is_autocast_enabled("cpu"))
        return result

    for name, hooks in {
        "float32": [],
        "short": [MixedPrecisionHook(dtype, init_scale=4.0)],
        "asked": [MixedPrecisionHook(dtype, init_scale=4.0, fp32_gradients=True)],
    }.items():
        model = potentials.potential()
        potentials.strategy(model, hooks, num_steps=1, training_fn=forward, optimizer_configs=SGD).run(potentials.loader())
        found[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert model.force_fp32_gradient is False
    assert kinds == [False, True, True]
    scale = found["float32"].abs().max()
    assert (found["asked"] - found["float32"]).abs().max() < 1e-4 * scale
    assert (found["short"] - found["float32"]).abs().max() > 1e-4 * scale


def test_scores_are_as_of_float32_where_asked_for():
    class Energy(EnergyModel):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 1))

        def forward(self, x):
            return self.net(x).squeeze(-1)

    found = []
    for hooks in ([], [MixedPrecisionHook("bf16", fp32_gradients=True)], [MixedPrecisionHook("bf16")]):
        model = Energy()
        TrainingStrategy(models=model, optimizer_configs=SGD, loss_fn=DenoisingScoreMatching(model, noise_scale=0.3), num_steps=1,
                         hooks=hooks).run([x for x, _ in batches()])  # fmt: skip
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-7)
    assert not torch.allclose(found[0], found[2], rtol=1e-5, atol=1e-7)


def test_there_must_be_an_energy_to_differentiate():
    with pytest.raises(ConfigError, match=r"no energy to differentiate.*Sequential"):
        strategy(network(), [MixedPrecisionHook(fp32_gradients=True)]).run(batches())


def test_weights_in_fp16_are_refused():
    model = nn.Linear(3, 1).half()
    with pytest.raises(ConfigError, match=r"weights are fp16 themselves.*model\.weight, model\.bias.*half"):
        strategy(model, [MixedPrecisionHook("fp16")]).run(batches())


def test_fp16_where_bf16_is_native_is_told(monkeypatch, caplog):
    monkeypatch.setattr(precision, "bf16_is_native", lambda device: True)
    with caplog.at_level(logging.WARNING, "nvalchemi"):
        strategy(network(), [MixedPrecisionHook("bf16")], num_steps=1).run(batches())
        assert "this device has bf16" not in caplog.text
        strategy(network(), [MixedPrecisionHook("fp16", init_scale=8.0)], num_steps=1).run(batches())
    assert "this device has bf16" in caplog.text and "MixedPrecisionHook('bf16')" in caplog.text


def test_the_claim_is_exclusive():
    hook = MixedPrecisionHook()
    hook.name = "another"
    with pytest.raises(ConfigError, match="claim 'precision'"):
        strategy(network(), [hook, MixedPrecisionHook()]).run(batches())


@pytest.mark.parametrize("dtype", ["fp8", torch.float32, None])
def test_other_precisions_are_refused(dtype):
    with pytest.raises(ConfigError, match="bf16"):
        MixedPrecisionHook(dtype)


def test_impossible_scales_fail_at_the_start():
    with pytest.raises(ConfigError, match="loss scale"):
        strategy(network(), [MixedPrecisionHook("fp16", init_scale=0.0)], optimizer_configs=ADAM).run(batches())
