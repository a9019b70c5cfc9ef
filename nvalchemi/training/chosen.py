"""Which of a run's models a hook acts on: those that it names, or all that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nvalchemi.errors import ConfigError

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


def check_model_keys(model_keys: Sequence[str] | None) -> None:
    """Refuse a bare string, which is a sequence of its letters.

    Raises
    ------
    ConfigError
        For that.
    """
    if isinstance(model_keys, str):
        raise ConfigError("model_keys is no list of names", found=repr(model_keys), fix=f"write model_keys=[{model_keys!r}]")


def chosen_models(ctx: TrainContext, model_keys: Sequence[str] | None, does: str) -> list[str]:
    """The names, each of a model of the run.

    Parameters
    ----------
    model_keys
        Names; ``None`` for all that are trained.
    does
        The hook and what it does with models, for the error: ``"EMAHook averages"``.

    Raises
    ------
    ConfigError
        Naming models that there are not.
    """
    names = list(ctx.trained) if model_keys is None else list(model_keys)
    unknown = [name for name in names if name not in ctx.models]
    if unknown:
        raise ConfigError(f"{does} models that there are not", found=unknown, needed=f"some of {list(ctx.models)}")
    return names
