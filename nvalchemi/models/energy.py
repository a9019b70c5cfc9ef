"""The facade of every energy: a network inside, energies, forces and scores outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.errors import ConfigError
from nvalchemi.models.gradient import differentiable, input_gradient, leaf


class EnergyModel(nn.Module):
    """An energy, one number a sample.

    A subclass sets ``self.net``, which holds every learnable parameter, and defines `forward`, which calls ``self.net(...)`` for
    everything learnable. Wrappers of distributed training replace ``net`` and leave the facade as it is, so samplers, losses and users
    keep the same object, whose methods go through the wrapper.

    Attributes
    ----------
    net
        The network.

    Examples
    --------
    >>> class Quadratic(EnergyModel):
    ...     def __init__(self, dim):
    ...         super().__init__()
    ...         self.net = nn.Linear(dim, 1)
    ...
    ...     def forward(self, x):
    ...         return self.net(x).square().squeeze(-1)
    """

    net: nn.Module

    def forward(self, x: Any) -> Tensor:
        """One energy a sample, (batch,), of vectors ``x`` (batch, ...) or of a `nvalchemi.data.Batch`."""
        raise ConfigError(f"{type(self).__name__} has no forward", fix="define forward(self, x) -> Tensor of shape (batch,)")

    def gradient(self, x: Any, create_graph: bool = False) -> Tensor:
        """Give the gradient of the energy with respect to ``x``, which is minus the score.

        Parameters
        ----------
        x
            (batch, ...) of a floating dtype.
        create_graph
            Keep the graph, for a loss that differentiates the gradient. It then also reaches back to ``x``, if ``x`` requires a gradient.

        Returns
        -------
        Tensor
            Of the shape of ``x``. Works under ``torch.no_grad`` and ``torch.inference_mode`` as well.
        """
        with differentiable():
            at = x if create_graph and x.requires_grad else leaf(x)
            return input_gradient(self(at), at, create_graph=create_graph)

    def predict(self, x: Any, outputs: Sequence[str] = ("energy",)) -> dict[str, Tensor]:
        """Give the asked-for predictions by name; a plain energy knows ``"energy"`` only.

        Raises
        ------
        ConfigError
            For any other name.
        """
        check_outputs(self, outputs, ("energy",))
        energy = self(x)
        return {"energy": energy if self.training else energy.detach()}

    def config(self) -> dict[str, Any]:
        """Plain data from which `nvalchemi.models.build_model` makes the same model, without its weights."""
        raise ConfigError(
            f"{type(self).__name__} cannot say how it is rebuilt",
            fix="define config() and register the class with register_model",
        )


def check_outputs(model: nn.Module, outputs: Sequence[str], known: Sequence[str]) -> None:
    """Refuse names that ``model`` does not predict."""
    unknown = [name for name in outputs if name not in known]
    if isinstance(outputs, str) or unknown:
        raise ConfigError(
            f"{type(model).__name__} does not predict that",
            found=repr(outputs) if isinstance(outputs, str) else ", ".join(unknown),
            needed=f"some of {', '.join(known)}",
        )


def parameter_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of the first floating parameter, None where there is none."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return None
