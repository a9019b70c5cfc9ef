"""Validation: exact means, nothing disturbed, the right moments."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from nvalchemi.errors import ConfigError, DataError
from nvalchemi.models.energy import EnergyModel
from nvalchemi.objective import LossOutput, LossPart, Objective
from nvalchemi.training import (
    EnergyMAELoss,
    EnergyMSELoss,
    Every,
    ForceMSELoss,
    Hook,
    LinearWeight,
    OptimizerConfig,
    PeriodicHook,
    TrainingSpan,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
    around,
    evaluate,
    measures,
    on,
)
from nvalchemi.training.hooks import EMAHook
from tests.training.losses.systems import make_batch


class Springs(EnergyModel):
    """Every atom on a spring to the origin; the net is one stiffness and a dropout."""

    outputs = ("energy", "forces")

    def __init__(self, stiffness=1.0, dropout=0.0):
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.net.weight, stiffness)
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch):
        squares = batch.positions.square().sum(-1, keepdim=True)
        energy = 0.5 * self.dropout(self.net(squares.to(self.net.weight.dtype))).squeeze(-1).double()
        return energy.new_zeros(batch.num_graphs).index_add(0, batch.batch_idx, energy)


@pytest.fixture
def batches():
    whole = make_batch((3, 1, 5, 2, 2, 4, 1, 3, 6), lacking={"energy": [4], "forces": [0], "stress": [1, 2]}, dtype=torch.float32)
    whole.forces[-1, 0] = float("nan")
    return [whole.index_select(range(4)), whole.index_select(range(4, 8)), whole.index_select([8])], whole


def test_errors_are_exact_whatever_the_batches(batches):
    parts, whole = batches
    model = Springs()
    metrics = evaluate(model, parts, outputs=("energy", "forces"))
    x = whole.positions.double()
    energy = torch.zeros(9, dtype=torch.float64).index_add(0, whole.batch_idx, 0.5 * x.square().sum(1)) - whole.energy
    per_atom = energy / whole.num_nodes_per_graph
    force = -x - whole.forces.double()
    for name, error in (("energy", energy), ("energy_per_atom", per_atom), ("forces", force)):
        error = error[~error.isnan()]
        assert metrics[f"{name}_mae"] == pytest.approx(error.abs().mean().item(), rel=1e-6)
        assert metrics[f"{name}_rmse"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-6)
    assert (metrics["n"], metrics["n_energy"], metrics["n_forces"]) == (9, 8, 24 * 3 - 1)
    assert "loss" not in metrics and "stress_mae" not in metrics


def test_the_loss_is_that_of_all_as_one_batch(batches):
    parts, whole = batches
    model = Springs().eval()
    loss_fn = EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss() + LinearWeight(0.0, 1.0, 10) * EnergyMAELoss(name="mae")
    metrics = evaluate(model, parts, loss_fn, step=5)
    expected = loss_fn(model.predict(whole, ("energy", "forces")), whole, 5)
    assert metrics["loss"] == pytest.approx(expected.total.item())
    for name, part in expected.parts.items():
        assert metrics[f"loss/{name}"] == pytest.approx(part.value.item())


class Told(Objective):
    """Gives what each batch says, (values, weights)."""

    def __call__(self, model, batch, *, generator, step):
        return LossOutput.from_parts({"told": LossPart(batch.sum(), len(batch), 2.0)}, len(batch))


def test_b106_batches_weigh_by_their_size():
    batches = [torch.full((4,), 1.0), torch.full((4,), 1.0), torch.full((1,), 10.0)]
    assert evaluate(nn.Linear(1, 1), batches, Told()) == {"loss": 4.0, "loss/told": 2.0, "n": 9}
    mean = evaluate(nn.Linear(1, 1), batches, lambda x, generator: x.mean())
    assert mean == {"loss": 2.0, "n": 9}


def test_an_output_without_any_label_is_left_out():
    batch = make_batch(lacking={"energy": [0, 1]}).index_select([0, 1])
    metrics = evaluate(Springs(), [batch], EnergyMSELoss() + ForceMSELoss(), outputs=())
    assert metrics["loss/forces"] == pytest.approx(metrics["loss"])
    assert not [k for k in metrics if "energy" in k]


def test_other_label_names_are_followed():
    batch = make_batch().replace(ref=torch.zeros(4, dtype=torch.float64), levels={"ref": "system"})
    metrics = evaluate(Springs(0.0), [batch], EnergyMAELoss(target_key="ref"))
    assert metrics["energy_mae"] == metrics["loss"] == 0.0


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_forces_come_in_any_gradient_mode_and_leave_nothing(context, batches):
    parts, _ = batches
    model = Springs()
    model.net.weight.grad = torch.full((1, 1), 7.0)
    outside = evaluate(model, parts, ForceMSELoss())
    kept = []
    with context():
        inside = evaluate(model, parts, ForceMSELoss(), batch_callback=lambda b, p, loss: kept.append((p, loss)))
    assert inside == outside
    assert model.net.weight.grad.item() == 7.0
    assert all(not p["forces"].requires_grad and not loss.total.requires_grad for p, loss in kept)


def test_modes_and_random_streams_are_left_as_they_were(batches):
    parts, _ = batches
    model = Springs(dropout=0.5)
    model.train()
    model.dropout.eval()  # a part frozen by its user

    def greedy(model, batch):
        assert not model.training and not model.dropout.training
        torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
        return model.predict(batch, ("forces",))

    def streams():
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()  # noqa: NPY002

    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5)
    expected = streams()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5)
    evaluate(model, parts, ForceMSELoss(), training_fn=greedy)
    assert streams() == expected
    assert model.training and not model.dropout.training and model.net.training

    def fails(model, batch):
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        evaluate(model, parts, ForceMSELoss(), training_fn=fails)
    assert model.training and not model.dropout.training


def test_noise_is_the_same_every_time():
    def noisy(x, generator):
        return (x + torch.randn(x.shape, generator=generator)).square().mean()

    data = [torch.zeros(5), torch.zeros(3)]
    assert evaluate(nn.Linear(1, 1), data, noisy) == evaluate(nn.Linear(1, 1), data, noisy)


class Chains(nn.Module):
    """A loss with a state of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("chains", torch.zeros(3))

    def forward(self, x, generator):
        self.chains += 1
        return x.mean() + self.chains.sum()


def test_a_loss_with_chains_keeps_them():
    loss = Chains()
    evaluate(nn.Linear(1, 1), [torch.zeros(2)] * 3, loss)
    assert (loss.chains == 0).all()


def test_scores_can_be_taken_in_a_users_loss():
    net = nn.Linear(2, 1)

    def score(x, generator):
        x = x.requires_grad_()
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return gradient.square().mean()

    with torch.no_grad():
        metrics = evaluate(net, [torch.zeros(4, 2)], score)
    assert metrics["loss"] == pytest.approx(net.weight.square().mean().item())


def test_nothing_to_validate_on():
    with pytest.raises(DataError, match="gave no batch"):
        evaluate(Springs(), [], ForceMSELoss())
    with pytest.raises(DataError, match="needed: forces"):
        evaluate(Springs(), [make_batch().replace(forces=None)], ForceMSELoss())
    with pytest.raises(DataError, match="no labelled forces"):
        evaluate(Springs(), [make_batch().replace(forces=None)], outputs=("forces",))


class EnergiesAlone(Springs):
    outputs = ("energy",)


def test_what_the_model_predicts_is_what_is_measured(batches):
    parts, _ = batches
    assert "forces" in parts[0]
    metrics = evaluate(EnergiesAlone(), parts)
    assert metrics["energy_mae"] > 0 and not [name for name in metrics if "forces" in name]
    assert metrics == evaluate(EnergiesAlone(), parts, outputs=("energy",))
    with pytest.raises(ConfigError, match="does not predict that; found: forces"):
        evaluate(EnergiesAlone(), parts, outputs=("forces",))
    for outputs in (("force",), "energy"):
        with pytest.raises(ConfigError, match="errors are not measured of that"):
            evaluate(Springs(), parts, outputs=outputs)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"validation_data": iter([1])}, "only once"),
        ({"validation_data": 3}, "iterated"),
        ({"validation_data": [], "every_n_steps": 1, "every_n_epochs": 1}, "one frequency"),
        ({"validation_data": [], "every_n_epochs": 0}, "one positive whole number"),
        ({"validation_data": [], "outputs": ("dipole",)}, "not measured of that"),
    ],
)
def test_configs_that_cannot_work(settings, words):
    with pytest.raises(ConfigError, match=words):
        ValidationConfig(**settings)


def test_ranks_add_up_even_if_one_has_no_batch(batches, monkeypatch):
    parts, whole = batches
    model, loss_fn = Springs(), EnergyMSELoss() + 2.0 * ForceMSELoss()
    ranks = []
    for mine in (parts[:2], parts[2:], []):
        totals = measures.Totals(torch.device("cpu"))
        for batch in mine:
            predictions = model.predict(batch, ("energy", "forces"))
            totals.add_samples(len(batch))
            totals.add_loss(loss_fn(predictions, batch).detached())
            totals.add_errors({k: v.detach() for k, v in predictions.items()}, batch, {k: k for k in measures.OUTPUTS})
        ranks.append(totals)
    tables = []

    def gather(value, manager):
        return [(list(t.sums) if t.samples else ["samples"], t.weights) for t in ranks]

    def all_reduce(table, manager):
        tables.append(table)
        return sum(tables)

    expected = evaluate(model, parts, loss_fn, outputs=())
    monkeypatch.setattr(measures, "gather", gather)
    monkeypatch.setattr(measures, "all_reduce", all_reduce)
    found = [totals.metrics(None) for totals in ranks[:2]] + [ranks[2].metrics(None)]
    assert found[2] == pytest.approx(expected, rel=1e-12)


# -- under a strategy ------------------------------------------------------------------------------------------------


class Watch(Hook):
    """What a hook sees of validations, and the losses of the steps."""

    def __init__(self):
        self.seen, self.spans, self.losses = [], 0, []

    @on(TrainingStage.VALIDATED)
    def validated(self, ctx):
        self.seen.append((ctx.progress.step, dict(ctx.validation)))

    @around(TrainingSpan.VALIDATION)
    def span(self, ctx):
        yield
        self.spans += 1

    @on(TrainingStage.STEP_END)
    def step(self, ctx):
        self.losses.append(float(ctx.loss.total))


def run(validation=None, hooks=(), model=None, **kwargs):
    torch.manual_seed(0)
    watch = Watch()
    model = Springs(dropout=0.3) if model is None else model
    data = [make_batch(seed=i, dtype=torch.float32) for i in range(3)]
    settings = {"num_epochs": 2} | kwargs
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 0.01}),
        loss_fn=EnergyMSELoss() + ForceMSELoss(),
        validation_config=validation,
        hooks=[watch, *hooks],
        **settings,
    )
    return strategy.run(data), watch, model


def config(**kwargs):
    return ValidationConfig(validation_data=[make_batch(seed=9, dtype=torch.float32)], **kwargs)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [3, 6]),
        ({"every_n_epochs": 2}, [6]),
        ({"every_n_epochs": 5}, [6]),  # the last state, in any case
        ({"every_n_steps": 2}, [2, 4, 6]),
        ({"every_n_steps": 4}, [4, 6]),
        ({"every_n_steps": 4, "at_start": True}, [0, 4, 6]),
    ],
)
def test_when(settings, steps):
    ctx, watch, model = run(config(**settings))
    assert [step for step, _ in watch.seen] == steps and watch.spans == len(steps)
    assert ctx.validation == watch.seen[-1][1]
    last = evaluate(model, config().validation_data, EnergyMSELoss() + ForceMSELoss(), outputs=())
    assert ctx.validation == last


def test_how_often_changes_no_training_step():
    runs = [run(None), *(run(config(every_n_steps=n, at_start=True)) for n in (1, 2, 5))]
    assert all(watch.losses == runs[0][1].losses for _, watch, _ in runs)
    assert all(torch.equal(model.net.weight, runs[0][2].net.weight) for _, _, model in runs)


def test_the_first_report_is_of_the_validation_set():
    """Distinct constant losses tell which set a number came from."""
    flat = Springs(0.0)
    data = make_batch(seed=9, dtype=torch.float32)
    for label, value in (("energy", 3.0), ("forces", 0.0)):
        data.fields[label].fill_(value)
    _, watch, _ = run(ValidationConfig(validation_data=[data], at_start=True), model=flat, num_epochs=1)
    assert watch.seen[0][0] == 0 and watch.seen[0][1]["loss"] == pytest.approx(9.0)


def test_averaged_weights_are_validated():
    ema = EMAHook(0.5)
    ctx, _, model = run(config(), [ema])
    averaged = Springs()
    ema.copy_to(averaged)
    expected = evaluate(averaged, config().validation_data, EnergyMSELoss() + ForceMSELoss(), outputs=())
    assert ctx.validation["loss"] == pytest.approx(expected["loss"])
    assert not torch.equal(averaged.net.weight, model.net.weight)


def test_a_scheduler_reads_the_metric():
    plateau = OptimizerConfig(
        torch.optim.SGD,
        {"lr": 1.0},
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        {"patience": 0, "threshold": 1e9},
        scheduler_metric="forces_mae",
    )
    strategy = TrainingStrategy(
        models=Springs(),
        optimizer_configs=plateau,
        loss_fn=ForceMSELoss(),
        validation_config=config(every_n_steps=1),
        num_steps=4,
    )
    ctx = strategy.run([make_batch(dtype=torch.float32)])
    assert ctx.optimizers["model"].param_groups[0]["lr"] < 1.0


def test_the_last_validation_moves_no_scheduler():
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    settings = {"factor": 0.5, "patience": 0, "threshold": 1e9}

    def rate(steps):
        strategy = TrainingStrategy(
            models=Springs(),
            optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 1e-3}, plateau, settings, scheduler_metric="loss"),
            loss_fn=ForceMSELoss(),
            validation_config=config(every_n_steps=2),
            num_steps=steps,
        )
        return strategy.run([make_batch(dtype=torch.float32)]).optimizers["model"].param_groups[0]["lr"]

    assert rate(5) == rate(4) < 1e-3  # resumed for longer, the run must be on the curve of one that was not stopped


def test_resumes(tmp_path):
    from nvalchemi.testing import assert_resumes

    def factory(directory):
        torch.manual_seed(0)
        strategy = TrainingStrategy(
            models=Springs(dropout=0.2),
            optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 0.01}),
            loss_fn=EnergyMSELoss() + ForceMSELoss(),
            validation_config=config(every_n_steps=2),
            num_epochs=3,
        )
        return strategy, [make_batch(seed=i, dtype=torch.float32) for i in range(3)]

    assert_resumes(factory, steps=9, stop_at=4)


def test_periodic_hooks_of_a_users_own_see_the_metrics():
    class Reporter(PeriodicHook):
        def act(self, ctx):
            seen.append(ctx.validation is not None)

    seen = []
    run(config(every_n_steps=1), [Reporter(Every(steps=1))])
    assert seen == [True] * 6
