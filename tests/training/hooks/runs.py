"""Small runs that the tests of the hooks share."""

from __future__ import annotations

import torch
from torch import nn

from nvalchemi.training import OptimizerConfig, TrainingStrategy

SGD = OptimizerConfig(torch.optim.SGD, {"lr": 1.0})
ADAM = OptimizerConfig(torch.optim.AdamW, {"lr": 1e-2})


def squared(prediction, batch):
    return (prediction - batch[1]).square().mean()


def linear(prediction, batch):
    """The mean prediction: its gradient does not depend on the weights."""
    return prediction.mean()


def predict(model, batch):
    return model(batch[0])


def strategy(model, hooks=(), **kwargs):
    settings = {"models": model, "optimizer_configs": ADAM, "loss_fn": squared, "training_fn": predict, "hooks": list(hooks)}
    if not {"num_epochs", "num_steps"} & kwargs.keys():
        settings["num_steps"] = 4
    return TrainingStrategy(**{**settings, **kwargs})


def batches(count=4, size=4, dim=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, dim, generator=generator), torch.randn(size, 1, generator=generator)) for _ in range(count)]


def network(seed=3, dropout=0.2):
    """A net with dropout and a batch norm: random numbers, float buffers and an integer counter."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.SiLU(), nn.Dropout(dropout), nn.Linear(4, 1))


def weight_row(*values):
    """A linear model without bias, so that its gradient under :func:`linear` is the batch's mean row."""
    model = nn.Linear(len(values), 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([values]))
    return model


def rows(*batch_rows):
    """One batch of one row each."""
    return [(torch.tensor([row]), torch.zeros(1, 1)) for row in batch_rows]
