"""What the ranks do in test_alike.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel
from nvalchemi.training import OptimizerConfig, TrainingStrategy
from nvalchemi.training.hooks import DDPHook, FSDP2Hook
from tests.multiprocess.ddp_cases import own


class Shifted(EnergyModel):
    """An energy with a buffer and a frozen parameter beside its network."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.register_buffer("shift", torch.randn(size))
        self.scale = nn.Parameter(torch.rand(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(x).squeeze(-1) + self.shift.sum()


def begun(manager: Any, kind: str, size: int = 2) -> Any:
    """A run of one step with models that each rank makes by its own random numbers; what is beside the trained network after it."""
    torch.manual_seed(manager.rank)
    student, teacher = Shifted(size + manager.rank * (size > 2)), nn.Linear(3, 1)
    strategy = TrainingStrategy(
        models={"student": student, "teacher": teacher},
        optimizer_configs={"student": OptimizerConfig(torch.optim.SGD, {"lr": 0.1})},
        training_fn=lambda models, batch: models["student"](batch) - models["teacher"](batch).squeeze(-1),
        loss_fn=lambda found, batch: found.square().mean(),
        num_steps=1,
        distributed_manager=manager,
        hooks=[{"ddp": DDPHook, "fsdp2": FSDP2Hook}[kind]()],
    )
    try:
        strategy.run(own([torch.ones(2, 3)], manager))
    except ConfigError as error:
        return str(error)
    return [student.shift, student.scale.detach(), *(p.detach() for p in teacher.parameters())]
