"""The compiled form of an energy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel
from nvalchemi.models.gradient import compiled_gradient


class CompiledEnergy:
    """Energies and gradients of a model by one compiled graph; see `nvalchemi.models.gradient.compiled_gradient`.

    The weights are the model's own: training it changes what comes out here.
    """

    def __init__(self, model: EnergyModel, **options: Any) -> None:
        self._model = model
        self._both = compiled_gradient(self._wide, **options)

    def _wide(self, x: Tensor) -> Tensor:
        return self._model(x.float() if self._model.force_fp32_gradient else x)

    def __call__(self, x: Any, /) -> Tensor:
        """Energies, by the model itself."""
        return self._model(x)

    def gradient(self, x: Any, /) -> Tensor:
        """The gradient, of the shape and dtype of ``x``."""
        return self.energy_and_gradient(x)[1]

    def energy_and_gradient(self, x: Any, /) -> tuple[Tensor, Tensor]:
        """Both of them."""
        if not isinstance(x, Tensor):
            raise ConfigError("only samples that are tensors are compiled for", found=type(x).__name__, fix="leave out compile()")
        with torch.autocast(
            x.device.type, enabled=not self._model.force_fp32_gradient and torch.is_autocast_enabled(x.device.type)
        ):
            return self._both(x)
