"""No loss lands without a resume test: one entry here for every loss of the package."""

import importlib
import inspect
import pkgutil

import pytest
import torch
from torch import nn

from nvalchemi.data import AtomicData
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.data.transforms import NeighborList
from nvalchemi.ebm import losses as ebm_losses
from nvalchemi.ebm.losses import (
    ConditionDropout,
    ContrastiveDivergence,
    DenoisingScoreMatching,
    EnergyDiscrepancy,
    EnergyMatching,
    EquilibriumMatching,
    FlowMatching,
    NoiseContrastiveEstimation,
    ScoreMatching,
    SlicedScoreMatching,
)
from nvalchemi.ebm.samplers import HamiltonianMonteCarlo, LangevinDynamics
from nvalchemi.models import InteratomicPotential, MLPEnergy, PaiNN
from nvalchemi.objective import ModelLoss, SupervisedLoss
from nvalchemi.testing import assert_resumes
from nvalchemi.training import OptimizerConfig, TrainingStrategy
from nvalchemi.training import losses as supervised_losses
from nvalchemi.training.losses import (
    ComposedLoss,
    CosineWeight,
    EnergyHuberLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceHuberLoss,
    ForceL2NormLoss,
    ForceMAELoss,
    ForceMSELoss,
    StressHuberLoss,
    StressMAELoss,
    StressMSELoss,
)

ADAM = OptimizerConfig(torch.optim.Adam, {"lr": 1e-3})
CUTOFF = 3.0


def langevin(model):
    return LangevinDynamics(model, step_size=0.01)


#: loss of a model of vectors -> how it is made
OF_VECTORS = {
    ConditionDropout: [
        lambda m: ConditionDropout(EnergyMatching(m, n_langevin_steps=2), 0.5, 0.0),
        lambda m: ConditionDropout(
            ContrastiveDivergence(m, langevin(m), k_steps=2, persistent=True, buffer_size=7, init_steps=2), 0.5, 0.0
        ),
    ],
    ContrastiveDivergence: [
        lambda m: ContrastiveDivergence(m, langevin(m), k_steps=2),
        lambda m: ContrastiveDivergence(
            m, langevin(m), k_steps=2, persistent=True, buffer_size=7, init_steps=2, new_sample_ratio=0.3
        ),
        lambda m: ContrastiveDivergence(m, HamiltonianMonteCarlo(m), k_steps=1, persistent=True, buffer_size=5, init_steps=1),
    ],
    DenoisingScoreMatching: [
        lambda m: DenoisingScoreMatching(m, 0.2),
        lambda m: DenoisingScoreMatching(m, [0.1, 0.5]),
    ],
    EnergyDiscrepancy: [lambda m: EnergyDiscrepancy(m)],
    EnergyMatching: [lambda m: EnergyMatching(m, n_langevin_steps=2)],
    EquilibriumMatching: [lambda m: EquilibriumMatching(m, energy_type="none")],
    FlowMatching: [lambda m: FlowMatching(m), lambda m: FlowMatching(m, coupling="ot")],
    NoiseContrastiveEstimation: [lambda m: NoiseContrastiveEstimation(m)],
    ScoreMatching: [lambda m: ScoreMatching(m), lambda m: ScoreMatching(m, "hutchinson")],
    SlicedScoreMatching: [lambda m: SlicedScoreMatching(m)],
}
#: loss of a potential's predictions -> how it is made; weights are functions of the step
OF_PREDICTIONS = {
    ComposedLoss: [lambda: CosineWeight(1.0, 0.1, 6) * EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss()],
    **{kind: [kind] for kind in (EnergyHuberLoss, EnergyMAELoss, EnergyMSELoss)},
    **{kind: [kind] for kind in (ForceHuberLoss, ForceL2NormLoss, ForceMAELoss, ForceMSELoss)},
    **{kind: [kind] for kind in (StressHuberLoss, StressMAELoss, StressMSELoss)},
}


def every_loss(package, base):
    """Its classes that can be made."""
    modules = [importlib.import_module(f"{package.__name__}.{module.name}") for module in pkgutil.iter_modules(package.__path__)]
    found = {value for module in modules for value in vars(module).values() if inspect.isclass(value) and issubclass(value, base)}
    return {value for value in found if value.__module__.startswith(package.__name__) and not inspect.isabstract(value)}


def test_every_loss_is_here():
    parts_of_terms = {name for name in dir(supervised_losses) if not name.startswith("_")}
    known = OF_VECTORS.keys() | OF_PREDICTIONS.keys()
    present = every_loss(ebm_losses, ModelLoss) | {
        kind for kind in every_loss(supervised_losses, SupervisedLoss) if kind.__name__ in parts_of_terms
    }
    missing = sorted(kind.__name__ for kind in present - known)
    assert not missing, f"no resume test for {', '.join(missing)}: add an entry"
    assert len(present) >= 20


class Field(nn.Module):
    """A velocity of points and times."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, t.reshape(-1, 1).expand(len(x), 1)], 1))


class Conditioned(MLPEnergy):
    """An energy that is told a number a sample."""

    def forward(self, x, y):
        return super().forward(torch.cat([x, y], 1))


def vectors():
    return InMemoryDataset(torch.randn(14, 2, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("kind", "make"),
    [pytest.param(kind, make, id=f"{kind.__name__}-{i}") for kind, makes in OF_VECTORS.items() for i, make in enumerate(makes)],
)
def test_a_loss_of_vectors_resumes(kind, make):
    def build(folder):
        torch.manual_seed(3)
        loader = DataLoader(vectors(), batch_size=4, shuffle=True, seed=5)
        model = Field() if kind in (EquilibriumMatching, FlowMatching) else MLPEnergy(2, 8)
        if kind is ConditionDropout:
            model = Conditioned(3, 8)
            rows = torch.randn(14, 3, generator=torch.Generator().manual_seed(0))
            loader = [{"x": some[:, :2], "y": some[:, 2:]} for some in rows.split(4)]
        strategy = TrainingStrategy(models=model, optimizer_configs=ADAM, loss_fn=make(model), num_steps=1)
        return strategy, loader

    assert_resumes(build, steps=9, stop_at=5)


def crystals():
    """Four atoms in a periodic cell, with every label."""
    generator = torch.Generator().manual_seed(0)
    corners = 2.0 * torch.tensor([[0.0, 0, 0], [1, 1, 0], [1, 0, 1], [0, 1, 1]])
    for _ in range(6):
        moved = 0.2 * torch.randn(4, 3, generator=generator)
        stress = 0.01 * torch.randn(3, 3, generator=generator)
        yield AtomicData(
            corners + moved,
            torch.tensor([1, 6, 8, 1]),
            cell=4.0 * torch.eye(3),
            pbc=[True, True, True],
            energy=moved.double().square().sum(),
            forces=-moved,
            stress=stress + stress.T,
        )


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=f"{kind.__name__}-{i}") for kind, makes in OF_PREDICTIONS.items() for i, make in enumerate(makes)],
)
def test_a_loss_of_predictions_resumes(make):
    def build(folder):
        torch.manual_seed(3)
        model = InteratomicPotential(PaiNN(n_features=4, n_interactions=1, cutoff=CUTOFF), cutoff=CUTOFF)
        data = InMemoryDataset(list(crystals()), transforms=[NeighborList(CUTOFF)])
        strategy = TrainingStrategy(models=model, optimizer_configs=ADAM, loss_fn=make(), num_steps=1)
        return strategy, DataLoader(data, batch_size=2, shuffle=True, seed=5)

    assert_resumes(build, steps=5, stop_at=2)
