"""Shards of a model, one a rank: torch's ``fully_shard`` on a target, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from nvalchemi.distributed.alike import give_to_all
from nvalchemi.distributed.blocks import follow_gradients, is_sharded, is_unit, reshard
from nvalchemi.distributed.meta import Initialise, is_on_meta, materialise
from nvalchemi.distributed.ranks import Manager
from nvalchemi.distributed.reads import whole_reads
from nvalchemi.distributed.state import check_division
from nvalchemi.distributed.targets import Target
from nvalchemi.distributed.wrap import Wrap, units
from nvalchemi.errors import ConfigError, TrainingError


@dataclass(frozen=True, slots=True)
class Sharding:
    """How models are sharded; the settings of `nvalchemi.training.hooks.FSDP2Hook`.

    Parameters
    ----------
    shard
        Over how many ranks the parameters are divided; the groups of so many ranks are replicas of each other. ``None`` for all ranks.
    mesh
        A ``DeviceMesh`` of one dimension (shards) or two (replicas, shards), in place of ``shard``.
    wrap
        Which parts are gathered each by itself: see `nvalchemi.distributed.wrap.units`.
    reshard_after_forward
        As ``fully_shard`` takes it.
    param_dtype, reduce_dtype, output_dtype
        Of ``MixedPrecisionPolicy``.
    cpu_offload
        Keep the parts on the host between their uses.
    """

    shard: int | None = None
    mesh: Any = None
    wrap: Wrap = None
    reshard_after_forward: bool | int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cpu_offload: bool = False

    def options(self, manager: Manager) -> dict[str, Any]:
        """The arguments of ``fully_shard``.

        Raises
        ------
        ConfigError
            Where the ranks cannot be divided like this.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype, self.output_dtype)
        options: dict[str, Any] = {"mesh": self._mesh(manager), "mp_policy": policy}
        if self.reshard_after_forward is not None:
            options["reshard_after_forward"] = self.reshard_after_forward
        if self.cpu_offload and manager.cuda:  # on the CPU they are there
            options["offload_policy"] = CPUOffloadPolicy()
        return options

    def _mesh(self, manager: Manager) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        ranks = manager.world_size
        if self.mesh is not None:
            if self.mesh.ndim not in (1, 2) or self.mesh.size() != ranks:
                raise ConfigError(
                    "the mesh does not fit the run",
                    found=f"shape {tuple(self.mesh.shape)}",
                    needed=f"one dimension (shards) or two (replicas, shards) of all {ranks} ranks",
                )
            return self.mesh
        size = ranks if self.shard is None else self.shard
        if size < 1 or ranks % size:
            raise ConfigError(
                "the ranks cannot be divided into replicas",
                found=f"shard={size} and {ranks} ranks",
                needed="a divisor of the number of ranks",
            )
        if size == ranks:
            return init_device_mesh(manager.device.type, (ranks,), mesh_dim_names=("shard",))
        return init_device_mesh(manager.device.type, (ranks // size, size), mesh_dim_names=("replicate", "shard"))


class Shards:
    """The models of a run, each divided between the ranks; gradients are averaged over the ranks and divided like the parameters.

    A model that is sharded already, by its user or by an earlier run, is left as it is. It stays sharded after the run: on one device
    there may be no room for all of it.

    Parameters
    ----------
    models
        The models of a run by name; sharded in place.
    names
        Which to shard.
    sharding
        How.
    manager
        Who the ranks are.
    seed
        Of the first weights of models on the meta device.
    initialise
        See `nvalchemi.distributed.meta.materialise`.

    Raises
    ------
    ConfigError
        For a model that cannot be sharded like this: before anything is changed.
    """

    def __init__(
        self,
        models: dict[str, nn.Module],
        names: Sequence[str],
        sharding: Sharding,
        manager: Manager,
        seed: int,
        initialise: Initialise | None = None,
    ) -> None:
        self.names = list(names)
        self.nets = [Target(models, name).original for name in names]
        new = [(name, net, units(net, sharding.wrap)) for name, net in zip(names, self.nets, strict=True) if not is_sharded(net)]
        for name, net, _ in new:
            _check(name, net, sharding)
        self._manager = manager
        options = sharding.options(manager)
        for _, net, parts in new:
            _shard(net, parts, options, manager)
            net.register_load_state_dict_pre_hook(_before_loading)
        for name, net in zip(names, self.nets, strict=True):
            if is_on_meta(models[name]):
                stay = torch.device("cpu") if sharding.cpu_offload else None
                materialise(models[name], manager.device, seed, initialise, keep_on=stay)
            _take_up(net)
            follow_gradients(net)
        self._called: set[nn.Module] = set()
        self._handles = [net.register_forward_pre_hook(self._note) for net in self.nets]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of what runs inside on this rank, whole: the next backward outside divides their sum."""
        for net in self.nets:
            net.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            yield
        finally:
            for net in self.nets:
                net.set_requires_gradient_sync(True)  # type: ignore[operator]

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Divide, in the backward of what runs inside, the gradients of the whole step.

        Raises
        ------
        TrainingError
            Where some could not be: a model was called in earlier micro-batches and not in this one.
        """
        before, self._called = self._called, set()
        yield
        for name, net in zip(self.names, self.nets, strict=True):
            if net in before and net not in self._called:
                raise TrainingError(
                    f"model '{name}' was used in earlier micro-batches of the step and not in its last, which sends the gradients",
                    fix="use it in every micro-batch, or accumulate=1",
                )
        self._called.clear()

    def explained(self) -> AbstractContextManager[None]:
        """Inside, a shard that is read as if it were whole is an error that names its reader."""
        return whole_reads(dict(zip(self.names, self.nets, strict=True)))

    def align_buffers(self) -> None:
        """Give every rank the buffers (running means, counters) of rank 0."""
        give_to_all((buffer for net in self.nets for buffer in net.buffers()), self._manager)

    def _note(self, net: nn.Module, arguments: Any) -> None:
        # Only the calls that go through the hooks of fully_shard come here; the others divide their gradients at once.
        if torch.is_grad_enabled():
            self._called.add(net)

    def reshard(self) -> None:
        """Free whatever is gathered."""
        for net in self.nets:
            reshard(net)

    def close(self) -> None:
        """Leave the models sharded, with nothing gathered and none of this run's hooks."""
        self.reshard()
        for handle in self._handles:
            handle.remove()


def _shard(net: nn.Module, parts: Sequence[nn.Module], options: dict[str, Any], manager: Manager) -> None:
    from torch.distributed.fsdp import fully_shard

    if not is_on_meta(net):
        give_to_all(chain(net.parameters(), net.buffers()), manager)  # each rank keeps its part of what must be one model
    # torch cannot scatter gradients that have no entries, and there is nothing to divide
    empty = {p for p in net.parameters() if not p.numel()}
    for part in (*parts, net):
        fully_shard(part, **options, ignored_params=empty or None)
        if options["mesh"].device_type == "cpu":
            # gloo has no mean, and older torch took the sum for it: gradients were larger by the number of ranks
            part.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]


def _before_loading(net: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    if not prefix:  # an energy around it has its own check
        check_division(net, state)


def _take_up(net: nn.Module) -> None:
    """Let torch see parameters that were put in place, and make its own of all of them now.

    Later it would replace what others refer to, to pad it; and older torch misses those of parts that a first backward pass leaves out.
    """
    for module in net.modules():
        if is_unit(module):
            module.unshard()  # type: ignore[operator]
            module.reshard()  # type: ignore[operator]


def _check(name: str, net: nn.Module, sharding: Sharding) -> None:
    scalars = [key for key, p in net.named_parameters() if p.dim() == 0]
    if scalars:
        raise ConfigError(
            f"model '{name}' has parameters that cannot be divided",
            found=", ".join(f"{key} of shape ()" for key in scalars),
            needed="at least one dimension",
            fix="make them of shape (1,)",
        )
    short = sharding.param_dtype or sharding.reduce_dtype
    complex_ones = [f"{key} of {p.dtype}" for key, p in net.named_parameters() if p.is_complex()]
    if short and complex_ones:
        raise ConfigError(
            f"model '{name}' has complex parameters, of which torch would drop the imaginary part",
            found=f"{', '.join(complex_ones)}, and {short} to compute or to sum gradients in",
            fix="leave param_dtype and reduce_dtype out, or hold real and imaginary parts as real parameters (torch.view_as_real)",
        )
