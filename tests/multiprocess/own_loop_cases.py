"""A user's own ``fully_shard`` and loop, without any strategy, with losses, samplers, averages and checkpoints by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from nvalchemi.data import AtomicData, Batch
from nvalchemi.distributed import full_state, unsharded
from nvalchemi.distributed.shard import Sharding, Shards
from nvalchemi.distributed.tensors import full, is_sharded_tensor
from nvalchemi.ebm.losses import DenoisingScoreMatching, EquilibriumMatching, ScoreMatching, SlicedScoreMatching
from nvalchemi.ebm.samplers import FlowSampler, HamiltonianMonteCarlo, LangevinDynamics, NoUTurnSampler
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel, InteratomicPotential, MLPEnergy, PaiNN
from nvalchemi.training.hooks import update_ema

DIM = 3


def energy(seed: int = 0) -> MLPEnergy:
    torch.manual_seed(seed)
    return MLPEnergy(DIM, 8).double()


def shard(model: EnergyModel, **options: Any) -> EnergyModel:
    from torch.distributed.fsdp import fully_shard

    for layer in model.net:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    fully_shard(model.net, **options)
    return model


LOSSES = {
    "denoising": lambda m: DenoisingScoreMatching(m, 0.3, use_autograd=False, functional_model=energy()),
    "sliced": lambda m: SlicedScoreMatching(m, 2, functional_model=energy()),
    "exact": lambda m: ScoreMatching(m, use_autograd=False),
    "equilibrium": EquilibriumMatching,
}


def loop(manager: Any, name: str, folder: str) -> dict[str, Any]:
    """Ten steps with an average, a checkpoint in the middle, and samples at the end; on two ranks or in one process."""
    import torch.distributed.checkpoint as dcp

    model, average = energy(), energy()
    if manager.distributed:
        shard(model), shard(average)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss_fn = LOSSES[name](model)
    size = 8 // manager.world_size
    kept: dict[str, Any] = {}
    for step in range(10):
        x = torch.randn(8, DIM, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        total: Any = 0.0
        # one process draws the noise of both ranks
        for rank in range(2) if not manager.distributed else [manager.rank]:
            own = x[rank * 4 : rank * 4 + 4]
            result = loss_fn(own, generator=torch.Generator().manual_seed(100 * step + rank))
            value = result[0] if isinstance(result, tuple) else result
            total = total + (value if manager.distributed else value / 2)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        update_ema(average, model, 0.5)
        if step == 4 and manager.distributed:
            state = {"model": model.state_dict(), "average": average.state_dict()}
            dcp.save(state, checkpoint_id=folder)
            kept = {k: full(v).clone() for k, v in state["model"].items()}
    assert size
    result = {
        "weights": [full(p).detach().clone() for p in model.parameters()],
        "average": [full(p).detach() for p in average.parameters()],
    }
    if manager.distributed:
        fresh = shard(energy(1))
        dcp.load({"model": (state := fresh.state_dict())}, checkpoint_id=folder)
        fresh.load_state_dict(state)
        result["restored"] = all(torch.equal(full(v), kept[k]) for k, v in fresh.state_dict().items())
        assert any(Path(folder).iterdir())
    return result


def whole_energy(manager: Any, layers: bool) -> list[float]:
    """``fully_shard`` on the energy itself, with its layers or not, in place of its network; then samples of it, and its state."""
    from torch.distributed.fsdp import fully_shard

    whole, model = energy(), energy()
    if layers:
        for layer in (model.net[0], model.net[-1]):
            fully_shard(layer)
    fully_shard(model)
    x = torch.randn(4 * manager.world_size, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(2):
        ScoreMatching(whole)(x).backward()
        ScoreMatching(model)(x.chunk(manager.world_size)[manager.rank]).backward()
    pairs = list(zip(model.parameters(), whole.parameters(), strict=True))
    errors = [float((full(p.grad) - q.grad).abs().max()) for p, q in pairs if p.grad is not None and q.grad is not None]
    assert len(errors) >= len(pairs) - 1
    errors.append(float((model(x) - whole(x)).abs().max()))
    found = [LangevinDynamics(m, 0.01).sample(x, n_steps=3, generator=torch.Generator().manual_seed(1)) for m in (whole, model)]
    with unsharded(model):
        errors += [float((model(x) - whole(x)).abs().max()), float((model.gradient(x) - whole.gradient(x)).abs().max())]
    return [*errors, float((found[0] - found[1]).abs().max())]


def whole_potential(manager: Any) -> str:
    from torch.distributed.fsdp import fully_shard

    model = InteratomicPotential(PaiNN(["H"], n_features=4, n_interactions=1, cutoff=3.0))
    fully_shard(model)
    atoms = AtomicData(positions=torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.9]]), atomic_numbers=torch.tensor([1, 1]))
    try:
        model.predict(Batch.from_data_list([atoms]), ("energy", "forces"))
    except ConfigError as error:
        return str(error)
    return "nothing"


def samples(manager: Any) -> dict[str, Any]:
    """Chains on shards, as on the whole network; kinds whose calls depend on the samples do not wait for other ranks."""
    whole, model = energy(), shard(energy())
    start = torch.randn(5, DIM, generator=torch.Generator().manual_seed(7 + manager.rank), dtype=torch.float64)
    kinds: dict[str, Any] = {
        "langevin": lambda m: LangevinDynamics(m, 0.01),
        "hmc": lambda m: HamiltonianMonteCarlo(m, 0.1, 3),
        "nuts": lambda m: NoUTurnSampler(m, 0.05 if manager.rank else 0.3),
        "flow": lambda m: FlowSampler(m, integrator="dopri5", rtol=1e-3 if manager.rank else 1e-7),
    }
    errors = {}
    for name, make in kinds.items():
        found = [make(m).sample(start, n_steps=4, generator=torch.Generator().manual_seed(1)) for m in (whole, model)]
        errors[name] = float((found[0] - found[1]).abs().max())
    with unsharded(model):
        sampler = LangevinDynamics(model, 0.01)
        found = [sampler.sample(start, n_steps=4 + manager.rank, generator=torch.Generator().manual_seed(1))]
    left = [n for n, p in model.named_parameters() if not is_sharded_tensor(p)]
    with torch.no_grad():
        model(start)
    return {"errors": errors, "left": left + [n for n, p in model.named_parameters() if not is_sharded_tensor(p)]}


def from_meta(manager: Any) -> list[Tensor]:
    """The recipe of torch: shards on the meta device, memory, one seed, each module's own reset."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(DIM, 8), nn.SiLU(), nn.Linear(8, 1)).double()
    model = MLPEnergy(DIM, 4)
    model.net = net
    shard(model)
    model.net.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in model.net:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    x = torch.randn(4, DIM, dtype=torch.float64)
    DenoisingScoreMatching(model, 0.1)(x, generator=torch.Generator().manual_seed(0)).backward()
    return [full(p.grad) for p in model.net.parameters() if p.grad is not None]


def in_bf16(manager: Any) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    whole, model = energy().float(), shard(energy().float(), mp_policy=policy)
    x = torch.randn(16, DIM, generator=torch.Generator().manual_seed(0))
    for m in (whole, model):
        DenoisingScoreMatching(m, 0.3)(x, generator=torch.Generator().manual_seed(1)).backward()
    pairs = [(full(p.grad), q.grad) for p, q in zip(model.parameters(), whole.parameters(), strict=True) if p.grad is not None]
    return {
        "dtypes": {str(p.grad.dtype) for p in model.parameters() if p.grad is not None},
        "angles": [
            float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0))
            for a, b in pairs
            if b is not None and bool(b.any())
        ],
    }


def replicated_operand(manager: Any) -> float:
    """B84: a batch that is shared out, parameters that are not sharded, a score by functional means."""
    model = energy()
    x = torch.randn(8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    size = 8 // manager.world_size
    own = x[manager.rank * size : (manager.rank + 1) * size]
    sharded = shard(energy())
    force = torch.func.grad(lambda y: torch.func.functional_call(model, dict(model.named_parameters()), (y,)).sum())(own)
    return float((sharded.gradient(own) - force).abs().max())


def not_alike(manager: Any) -> str:
    try:
        update_ema(energy(), shard(energy()), 0.5)
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}"
    return "no error"


def whole_state(manager: Any) -> dict[str, Tensor]:
    return full_state(shard(energy()), manager)


def loaded(manager: Any, what: str) -> Any:
    """What is said where a state and a model are not divided alike; and the cures, after which the weights are those of rank 0's state."""
    whole, model = energy(manager.rank), shard(energy(7))
    inner = energy(3).net
    Shards({"model": inner}, ["model"], Sharding(), manager, seed=0).close()
    wrong = {
        "whole": lambda: model.load_state_dict(whole.state_dict()),
        "assigned": lambda: model.load_state_dict(whole.state_dict(), assign=True),
        "into a network": lambda: inner.load_state_dict(whole.net.state_dict()),
        "shards": lambda: whole.load_state_dict(model.state_dict()),
    }
    if what in wrong:
        try:
            wrong[what]()
        except ConfigError as error:
            return str(error)
        return "nothing"
    if what == "gathered":
        try:
            with unsharded(model):
                model.load_state_dict(whole.state_dict())
        except ConfigError as error:
            return str(error)
        return "nothing"
    model(torch.ones(2, DIM).double())  # which leaves the outermost parameters gathered
    set_model_state_dict(
        model,
        whole.state_dict() if manager.rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    with unsharded(model):
        energies = model(torch.ones(2, DIM).double())
    return torch.equal(energies, energy(0)(torch.ones(2, DIM).double()))
