"""What the ranks do in test_data.py: data in stores, read by workers or by their owners alone, under DDPHook."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader as TorchLoader

from nvalchemi.data.datapipes import ArrayZarrReader, DataLoader, Dataset, PreShardedSampler, collate
from nvalchemi.errors import ConfigError
from nvalchemi.training import Every, OptimizerConfig, TrainingStage, TrainingStrategy, ValidationConfig, on
from nvalchemi.training.hooks import CheckpointHook, DDPHook


def train(manager: Any, loader: Any, validation: Any = None, stop_at: int | None = None, **options: Any) -> dict[str, Any]:
    """Train a line on rows whose first number says which they are; the numbers of each batch, and counters."""
    model = nn.Linear(2, 1).double()
    seen: list[list[int]] = []

    @on(TrainingStage.STEP_END)
    def note(ctx: Any) -> None:
        seen.append(ctx.batch[:, 0].long().tolist())
        if ctx.progress.step == stop_at:
            ctx.stop("for the test")

    hooks = [note, DDPHook()]
    if "resume_from" in options:
        hooks.append(CheckpointHook(options.pop("folder"), Every(steps=100)))
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 1e-6}),
        training_fn=lambda net, batch: net(batch).squeeze(1),
        loss_fn=lambda prediction, batch: (prediction - batch[:, 1]).square().mean(),
        validation_config=None if validation is None else ValidationConfig(validation_data=validation, every_n_epochs=1),
        distributed_manager=manager,
        hooks=hooks,
        **options,
    )
    ctx = strategy.run(loader)
    return {
        "seen": seen,
        "samples": ctx.progress.samples,
        "steps": ctx.progress.step,
        "validation": ctx.validation,
        "weights": [p.detach() for p in model.parameters()],
    }


def workers(manager: Any, path: str, folder: str, workers: int, method: str | None, persistent: bool) -> dict[str, Any]:
    """Two epochs without a stop; then up to the fifth step, and the rest."""
    # Standing ranks are daemons, which multiprocessing lets have no children; torch's workers end by themselves when their parent has.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    dataset = Dataset(ArrayZarrReader(path))
    dataset.read_many([3, 1])  # B05: the parent has read
    facts = {"prefetch_factor": 3, "persistent_workers": persistent, "multiprocessing_context": method} if workers else {}

    def loader() -> Any:
        return TorchLoader(
            dataset,  # type: ignore[arg-type]
            batch_size=2,
            shuffle=True,
            num_workers=workers,
            collate_fn=collate,
            timeout=100 if workers else 0,
            **facts,
        )

    whole = train(manager, loader(), num_epochs=2)
    if method == "spawn":  # each of whose workers takes seconds to start
        return {"whole": whole["seen"]}
    first = train(manager, loader(), num_epochs=2, stop_at=5, resume_from="latest", folder=folder)
    second = train(manager, loader(), num_epochs=2, resume_from="latest", folder=folder)
    return {"whole": whole["seen"], "parts": first["seen"] + second["seen"]}


def own_stores(manager: Any, paths: list[str], drop_last: bool, accumulate: int) -> dict[str, Any]:
    """Each rank opens its own store alone."""
    sizes = [len(ArrayZarrReader(path)) for path in paths]
    dataset = Dataset(ArrayZarrReader(paths[manager.rank]))

    def loader() -> Any:
        sampler = PreShardedSampler(dataset, sizes, manager.world_size, manager.rank, seed=2, drop_last=drop_last)
        return DataLoader(dataset, batch_size=2, sampler=sampler)

    return train(manager, loader(), loader(), num_epochs=2, accumulate=accumulate)


def wrong_store(manager: Any, paths: list[str]) -> str:
    """Both ranks open the first store: the second one is told."""
    sizes = [len(ArrayZarrReader(path)) for path in paths]
    dataset = Dataset(ArrayZarrReader(paths[0]))
    try:
        PreShardedSampler(dataset, sizes, manager.world_size, manager.rank)
    except ConfigError as error:
        return str(error)
    return ""
