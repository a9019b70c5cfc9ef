"""What the ranks do in test_rates.py."""

from __future__ import annotations

import logging

import torch

from nvalchemi.training import OptimizerConfig, TrainingStrategy
from nvalchemi.training.hooks import DDPHook
from tests.multiprocess.ddp_cases import own
from tests.multiprocess.together_cases import batches, line, predict, squared


def scaled(manager, rule):
    """Rates, what is said of them, and the log of a run of one step."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("nvalchemi")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        ctx = TrainingStrategy(
            models=line(),
            optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 0.01}, lr_scaling=rule),
            training_fn=predict,
            loss_fn=squared,
            num_steps=1,
            distributed_manager=manager,
            hooks=[DDPHook()],
        ).run(own(batches(1, manager.rank), manager))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return ctx.learning_rates, {name: str(rates) for name, rates in ctx.scaled_rates.items()}, said
