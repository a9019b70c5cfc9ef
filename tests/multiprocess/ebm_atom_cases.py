"""What the ranks do in test_ebm_atoms.py, and the same steps in one process: losses of structures of unequal sizes."""

from __future__ import annotations

from typing import Any

import torch

from nvalchemi.data import Batch
from nvalchemi.ebm.losses import ContrastiveDivergence, DenoisingScoreMatching
from nvalchemi.ebm.samplers import HamiltonianMonteCarlo, LangevinDynamics
from nvalchemi.models import InteratomicPotential, PaiNN
from nvalchemi.training import OptimizerConfig, TrainingStrategy
from nvalchemi.training.hooks import DDPHook
from nvalchemi.training.seeds import derive_seed
from tests.ebm.molecules import crystals, molecules
from tests.multiprocess.ddp_cases import own
from tests.multiprocess.ebm_loss_cases import RATE, SEED, Keep


def potential() -> InteratomicPotential:
    torch.manual_seed(0)
    net = PaiNN(["C"], n_features=4, n_interactions=1, cutoff=3.0, n_rbf=4).double()
    return InteratomicPotential(net)


def persistent(model: Any) -> ContrastiveDivergence:
    sampler = HamiltonianMonteCarlo(model, 0.05, n_leapfrog_steps=2, mass="atomic")
    return ContrastiveDivergence(model, sampler, k_steps=2, persistent=True, buffer_size=6, new_sample_ratio=0.3, init_steps=1)


CASES: dict[str, Any] = {
    "denoising": lambda m: DenoisingScoreMatching(m, 0.2),
    "denoising, many scales": lambda m: DenoisingScoreMatching(m, [0.1, 0.3]),
    "contrastive": lambda m: ContrastiveDivergence(m, LangevinDynamics(m, 0.01), k_steps=2),
    "persistent": persistent,
}

#: how many structures each micro-batch has, by rank
SIZES = [[2, 4], [5, 1]]


def batches_of(rank: int) -> list[Batch]:
    """Molecules of unequal sizes, and a crystal."""
    return [
        Batch.from_data_list(
            [
                *molecules([2 + (i + rank) % 3 for i in range(count - 1)] + [3], seed=7 * rank + k, spread=1.2).to_data_list(),
                *crystals(1, n=2 + rank, seed=k).to_data_list(),
            ][-count:]
        )
        for k, count in enumerate(SIZES[rank])
    ]


def train(manager: Any, name: str) -> dict[str, Any]:
    """Train a case on the rank's share."""
    model, keep = potential(), Keep()
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": RATE}),
        loss_fn=CASES[name](model),
        num_epochs=1,
        distributed_manager=manager,
        seed=SEED,
        hooks=[keep, DDPHook()],
    )
    strategy.run(own(batches_of(manager.rank), manager))
    return {"gradients": keep.gradients, "losses": keep.losses, "weights": [p.detach() for p in model.parameters()]}


def by_hand(name: str) -> dict[str, Any]:
    """The same structures and noise in one process: the mean over the structures of both ranks."""
    model = potential()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loss_fns = [CASES[name](model) for _ in SIZES]
    generators = [torch.Generator().manual_seed(derive_seed(SEED, "rank", rank)) for rank in range(len(SIZES))]
    shares = [batches_of(rank) for rank in range(len(SIZES))]
    result: dict[str, Any] = {"gradients": [], "losses": []}
    for step, pair in enumerate(zip(*shares, strict=True)):
        optimizer.zero_grad()
        count, total = sum(len(batch) for batch in pair), 0.0
        for loss_fn, generator, batch in zip(loss_fns, generators, pair, strict=True):
            found = loss_fn(batch, generator=generator, step=step)
            loss = (found[0] if isinstance(found, tuple) else found) * len(batch) / count
            loss.backward()
            total += loss.item()
        result["gradients"].append([p.grad.clone() for p in model.parameters()])
        result["losses"].append(total)
        optimizer.step()
    result["weights"] = [p.detach() for p in model.parameters()]
    return result
