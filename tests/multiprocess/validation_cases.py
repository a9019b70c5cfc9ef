"""What the ranks do in test_validation_ranks.py and test_more_ranks.py; each is also called in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nvalchemi.cli.parity import Parity
from nvalchemi.data import AtomicData
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.data.datapipes.share import share_for_validation
from nvalchemi.training import (
    EnergyMSELoss,
    ForceMSELoss,
    Hook,
    OptimizerConfig,
    Order,
    TrainingSpan,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
    around,
    evaluate,
    on,
)
from nvalchemi.training.hooks import DDPHook, EMAHook
from tests.multiprocess.ddp_cases import potential, structures


class Untouched(Hook):
    """Whether validation leaves every gradient as it was."""

    order = Order.SAVE

    def __init__(self) -> None:
        self.same: list[bool] = []

    @around(TrainingSpan.VALIDATION)
    def look(self, ctx):
        before = [None if p.grad is None else p.grad.clone() for p in ctx.model.parameters()]
        yield
        after = [p.grad for p in ctx.model.parameters()]
        self.same.append(all(a is b is None or torch.equal(a, b) for a, b in zip(before, after, strict=True)))


def forces(manager):
    """A potential that is trained on energies and forces and validated with averaged weights."""
    graphs: list[bool] = []
    untouched, ema = Untouched(), EMAHook(0.5)
    data = InMemoryDataset(structures([3, 5, 2, 7, 4, 6, 3, 8, 1, 4, 2]))
    config = ValidationConfig(
        validation_data=DataLoader(data, batch_size=3),
        every_n_steps=1,
        batch_callback=lambda batch, predictions, loss: graphs.extend(
            value.requires_grad for value in (*predictions.values(), loss.total)
        ),
    )
    ctx = TrainingStrategy(
        models=potential(False),
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 1e-3}),
        loss_fn=EnergyMSELoss(per_atom=True) + ForceMSELoss(),
        num_steps=3,
        validation_config=config,
        distributed_manager=manager,
        hooks=[DDPHook(), ema, untouched],
    ).run(DataLoader(data, batch_size=4, shuffle=True))
    return {"validation": ctx.validation, "same": untouched.same, "graphs": graphs, "average": ema.weights()}


def plain_forward(weights) -> dict[str, float]:
    """The same numbers by one forward over all structures, by hand."""
    from nvalchemi.data import Batch

    model = potential(False)
    model.load_state_dict(weights)
    batch = Batch.from_data_list(structures([3, 5, 2, 7, 4, 6, 3, 8, 1, 4, 2]))
    model.eval()
    made = model.predict(batch, ("energy", "forces"))
    there = ~batch.energy.isnan()
    return {
        "energy_mae": float((made["energy"] - batch.energy)[there].abs().mean()),
        "forces_mae": float((made["forces"] - batch.forces).abs().mean()),
        "n_energy": int(there.sum()),
        "n_forces": batch.forces.numel(),
        "n": 11,
    }


class Nothing(nn.Module):
    """Predicts zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, batch):
        zero = 0 * self.weight
        return {"energy": zero.expand(batch.num_graphs), "forces": zero.expand(batch.positions.shape)}


def weighed(manager):
    """Batches of 4, 4 and 1 structures: energies 1, 1, 10 off; forces 1 off but for the last structure's, which has 12 atoms of 2."""
    made = []
    for number in range(9):
        last = number == 8
        n = 12 if last else 1
        made.append(
            AtomicData(
                torch.randn(n, 3, dtype=torch.float64),
                torch.full((n,), 6),
                energy=10.0 if last else 1.0,
                forces=torch.full((n, 3), 2.0 if last else 1.0, dtype=torch.float64),
            )
        )
    data = InMemoryDataset(made)
    ctx = TrainingStrategy(
        models=Nothing(),
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 0.0}),
        loss_fn=EnergyMSELoss() + ForceMSELoss(),
        num_steps=1,
        validation_config=ValidationConfig(validation_data=DataLoader(data, batch_size=4), outputs=("energy", "forces")),
        distributed_manager=manager,
        hooks=[DDPHook()],
    ).run(DataLoader(data, batch_size=1))
    return ctx.validation


def disturbed(manager, every):
    """Losses of a run with dropout and a shuffled order that is validated every so many steps, or never."""
    losses = []

    @on(TrainingStage.STEP_END)
    def note(ctx):
        losses.append(float(ctx.loss.total))

    torch.manual_seed(10 + manager.rank)
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 1)).double()
    rows = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(rows)
    config = None
    if every:
        config = ValidationConfig(
            validation_data=torch.utils.data.DataLoader(data, batch_size=5, shuffle=True), every_n_steps=every
        )
    TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 0.1}),
        training_fn=lambda m, batch: m(batch[0][:, :2]).squeeze(1),
        loss_fn=lambda prediction, batch: (prediction - batch[0][:, 2]).square().mean(),
        num_steps=11,
        validation_config=config,
        distributed_manager=manager,
        hooks=[DDPHook(), note],
    ).run(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
    return losses


def gathered(manager, count) -> dict[str, Any]:
    """Predictions of ``count`` structures of one atom each, gathered: batches of 64."""
    numbers = torch.arange(count, dtype=torch.float64)
    data = InMemoryDataset(
        [AtomicData(torch.full((1, 3), float(n), dtype=torch.float64), torch.tensor([6]), energy=float(n)) for n in numbers]
    )
    parity = Parity()
    share = share_for_validation(DataLoader(data, batch_size=64), manager.rank, manager.world_size)
    metrics = evaluate(Place(), share, manager=manager, outputs=("energy",), batch_callback=parity)
    parity.gather(manager)
    return {"energy": torch.from_numpy(parity.arrays()["energy"]), "n": metrics["n"], "energy_mae": metrics["energy_mae"]}


class Place(nn.Module):
    """Predicts where the atom is, plus a quarter."""

    def forward(self, batch):
        return {"energy": batch.positions[:, 0] + 0.25}
