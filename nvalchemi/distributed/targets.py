"""Which module to wrap: an energy's network, which stays inside the user's object; any other module itself."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn

from nvalchemi.errors import ConfigError


@runtime_checkable
class Facade(Protocol):
    """A module of which only one part is wrapped, because the user, samplers and losses keep the object itself."""

    distributed_part: str
    """Name of the submodule that holds every learnable parameter."""


class Target:
    """The place of a module that can be replaced, and put back.

    Parameters
    ----------
    models
        The models of a run by name; the entry is replaced where the model is no facade.
    name
        Which of them.

    Raises
    ------
    ConfigError
        Where a facade has learnable parameters outside the part that is wrapped: no rank would hear of their gradients.
    """

    def __init__(self, models: dict[str, nn.Module], name: str) -> None:
        model = models[name]
        self._owner: nn.Module | None = model if isinstance(model, Facade) else None
        self._models, self._name = models, name
        self._part = model.distributed_part if isinstance(model, Facade) else ""
        self.original = self.present
        if self._owner is not None:
            inside = {id(p) for p in self.original.parameters()}
            outside = [key for key, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
            if outside:
                raise ConfigError(
                    f"model '{name}' has learnable parameters outside its '{self._part}'",
                    found=", ".join(outside),
                    fix=f"move them into {type(model).__name__}.{self._part}, which is what is wrapped",
                )

    @property
    def present(self) -> nn.Module:
        """What stands in the place now."""
        return self._models[self._name] if self._owner is None else self._owner.get_submodule(self._part)

    def put(self, module: nn.Module) -> None:
        """Let ``module`` stand in the place."""
        if self._owner is None:
            self._models[self._name] = module
        else:
            setattr(self._owner, self._part, module)

    def restore(self) -> None:
        """Put the original back."""
        self.put(self.original)
