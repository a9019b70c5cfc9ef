"""The facade of every energy: a network inside, energies, forces and scores outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nvalchemi.data import Batch
from nvalchemi.distributed.blocks import follow_gradients, following, is_unit, may_be_sharded
from nvalchemi.distributed.state import check_division
from nvalchemi.errors import ConfigError
from nvalchemi.models.derivatives import energy_and_derivatives
from nvalchemi.models.gradient import all_plain, check_energy, differentiable, input_gradient, leaf


class EnergyModel(nn.Module):
    """An energy, one number a sample.

    A subclass sets ``self.net``, which holds every learnable parameter, and defines `forward`, which calls ``self.net(...)`` for
    everything learnable. Wrappers of distributed training replace ``net`` and leave the facade as it is, so samplers, losses and users
    keep the same object, whose methods go through the wrapper.

    Attributes
    ----------
    net
        The network.
    outputs
        What `predict` can give. An energy of atoms that is differentiable with respect to the positions (and, for stress, the cell) of
        its batch says ``("energy", "forces", "stress")``, and the derivatives are made for it.
    force_fp32_gradient
        Compute `gradient` in float32, without autocast, whatever the dtype of ``x`` (the result has ``x``'s). The parameters must then
        be float32. Forces and stress of `predict` are computed without autocast, and the energy of the same call. Set it on an object or
        a class, or by ``MixedPrecisionHook(fp32_gradients=True)``.

    has_energy
        False for what has a gradient and no energy, such as a field that equilibrium matching trained: samplers that go by the gradient
        alone then report no energy.

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
    distributed_part: ClassVar[str] = "net"  # what wrappers of distributed training replace
    outputs: ClassVar[tuple[str, ...]] = ("energy",)
    force_fp32_gradient: bool = False
    has_energy: bool = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`; where the network is sharded, so that gradients can be taken of what it gives, to any order."""
        if not may_be_sharded():
            return super().__call__(*args, **kwargs)
        net = self._modules.get(self.distributed_part)  # a known function has none
        if is_unit(self):  # its user has sharded the energy itself
            return self(*args, **kwargs) if follow_gradients(self) else super().__call__(*args, **kwargs)
        if net is None:
            return super().__call__(*args, **kwargs)
        inputs = [x.positions if isinstance(x, Batch) else x for x in (*args, *kwargs.values())]
        return following(net, inputs, partial(super().__call__, *args, **kwargs))

    def forward(self, x: Any) -> Tensor:
        """One energy a sample, (batch,), of vectors ``x`` (batch, ...) or of a `nvalchemi.data.Batch`."""
        raise ConfigError(f"{type(self).__name__} has no forward", fix="define forward(self, x) -> Tensor of shape (batch,)")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module.

        Raises
        ------
        ConfigError
            Where the state or the energy is sharded and the other is not.
        """
        check_division(self, state_dict)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def gradient(self, x: Any, create_graph: bool = False, **conditions: Any) -> Tensor:
        """Give the gradient of the energy with respect to ``x``, which is minus the score, or minus the forces.

        Parameters
        ----------
        x
            (batch, ...) of a floating dtype, or a `nvalchemi.data.Batch`, whose positions are then what is differentiated by.
        create_graph
            Keep the graph, for a loss that differentiates the gradient. It then also reaches back to ``x``, if ``x`` requires a gradient.
        **conditions
            Handed to `forward` by name, such as labels.

        Returns
        -------
        Tensor
            Of the shape and dtype of ``x``, or (N, 3) in eV/Å. Works under ``torch.no_grad`` and ``torch.inference_mode`` as well.
        """
        return self.energy_and_gradient(x, create_graph, **conditions)[1]

    def energy_and_gradient(
        self, x: Any, create_graph: bool = False, *, anchored: bool = True, **conditions: Any
    ) -> tuple[Tensor, Tensor]:
        """Give the energies (batch,) and their gradient by one pass; otherwise as `gradient`.

        ``anchored`` is that of `nvalchemi.models.gradient.input_gradient`; ``conditions`` are handed to `forward` by name.

        Raises
        ------
        ConfigError
            Where `forward` gives something else than one energy a sample: the gradient of a mean, or energies (batch, 1) that are compared
            with each other, would be wrong without notice.
        """
        atoms = isinstance(x, Batch)
        moves = x.positions if atoms else x
        with differentiable():
            at = moves if create_graph and moves.requires_grad else leaf(moves)
            with self._gradient_precision(at.device):  # the backward pass too: autocast would reach its products
                seen = at.float() if self.force_fp32_gradient else at
                told = all_plain(conditions) if conditions else conditions
                energy = self(x.replace(positions=seen) if atoms else seen, **told)
                check_energy(energy, len(x) if atoms else x.shape[0])  # the len of a tensor costs more than this check
                gradient = input_gradient(energy, at, create_graph=create_graph, anchored=anchored)
        return energy if create_graph else energy.detach(), gradient

    def predict(self, x: Any, outputs: Sequence[str] = ("energy",)) -> dict[str, Tensor]:
        """Predict what is asked for, and compute nothing else.

        Parameters
        ----------
        x
            As `forward` takes it; a `nvalchemi.data.Batch` for forces and stress.
        outputs
            Some of `outputs`: ``"energy"`` (B,), and of a batch's energy in eV ``"forces"`` (N, 3) eV/Å and ``"stress"`` (B, 3, 3)
            eV/Å³ with tension positive, both derivatives of the energy. The stress of a structure that repeats nowhere is NaN.

        Returns
        -------
        dict
            By name. With a graph, ready for one backward pass to the parameters, where the model is in training mode and gradients are
            enabled; without one otherwise, also under ``torch.no_grad`` and ``torch.inference_mode``.

        Raises
        ------
        ConfigError
            For a name that is not among `outputs`.
        """
        self.check_outputs(outputs)
        graph = self.training and torch.is_grad_enabled()
        if {"forces", "stress"}.isdisjoint(outputs):
            with torch.set_grad_enabled(graph):
                return {"energy": self(x)} if "energy" in outputs else {}
        with self._gradient_precision(x.positions.device):
            return energy_and_derivatives(self, x, outputs, graph=graph)

    def _gradient_precision(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, enabled=False) if self.force_fp32_gradient else nullcontext()

    def check_outputs(self, outputs: Sequence[str]) -> None:
        """Refuse names that are not among `outputs`.

        Raises
        ------
        ConfigError
            For these, and for a bare string in place of a tuple.
        """
        unknown = [name for name in outputs if name not in self.outputs]
        if isinstance(outputs, str) or unknown:
            raise ConfigError(
                f"{type(self).__name__} does not predict that",
                found=repr(outputs) if isinstance(outputs, str) else ", ".join(unknown),
                needed=f"some of {', '.join(self.outputs)}",
            )

    def config(self) -> dict[str, Any]:
        """Plain data from which `nvalchemi.models.build_model` makes the same model, without its weights."""
        raise ConfigError(
            f"{type(self).__name__} cannot say how it is rebuilt",
            fix="define config() and register the class with register_model",
        )


def parameter_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of the first floating parameter, None where there is none."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return None
