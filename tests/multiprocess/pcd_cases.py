"""What the ranks do in test_pcd_checkpoint.py; each function is also called in one process."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.ebm.buffer import ReplayBuffer
from nvalchemi.ebm.losses import ContrastiveDivergence
from nvalchemi.ebm.samplers import LangevinDynamics
from nvalchemi.models import MLPEnergy
from nvalchemi.training import Every, OptimizerConfig, TrainingStage, TrainingStrategy, on
from nvalchemi.training.hooks import CheckpointHook, DDPHook, FSDP2Hook, PCDCheckpointHook

SLOTS = 5


def train(
    manager: Any,
    folder: str,
    steps: int,
    resume_from: str | None = None,
    settings: dict[str, Any] | None = None,
    sharded: bool = False,
    keeper: bool = True,
) -> Any:
    """Train up to ``steps`` steps; gives the chains before the first and after the last, or the error."""
    torch.manual_seed(1)
    model = MLPEnergy(dim=2, hidden=8)
    sampler = LangevinDynamics(model, step_size=0.01)
    loss = ContrastiveDivergence(
        model, sampler, k_steps=2, persistent=True, buffer_size=SLOTS, init_steps=3, new_sample_ratio=0.0
    )
    seen: dict[str, Any] = {"start": None, "error": None, "said": []}

    @on(TrainingStage.TRAINING_START)
    def at_start(ctx: Any) -> None:
        seen["start"] = chains(loss)

    handler = logging.Handler()
    handler.emit = lambda record: seen["said"].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nvalchemi").addHandler(handler)
    try:
        TrainingStrategy(
            models=model,
            optimizer_configs=OptimizerConfig(torch.optim.Adam, {"lr": 1e-3}),
            loss_fn=loss,
            num_steps=steps,
            distributed_manager=manager,
            resume_from=resume_from,
            hooks=[
                *([PCDCheckpointHook(**(settings or {}))] if keeper else []),
                CheckpointHook(folder, Every(steps=2), keep_last=None),
                at_start,
                FSDP2Hook() if sharded else DDPHook(),
            ],
        ).run(DataLoader(InMemoryDataset(torch.randn(32, 2)), batch_size=8 // manager.world_size, shuffle=True, seed=3))
    except Exception as error:  # noqa: BLE001 - told to the test
        seen["error"] = f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger("nvalchemi").removeHandler(handler)
    seen["end"] = chains(loss)
    seen["weights"] = [p.detach() for p in model.parameters()] if not sharded else None
    return seen


def chains(loss: Any) -> Tensor | None:
    buffer = loss.replay_buffer
    return buffer.samples if buffer.is_initialized else None


def mixed(manager: Any, total: int, times: int, structures: bool) -> Any:
    """Chains numbered 0 to ``total`` - 1, dealt out to these ranks and mixed; which are here before each time.

    Each has two conditions that say its number too, which must go with it.
    """
    whole, buffer = ReplayBuffer(total), ReplayBuffer(total)
    numbers = torch.arange(total, dtype=torch.float64)
    line = 1.5 * torch.arange(3, dtype=torch.float64)[:, None].expand(3, 3)
    atoms = [AtomicData(line[: 1 + n % 3], [n + 1] * (1 + n % 3)) for n in range(total)]
    told = {"label": torch.arange(total), "weight": torch.stack([numbers, -numbers], 1)}
    whole.initialize(Batch.from_data_list(atoms) if structures else numbers[:, None], told)
    buffer.load_state_dict(ReplayBuffer.dealt([whole.state_dict()], manager.rank, manager.world_size))
    generator = torch.Generator().manual_seed(manager.rank)
    seen = []
    for _ in range(times):
        here = buffer.samples
        seen.append([int(s.atomic_numbers[0]) - 1 for s in here.to_data_list()] if structures else here.flatten().int().tolist())
        conditions = buffer.conditions(torch.arange(len(buffer)))
        if conditions["label"].tolist() != seen[-1] or conditions["weight"].tolist() != [[n, -n] for n in seen[-1]]:
            raise AssertionError(f"chains {seen[-1]} have the conditions {conditions}")
        buffer.mix_across_ranks(manager, generator)
    return seen
