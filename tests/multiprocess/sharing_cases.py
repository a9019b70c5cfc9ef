"""What the ranks do in test_sharing.py: what a page on distributed training shows, and every way in which a loader is divided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.data as torch_data
from torch import Tensor, nn

from nvalchemi.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    DataLoader,
    Dataset,
    DistributedSampler,
    InMemoryDataset,
    MultiDataset,
    MultiDatasetBatchSampler,
)
from nvalchemi.training import (
    EnergyMSELoss,
    Every,
    ForceMSELoss,
    Hook,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
    on,
)
from nvalchemi.training.hooks import CheckpointHook, DDPHook, EMAHook
from tests.multiprocess.ddp_cases import potential, structures

SIZES = {"a": 12, "b": 6}


def write_stores(folder: str) -> None:
    for number, (name, size) in enumerate(SIZES.items()):
        AtomicDataZarrWriter(f"{folder}/{name}.zarr").write(structures([2 + (i + number) % 4 for i in range(size)]))


class EveryOther:
    """A sampler whose constructor has names of its own, and none of the usual ones."""

    def __init__(self, data: Any, *, people: int, me: int, step: int = 1) -> None:
        self.size, self.people, self.me, self.step, self.epoch = len(data), people, me, step, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size // self.people

    def __iter__(self) -> Iterator[int]:
        first = self.epoch * self.step
        return ((first + place) % self.size for place in range(self.me, len(self) * self.people, self.people))


class Seen(Hook):
    """Which samples each epoch's batches hold."""

    def __init__(self) -> None:
        self.epochs: list[list[Any]] = [[]]
        self.loader: Any = None

    @on(TrainingStage.STEP_END)
    def look(self, ctx) -> None:
        self.loader = ctx.cursor.loader
        batch = ctx.batch
        if isinstance(batch, Tensor):
            self.epochs[-1].append(batch[:, 0].int().tolist())
        elif isinstance(batch, list):
            self.epochs[-1].append(batch[0][:, 0].int().tolist())
        elif batch.dataset_index is None:
            self.epochs[-1].append(batch.sample_index.tolist())
        else:
            self.epochs[-1].append(list(zip(batch.dataset_index.tolist(), batch.sample_index.tolist(), strict=True)))

    @on(TrainingStage.EPOCH_END)
    def next(self, ctx) -> None:
        self.epochs.append([])


def page(manager, folder, block):
    """The blocks of such a page, in this package's names."""
    model = potential(False)
    val_loader = DataLoader(Dataset(AtomicDataZarrReader(f"{folder}/b.zarr"), device=manager.device), batch_size=4)
    alone = Dataset(AtomicDataZarrReader(f"{folder}/a.zarr"), device=manager.device)
    dataset = MultiDataset(
        Dataset(AtomicDataZarrReader(f"{folder}/a.zarr"), device=manager.device),
        Dataset(AtomicDataZarrReader(f"{folder}/b.zarr"), device=manager.device),
    )
    hook, data = {
        "basic": lambda: (DDPHook(), alone),
        "overrides": lambda: (DDPHook(sampler_kwargs={"shuffle": False, "drop_last": True}), alone),
        "sampler class": lambda: (
            DDPHook(sampler_cls=EveryOther, sampler_kwargs={"people": manager.world_size, "me": manager.rank, "step": 3}),
            alone,
        ),
        "several": lambda: (
            DDPHook(sampler_kwargs={"epoch_policy": "max_size", "replacement": True, "seed": 1234}),
            dataset,
        ),
    }[block]()
    seen = Seen()
    loader = DataLoader(data, batch_size=5, shuffle=True, prefetch_factor=16, pin_memory=True)
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(
            torch.optim.AdamW,
            {"lr": 1e-3},
            scheduler_cls=torch.optim.lr_scheduler.CosineAnnealingLR,
            scheduler_kwargs={"T_max": 10},
        ),
        loss_fn=EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss(),
        validation_config=ValidationConfig(validation_data=val_loader, every_n_epochs=1),
        num_epochs=2,
        accumulate=1,
        distributed_manager=manager,
        hooks=[
            hook,
            EMAHook(0.999),
            CheckpointHook(f"{folder}/runs-{block}-{manager.world_size}", every=Every(steps=1000)),
            seen,
        ],
    )
    ctx = strategy.run(loader)
    return {
        "epochs": seen.epochs[:2],
        "weights": [p.detach() for p in model.parameters()],
        "validation": ctx.validation,
        "sampler": type(seen.loader.sampler).__name__,
        "batches": type(seen.loader.batch_sampler).__name__,
        "steps": ctx.progress.step,
        "samples": ctx.progress.samples,
        "hooks": [h.name for h in ctx.hooks],
    }


# --- what becomes of a loader


def numbered(count: int) -> Tensor:
    """Rows that say which they are."""
    return torch.stack([torch.arange(count), 0.1 * torch.arange(count)], dim=1).double()


class Stream(torch_data.IterableDataset):
    def __iter__(self):
        return iter(numbered(8))


class TwoAtATime:
    """A batch sampler of one's own, which knows of no ranks; yields the samples backwards."""

    def __len__(self) -> int:
        return 6

    def __iter__(self):
        return iter([[10], *([2 * i + 1, 2 * i] for i in reversed(range(5)))])


def loader_of(kind: str, manager: Any, count: int) -> Any:
    ours = InMemoryDataset(numbered(count))
    torchs = torch_data.TensorDataset(numbered(count))
    ranks = {"num_replicas": manager.world_size, "rank": manager.rank}
    several = MultiDataset(InMemoryDataset(numbered(count)), InMemoryDataset(numbered(4)))
    made = {
        "plain": lambda: DataLoader(ours, batch_size=3),
        "shuffled": lambda: DataLoader(ours, batch_size=3, shuffle=True, seed=5),
        "torch": lambda: torch_data.DataLoader(torchs, batch_size=3),
        "torch, shuffled": lambda: torch_data.DataLoader(torchs, batch_size=3, shuffle=True),
        "torch, dropping": lambda: torch_data.DataLoader(torchs, batch_size=3, drop_last=True),
        "dropping": lambda: DataLoader(ours, batch_size=3, drop_last=True),
        "aware": lambda: DataLoader(ours, batch_size=3, sampler=DistributedSampler(ours, shuffle=True, **ranks)),
        "torch, aware": lambda: torch_data.DataLoader(
            torchs, batch_size=3, sampler=torch_data.DistributedSampler(torchs, drop_last=count % 2 > 0, **ranks)
        ),
        "several": lambda: DataLoader(several, batch_size=3, shuffle=True),
        "several, undivided": lambda: DataLoader(several, batch_sampler=MultiDatasetBatchSampler(several, 3, seed=2)),
        "subset": lambda: torch_data.DataLoader(torchs, batch_size=2, sampler=torch_data.SubsetRandomSampler(range(5))),
        "own batches": lambda: DataLoader(ours, batch_sampler=TwoAtATime()),
        "list": lambda: list(numbered(count).split(3)),
        "iterable": lambda: (batch for batch in numbered(count).split(3)),
        "stream": lambda: torch_data.DataLoader(Stream(), batch_size=3),
    }
    return made[kind]()


def divided(manager, kind, count, sampler=None):
    """Train two epochs on a kind of loader; the samples that this rank saw."""
    seen = Seen()
    made = loader_of(kind, manager, count)
    hook = {
        None: lambda: DDPHook(),
        "own names": lambda: DDPHook(sampler_cls=EveryOther, sampler_kwargs={"people": manager.world_size, "me": manager.rank}),
        "torch's": lambda: DDPHook(sampler_cls=torch_data.DistributedSampler, sampler_kwargs={"seed": 3}),
        "function": lambda: DDPHook(sampler_cls=lambda data, num_replicas, rank: range(rank, len(data), num_replicas)),
    }[sampler]()
    strategy = TrainingStrategy(
        models=nn.Linear(1, 1).double(),
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 1e-6}),
        training_fn=lambda model, x: model(as_rows(x)[:, 1:]),
        loss_fn=lambda prediction, x: prediction.square().mean(),
        num_epochs=2,
        distributed_manager=manager,
        hooks=[seen, hook],
    )
    try:
        strategy.run(made)
    except Exception as error:  # noqa: BLE001 - compared by the test
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None, "epochs": seen.epochs[:2], "same": seen.loader is made}


def as_rows(batch: Any) -> Tensor:
    return batch[0] if isinstance(batch, list) else batch


def validated(manager, kind, count):
    """Validate on a kind of loader: the mean of the samples' own numbers, and how many there were."""
    model = nn.Linear(1, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    config_error = None
    try:
        config = ValidationConfig(validation_data=loader_of(kind, manager, count))
        ctx = TrainingStrategy(
            models=model,
            optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 0.0}),
            training_fn=lambda model, x: model(as_rows(x)[:, 1:]).squeeze(1) + as_rows(x)[:, 0],
            loss_fn=lambda prediction, x: prediction.mean(),
            num_steps=1,
            distributed_manager=manager,
            validation_config=config,
            hooks=[DDPHook()],
        ).run(DataLoader(InMemoryDataset(numbered(4)), batch_size=2))
    except Exception as error:  # noqa: BLE001 - compared by the test
        config_error = f"{type(error).__name__}: {error}"
        return {"error": config_error}
    return {"error": None, "loss": ctx.validation["loss"], "n": ctx.validation["n"]}
