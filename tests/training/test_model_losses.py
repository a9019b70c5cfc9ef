"""Losses that hold their model, under the strategy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nvalchemi.ebm.losses import DenoisingScoreMatching, ScoreMatching
from nvalchemi.errors import CheckpointError, ConfigError
from nvalchemi.models import EnergyModel, MLPEnergy
from nvalchemi.objective import ModelLoss, Terms
from nvalchemi.training import Every, Hook, OptimizerConfig, TrainingStage, TrainingStrategy, ValidationConfig, on
from nvalchemi.training.hooks import CheckpointHook
from nvalchemi.training.objectives import samples_and_conditions

SGD = OptimizerConfig(torch.optim.SGD, {"lr": 0.05})


def rows(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in sizes]


def mlp() -> MLPEnergy:
    torch.manual_seed(0)
    return MLPEnergy(2, 8).double()


class Gradients(Hook):
    def __init__(self) -> None:
        self.seen: list[list[Tensor]] = []
        self.losses: list[float] = []

    @on(TrainingStage.GRADIENTS_READY)
    def look(self, ctx) -> None:
        self.seen.append([p.grad.clone() for p in ctx.model.parameters()])
        self.losses.append(float(ctx.loss.total))


def train(make, batches, model=None, **settings):
    model = mlp() if model is None else model
    keep = Gradients()
    settings = {"num_epochs": 1, **settings}
    hooks = [keep, *settings.pop("hooks", ())]
    strategy = TrainingStrategy(models=model, optimizer_configs=SGD, loss_fn=make(model), hooks=hooks, **settings)
    return keep, strategy.run(batches)


def test_unequal_micro_batches_are_one_batch():
    """Samples are averaged, not the means of micro-batches."""
    parts = rows(3, 9)
    whole, _ = train(ScoreMatching, [torch.cat(parts)])
    cut, _ = train(ScoreMatching, parts, accumulate=2)
    for a, b in zip(whole.seen[0], cut.seen[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert cut.losses == pytest.approx(whole.losses, rel=1e-12)


def test_the_loss_alone_is_the_loss_of_the_run():
    """Noise comes from the run's generator."""
    keep, ctx = train(lambda model: DenoisingScoreMatching(model, 0.3), rows(5))
    generator = torch.Generator().manual_seed(0)
    model = mlp()
    generators = []

    class Look(Hook):
        @on(TrainingStage.TRAINING_START)
        def state(self, ctx) -> None:
            generators.append(ctx.generator.get_state())

    train(lambda model: DenoisingScoreMatching(model, 0.3), rows(5), hooks=[Look()])
    generator.set_state(generators[0])
    loss = DenoisingScoreMatching(model, 0.3)(rows(5)[0], generator=generator)
    assert loss.item() == pytest.approx(keep.losses[0], rel=1e-12)
    assert ctx.loss.samples == 5


class Conditional(EnergyModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1).double()
        self.asked: list[Tensor] = []

    def forward(self, x, y):
        self.asked.append(y)
        return self.net(torch.cat([x, y[:, None].to(x)], 1)).tanh().squeeze(1)


@pytest.mark.parametrize(
    "pack", [lambda x, y: (x, y), lambda x, y: [x, y], lambda x, y: {"y": y, "x": x}], ids=["tuple", "list", "dict"]
)
def test_labels_of_a_loader(pack):
    x, y = rows(4)[0], torch.arange(4)
    model = Conditional()
    _, ctx = train(lambda m: DenoisingScoreMatching(m, 0.3), [pack(x, y)], model)
    assert torch.equal(model.asked[0], y) and ctx.loss.samples == 4


def test_what_are_the_samples():
    x = rows(4)[0]
    assert samples_and_conditions([x])[0] is x
    for batch in ({"z": x}, (x, x, x), "x"):
        with pytest.raises(ConfigError, match="which of the batch"):
            samples_and_conditions(batch)


def test_another_model_is_refused():
    with pytest.raises(ConfigError, match="holds another model"):
        TrainingStrategy(models=mlp(), optimizer_configs=SGD, loss_fn=ScoreMatching(mlp()), num_epochs=1)
    model = mlp()
    TrainingStrategy(models={"a": mlp(), "b": model}, optimizer_configs={"b": SGD}, loss_fn=ScoreMatching(model), num_epochs=1)
    with pytest.raises(ConfigError, match="training_fn beside"):
        TrainingStrategy(
            models=model, optimizer_configs=SGD, loss_fn=ScoreMatching(model), training_fn=lambda m, b: m(b), num_epochs=1
        )


def test_the_right_one_of_several_models():
    energy, other = mlp(), nn.Linear(2, 1)
    strategy = TrainingStrategy(
        models={"other": other, "energy": energy}, optimizer_configs={"energy": SGD}, loss_fn=ScoreMatching(energy), num_epochs=1
    )
    before = energy.net[0].weight.detach().clone()
    strategy.run(rows(4))
    assert not torch.equal(before, energy.net[0].weight)


def test_validation_is_without_trace():
    """Scores are gradients, also in validation; nothing of it stays."""
    model = mlp()
    keep, ctx = train(ScoreMatching, rows(4), model, validation_config=ValidationConfig(validation_data=rows(3, 5)))
    x = torch.cat(rows(3, 5))
    wanted = ScoreMatching(model)(x).item()
    assert ctx.validation["loss"] == pytest.approx(wanted, rel=1e-12)
    assert model.training


class Counting(ModelLoss):
    """A loss with a state of its own."""

    def __init__(self, model, rank_local: bool) -> None:
        super().__init__(model)
        self.rank_local, self.calls = rank_local, torch.zeros(1)

    def terms(self, model, x, *, generator, step, conditions) -> Terms:
        self.calls += 1
        return Terms({"loss": model(x).square()})

    def state_dict(self):
        return {"chains": {"calls": self.calls}}

    def load_state_dict(self, state) -> None:
        self.calls = state["chains"]["calls"].clone()


@pytest.mark.parametrize("rank_local", [False, True])
def test_state_is_saved_and_taken_back(rank_local, tmp_path):
    """In the file of the rank where it is the rank's own; validation leaves it alone; a model is saved once."""
    settings = {
        "hooks": [CheckpointHook(tmp_path, every=Every(steps=1))],
        "validation_config": ValidationConfig(validation_data=rows(2, 2)),
    }
    _, ctx = train(lambda model: Counting(model, rank_local), rows(2, 2), **settings)
    assert float(ctx.objective.loss_fn.calls) == 2.0
    folder = sorted(tmp_path.glob("step-*"))[-1]
    files = {path.name: torch.load(path, weights_only=True) for path in folder.glob("*.pt")}
    holders = [name for name, state in files.items() if state.get("objective")]
    assert len(holders) == 1 and ("rank" in holders[0]) == rank_local
    assert sum(len(state.get("models", {})) for state in files.values()) == 1
    _, resumed = train(lambda model: Counting(model, rank_local), rows(2, 2, 2), resume_from="latest", num_epochs=2, **settings)
    assert float(resumed.objective.loss_fn.calls) > 2.0


def test_state_that_does_not_fit_is_an_error():
    with pytest.raises(CheckpointError, match="has no state"):
        ScoreMatching(mlp()).load_state_dict({"replay_buffer": {}})
    assert ScoreMatching(mlp()).state_dict() == {}


def test_a_loss_is_no_module():
    """So that no weight is saved twice or found twice by an optimizer."""
    loss_fn = ScoreMatching(mlp())
    assert not isinstance(loss_fn, nn.Module)
    assert "MLPEnergy" in repr(loss_fn)


class Switched(ModelLoss):
    """A second term that comes with the second step."""

    parts = ("first", "second")

    def terms(self, model, x, *, generator, step, conditions) -> Terms:
        energy = model(x)
        return Terms({"first": energy.square(), "second": energy if step else None})


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_term_that_is_switched_off_is_zero(accumulate):
    """The parts of a step are always the same, and the loss is that of the terms that are there."""
    model, x = mlp(), rows(5)[0]
    loss_fn = Switched(model)
    assert torch.equal(loss_fn(x, step=0), model(x).square().mean())
    torch.testing.assert_close(loss_fn(x, step=1), model(x).square().mean() + model(x).mean())
    seen = []

    @on(TrainingStage.LOSS_READY)
    def note(ctx):
        seen.append({name: float(part.value.detach()) for name, part in ctx.loss.parts.items()})

    train(Switched, rows(*[4, 3] * accumulate), model, accumulate=accumulate, hooks=[note])
    assert [part["second"] == 0.0 for part in seen] == [True] * accumulate + [False] * accumulate
    assert all(part.keys() == {"first", "second"} for part in seen)
