import copy
import math

import pytest
import torch
from torch import nn

from nvalchemi.errors import CheckpointError, ConfigError
from nvalchemi.training import (
    Every,
    Hook,
    OptimizerConfig,
    Order,
    TrainingSpan,
    TrainingStage,
    ValidationConfig,
    around,
    checkpoint,
    on,
)
from nvalchemi.training.hooks import CheckpointHook, EMAHook, MixedPrecisionHook, update_ema
from tests.training.hooks.runs import SGD, batches, linear, network, rows, strategy, weight_row


def by_hand(decay, values, start=0.0):
    average = start
    for value in values:
        average = decay * average + (1 - decay) * value
    return average


def test_weights_that_an_engine_has_taken_away_are_told():
    class Empties(Hook):
        """As an engine does that divides weights itself."""

        order = Order.COMPUTE

        @on(TrainingStage.BUILT)
        def take(self, ctx):
            for parameter in ctx.model.parameters():
                parameter.data = torch.empty(0)

    with pytest.raises(ConfigError, match="there is nothing to average: weights are empty"):
        strategy(network(), [Empties(), EMAHook(0.9)]).run(batches())


def test_whole_numbers_are_copied_and_complex_ones_averaged():
    model = network()
    model.register_parameter("order", torch.nn.Parameter(torch.arange(3), requires_grad=False))
    model.register_parameter("phase", torch.nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False))

    @on(TrainingStage.OPTIMIZER_STEPPED)
    def change(ctx):
        ctx.model.order.data += 1
        ctx.model.phase.data += 1j

    change.order = Order.COMPUTE
    hook = EMAHook(0.5)
    strategy(model, [change, hook], num_steps=2).run(batches())
    assert hook.weights()["order"].tolist() == [2, 3, 4]
    assert torch.equal(hook.weights()["phase"], torch.full((2,), 1 + 1.25j))
    average = copy.deepcopy(model)
    model.order.data += 5
    update_ema(average, model, 0.5)
    assert average.order.tolist() == [7, 8, 9]


def test_b56_once_an_optimizer_step_not_a_micro_batch():
    hook = EMAHook(0.5)
    ctx = strategy(weight_row(0.0), [hook], optimizer_configs=SGD, loss_fn=linear, accumulate=4, num_epochs=1).run(
        rows(*[(-1.0,)] * 8)
    )
    assert ctx.model.weight.item() == 2.0  # moved by 1 a step
    assert hook.count == 2
    assert hook.weights()["weight"].item() == by_hand(0.5, [1.0, 2.0]) == 1.25


def test_bias_corrected_gives_the_start_no_weight():
    hook = EMAHook(0.9, bias_corrected=True)
    strategy(weight_row(100.0), [hook], optimizer_configs=SGD, loss_fn=linear, num_steps=3).run(rows(*[(-1.0,)] * 3))
    weights = [0.9 ** (3 - i) * 0.1 for i in (1, 2, 3)]
    mean = sum(w * v for w, v in zip(weights, (101.0, 102.0, 103.0), strict=True)) / sum(weights)
    assert hook.weights()["weight"].item() == pytest.approx(mean, rel=1e-6)
    assert hook.effective_decay == pytest.approx(1 - 0.1 / (1 - 0.9**3))


def test_b44_a_skipped_step_moves_no_average():
    @on(TrainingStage.GRADIENTS_READY)
    def skip(ctx):
        if ctx.progress.step == 1 and ctx.progress.skipped == 0:
            ctx.skip_step("for the test")

    hook = EMAHook(0.5)
    ctx = strategy(weight_row(0.0), [hook, skip], optimizer_configs=SGD, loss_fn=linear, num_epochs=1).run(rows(*[(-1.0,)] * 3))
    assert (ctx.progress.step, ctx.progress.skipped, hook.count) == (2, 1, 2)
    assert hook.weights()["weight"].item() == 1.25


def test_validation_sees_the_average_and_the_weights_come_back():
    seen = []
    model = weight_row(0.0)
    hook = EMAHook(0.5)

    @on(TrainingStage.VALIDATED)
    def look(ctx):
        seen.append((ctx.validation["loss"], ctx.model.weight.item()))

    config = ValidationConfig(validation_data=rows((1.0,)), every_n_steps=1)
    parameter = model.weight
    strategy(model, [hook, look], optimizer_configs=SGD, loss_fn=linear, validation_config=config, num_steps=2).run(
        rows(*[(-1.0,)] * 2)
    )
    assert seen == [(0.5, 1.0), (1.25, 2.0)]
    assert model.weight is parameter


def test_the_weights_come_back_after_an_error_too():
    model = weight_row(0.0)

    def fail(batch, predictions, loss):
        raise ValueError("in the middle")

    config = ValidationConfig(validation_data=rows((1.0,)), every_n_steps=2, batch_callback=fail)
    run = strategy(model, [EMAHook(0.5)], optimizer_configs=SGD, loss_fn=linear, validation_config=config)
    with pytest.raises(ValueError, match="in the middle"):
        run.run(rows(*[(-1.0,)] * 4))
    assert model.weight.item() == 2.0


def test_several_averages_and_one_for_validation():
    slow, fast = EMAHook(0.9, use_for_validation=False, name="slow"), EMAHook(0.0, name="fast")
    seen = []

    @around(TrainingSpan.VALIDATION)
    def look(ctx):
        seen.append(ctx.model.weight.item())
        yield

    config = ValidationConfig(validation_data=rows((1.0,)), every_n_steps=2)
    strategy(
        weight_row(0.0), [slow, fast, look], optimizer_configs=SGD, loss_fn=linear, validation_config=config, num_steps=2
    ).run(rows(*[(-1.0,)] * 2))
    assert seen == [2.0]
    assert slow.weights()["weight"].item() == pytest.approx(by_hand(0.9, [1.0, 2.0]))
    assert fast.weights()["weight"].item() == 2.0


def test_b54_buffers_are_the_models_own():
    model, hook = network(), EMAHook(0.9)
    strategy(model, [hook], num_steps=5).run(batches())
    averaged, present = hook.weights(), model.state_dict()
    assert list(averaged) == list(present)
    assert averaged["1.num_batches_tracked"].item() == 5 and averaged["1.num_batches_tracked"].dtype == torch.int64
    assert torch.equal(averaged["1.running_mean"], present["1.running_mean"])
    assert not torch.equal(averaged["0.weight"], present["0.weight"])


def test_b54_validation_uses_them():
    model, hook = network(), EMAHook(0.9)
    data = batches(1, seed=5)
    config = ValidationConfig(validation_data=data, every_n_steps=5)
    ctx = strategy(model, [hook], validation_config=config, num_steps=5).run(batches())
    alone = network()
    hook.copy_to(alone)
    with torch.no_grad():
        assert ctx.validation["loss"] == (alone.eval()(data[0][0]) - data[0][1]).square().mean().item()


WAYS = {"plain": {}, "bias_corrected": {"bias_corrected": True}, "warmup": {"warmup": True}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("decay", [0.95, [0.5, 0.95]], ids=["one", "several"])
def test_b52_count_shadow_and_decay_are_resumed(tmp_path, decay, way):
    def run(steps, **kwargs):
        hook = EMAHook(decay, **WAYS[way])
        torch.manual_seed(0)
        return strategy(network(), [hook], num_steps=steps, **kwargs).run(batches()), hook

    _, whole = run(20)
    half, _ = run(10)
    saved = checkpoint.save(half, tmp_path)
    torch.manual_seed(9)
    _, resumed = run(20, resume_from=saved)
    assert whole.count == resumed.count == 20
    assert whole.effective_decay == resumed.effective_decay
    for kept in whole.decays:
        for key, value in whole.weights(decay=kept).items():
            assert torch.equal(value, resumed.weights(decay=kept)[key]), key


def test_b52_the_warm_up_does_not_begin_again():
    """The decay of update t + 1 is (1 + t) / (10 + t), up to the one asked for; the count is what a checkpoint keeps of it."""
    hook, seen = EMAHook([0.5, 0.25], warmup=True), []

    @on(TrainingStage.STEP_END)
    def look(ctx):
        seen.append(hook.effective_decay)

    steps = 12
    strategy(weight_row(0.0), [hook, look], optimizer_configs=SGD, loss_fn=linear, num_steps=steps).run(rows(*[(-1.0,)] * steps))
    decays = [min(0.5, (1 + t) / (10 + t)) for t in range(steps)]
    assert seen == decays and decays[:2] == [1 / 10, 2 / 11] and decays[-1] == 0.5
    for decay in hook.decays:
        average = 0.0
        for t in range(steps):
            average = by_hand(min(decay, (1 + t) / (10 + t)), [t + 1.0], start=average)
        assert hook.weights(decay=decay)["weight"].item() == pytest.approx(average, rel=1e-6)


def test_several_decays_in_one_hook(tmp_path):
    seen, hook = [], EMAHook([0.9, 0.0, 0.5], validation_decay=0.5)

    @around(TrainingSpan.VALIDATION)
    def look(ctx):
        seen.append(ctx.model.weight.item())
        yield

    config = ValidationConfig(validation_data=rows((1.0,)), every_n_steps=2)
    ctx = strategy(
        weight_row(0.0), [hook, look], optimizer_configs=SGD, loss_fn=linear, validation_config=config, num_steps=2
    ).run(rows(*[(-1.0,)] * 2))
    assert seen == [1.25] and ctx.model.weight.item() == 2.0
    for decay in (0.9, 0.0, 0.5):
        assert hook.weights(decay=decay)["weight"].item() == pytest.approx(by_hand(decay, [1.0, 2.0])), decay
    alone = weight_row(0.0)
    hook.copy_to(alone, decay=0.9)
    assert alone.weight.item() == pytest.approx(by_hand(0.9, [1.0, 2.0]))
    assert hook.weights()["weight"].item() == 1.25
    with pytest.raises(ConfigError, match=r"no average of this decay.*0\.7"):
        hook.weights(decay=0.7)


def run_of(hook, **kwargs):
    return strategy(weight_row(0.0), [hook], optimizer_configs=SGD, loss_fn=linear, num_steps=2, **kwargs).run(
        rows(*[(-1.0,)] * 2)
    )


def test_saved_averages_go_by_their_decay(tmp_path):
    """Another choice for validation exchanges no averages, and one of several can go on alone; one that was not kept is no zero."""
    run_of(saved := EMAHook([0.9, 0.5]))
    state = saved.state_dict()
    run_of(turned := EMAHook([0.5, 0.9]))
    turned.load_state_dict(state)
    run_of(alone := EMAHook(0.5))
    alone.load_state_dict(state)
    for decay in (0.9, 0.5):
        assert torch.equal(turned.weights(decay=decay)["weight"], saved.weights(decay=decay)["weight"])
    assert torch.equal(alone.weights()["weight"], saved.weights(decay=0.5)["weight"])
    run_of(more := EMAHook([0.9, 0.5, 0.25]))
    with pytest.raises(CheckpointError, match=r"no saved average of decay 0\.25.*fresh=\['ema'\]"):
        more.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"no saved average of decay 0\.5.*a single average"):
        turned.load_state_dict(alone.state_dict())


def test_a_single_average_is_saved_as_ever():
    """Files of before several decays can be read, and by others of before them."""
    run_of(hook := EMAHook(0.5))
    assert hook.state_dict() == {"count": 2, "models": {"model": {"weight": torch.tensor([[1.25]])}}}
    run_of(other := EMAHook(0.75))
    other.load_state_dict({"count": 7, "models": {"model": {"weight": torch.tensor([[3.5]])}}})
    assert other.count == 7 and other.weights()["weight"].item() == 3.5


@pytest.mark.parametrize("first", ["checkpoint", "average"])
@pytest.mark.parametrize("decay", [0.5, [0.5, 0.9]], ids=["one", "several"])
def test_b58_a_checkpoint_is_no_step_behind(tmp_path, first, decay):
    """Whatever the order of the list, the file of step 3 has the average after 3 updates."""
    hooks = [CheckpointHook(tmp_path, Every(steps=3)), EMAHook(decay)]
    strategy(
        weight_row(0.0), hooks if first == "checkpoint" else hooks[::-1], optimizer_configs=SGD, loss_fn=linear, num_steps=4
    ).run(rows(*[(-1.0,)] * 4))
    saved = torch.load(tmp_path / "step-00000003" / "shared.pt", weights_only=True)["hooks"]["ema"]
    assert saved["count"] == 3
    assert saved["models"]["model"]["weight"].item() == by_hand(0.5, [1.0, 2.0, 3.0])
    if decay != 0.5:
        assert saved["others"]["0.9"]["model"]["weight"].item() == pytest.approx(by_hand(0.9, [1.0, 2.0, 3.0]))


def test_an_average_that_starts_anew_starts_from_the_weights_resumed(tmp_path):
    torch.manual_seed(0)
    saved = checkpoint.save(strategy(network(), num_steps=20).run(batches()), tmp_path)
    hook = EMAHook(0.999)
    ctx = strategy(network(seed=8), [hook], num_steps=20, resume_from=saved, fresh=["ema"]).run(batches())
    for key, value in ctx.model.state_dict().items():
        assert torch.equal(hook.weights()[key], value), key


def test_b50_k04_a_checkpoint_at_validation_holds_the_training_weights(tmp_path):
    """A resume goes on from them: both sets of weights end as in the unbroken run."""

    def hooks(folder):
        return [CheckpointHook(folder, Every(steps=2), keep_last=None), EMAHook(0.9)]

    config = ValidationConfig(validation_data=batches(1, seed=5), every_n_steps=2)
    losses = {"whole": [], "resumed": []}

    def run(name, folder, model, steps, **kwargs):
        @on(TrainingStage.STEP_END)
        def keep(ctx):
            losses[name].append(ctx.loss.total.item())

        parts = hooks(folder)
        torch.manual_seed(0)
        strategy(model, [*parts, keep], validation_config=config, num_steps=steps, **kwargs).run(batches())
        return parts[1].weights()

    model, again = network(), network(seed=8)
    averaged = run("whole", tmp_path / "a", model, 6)
    saved = torch.load(tmp_path / "a" / "step-00000002" / "shared.pt", weights_only=True)
    raw, kept = saved["models"]["model"]["0.weight"], saved["hooks"]["ema"]["models"]["model"]["0.weight"]
    assert not torch.equal(raw, kept)
    resumed = run("resumed", tmp_path / "b", again, 6, resume_from=tmp_path / "a" / "step-00000002")
    assert losses["resumed"] == losses["whole"][2:]
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
        assert torch.equal(averaged[key], resumed[key]), key


def test_b74_saved_averages_load_into_a_plain_model(tmp_path):
    keys = set()
    for compiled in (False, True):
        model = network()
        hook = EMAHook(0.9)
        # The eager backend wraps as any other does, and compiles nothing.
        trained = torch.compile(model, backend="eager") if compiled else model
        ctx = strategy(trained, [hook], num_steps=2).run(batches())
        saved = torch.load(checkpoint.save(ctx, tmp_path / str(compiled)) / "shared.pt", weights_only=True)
        network(seed=1).load_state_dict(saved["hooks"]["ema"]["models"]["model"])
        network(seed=1).load_state_dict(saved["models"]["model"])
        network(seed=1).load_state_dict(hook.weights())
        keys.add(tuple(saved["hooks"]["ema"]["models"]["model"]))
        keys.add(tuple(saved["models"]["model"]))
    assert len(keys) == 1


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.second(self.first(x)))


def test_tied_parameters_have_one_average():
    model, hook = Tied(), EMAHook(0.5)
    strategy(model, [hook], num_steps=3).run(batches())
    averaged = hook.weights()
    assert torch.equal(averaged["first.weight"], averaged["second.weight"])
    Tied().load_state_dict(averaged)
    Tied().load_state_dict(hook.state_dict()["models"]["model"])


def test_low_precision_weights_are_averaged_in_float32():
    model = weight_row(1.0).to(torch.bfloat16)
    hook = EMAHook(0.999)
    data = [(x.bfloat16(), y.bfloat16()) for x, y in rows(*[(-1.0,)] * 4)]
    strategy(model, [hook], optimizer_configs=SGD, loss_fn=linear, num_steps=4).run(data)
    saved = hook.state_dict()["models"]["model"]["weight"]
    assert saved.dtype == torch.float32
    assert saved.item() == pytest.approx(by_hand(0.999, [2.0, 3.0, 4.0, 5.0], start=1.0), rel=1e-6)
    assert hook.weights()["weight"].dtype == torch.bfloat16


def test_float64_constants_stay_exact():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 1)
            self.register_buffer("reference", torch.tensor(math.pi, dtype=torch.float64))
            self.fixed = nn.Parameter(torch.tensor(math.e, dtype=torch.float64), requires_grad=False)

        def forward(self, x):
            return self.net(x) + self.reference + self.fixed

    hook = EMAHook(0.9)
    strategy(Shifted(), [hook], num_steps=7).run(batches())
    assert hook.weights()["reference"].item() == math.pi
    assert hook.weights()["fixed"].item() == math.e


def test_only_trained_models_are_averaged_by_default():
    models = {"student": nn.Linear(3, 1), "teacher": nn.Linear(3, 1)}
    hook = EMAHook(0.9)
    settings = {
        "optimizer_configs": {"student": OptimizerConfig(torch.optim.SGD, {"lr": 0.1})},
        "training_fn": lambda m, b: m["student"](b[0]) - m["teacher"](b[0]),
    }
    strategy(models, [hook], **settings).run(batches())
    assert list(hook.state_dict()["models"]) == ["student"]
    with pytest.raises(ConfigError, match="teachr"):
        strategy(models, [EMAHook(0.9, models=["teachr"])], **settings).run(batches())
    with pytest.raises(ConfigError, match="teacher"):
        hook.weights("teacher")


def test_another_models_state_is_refused(tmp_path):
    saved = checkpoint.save(strategy(network(), [EMAHook(0.9)]).run(batches()), tmp_path)
    state = torch.load(saved / "shared.pt", weights_only=True)["hooks"]["ema"]
    hook = EMAHook(0.9)
    strategy(nn.Linear(3, 1), [hook]).run(batches())
    with pytest.raises(CheckpointError, match=r"lacks parameters.*weight"):
        hook.load_state_dict(state)


def test_with_mixed_precision():
    hook = EMAHook(0.9)
    strategy(network(), [MixedPrecisionHook("bf16"), hook]).run(batches())
    assert all(v.isfinite().all() for v in hook.weights().values())


def test_before_a_run_there_is_no_average():
    with pytest.raises(ConfigError, match="no model yet"):
        EMAHook(0.9).weights()


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan"), "0.9", [], [0.9, 1.0], [0.5, 0.5]])
def test_impossible_decays(decay):
    with pytest.raises(ConfigError, match="decay"):
        EMAHook(decay)


def test_impossible_choices():
    with pytest.raises(ConfigError, match=r"no average to validate with.*0\.9"):
        EMAHook([0.5, 0.99], validation_decay=0.9)
    with pytest.raises(ConfigError, match="bias_corrected and warmup"):
        EMAHook(bias_corrected=True, warmup=True)


def test_update_ema_in_a_loop_of_ones_own():
    model = network()
    average = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    model(torch.randn(4, 3))
    start = average[0].weight.clone()
    update_ema(average, model, 0.75)
    torch.testing.assert_close(average[0].weight, start + 0.25)
    assert torch.equal(average[1].running_mean, model[1].running_mean)
    assert average[1].num_batches_tracked.item() == 1
    assert all(p.grad_fn is None for p in average.parameters())
    with pytest.raises(ConfigError, match="differ"):
        update_ema(average, nn.Linear(3, 1), 0.9)
    with pytest.raises(ConfigError, match="decay"):
        update_ema(average, model, 1.5)


def test_update_ema_knows_a_compiled_model():
    model = network()
    average = copy.deepcopy(model)
    update_ema(average, torch.compile(model, backend="eager"), 0.9)
