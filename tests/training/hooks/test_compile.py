import copy
import logging
import shutil

import pytest
import torch
from torch import nn

from nvalchemi.ebm.losses import ContrastiveDivergence, DenoisingScoreMatching
from nvalchemi.ebm.samplers import LangevinDynamics
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel
from nvalchemi.training import OptimizerConfig, TrainingStage, TrainingStrategy, ValidationConfig, checkpoint, on
from nvalchemi.training.hooks import ActivationCheckpointHook, CompileHook, EMAHook, MixedPrecisionHook
from tests.training.hooks import test_with_a_potential as potentials
from tests.training.hooks.runs import SGD, batches, network, strategy

COMPILED = pytest.mark.timeout(300)  # the first compilation imports much


class Energy(EnergyModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def score_loss(model):
    return DenoisingScoreMatching(model, noise_scale=0.5)


def chains(model):
    return ContrastiveDivergence(model=model, sampler=LangevinDynamics(model=model, step_size=0.01), k_steps=2)


def energy_run(loss, hooks, **kwargs):
    model = Energy()
    run = TrainingStrategy(models=model, optimizer_configs=OptimizerConfig(torch.optim.Adam, {"lr": 1e-2}),
                           loss_fn=loss(model), num_steps=3, hooks=hooks, **kwargs)  # fmt: skip
    return run.run([x for x, _ in batches()])


class Calls:
    """A backend of ``torch.compile`` that counts graphs and calls of them."""

    def __init__(self):
        self.graphs = self.calls = 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def run(*args):
            self.calls += 1
            return graph(*args)

        return run


@COMPILED
def test_a_run_is_the_same_and_nothing_stays_behind(tmp_path):
    """B74: names in checkpoints and averages are the plain model's."""
    found, backend = [], Calls()
    config = ValidationConfig(validation_data=batches(1, seed=5), every_n_steps=2)
    for hooks in ([], [CompileHook(backend=backend)]):
        model, ema = network(), EMAHook(0.9)
        torch.manual_seed(0)
        ctx = strategy(model, [*hooks, ema], validation_config=config).run(batches())
        saved = torch.load(checkpoint.save(ctx, tmp_path / str(len(hooks))) / "shared.pt", weights_only=True)
        network(seed=9).load_state_dict(saved["models"]["model"])
        network(seed=9).load_state_dict(saved["hooks"]["ema"]["models"]["model"])
        found.append((saved["models"]["model"], ctx.validation["loss"]))
        assert "forward" not in ctx.model.__dict__
    for key, value in found[0][0].items():
        assert torch.equal(value, found[1][0][key]), key
    assert found[0][1] == found[1][1]
    assert backend.calls >= 4 + 2  # steps and validations


@COMPILED
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_loss_of_second_order_is_not_compiled_and_the_log_says_so(backend, caplog):
    plain = energy_run(score_loss, [])
    with caplog.at_level(logging.WARNING, "nvalchemi"):
        ctx = energy_run(score_loss, [CompileHook(backend=backend)])
    assert [r.message for r in caplog.records] == [
        "model 'model' is not compiled: the loss differentiates it by its inputs, and torch refuses to differentiate a compiled graph twice"
    ]
    for p, q in zip(plain.model.parameters(), ctx.model.parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(ConfigError, match=r"'model' cannot be compiled.*twice.*drop strict=True"):
        energy_run(score_loss, [CompileHook(strict=True, backend=backend)])


@COMPILED
def test_contrastive_terms_are_compiled_beside_a_sampler_that_is_not(caplog):
    backend = Calls()
    plain = energy_run(chains, [])
    with caplog.at_level(logging.WARNING, "nvalchemi"):
        ctx = energy_run(chains, [CompileHook(strict=True, backend=backend)])
    assert not caplog.records and backend.calls >= 3
    for p, q in zip(plain.model.parameters(), ctx.model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@COMPILED
def test_forces_of_a_potential_with_a_derivative_of_its_own():
    """From outside it is of first order."""
    found = []
    for hooks in ([], [CompileHook(strict=True, backend="aot_eager", dynamic=True)]):
        model = potentials.potential()
        potentials.strategy(model, hooks, num_steps=2).run(potentials.loader())
        found.append(model.state_dict())
    for key, value in found[0].items():
        assert torch.allclose(value, found[1][key], rtol=1e-4, atol=1e-6), key


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.shift = network(dropout=0.0), nn.Parameter(torch.zeros(1, 3))

    def forward(self, x):
        return self.inner(x + self.shift)


def slope(model, batch):
    """A gradient by a parameter, of which no input tells."""
    return torch.autograd.grad(model(batch[0]).sum(), model.shift, create_graph=True)[0]


@COMPILED
def test_what_torch_refuses_later_is_explained():
    settings = {"training_fn": slope, "loss_fn": lambda prediction, batch: prediction.square().mean()}
    strategy(Shifted(), [], **settings).run(batches())
    with pytest.raises(ConfigError, match=r"something that is no input.*twice.*leave CompileHook out"):
        strategy(Shifted(), [CompileHook(backend="aot_eager")], **settings).run(batches())


@COMPILED
def test_a_module_that_is_copied_in_the_run_is_compiled_anew():
    copies = []

    @on(TrainingStage.STEP_END)
    def look(ctx):
        copies.append(copy.deepcopy(ctx.model))

    ctx = strategy(network(dropout=0.0), [CompileHook(backend="eager"), look], num_steps=1).run(batches())
    (twin,) = copies
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    x = torch.randn(4, 3)
    assert not twin(x).any() and ctx.model(x).any()


def test_with_activations_computed_again(caplog):
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 1))
    with caplog.at_level(logging.WARNING, "nvalchemi"):
        strategy(model, [CompileHook(), ActivationCheckpointHook()]).run(batches())
    assert "activations are computed again" in caplog.text
    with pytest.raises(ConfigError, match="leave one of the two out"):
        strategy(model, [CompileHook(strict=True), ActivationCheckpointHook()]).run(batches())


def test_unknown_models():
    with pytest.raises(ConfigError, match="modl"):
        strategy(network(), [CompileHook(["modl"])]).run(batches())
    with pytest.raises(ConfigError, match="list of names"):
        CompileHook("model")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_with_inductor():
    found = []
    for hooks in ([], [CompileHook(strict=True)], [CompileHook(strict=True), MixedPrecisionHook("bf16")]):
        model = network(dropout=0.0)
        # not Adam: a bias before a batch norm has a gradient of rounding errors, which Adam makes steps of
        strategy(model, hooks, optimizer_configs=SGD, num_steps=4).run(batches())
        found.append(model.state_dict())
    for key, value in found[0].items():
        assert torch.allclose(value, found[1][key], rtol=1e-4, atol=1e-5), key
        assert torch.isfinite(found[2][key]).all(), key
