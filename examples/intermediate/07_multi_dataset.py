"""Several stores of molecules as one data set, mixed at chosen rates, on one process or many.

    python examples/intermediate/07_multi_dataset.py
    torchrun --standalone --nproc-per-node=2 examples/intermediate/07_multi_dataset.py

Three stores of unlike sizes. In a first run ``DDPHook`` mixes them while it divides them between processes; in one process it takes no
part, and every structure comes once an epoch. The second run's batches hold as many structures of each store, on any number of
processes: an epoch goes on until the largest store has been gone through, and the others begin anew meanwhile.
"""

from __future__ import annotations

from collections import Counter

import torch
from ase.build import molecule
from ase.calculators.emt import EMT

from nvalchemi.data import AtomicData
from nvalchemi.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    DataLoader,
    Dataset,
    MultiDataset,
    MultiDatasetBatchSampler,
)
from nvalchemi.data.transforms import NeighborList
from nvalchemi.distributed import DistributedManager, barrier, gather
from nvalchemi.models import InteratomicPotential, PaiNN
from nvalchemi.training import (
    EnergyMSELoss,
    ForceMSELoss,
    Hook,
    OptimizerConfig,
    TrainContext,
    TrainingStage,
    TrainingStrategy,
    on,
)
from nvalchemi.training.hooks import DDPHook, ProgressHook

STORES = {"alkanes": ("C3H8", 96), "alcohols": ("CH3CH2OH", 48), "amines": ("CH3CH2NH2", 12)}
CUTOFF = 4.0


class CountOrigins(Hook):
    """How many structures of each store this process was given."""

    def __init__(self) -> None:
        self.seen: Counter[int] = Counter()

    @on(TrainingStage.STEP_END)
    def count(self, ctx: TrainContext) -> None:
        self.seen.update(ctx.batch.dataset_index.tolist())


def rattled(name: str, count: int) -> list[AtomicData]:
    """Rattled molecules with energies and forces of ASE's EMT."""
    structures = []
    for seed in range(count):
        atoms = molecule(name)
        atoms.rattle(0.05, seed=seed)
        atoms.calc = EMT()
        atoms.get_forces()
        structures.append(AtomicData.from_atoms(atoms))
    return structures


def train(loader: DataLoader, manager: DistributedManager, hook: DDPHook) -> tuple[float, list[int]]:
    """Two epochs; the last loss and what all processes together saw of each store."""
    torch.manual_seed(0)
    origins = CountOrigins()
    ctx = TrainingStrategy(
        models=InteratomicPotential(PaiNN(["H", "C", "N", "O"], n_features=16, n_interactions=1, cutoff=CUTOFF)),
        optimizer_configs=OptimizerConfig(torch.optim.AdamW, {"lr": 2e-3}),
        loss_fn=EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss(),
        num_epochs=2,
        distributed_manager=manager,
        hooks=[hook, origins, ProgressHook()],
    ).run(loader)
    everywhere = sum((Counter(seen) for seen in gather(dict(origins.seen), manager)), Counter())
    assert ctx.loss is not None
    return ctx.loss.total.item(), [everywhere[number] for number in range(len(STORES))]


def main() -> None:
    """Write the stores once, then train on them mixed in two ways."""
    DistributedManager.initialize()
    manager = DistributedManager()
    if manager.rank == 0:
        for name, (formula, count) in STORES.items():
            AtomicDataZarrWriter(f"{name}.zarr", overwrite=True).write(rattled(formula, count))
    barrier(manager)

    dataset = MultiDataset(
        *(
            Dataset(
                AtomicDataZarrReader(f"{name}.zarr"),
                device=manager.device,
                dtype=torch.float32,
                transforms=[NeighborList(CUTOFF)],
            )
            for name in STORES
        )
    )

    settings = {"weights": [2, 1, 1], "epoch_policy": "max_size", "replacement": True, "seed": 1234}
    hook = DDPHook(sampler_kwargs=settings)
    mixed = train(DataLoader(dataset, batch_size=6, shuffle=True, prefetch_factor=4), manager, hook)

    sampler = MultiDatasetBatchSampler.balanced(dataset, batch_size=6, epoch_policy="max_size", seed=1234)
    balanced = train(DataLoader(dataset, batch_sampler=sampler, prefetch_factor=4), manager, DDPHook())

    if manager.rank == 0:
        print(f"structures of {', '.join(STORES)} seen in two epochs by {manager.world_size} process(es):")
        print(f"  by DDPHook {mixed[1]}, last loss {mixed[0]:.3f}")
        print(f"  balanced   {balanced[1]}, last loss {balanced[0]:.3f}")
    DistributedManager.cleanup()
    if len(set(balanced[1])) != 1:
        raise SystemExit("the balanced batches are not balanced")


if __name__ == "__main__":
    main()
