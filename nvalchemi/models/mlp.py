"""Small energies of plain vectors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from nvalchemi.errors import ConfigError
from nvalchemi.models.energy import EnergyModel

ACTIVATIONS: dict[str, type[nn.Module]] = {"silu": nn.SiLU, "tanh": nn.Tanh, "softplus": nn.Softplus, "gelu": nn.GELU}
"""All smooth: a score-based loss differentiates the energy twice, and the second derivative of a ReLU is zero."""


class MLPEnergy(EnergyModel):
    """A multi-layer perceptron whose single output is the energy.

    Parameters
    ----------
    dim
        Length of a vector.
    hidden
        Width of the hidden layers.
    layers
        How many hidden layers.
    activation
        ``"silu"``, ``"tanh"``, ``"softplus"`` or ``"gelu"``.
    """

    def __init__(self, dim: int, hidden: int = 128, layers: int = 2, activation: str = "silu") -> None:
        super().__init__()
        if dim < 1 or hidden < 1 or layers < 1:
            raise ConfigError("no such network", found=f"dim={dim}, hidden={hidden}, layers={layers}", needed="all at least 1")
        if activation not in ACTIVATIONS:
            raise ConfigError("unknown activation", found=repr(activation), needed=", ".join(ACTIVATIONS))
        self._config = {"dim": dim, "hidden": hidden, "layers": layers, "activation": activation}
        widths = [dim, *[hidden] * layers]
        blocks: list[nn.Module] = []
        for before, after in pairwise(widths):
            blocks += [nn.Linear(before, after), ACTIVATIONS[activation]()]
        self.net = nn.Sequential(*blocks, nn.Linear(hidden, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Energies (batch,) of vectors (batch, dim)."""
        return self.net(x).squeeze(-1)

    def config(self) -> dict[str, Any]:
        """See `EnergyModel.config`."""
        return {"model": "mlp", **self._config}
