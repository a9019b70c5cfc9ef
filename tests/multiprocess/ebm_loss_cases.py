"""What the ranks do in test_ebm_losses.py, and the same steps written by hand in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from nvalchemi.data import AtomicData, Batch
from nvalchemi.distributed.tensors import full
from nvalchemi.ebm import losses
from nvalchemi.ebm.couplings import SinkhornCoupling
from nvalchemi.ebm.samplers import LangevinDynamics
from nvalchemi.models import InteratomicPotential, MLPEnergy, PaiNN
from nvalchemi.training import Hook, OptimizerConfig, TrainingStage, TrainingStrategy, ValidationConfig, on
from nvalchemi.training.hooks import DDPHook, FSDP2Hook
from nvalchemi.training.seeds import derive_seed
from tests.multiprocess.ddp_cases import own

RATE, SEED = 0.05, 3


def energy() -> MLPEnergy:
    """A small energy whose head has a bias."""
    torch.manual_seed(0)
    return MLPEnergy(2, 6).double()


def divergence(model: Any, **settings: Any) -> losses.ContrastiveDivergence:
    sampler = LangevinDynamics(model, step_size=0.01)
    return losses.ContrastiveDivergence(model, sampler, k_steps=3, energy_reg_weight=0.01, **settings)


class Field(nn.Module):
    """A plain module, which is wrapped as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(torch.cat([x, t[:, None]], 1)).tanh())


def field() -> Field:
    torch.manual_seed(0)
    return Field().double()


def potential() -> InteratomicPotential:
    torch.manual_seed(0)
    return InteratomicPotential(PaiNN(["C"], n_features=8, n_interactions=2, cutoff=4.0, n_rbf=5).double(), cutoff=4.0)


def matching(model: Any, **settings: Any) -> losses.EnergyMatching:
    return losses.EnergyMatching(model, n_langevin_steps=5, **settings)


#: a model, and a loss of it
CASES: dict[str, tuple[Any, Any]] = {
    "score matching": (energy, losses.ScoreMatching),
    "hutchinson": (energy, lambda m: losses.ScoreMatching(m, "hutchinson")),
    "sliced": (energy, lambda m: losses.SlicedScoreMatching(m, 2)),
    "denoising": (energy, lambda m: losses.DenoisingScoreMatching(m, 0.3)),
    "denoising, many scales": (energy, lambda m: losses.DenoisingScoreMatching(m, [0.1, 1.0])),
    "contrastive": (energy, divergence),
    "persistent": (energy, lambda m: divergence(m, persistent=True, buffer_size=16, init_steps=2, new_sample_ratio=0.2)),
    "noise contrastive": (energy, lambda m: losses.NoiseContrastiveEstimation(m, noise_ratio=2)),
    "discrepancy": (energy, losses.EnergyDiscrepancy),
    "flow": (field, losses.FlowMatching),
    "flow of an energy": (energy, lambda m: losses.FlowMatching(m, "cosine", coupling="sinkhorn")),
    "equilibrium": (field, losses.EquilibriumMatching),
    "equilibrium, dot": (field, lambda m: losses.EquilibriumMatching(m, energy_type="dot")),
    "equilibrium, l2": (field, lambda m: losses.EquilibriumMatching(m, energy_type="l2")),
    "equilibrium of an energy": (energy, losses.EquilibriumMatching),
    "energy matching": (energy, lambda m: matching(m, cd_trim_fraction=0.0, cd_clamp=None)),
    "energy matching, warm-up": (
        energy,
        lambda m: matching(m, lambda_cd=lambda step: 2.0 * (step > 0), cd_clamp=None, cd_trim_fraction=0.0),
    ),
}


#: the same of structures
ATOMS: dict[str, tuple[Any, Any]] = {
    "denoising of atoms": (potential, lambda m: losses.DenoisingScoreMatching(m, [0.05, 0.2])),
    "sliced, of atoms": (potential, lambda m: losses.SlicedScoreMatching(m, 1)),
    "contrastive, of atoms": (
        potential,
        lambda m: losses.ContrastiveDivergence(m, LangevinDynamics(m, 1e-4, temperature=0.03), k_steps=2),
    ),
}


def molecules(count: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    data = []
    for i in range(count):
        positions = 1.5 * torch.randn(2 + i % 3, 3, generator=generator, dtype=torch.float64)
        data.append(AtomicData(positions, torch.full((len(positions),), 6)))
    return Batch.from_data_list(data)


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


#: sizes of the micro-batches by rank; windows of `accumulate` of them are a step
SHARES = {
    "equal": (1, [[4, 4, 4], [4, 4, 4]]),
    "unequal ranks": (1, [[2, 5], [7, 3]]),
    "unequal micro-batches": (2, [[2, 5, 3], [7, 3, 1]]),
}


def batches_of(sizes: list[list[int]], rank: int, name: str = "") -> list[Any]:
    return [(molecules if name in ATOMS else rows)(count, 100 * rank + i) for i, count in enumerate(sizes[rank])]


class Keep(Hook):
    def __init__(self) -> None:
        self.gradients: list[list[torch.Tensor]] = []
        self.losses: list[float] = []

    @on(TrainingStage.GRADIENTS_READY)
    def look(self, ctx) -> None:
        self.gradients.append([full(p.grad).clone() for p in ctx.model.parameters()])
        self.losses.append(float(ctx.loss.total))


def train(
    manager, name: str, accumulate: int, sizes: list[list[int]], hook: Hook | None = None, rate: float = RATE
) -> dict[str, Any]:
    """Train a case on the rank's share, replicated or as the hook says."""
    make_model, make_loss = (CASES | ATOMS)[name]
    model, keep = make_model(), Keep()
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": rate}),
        loss_fn=make_loss(model),
        num_epochs=1,
        accumulate=accumulate,
        distributed_manager=manager,
        seed=SEED,
        hooks=[keep, DDPHook() if hook is None else hook],
    )
    strategy.run(own(batches_of(sizes, manager.rank, name), manager))
    return {"gradients": keep.gradients, "losses": keep.losses, "weights": [full(p).detach() for p in model.parameters()]}


def sharded(
    manager, name: str, accumulate: int, sizes: list[list[int]], options: dict[str, Any], rate: float = RATE
) -> dict[str, Any]:
    """As `train`, divided between the ranks."""
    return train(manager, name, accumulate, sizes, FSDP2Hook(**options), rate)


def decayed(manager, kind: str) -> list[torch.Tensor]:
    """Weights that decay, the output bias among them, under a loss that does not depend on it; noise is the rank's, so there is one batch."""
    model = energy()
    torch.manual_seed(0)
    with torch.no_grad():
        model.net[-1].bias.fill_(1.0)
    x = torch.ones(4, 2, dtype=torch.float64)  # all ranks' batches are alike, and so are the gradients' means

    def score(_: Any, batch: torch.Tensor) -> torch.Tensor:
        return losses.DenoisingScoreMatching(model, 0.3)(batch, generator=torch.Generator().manual_seed(1))

    TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5}),
        training_fn=score,
        loss_fn=lambda value, batch: value,
        num_steps=3,
        distributed_manager=manager,
        hooks=[{"DDPHook": DDPHook, "FSDP2Hook": FSDP2Hook}[kind]()],
    ).run(own([x] * 3, manager))
    return [full(p).detach() for p in model.parameters()]


def by_hand(name: str, accumulate: int, sizes: list[list[int]], rate: float = RATE) -> dict[str, Any]:
    """The same batches and noise in one process: a plain loop, one loss and one generator for each rank."""
    make_model, make_loss = (CASES | ATOMS)[name]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    ranks = range(len(sizes))
    loss_fns = [make_loss(model) for _ in ranks]
    generators = [torch.Generator().manual_seed(derive_seed(SEED, "rank", rank)) for rank in ranks]
    assert generators[0].initial_seed() != generators[1].initial_seed()
    shares = [batches_of(sizes, rank, name) for rank in ranks]
    result: dict[str, Any] = {"gradients": [], "losses": []}
    for start in range(0, len(shares[0]), accumulate):
        window = [share[start : start + accumulate] for share in shares]
        count = sum(len(batch) for share in window for batch in share)
        optimizer.zero_grad()
        total = 0.0
        for rank in ranks:
            for batch in window[rank]:
                found = loss_fns[rank](batch, generator=generators[rank], step=start // accumulate)
                loss = (found[0] if isinstance(found, tuple) else found) * len(batch) / count
                loss.backward()
                total += loss.item()
        result["gradients"].append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
        result["losses"].append(total)
        optimizer.step()
    result["weights"] = [p.detach() for p in model.parameters()]
    return result


#: the bound holds in one of them
POOLED = {"bounded": {"cd_clamp": 1e-4}, "free": {"cd_clamp": 10.0}}


def pooled(manager, name: str, sizes: list[list[int]]) -> dict[str, Any]:
    """Energy matching whose chains are ranked over all ranks; validated on shares of unequal numbers of batches."""
    model, keep = energy(), Keep()
    loss_fn = matching(model, sigma=0.0, cd_trim_fraction=0.3, process_group=manager, **POOLED[name])
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": RATE}),
        loss_fn=loss_fn,
        num_epochs=1,
        distributed_manager=manager,
        seed=SEED,
        hooks=[keep, DDPHook()],
        validation_config=ValidationConfig(validation_data=DataLoader(rows(5, 0), batch_size=2)),
    )
    strategy.run(own(batches_of(sizes, manager.rank), manager))
    return {"gradients": keep.gradients, "losses": keep.losses, "weights": [p.detach() for p in model.parameters()]}


def coupled_together(manager) -> dict[str, Any]:
    """A coupling of the rows of all ranks, in training; in validation rank 0 has two batches and rank 1 has one."""
    model = energy()
    coupling = SinkhornCoupling(process_group=manager)
    data = DataLoader(rows(5, 0), batch_size=2)
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": RATE}),
        loss_fn=losses.FlowMatching(model, coupling=coupling),
        num_epochs=1,
        distributed_manager=manager,
        seed=SEED,
        hooks=[DDPHook()],
        validation_config=ValidationConfig(validation_data=data),
    )
    ctx = strategy.run(own(batches_of([[2, 3], [3, 2]], manager.rank), manager))
    return {"validation": ctx.validation, "weights": [p.detach() for p in model.parameters()]}


def pooled_by_hand(name: str, sizes: list[list[int]]) -> dict[str, Any]:
    """One process on the joined batches, whose chains and paths are drawn by the ranks' generators one after the other."""
    model = energy()
    loss_fn = matching(model, sigma=0.0, cd_trim_fraction=0.3, **POOLED[name])
    generators = [torch.Generator().manual_seed(derive_seed(SEED, "rank", rank)) for rank in range(2)]
    chains, draw = loss_fn._chains, loss_fn.paths.draw

    def parts(x: torch.Tensor) -> Any:
        return zip(x.split([share[step] for share in sizes]), generators, strict=True)

    def joined(points: list[Any]) -> Any:
        fields = [torch.cat(values) for values in list(zip(*points, strict=True))[:5]]
        return type(points[0])(*fields, None, {})

    loss_fn._chains = lambda x, *_: (torch.cat([chains(own, None, g, {})[0] for own, g in parts(x)]), {})
    loss_fn.paths.draw = lambda x, _, conditions, together: joined([draw(own, g, conditions) for own, g in parts(x)])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    result: dict[str, Any] = {"gradients": [], "losses": []}
    for step in range(len(sizes[0])):
        optimizer.zero_grad()
        loss = loss_fn(torch.cat([batches_of(sizes, rank)[step] for rank in range(2)]))
        loss.backward()
        result["losses"].append(loss.item())
        result["gradients"].append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    result["weights"] = [p.detach() for p in model.parameters()]
    return result
