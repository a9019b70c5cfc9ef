"""Networks as people write them: what the ranks do in test_odd_nets.py."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout
from torch.nn.attention import SDPBackend, sdpa_kernel

from nvalchemi.distributed import failures, unsharded
from nvalchemi.distributed.shard import Sharding, Shards
from nvalchemi.distributed.tensors import full
from nvalchemi.ebm.losses import ScoreMatching
from nvalchemi.errors import ConfigError, TrainingError
from nvalchemi.models import EnergyModel
from nvalchemi.training import Every, OptimizerConfig, TrainingStrategy, ValidationConfig
from nvalchemi.training.hooks import CheckpointHook, DDPHook, EMAHook, FSDP2Hook, GradientClipHook
from tests.multiprocess.ddp_cases import own

DIM, WIDTH = 5, 12


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def hooked() -> nn.Module:
    """Hooks of the user's on parts, on the network, and on something without weights."""
    net = chain()
    net[2].register_forward_hook(lambda module, given, out: 2 * out)
    net[2].register_forward_pre_hook(lambda module, given: (given[0] + 0.5,))
    net[3].register_forward_hook(lambda module, given, out: out - 1)
    net.register_forward_hook(lambda module, given, kwargs, out: out + given[0].square().sum(-1, keepdim=True), with_kwargs=True)
    return net


def replaced() -> nn.Module:
    """A forward of an object's own."""
    net = chain()
    net[2].forward = lambda x: 3 * F.linear(x, net[2].weight, net[2].bias)  # type: ignore[method-assign]
    return net


class Doubles(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


def called() -> nn.Module:
    """A class with a ``__call__`` of its own."""
    return nn.Sequential(nn.Linear(DIM, WIDTH), nn.Tanh(), Doubles(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def spectral() -> nn.Module:
    """Every forward changes the buffers that the weight is computed from."""
    net = chain()
    nn.utils.parametrizations.spectral_norm(net[2])
    return net


def old_norm() -> nn.Module:
    """The weight is set by a hook before the forward, from two parameters."""
    net = chain()
    nn.utils.weight_norm(net[2])
    return net


def normalised() -> nn.Module:
    """Running means of a layer whose batches are alike on all ranks."""
    return nn.Sequential(nn.Linear(DIM, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


class Attentive(nn.Module):
    """Attention reads the weights of its last layer without calling it; a feed-forward part of unlike size."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(1, 8), nn.Linear(8, 1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x[..., None])
        # weights are asked for, so that torch takes the way that can be differentiated twice
        return self.out(torch.tanh(h + self.attention(h, h, h, need_weights=True)[0]).mean(1))


class Vacant(nn.Module):
    """Parameters without entries, as of a kind of feature that this network has none of."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.none, self.out = nn.Linear(DIM, WIDTH), NoInputs(0, WIDTH), nn.Linear(WIDTH, 1)
        self.rows, self.columns = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.zeros(4, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.into(x) + self.none(x[:, :0]))) + self.rows.sum() + self.columns.sum()


class NoInputs(nn.Linear):
    def reset_parameters(self) -> None:  # torch's warns that there is nothing to do
        nn.init.ones_(self.bias)


class Mixes(nn.Module):
    """Chooses a kind of attention that can be differentiated twice, around the part that attends."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(1, 8), nn.Linear(8, 1)
        self.part = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.out(self.part(self.into(x[..., None])).mean(1))


class Wave(nn.Linear):
    """Gives complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.complex(torch.cos(y), torch.sin(y))


class Waves(nn.Module):
    """Complex parameters, and complex numbers between the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = Wave(DIM, WIDTH), nn.Linear(WIDTH, 1)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.into(x) @ self.mix).abs())


class Numbers(nn.Module):
    """A parameter of whole numbers, and one layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(WIDTH, WIDTH)
        self.into, self.out = nn.Linear(DIM, WIDTH), nn.Linear(WIDTH, 1)
        self.first, self.second = nn.Sequential(layer, nn.Tanh()), nn.Sequential(layer, nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(torch.tanh(self.into(x)))[:, self.order]))


NETS: dict[str, Callable[[], nn.Module]] = {
    f.__name__: f for f in (hooked, replaced, called, spectral, old_norm, normalised, Attentive, Vacant, Waves, Numbers, Mixes)
}


class Energy(EnergyModel):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)


def energies(model: Energy, x: Tensor) -> Tensor:
    return (model(x) - x.square().sum(-1)).square().mean()


def scores(model: Energy, x: Tensor) -> Tensor:
    energy, gradient = model.energy_and_gradient(x, create_graph=True)
    return (energy.square() + (gradient + x).square().sum(-1)).mean()


class Parts(Energy):
    """An energy that calls the layers of its network, and never the network."""

    def forward(self, x: Tensor) -> Tensor:
        net = self.net
        return net[4](torch.tanh(net[2](torch.tanh(net[0](x))))).squeeze(-1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()

    def encode(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Method(Energy):
    """An energy that calls another method of its network."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net.encode(x).squeeze(-1)


class Reader(nn.Module):
    """A method reads the network's own parameters, after it has moved a buffer."""

    def __init__(self, layers: bool = True) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.Linear(DIM, WIDTH), nn.BatchNorm1d(WIDTH)) if layers else nn.Identity()
        self.weight = nn.Parameter(torch.randn(WIDTH if layers else DIM, 1))
        self.scale = nn.Parameter(torch.ones(1))

    def read(self, x: Tensor) -> Tensor:
        return torch.tanh(self.into(x)) @ self.weight * self.scale


class Own(Method):
    def forward(self, x: Tensor) -> Tensor:
        return self.net.read(x).squeeze(-1)


LOSSES: dict[str, Callable[[Energy, Tensor], Tensor]] = {"energies": energies, "scores": scores}


def agrees(manager: Any, name: str, loss: str, each: bool) -> float:
    """The largest error after three steps, of gradients, weights and buffers; then of the energies, sharded and gathered."""
    torch.manual_seed(0)
    make = {
        "parts": lambda: Parts(chain()),
        "method": lambda: Method(Encoder()),
        "own": lambda: Own(Reader()),
        "alone": lambda: Own(Reader(False)),
    }.get(name, lambda: Energy(NETS[name]()))
    whole, model = (make().double() for _ in range(2))
    model.load_state_dict(whole.state_dict())
    shards = Shards({"model": model}, ["model"], Sharding(wrap=nn.Linear if each else None), manager, seed=0)
    x = torch.randn(4, 6, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    errors = []
    for batch in x[:3]:
        for m in (whole, model):
            m.zero_grad()
            LOSSES[loss](m, batch).backward()
        errors += [_error(p, q, "grad") for p, q in zip(whole.parameters(), model.parameters(), strict=True)]
        with torch.no_grad():
            for m in (whole, model):
                for p in (p for p in m.parameters() if p.numel() and p.requires_grad):
                    p -= 0.05 * p.grad
    shards.reshard()
    errors += [_error(p, q) for p, q in zip(whole.parameters(), model.parameters(), strict=True)]
    errors += [_error(p, q) for p, q in zip(whole.buffers(), model.buffers(), strict=True)]
    whole.eval(), model.eval()
    with torch.no_grad():
        wanted = whole(x[3])
        errors.append(_error(wanted, model(x[3])))
        with unsharded(model):
            errors.append(_error(wanted, model(x[3])))
    errors.append(_error(whole.gradient(x[3]), model.gradient(x[3])))
    shards.close()
    return max(errors)


def _error(wanted: Any, got: Any, what: str | None = None) -> float:
    if what is not None:
        wanted, got = getattr(wanted, what), getattr(got, what)
        if wanted is None or got is None:
            return 0.0 if all(g is None or not full(g).any() for g in (wanted, got)) else float("inf")
    return float((full(got) - wanted).detach().abs().max()) if wanted.numel() else 0.0


class Reads(nn.Module):
    """Uses a layer's weight once more without calling the layer."""

    def __init__(self, in_training: bool = True) -> None:
        super().__init__()
        self.in_training = in_training
        self.into, self.out = nn.Linear(DIM, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.into(x))
        return (
            self.out(h)
            if self.training > self.in_training
            else self.out(h) + (h @ self.into.weight).square().sum(-1, keepdim=True)
        )


def penalised(found: Tensor, batch: Tensor, model: nn.Module) -> Tensor:
    return found.square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters())


def train(manager: Any, model: nn.Module, *, loss: Any = None, wrap: Any = None, **options: Any) -> Any:
    """Two steps on batches that differ from rank to rank."""
    batches = [torch.randn(6, DIM, generator=torch.Generator().manual_seed(10 * i + manager.rank)).double() for i in range(2)]
    return TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 0.01}),
        loss_fn=loss or (lambda found, batch: found.square().mean()),
        training_fn=lambda m, batch: m(batch),
        num_epochs=1,
        distributed_manager=manager,
        hooks=[FSDP2Hook(wrap=wrap)],
        **options,
    ).run(own(batches, manager))


def misread(manager: Any, what: str) -> str:
    """What is said where a shard is read as if it were whole; with a part that holds both all is well."""
    torch.manual_seed(0)
    model: nn.Module = Energy(Reads(what == "forward") if what != "penalty" else chain()).double()
    loss = (lambda found, batch: penalised(found, batch, model)) if what == "penalty" else None
    validation = ValidationConfig(validation_data=[torch.ones(3, DIM).double()], every_n_steps=1)
    try:
        train(manager, model, loss=loss, validation_config=validation)
    except ConfigError as error:
        return str(error)
    return "nothing"


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Reads(), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


def alone(manager: Any) -> str:
    """A part is called by itself, by somebody who takes two gradients of it."""

    def scores_of_a_part(found: Any, batch: Tensor) -> Tensor:
        x = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(model.net[0](x)).sum(), x, create_graph=True)
        return slope.square().mean()

    torch.manual_seed(0)
    model = Energy(chain()).double()
    try:
        train(manager, model, loss=scores_of_a_part)
    except ConfigError as error:
        return str(error)
    return "nothing"


class Conditioned(nn.Linear):
    """Reads what somebody else has put into an attribute."""

    given: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.given


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, WIDTH), Conditioned(WIDTH, 1)

    def forward(self, x: Any) -> Tensor:
        x = x if isinstance(x, Tensor) else x.inside
        self.last.given = torch.tanh(self.first(x))[:, :1]
        return self.last(torch.tanh(self.first(x)))


def hidden(manager: Any, where: str) -> str:
    """A tensor that is differentiated by reaches a part, or the network, past its arguments."""
    torch.manual_seed(0)
    model = Energy(Hides()).double()

    def loss(found: Any, batch: Tensor) -> Tensor:
        if where == "attribute":
            return scores(model, batch)
        x = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(SimpleNamespace(inside=x)).sum(), x, create_graph=True)
        return slope.square().mean()

    try:
        train(manager, model, loss=loss, wrap=nn.Linear if where == "attribute" else None)
    except ConfigError as error:
        return str(error)
    return "nothing"


def read_within(manager: Any) -> str:
    """The cure: the reader is a part."""
    train(manager, Energy(Around()).double(), wrap=Reads)
    return "nothing"


def vacant_run(manager: Any, how: str, folder: str) -> list[tuple[str, Tensor]]:
    """Three steps, a save and two more in another run, with an average; then the whole weights and their average."""
    hook = DDPHook if how == "ddp" else FSDP2Hook
    from torch.distributed.fsdp import fully_shard

    for steps in (3, 5):
        torch.manual_seed(0)
        model = Energy(Vacant()).double()
        if how == "by hand" and manager.distributed:
            fully_shard(model.net)
        ema = EMAHook(0.5)
        TrainingStrategy(
            models=model,
            optimizer_configs=OptimizerConfig(torch.optim.AdamW, {"lr": 0.01}),
            loss_fn=ScoreMatching(model),
            num_steps=steps,
            distributed_manager=manager,
            hooks=[hook(), ema, GradientClipHook(0.1, norm_type=float("inf")), CheckpointHook(folder, every=Every(steps=3))],
            resume_from="latest",
        ).run(own([torch.ones(4, DIM).double() for _ in range(5)], manager))
    return [(name, full(t)) for state in (model.state_dict(), ema.weights()) for name, t in state.items()]


def running_means(manager: Any) -> dict[str, Any]:
    """Of batches that differ from rank to rank: what is validated with, and what is left."""
    torch.manual_seed(0)
    model = Energy(normalised()).double()
    validation = ValidationConfig(validation_data=[torch.ones(3, DIM).double(), torch.zeros(4, DIM).double()], every_n_steps=1)
    ctx = train(manager, model, validation_config=validation)
    return {
        "buffers": [b.clone() for b in model.buffers()],
        "validation": ctx.validation,
        "moved": model.net[1].running_mean.any(),
    }


def unlike_calls(manager: Any, how: str) -> str:
    """One rank calls the model once more than the other, which both learn when their time is over, or at once where torch looks."""
    if how == "looked at":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        store = dist.PrefixStore("looked at", dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=manager.rank, world_size=manager.world_size)
        dist.set_debug_level(dist.DebugLevel.OFF)
    set_timeout(timedelta(seconds=2), dist.group.WORLD)
    patience, failures.GRACE = failures.GRACE, 1.0
    torch.manual_seed(0)
    model = Energy(chain()).double()

    def scored(found: Any, batch: Tensor) -> Tensor:
        return sum((scores(model, batch) for _ in range(1 + manager.rank)), found.mean())

    def once_more(found: Tensor, batch: Tensor) -> Tensor:
        if manager.rank == 0:
            model(batch)
        return found.square().mean()

    try:
        train(manager, model, loss=scored if how == "scores" else once_more)
    except TrainingError as error:
        return f"{error} {error.__cause__}"
    finally:
        failures.GRACE = patience
    return "nothing"
