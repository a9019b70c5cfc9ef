"""Energies that the tests of the samplers share."""

from __future__ import annotations

import torch
from torch import nn

from nvalchemi.models import EnergyModel


class Quadratic(EnergyModel):
    """a |x|²/2: a normal distribution of variance 1/a, without parameters."""

    def __init__(self, a: float = 1.0) -> None:
        super().__init__()
        self.a = a

    def forward(self, x):
        return 0.5 * self.a * x.square().flatten(1).sum(1)


class Labelled(EnergyModel):
    """a |x|²/2 with a of each sample's own."""

    def forward(self, x, a):
        return 0.5 * a * x.square().flatten(1).sum(1)


class Ball(EnergyModel):
    """Flat within radius 1, NaN outside."""

    def forward(self, x):
        radius = x.square().sum(1)
        return radius * torch.where(radius < 1, 0.0, torch.nan)


class Noted(EnergyModel):
    """A network with dropout and a frozen part, that notes the mode in which it is called and can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.SiLU(), nn.Linear(8, 1))
        self.net[0].requires_grad_(False)
        self.net[0].eval()
        self.modes: list[bool] = []
        self.fail_at = -1

    def forward(self, x):
        self.modes.append(self.net[1].training)
        if len(self.modes) == self.fail_at:
            raise RuntimeError("asked to fail")
        return self.net(x).squeeze(-1)
