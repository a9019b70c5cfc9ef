"""What the losses of energy-based models share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from nvalchemi.data import Batch
from nvalchemi.ebm.conditions import check_rows
from nvalchemi.errors import ConfigError
from nvalchemi.models.energy import EnergyModel
from nvalchemi.objective import ModelLoss


class ScalarEnergyLoss(ModelLoss):
    """A loss of an energy, `nvalchemi.models.EnergyModel`."""

    model: EnergyModel

    def __init__(self, model: EnergyModel) -> None:
        if not isinstance(model, EnergyModel):
            raise ConfigError(
                f"{type(self).__name__} trains an energy",
                found=type(model).__name__,
                needed="a nvalchemi.models.EnergyModel",
                fix="derive the energy from EnergyModel and put its network into self.net",
            )
        super().__init__(model)


class ScoreLoss(ScalarEnergyLoss):
    """A loss of an energy's score, the gradient by its input.

    Parameters
    ----------
    model
        The energy.
    use_autograd, functional_model
        Two settings of other libraries, which choose there how the score of a sharded energy is made. Here there is one way for sharded and
        whole energies, so they change nothing.

    Raises
    ------
    ConfigError
        For a ``functional_model`` that is no module.
    """

    def __init__(self, model: EnergyModel, *, use_autograd: bool = True, functional_model: nn.Module | None = None) -> None:
        super().__init__(model)
        template: Any = functional_model
        if template is not None and not isinstance(template, nn.Module):
            raise ConfigError("functional_model is no module", found=type(template).__name__, fix="leave it out")


def vectors(x: Any, loss: ModelLoss) -> Tensor:
    """The samples, if they are rows of a tensor.

    Raises
    ------
    ConfigError
        For structures, where the loss takes none.
    """
    if not isinstance(x, Tensor):
        raise ConfigError(
            f"{type(loss).__name__} takes vectors",
            found=type(x).__name__,
            needed="a tensor (batch, ...)",
            fix="structures are for DenoisingScoreMatching, ContrastiveDivergence, SlicedScoreMatching and ScoreMatching",
        )
    return x


def check_conditions(conditions: Mapping[str, Any], x: Any) -> None:
    """Refuse conditions that have not a row for each sample, or for each atom."""
    check_rows(conditions, len(x), *([len(x.positions)] if isinstance(x, Batch) else []))


def at_step(name: str, setting: Any, step: int | None) -> float:
    """A number, or what a function of the step gives."""
    if not callable(setting):
        return float(setting)
    if step is None:
        raise ConfigError(f"{name} is a function of the step", found="no step", fix="call loss_fn(x, step=..., generator=...)")
    return float(setting(step))
