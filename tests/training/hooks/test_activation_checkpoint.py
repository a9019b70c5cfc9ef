import pytest
import torch
from torch import nn

from nvalchemi.distributed.recompute import is_recomputed
from nvalchemi.ebm.losses import DenoisingScoreMatching
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel
from nvalchemi.training import OptimizerConfig, TrainingStage, TrainingStrategy, ValidationConfig, checkpoint, on
from nvalchemi.training.hooks import ActivationCheckpointHook, EMAHook, MixedPrecisionHook
from tests.memory import MostAlive
from tests.training.hooks.runs import batches, strategy


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self, width=3, blocks=4, dropout=0.2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.head = nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Energy(EnergyModel):
    def __init__(self, **options):
        super().__init__()
        self.net = Net(**options)

    def forward(self, x):
        return self.net(x).squeeze(-1)


def network(kind=Net, **options):
    torch.manual_seed(2)
    return kind(**options).double()


def doubles(count=4, size=4, dim=3):
    return [(x.double(), y.double()) for x, y in batches(count, size, dim)]


def trained(hooks, model=None, loss_fn=None, data=None, **kwargs):
    """Weights after a run, with the random stream set before it."""
    model = network() if model is None else model
    torch.manual_seed(4)
    if loss_fn is None:
        ctx = strategy(model, hooks, **kwargs).run(doubles() if data is None else data)
    else:
        ctx = TrainingStrategy(models=model, optimizer_configs=OptimizerConfig(torch.optim.Adam, {"lr": 1e-2}),
                               loss_fn=loss_fn, num_steps=4, hooks=hooks, **kwargs).run(data)  # fmt: skip
    return ctx, {key: value.clone() for key, value in model.state_dict().items()}


def assert_equal(got, wanted):
    assert list(got) == list(wanted)
    for key, value in wanted.items():
        assert torch.allclose(got[key], value, rtol=1e-10, atol=1e-12), key


def test_the_weights_are_those_of_a_plain_run_with_dropout():
    _, wanted = trained([])
    seen = []

    @on(TrainingStage.STEP_END)
    def look(ctx):
        seen.append([is_recomputed(block) for block in ctx.model.blocks] + [is_recomputed(ctx.model.head)])

    ctx, got = trained([ActivationCheckpointHook(), look])
    assert_equal(got, wanted)
    assert seen == [[True] * 4 + [False]] * 4
    assert not is_recomputed(ctx.model) and "forward" not in ctx.model.blocks[0].__dict__


def test_a_score_loss_with_accumulation_and_averages():
    data = [x for x, _ in doubles(8)]
    runs = []
    for hooks in ([EMAHook(0.5)], [ActivationCheckpointHook(), EMAHook(0.5)]):
        model = network(Energy, dropout=0.0)
        loss = DenoisingScoreMatching(model, noise_scale=0.5)
        runs.append((trained(hooks, model, loss, data, accumulate=2)[1], hooks[-1].weights()))
    assert_equal(runs[1][0], runs[0][0])
    assert_equal(runs[1][1], runs[0][1])


CHOICES = {
    "a class": (Block, 4),
    "a pattern": ("net.blocks.[12]", 2),
    "a pattern of inner ones": ("*.up", 4),
    "a list": ([Block, "net.head"], 5),
    "a function": (lambda module: isinstance(module, nn.Linear) and module.out_features == 12, 4),
    "the default": (None, 4),
    "outer ones, not what is within": (lambda module: True, 5),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_what_is_chosen(choice):
    wrap, number = CHOICES[choice]
    found = []

    @on(TrainingStage.TRAINING_START)
    def look(ctx):
        found.extend(name for name, m in ctx.model.named_modules() if "forward" in m.__dict__)

    model = network(Energy)
    loss = DenoisingScoreMatching(model, noise_scale=0.5)
    trained([ActivationCheckpointHook(wrap), look], model, loss, [x for x, _ in doubles()])
    assert len(found) == number, found
    assert "net" not in found and "" not in found


@pytest.mark.parametrize("order", [1, 2])
def test_less_memory(order):
    """A run's most bytes at once, of a net of many blocks: with a loss of first order, and with one that contains a gradient."""
    most = []
    for hooks in ([], [ActivationCheckpointHook()]):
        model = network(Energy, width=8, blocks=10, dropout=0.0)
        data = [x for x, _ in doubles(1, size=256, dim=8)]
        loss = (
            DenoisingScoreMatching(model, noise_scale=0.5) if order == 2 else (lambda x, generator, m=model: m(x).square().mean())
        )
        with MostAlive() as seen:
            trained(hooks, model, loss, data)
        most.append(seen.most)
    assert most[1] < 0.5 * most[0], most


def test_checkpoints_and_validation_know_nothing_of_it(tmp_path):
    config = ValidationConfig(validation_data=doubles(2), every_n_steps=2)
    saved = {}
    for name, hooks in {"plain": [], "recomputed": [ActivationCheckpointHook()]}.items():
        kept = []

        @on(TrainingStage.STEP_END)
        def keep(ctx, kept=kept):
            kept.append(ctx.validation)
            if ctx.progress.step == 4:
                saved[name] = checkpoint.save(ctx, tmp_path / name)  # noqa: B023

        trained([*hooks, keep], validation_config=config)
        saved[name] = (torch.load(saved[name] / "shared.pt", weights_only=True)["models"]["model"], kept)
    assert_equal(saved["recomputed"][0], saved["plain"][0])
    assert saved["recomputed"][1][-1]["loss"] == pytest.approx(saved["plain"][1][-1]["loss"], rel=1e-10)
    Net().double().load_state_dict(saved["recomputed"][0])


def test_with_mixed_precision():
    ctx, _ = trained([ActivationCheckpointHook(), MixedPrecisionHook("bf16")], network().float(), data=batches())
    plain, _ = trained([MixedPrecisionHook("bf16")], network().float(), data=batches())
    for (name, p), q in zip(ctx.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-3, atol=1e-4), name


def test_the_modules_come_back_after_an_error():
    def fail(prediction, batch):
        raise ValueError("in the middle")

    model = network()
    with pytest.raises(ValueError, match="in the middle"):
        strategy(model, [ActivationCheckpointHook()], loss_fn=fail).run(doubles())
    assert not is_recomputed(model)


def test_nothing_to_choose_is_an_error():
    flat = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with pytest.raises(ConfigError, match=r"finds no module.*0 \(Linear\), 1 \(Linear\).*give wrap="):
        strategy(flat, [ActivationCheckpointHook()]).run(batches())
    with pytest.raises(ConfigError, match=r"finds no module.*layers\.\*"):
        strategy(network(), [ActivationCheckpointHook("layers.*")]).run(doubles())
    with pytest.raises(ConfigError, match=r"models that there are not.*modl"):
        strategy(network(), [ActivationCheckpointHook(model_keys=["modl"])]).run(doubles())


@pytest.mark.parametrize("wrap", [3, [], [Block, 3], nn.Linear(1, 1), int])
def test_other_choices_are_refused(wrap):
    with pytest.raises(ConfigError, match="wrap is wrong"):
        ActivationCheckpointHook(wrap)
