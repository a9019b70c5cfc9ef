"""A sampler of one's own, whose constructor has names of its own, divided between processes by ``DDPHook``.

    python examples/intermediate/08_custom_sampler.py
    torchrun --standalone --nproc-per-node=2 examples/intermediate/08_custom_sampler.py

The sampler begins with the easy samples and lets harder ones in epoch by epoch. ``DDPHook`` gives a sampler class those of
``num_replicas``, ``rank``, ``shuffle``, ``seed``, ``drop_last`` and ``batch_size`` that its constructor names; whatever else it takes
goes into ``sampler_kwargs``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.distributed import DistributedManager
from nvalchemi.training import Hook, OptimizerConfig, TrainContext, TrainingStage, TrainingStrategy, on
from nvalchemi.training.hooks import DDPHook


class EasyFirst:
    """Samples up to a difficulty that grows with the epoch, in an order of their own each epoch, as many on every rank.

    Parameters
    ----------
    dataset
        The loader's data set.
    difficulty
        One number a sample.
    start, growth
        Share of the samples (easiest first) in the first epoch, and what each epoch adds.
    world, place
        How many ranks there are, and which this one is: names of its own.
    """

    def __init__(
        self, dataset: InMemoryDataset, *, difficulty: Sequence[float], start: float, growth: float, world: int, place: int
    ) -> None:
        self.order = sorted(range(len(dataset)), key=lambda index: difficulty[index])
        self.start, self.growth = start, growth
        # with these and set_epoch a sampler knows of ranks, and is told the epoch
        self.num_replicas, self.rank, self.epoch = world, place, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def admitted(self) -> list[int]:
        share = min(1.0, self.start + self.growth * self.epoch)
        count = round(share * len(self.order))
        return self.order[: count - count % self.num_replicas]  # every rank has as many

    def __len__(self) -> int:
        return len(self.admitted) // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        admitted = self.admitted
        shuffled = torch.randperm(len(admitted), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return (admitted[index] for index in shuffled[self.rank :: self.num_replicas])


class Hardest(Hook):
    """The hardest sample of each epoch, and how many there were."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float]] = []
        self.hardest = 0.0

    @on(TrainingStage.STEP_END)
    def look(self, ctx: TrainContext) -> None:
        self.hardest = max(self.hardest, ctx.batch["x"].norm(dim=1).max().item())

    @on(TrainingStage.EPOCH_END)
    def note(self, ctx: TrainContext) -> None:
        self.rows.append((ctx.progress.samples, self.hardest))


def main() -> None:
    """Fit a function of vectors, the short ones first."""
    DistributedManager.initialize()
    manager = DistributedManager()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 4, generator=generator)
    dataset = InMemoryDataset({"x": x, "y": x.square().sum(1)}, device=manager.device)

    torch.manual_seed(0)
    hardest = Hardest()
    sampling = DDPHook(
        sampler_cls=EasyFirst,
        sampler_kwargs={
            "difficulty": x.norm(dim=1).tolist(),
            "start": 0.25,
            "growth": 0.25,
            "world": manager.world_size,
            "place": manager.rank,
        },
    )
    loader = DataLoader(dataset, batch_size=20, shuffle=True)
    if not manager.distributed:  # one process: the hook takes no part, so the loader is given the sampler
        sampler = EasyFirst(dataset, **sampling.sampler_kwargs)
        loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    ctx = TrainingStrategy(
        models=nn.Sequential(nn.Linear(4, 64), nn.SiLU(), nn.Linear(64, 1)),
        optimizer_configs=OptimizerConfig(torch.optim.Adam, {"lr": 1e-2}),
        training_fn=lambda model, batch: model(batch["x"]).squeeze(1),
        loss_fn=lambda prediction, batch: (prediction - batch["y"]).square().mean(),
        num_epochs=5,
        distributed_manager=manager,
        hooks=[sampling, hardest],
    ).run(loader)

    if manager.rank == 0:
        before = 0
        for epoch, (samples, norm) in enumerate(hardest.rows):
            print(f"epoch {epoch}: {samples - before:4d} samples on {manager.world_size} process(es), hardest here {norm:.2f}")
            before = samples
    DistributedManager.cleanup()
    if ctx.progress.samples != 150 + 300 + 450 + 600 + 600:
        raise SystemExit("the sampler was not told its epochs")


if __name__ == "__main__":
    main()
