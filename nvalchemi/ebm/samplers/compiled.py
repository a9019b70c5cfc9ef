"""The compiled form of an energy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel
from nvalchemi.models.gradient import check_energy, compiled_gradient


class CompiledEnergy(EnergyModel):
    """Energies and gradients of a model by one compiled graph; see `nvalchemi.models.gradient.compiled_gradient`.

    The weights are the model's own, which is no submodule of this: training it changes what comes out here.
    """

    def __init__(self, model: EnergyModel, **options: Any) -> None:
        super().__init__()
        self._held = (model,)
        self._both = compiled_gradient(self._wide, **options)

    def _wide(self, x: Tensor) -> Tensor:
        (model,) = self._held
        return model(x.float() if model.force_fp32_gradient else x)

    def forward(self, x: Any, **conditions: Any) -> Tensor:
        """Energies, by the model itself."""
        return self._held[0](x, **conditions)

    def energy_and_gradient(
        self, x: Any, create_graph: bool = False, *, anchored: bool = True, **conditions: Any
    ) -> tuple[Tensor, Tensor]:
        """See `EnergyModel.energy_and_gradient`; no graph can be had of it."""
        if not isinstance(x, Tensor) or create_graph or conditions:
            raise ConfigError(
                "only samples that are tensors are compiled for, without conditions, and no graph is kept",
                found=f"{type(x).__name__}, create_graph={create_graph}" + "".join(f", {name}" for name in conditions),
                fix="leave out compile()",
            )
        wide = self._held[0].force_fp32_gradient
        with torch.autocast(x.device.type, enabled=not wide and torch.is_autocast_enabled(x.device.type)):
            energy, gradient = self._both(x)
        return check_energy(energy, len(x)), gradient
