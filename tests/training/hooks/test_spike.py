import logging

import pytest
import torch
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.errors import ConfigError, TrainingError
from nvalchemi.training import TrainingStage, checkpoint, on
from nvalchemi.training.hooks import MixedPrecisionHook, SpikeHook
from nvalchemi.training.structures import name_structures
from tests.training.hooks.runs import SGD, linear, rows, strategy, weight_row

NAN, INF = float("nan"), float("inf")


class Level(nn.Module):
    """Predicts the batch's first number, plus zero times a weight: the loss is what the data say."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x[:, :1] + 0 * self.weight


def run(losses, hook, model=None, **kwargs):
    skipped = []

    @on(TrainingStage.OPTIMIZER_SKIPPED)
    def note(ctx):
        skipped.append((ctx.progress.batch - 1, ctx.skip_reason))

    settings = {"optimizer_configs": SGD, "loss_fn": linear, "num_epochs": 1, **kwargs}
    ctx = strategy(Level() if model is None else model, [hook, note], **settings).run(rows(*[(v,) for v in losses]))
    return ctx, skipped


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_loss_that_is_not_finite_is_skipped(bad):
    model = Level()
    ctx, skipped = run([1.0, bad, 1.0], SpikeHook(), model)
    assert [i for i, _ in skipped] == [1]
    assert f"the loss is {bad}" in skipped[0][1]
    assert (ctx.progress.step, ctx.progress.skipped) == (2, 1)
    assert model.weight.isfinite().all()


def test_without_the_guard_the_run_ends_with_an_error():
    model = weight_row(0.0)
    with pytest.raises(TrainingError, match=r"the loss of the step after 1 is nan.*SpikeHook"):
        strategy(model, optimizer_configs=SGD, loss_fn=linear, num_epochs=1).run(rows((1.0,), (NAN,), (1.0,)))
    assert model.weight.isfinite().all()


def test_a_gradient_that_is_not_finite_is_skipped():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return (self.weight * x).abs().sqrt() + x  # at 0 the value is fine and the slope is not

    model = Root()
    _, skipped = run([1.0], SpikeHook(), model)
    assert "a gradient is not finite, and the loss is 1" in skipped[0][1]
    assert model.weight.item() == 0.0


@pytest.mark.parametrize(
    ("losses", "skipped"),
    [
        ([1.0] * 30 + [9.0, 11.0, 1.0], [31]),
        ([1.0] * 4 + [50.0, 1.0], []),  # too few to judge by
        ([-5.0] * 30 + [-4.9, 30.0, 41.0], [32]),
        ([0.1 * (-1) ** i for i in range(30)] + [0.3, 5.0], [31]),
    ],
)
def test_what_is_a_spike(losses, skipped):
    _, seen = run(losses, SpikeHook(factor=10.0, window=20))
    assert [i for i, _ in seen] == skipped


def test_no_factor_looks_at_non_finite_values_only():
    _, skipped = run([1.0] * 30 + [1e6, NAN], SpikeHook(factor=None))
    assert [i for i, _ in skipped] == [31]


def test_the_window_moves_on():
    losses = [1.0] * 12 + [5.0] * 8 + [40.0]
    assert run(losses, SpikeHook(factor=10.0, window=10))[1] == []
    assert [i for i, _ in run(losses, SpikeHook(factor=10.0, window=20))[1]] == [20]


def test_too_many_in_a_row_end_the_run():
    with pytest.raises(TrainingError, match=r"4 steps in a row.*the loss is nan.*at most 3"):
        run([1.0, NAN, NAN, NAN, NAN], SpikeHook(max_consecutive=3))
    ctx, _ = run([NAN, NAN, NAN, 1.0, NAN, NAN, NAN], SpikeHook(max_consecutive=3))
    assert ctx.progress.skipped == 6


def test_overflow_under_loss_scaling_is_not_the_datas_fault():
    hook = SpikeHook(max_consecutive=1)
    data = rows(*[(2.0,)] * 6)
    model = weight_row(1.0)
    ctx = strategy(
        model, [MixedPrecisionHook("fp16", init_scale=2.0**20), hook], optimizer_configs=SGD, loss_fn=linear, num_epochs=1
    ).run(data)
    assert ctx.progress.skipped >= 3
    assert hook.consecutive == 0


def structures(*energies, first=0, names=("a.zarr",), dataset=0):
    data = [AtomicData(torch.zeros(1, 3), torch.tensor([1]), energy=torch.tensor(e, dtype=torch.float64)) for e in energies]
    batch = Batch.from_data_list(data)
    batch.sample_index = torch.arange(first, first + len(energies))
    batch.dataset_index = torch.full((len(energies),), dataset)
    batch.dataset_names = names
    return batch


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, batch):
        return self.energy.expand(len(batch))


def atomic_run(data, hook, **kwargs):
    reasons = []

    @on(TrainingStage.OPTIMIZER_SKIPPED)
    def note(ctx):
        reasons.append(ctx.skip_reason)

    strategy(
        Constant(),
        [hook, note],
        optimizer_configs=SGD,
        training_fn=lambda model, batch: model(batch),
        loss_fn=lambda energies, batch: (energies - batch.energy).square().mean(),
        num_epochs=1,
        **kwargs,
    ).run(data)
    return reasons


def test_the_structures_are_named_by_data_set_and_index(caplog):
    names = ("train.zarr", "more.zarr")
    with caplog.at_level(logging.WARNING, "nvalchemi"):
        reasons = atomic_run(
            [structures(0.1, 0.2, names=names), structures(0.1, NAN, first=17, names=names, dataset=1)], SpikeHook()
        )
    assert reasons == ["the loss is nan; structures: more.zarr: 17, 18"]
    assert "structures of the batch: more.zarr: 17, 18" in caplog.text


def test_only_the_micro_batch_at_fault_is_named():
    groups = [structures(0.1, first=3), structures(NAN, first=4), structures(0.2, first=5)]
    assert atomic_run(groups, SpikeHook(), accumulate=3) == ["the loss is nan; structures: a.zarr: 4"]


def test_the_reason_is_short_and_the_log_whole(caplog):
    with caplog.at_level(logging.WARNING, "nvalchemi"):
        (reason,) = atomic_run([structures(*[NAN] * 20)], SpikeHook())
    assert reason.endswith("a.zarr: 0, 1, 2, 3, 4, 5, 6, 7 and 12 more")
    assert "18, 19" in caplog.text


def test_batches_without_an_origin():
    assert name_structures([torch.zeros(3)]).startswith("not known")
    assert name_structures([structures(0.0, 0.0, names=())]) == "data set 0: 0, 1"


def test_the_window_resumes(tmp_path):
    hook = SpikeHook(factor=3.0, window=8)
    ctx, _ = run([float(i) for i in range(1, 13)] + [NAN], hook)
    saved = checkpoint.save(ctx, tmp_path)
    again = SpikeHook(factor=3.0, window=8)
    again.load_state_dict(torch.load(saved / "shared.pt", weights_only=True)["hooks"]["spike"])
    assert again.consecutive == 1
    assert list(again._recent) == list(hook._recent) == [5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0]
    assert again._sorted == hook._sorted


@pytest.mark.parametrize("settings", [{"factor": 1.0}, {"factor": NAN}, {"window": 4}, {"max_consecutive": 0}])
def test_impossible_settings(settings):
    with pytest.raises(ConfigError, match="factor"):
        SpikeHook(**settings)
