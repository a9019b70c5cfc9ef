"""An optimizer's state by the names of its parameters, so that it fits the same model however that is wrapped or sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nvalchemi.distributed.parts import on_every_rank_like
from nvalchemi.distributed.tensors import is_sharded_tensor
from nvalchemi.errors import CheckpointError
from nvalchemi.training.names import plain_name
from nvalchemi.training.shards import SavedTensor, placed


def named_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """The optimizer's state dict with names where torch has numbers; a parameter that is not the model's goes by its place."""
    names = _names(optimizer, model)
    whole = optimizer.state_dict()
    state = {names[key] if isinstance(key, int) else key: value for key, value in whole["state"].items()}
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in whole["param_groups"]]
    return {**whole, "state": state, "param_groups": groups}


def settings_that_stay(optimizer: Optimizer, saved: Mapping[str, Any]) -> list[str]:
    """Settings that are declared otherwise than they were saved, where what was saved goes on; not the rate, which training itself changes.

    Parameters
    ----------
    optimizer
        As it is declared, before a state is loaded.
    saved
        What :func:`named_state` gave.
    """
    said = []
    for group, kept in zip(optimizer.param_groups, saved["param_groups"], strict=False):
        cycled = {"betas", "momentum"} if "max_momentum" in kept else set()  # a schedule's business
        for name in sorted((group.keys() & kept.keys()) - _NO_SETTINGS - cycled):
            now, then = _plain(group[name]), _plain(kept[name])
            if now != then and now is not None and then is not None:
                said.append(f"{name} {then} (declared: {now})")
    return list(dict.fromkeys(said))


# rates, and what chooses between equal computations
_NO_SETTINGS = {"params", "lr", "initial_lr", "max_lr", "min_lr", "foreach", "fused", "capturable", "differentiable"}


def _plain(value: Any) -> Any:
    """A number, or several of them; ``None`` for all else."""
    if isinstance(value, list | tuple):
        return tuple(value) if all(isinstance(item, bool | int | float) for item in value) else None
    return value if isinstance(value, bool | int | float) else None


def load_named_state(optimizer: Optimizer, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Take back what :func:`named_state` gave, each tensor sharded as its parameter is now.

    Numbers in place of names, which files of the first two formats have, are places in the order of the parameters.

    Raises
    ------
    CheckpointError
        For other parameters than the saved ones, naming them.
    """
    names, parameters = _names(optimizer, model), _parameters(optimizer)
    now = iter(range(len(parameters)))
    own = [[next(now) for _ in group["params"]] for group in optimizer.param_groups]
    groups: Sequence[Mapping[str, Any]] = saved["param_groups"]
    if len(groups) != len(own):
        raise CheckpointError("another number of parameter groups", found=len(own), needed=len(groups))
    number: dict[Any, int] = {}
    for group, indices in zip(groups, own, strict=True):
        if all(isinstance(name, int) for name in group["params"]):
            if len(group["params"]) != len(indices):
                raise CheckpointError("another number of parameters", found=len(indices), needed=len(group["params"]))
            number.update(zip(group["params"], indices, strict=True))
            continue
        of_name = {names[i]: i for i in indices}
        other = sorted(set(map(str, group["params"])) ^ of_name.keys())
        if other:
            raise CheckpointError(
                "the optimizer has other parameters than the saved one",
                found=", ".join(other[:5]) + (f" and {len(other) - 5} more" if len(other) > 5 else ""),
                needed="the same model, with the same parameters frozen and in the same groups",
            )
        number.update(of_name)
    state = {
        number.get(key, key): _placed(value, parameters[number[key]]) if key in number else placed(value)
        for key, value in saved["state"].items()
    }
    optimizer.load_state_dict(
        {
            **{key: placed(value) for key, value in saved.items()},
            "state": state,
            "param_groups": [{**placed(group), "params": indices} for group, indices in zip(groups, own, strict=True)],
        }
    )


def _placed(value: Any, parameter: Tensor) -> Any:
    """What an optimizer keeps of a parameter: of its shape, and then sharded like it, or of another."""
    if isinstance(value, Mapping):
        return {key: _placed(item, parameter) for key, item in value.items()}
    if isinstance(value, (Tensor, SavedTensor)) and is_sharded_tensor(parameter) and tuple(value.shape) != tuple(parameter.shape):
        whole: Tensor = placed(value)
        # A counter of steps is the host's own; a row of second moments goes into arithmetic with what is sharded.
        return whole if whole.ndim == 0 else on_every_rank_like(parameter, whole)
    return placed(value, parameter)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """A name for each parameter, in the order in which torch counts them."""
    known = {id(parameter): plain_name(model, key) for key, parameter in model.named_parameters()}
    return [known.get(id(parameter), f"parameter {i}") for i, parameter in enumerate(_parameters(optimizer))]
