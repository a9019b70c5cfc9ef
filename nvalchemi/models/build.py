"""Models from plain data: a registry of names, so that no file can name code to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from nvalchemi.errors import ConfigError
from nvalchemi.models.energy import EnergyModel
from nvalchemi.models.mlp import MLPEnergy
from nvalchemi.models.painn import PaiNN
from nvalchemi.models.potential import InteratomicPotential, PotentialNet

T = TypeVar("T")
_MODELS: dict[str, Callable[..., EnergyModel]] = {}
_NETS: dict[str, Callable[..., PotentialNet]] = {}


def register_model(name: str, make: Callable[..., EnergyModel]) -> None:
    """Let `build_model` make models of ``{"model": name, ...}`` by ``make(...)``.

    Raises
    ------
    ConfigError
        The name is taken by something else.
    """
    _register(_MODELS, name, make)


def register_net(name: str, make: Callable[..., PotentialNet]) -> None:
    """Let `build_net` make networks of ``{"net": name, ...}`` by ``make(...)``; otherwise as `register_model`."""
    _register(_NETS, name, make)


def build_model(config: Mapping[str, Any]) -> EnergyModel:
    """Make the model that ``model.config()`` described, with fresh weights.

    Raises
    ------
    ConfigError
        An unknown name, or settings that the model does not have.
    """
    return _build(_MODELS, "model", config)


def build_net(config: Mapping[str, Any]) -> PotentialNet:
    """Make the network that ``net.config()`` described, with fresh weights; raises as `build_model`."""
    return _build(_NETS, "net", config)


def check_model(config: Mapping[str, Any]) -> None:
    """See that `build_model` knows the names in a configuration, and that of the network in it, without making anything.

    Raises
    ------
    ConfigError
        An unknown name.
    """
    _maker(_MODELS, "model", config)
    if isinstance(config.get("net"), Mapping):
        _maker(_NETS, "net", config["net"])


def _potential(net: Mapping[str, Any], **settings: Any) -> InteratomicPotential:
    return InteratomicPotential(build_net(net), **settings)


def _mace(**settings: Any) -> PotentialNet:
    from nvalchemi.models.mace import MACENet

    return MACENet.new(**settings)


def _register(table: dict[str, Any], name: str, make: Callable[..., Any]) -> None:
    if table.get(name, make) is not make:
        raise ConfigError("the name is taken", found=repr(name), fix="choose another name")
    table[name] = make


def _maker(table: Mapping[str, Callable[..., T]], kind: str, config: Mapping[str, Any]) -> Callable[..., T]:
    name = config.get(kind)
    if not isinstance(name, str) or name not in table:
        raise ConfigError(
            f"no such {kind}",
            found=repr(name),
            needed=f"{kind}: one of {', '.join(sorted(table))}",
            fix=f"import what registers it with register_{kind}, or mend the name",
        )
    return table[name]


def _build(table: Mapping[str, Callable[..., T]], kind: str, config: Mapping[str, Any]) -> T:
    make = _maker(table, kind, config)
    settings = {key: value for key, value in config.items() if key != kind}
    try:
        return make(**settings)
    except TypeError as error:
        raise ConfigError(f"settings that {kind} {config[kind]!r} does not take", found=str(error)) from error


register_model("potential", _potential)
register_model("mlp", MLPEnergy)
register_net("painn", PaiNN)
register_net("mace", _mace)
