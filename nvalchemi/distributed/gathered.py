"""The gathered call: a block of a sharded network as one operation that can be differentiated to any order.

``fully_shard`` frees a block's weights after its forward and gathers them again for its backward. A loss that contains a gradient goes
through a block three times and more, and there the hooks that gather and free lose count. Here nothing is hooked: the block is a
function of its *shards*. Forward gathers them, runs the block and frees them. Backward is the same operation again, applied to the
block's vector-Jacobian product, and so has a backward of its own. No full weight outlives the operation that reads it, and gradients are
scattered as soon as they exist, so a step of second order needs the memory of one of first order; the price is computing again.

Gradients of parameters are means over the ranks, as with ``fully_shard``. All ranks must build the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.attention import SDPBackend, sdpa_kernel

from nvalchemi.distributed.moving import MovingBuffers
from nvalchemi.errors import TrainingError

Block = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""From full parameters and inputs to outputs; deterministic, and without collectives of its own."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sharded parameter lies: all that is needed to gather it from the ranks' parts, and to scatter a gradient to them.

    Parameters
    ----------
    mesh, placements, shape, stride
        Of the ``DTensor``.
    dtype
        In which the block is computed; ``None`` for the parameter's own.
    reduce_dtype
        In which gradients are summed over the ranks; ``None`` for that in which they come.
    device
        Where the block is computed; the shards may lie elsewhere (offloaded).
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def alone(self, shard: Tensor) -> Tensor:
        """The full parameter from this rank's part, by a collective of its own."""
        from torch.distributed.tensor import DTensor  # slow to import, and whoever comes here has it

        part = shard.to(device=self.device, dtype=self.dtype or shard.dtype)
        whole = DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride)
        return whole.full_tensor()

    def scatter_alone(self, gradient: Tensor) -> Tensor:
        """Give this rank's part of the sum over the ranks of their full gradients."""
        from torch.distributed.tensor import DTensor, Partial

        partial = DTensor.from_local(gradient.contiguous(), self.mesh, [Partial()] * self.mesh.ndim, run_check=False)
        return partial.redistribute(self.mesh, self.placements).to_local()

    @property
    def rows(self) -> int | None:
        """How many rows each rank has room for, where rows are divided over the mesh's last dimension; ``None`` for other divisions."""
        return _rows(self.shape, self.stride, self.placements, self.ranks)

    @property
    def ranks(self) -> int:
        """Over how many ranks the mesh's last dimension goes."""
        return self.mesh.size(self.mesh.ndim - 1)  # type: ignore[no-any-return]

    @property
    def group(self) -> Any:
        """The process group of the mesh's last dimension."""
        return self.mesh.get_group(self.mesh.ndim - 1)


@lru_cache(maxsize=4096)
def _rows(shape: torch.Size, stride: tuple[int, ...], placements: tuple[Any, ...], ranks: int) -> int | None:
    *replicas, last = placements
    by_rows = last.is_shard() and last.dim == 0 and all(p.is_replicate() for p in replicas)
    in_order = stride == torch.empty(shape, device="meta").stride()
    return -(-shape[0] // ranks) if by_rows and in_order else None


def gather(places: Sequence[Place], shards: Sequence[Tensor]) -> list[Tensor]:
    """Full parameters from this rank's parts: one collective for all that are of one kind."""
    # what has no entries is never sent
    found: list[Tensor | None] = [
        None if p.shape.numel() else s.new_empty(p.shape, dtype=p.dtype or s.dtype, device=p.device)
        for p, s in zip(places, shards, strict=True)
    ]
    for members in _alike(places, [place.dtype or shard.dtype for place, shard in zip(places, shards, strict=True)]):
        place = places[members[0]]
        if place.rows is None or len(members) == 1:
            for i in members:
                found[i] = places[i].alone(shards[i])
            continue
        sizes = [_room(places[i]) for i in members]
        parts = [shards[i].to(device=place.device, dtype=place.dtype or shards[i].dtype) for i in members]
        mine = _packed(parts, sizes)
        whole = mine.new_empty(place.ranks * mine.numel())
        dist.all_gather_into_tensor(whole, mine, group=place.group)
        for i, columns in zip(members, whole.view(place.ranks, -1).split(sizes, 1), strict=True):
            shape = places[i].shape
            found[i] = columns.reshape(-1)[: shape.numel()].view(shape)
    return found  # type: ignore[return-value]


def scatter(places: Sequence[Place], gradients: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Give this rank's parts of the means over the ranks of their full gradients, of the dtypes and on the devices of ``like``."""
    given = [g if p.reduce_dtype is None else g.to(p.reduce_dtype) for p, g in zip(places, gradients, strict=True)]
    found: list[Tensor | None] = [
        None if p.shape.numel() else g.new_empty(x.shape) for p, g, x in zip(places, given, like, strict=True)
    ]
    for members in _alike(places, [g.dtype for g in given]):
        place = places[members[0]]
        if place.rows is None or len(members) == 1:
            for i in members:
                found[i] = places[i].scatter_alone(given[i])
            continue
        sizes = [_room(places[i]) for i in members]
        sent = given[members[0]].new_empty(place.ranks, sum(sizes))
        for i, columns in zip(members, sent.split(sizes, 1), strict=True):
            flat = given[i].reshape(-1)
            full_rows, rest = divmod(flat.numel(), columns.shape[1])
            columns[:full_rows] = flat[: flat.numel() - rest].view(full_rows, -1)
            columns[full_rows:] = 0  # room beyond the last row of the parameter
            if rest:
                columns[full_rows, :rest] = flat[flat.numel() - rest :]
        mine = sent.new_empty(sum(sizes))
        dist.reduce_scatter_tensor(mine, sent.view(-1), group=place.group)
        for dimension in range(place.mesh.ndim - 1):
            dist.all_reduce(mine, group=place.mesh.get_group(dimension))
        for i, part in zip(members, mine.split(sizes), strict=True):
            found[i] = part[: like[i].numel()].view(like[i].shape)
    return [
        (part / place.mesh.size()).to(device=x.device, dtype=x.dtype)  # type: ignore[operator]
        for part, place, x in zip(found, places, like, strict=True)
    ]


def _alike(places: Sequence[Place], dtypes: Sequence[torch.dtype]) -> list[list[int]]:
    """The places that one collective can serve, by number; those without entries need none."""
    groups: dict[Any, list[int]] = {}
    for i, (place, dtype) in enumerate(zip(places, dtypes, strict=True)):
        if place.shape.numel():
            key = (id(place.mesh), place.placements, dtype, place.rows is None)
            groups.setdefault(key, []).append(i)
    return list(groups.values())


def _room(place: Place) -> int:
    """Entries that a rank has room for: its rows, or those that it would have if there were enough."""
    assert place.rows is not None
    return place.rows * place.shape[1:].numel()


def _packed(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The parts one behind the other, each filled up to its size."""
    mine = parts[0].new_zeros(sum(sizes))
    for part, room in zip(parts, mine.split(list(sizes)), strict=True):
        room[: part.numel()] = part.reshape(-1)
    return mine


def gathered_call(
    block: Block,
    places: Sequence[Place],
    shards: Sequence[Tensor],
    inputs: Sequence[Tensor],
    module: nn.Module | None = None,
) -> tuple[Tensor, ...]:
    """Call ``block`` on the full parameters and ``inputs``; differentiable to any order by both.

    Parameters
    ----------
    block
        The function, called again in every backward.
    places, shards
        Where each parameter lies, and this rank's part of it; none where nothing is sharded.
    inputs
        Tensors of any kind, at least one where there are no places; gradients flow to those that require one.
    module
        Whose forward the function is, if any: its buffers move with the call, and not again when it is computed again.

    Returns
    -------
    tuple
        The outputs.

    Raises
    ------
    TrainingError
        Where a gradient with respect to *parameters* is to be differentiated again: only gradients of inputs can be.
    """
    with torch.profiler.record_function("nvalchemi::gathered_call"):
        device = places[0].device if places else inputs[0].device
        return GatheredCall.apply(Repeated(block, device, module), tuple(places), *shards, *inputs)


class Repeated:
    """A block that computes the same each time: autocast, kinds of attention, random streams and moving buffers are those of its first call.

    Parameters
    ----------
    block
        The function.
    device
        Where it is computed.
    module
        Whose buffers it moves.
    """

    def __init__(self, block: Block, device: torch.device, module: nn.Module | None = None) -> None:
        self._block, self._device = block, device
        self._dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        self._attention = _chosen_attention()
        self._streams: tuple[Tensor, Tensor | None] | None = None
        self._buffers = None if module is None else MovingBuffers(module)

    def __call__(self, parameters: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        # Cached casts of weights would keep them from being freed.
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype is not None, cache_enabled=False):
            if self._streams is None:
                self._streams = (torch.get_rng_state(), self._accelerator().get_rng_state() if self._on_accelerator else None)
                with nullcontext() if self._buffers is None else self._buffers.first:
                    return self._block(parameters, inputs)
            devices = [self._device] if self._on_accelerator else []
            with torch.random.fork_rng(devices=devices, device_type=self._device.type if devices else "cuda"):
                torch.set_rng_state(self._streams[0])
                if self._streams[1] is not None:
                    self._accelerator().set_rng_state(self._streams[1])
                buffers = nullcontext() if self._buffers is None else self._buffers.again
                with buffers, nullcontext() if self._attention is None else sdpa_kernel(self._attention):
                    return self._block(parameters, inputs)

    @property
    def _on_accelerator(self) -> bool:
        return self._device.type != "cpu"

    def _accelerator(self) -> Any:
        return torch.get_device_module(self._device)


def _chosen_attention() -> list[SDPBackend] | None:
    """The kinds of attention that are allowed here, where a user has chosen: not each of them can be differentiated twice."""
    allowed = [
        (SDPBackend.MATH, torch.backends.cuda.math_sdp_enabled()),
        (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.flash_sdp_enabled()),
        (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.mem_efficient_sdp_enabled()),
        (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.cudnn_sdp_enabled()),
    ]
    return None if all(yes for _, yes in allowed) else [kind for kind, yes in allowed if yes]


class GatheredCall(Function):
    """See `gathered_call`."""

    @staticmethod
    def forward(ctx: Any, block: Block, places: tuple[Place, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Gather, run, free."""
        shards, inputs = tensors[: len(places)], tensors[len(places) :]
        ctx.block, ctx.places = block, places
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        outputs = tuple(block(gather(places, shards), inputs))
        # an output that is an input as it came would be taken for one that was changed in place
        outputs = tuple(y.view_as(y) if any(y is x for x in inputs) else y for y in outputs)
        ctx.mark_non_differentiable(*(y for y in outputs if not (y.is_floating_point() or y.is_complex())))
        ctx.shapes = [(y.shape, y.dtype, y.device) for y in outputs]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """The same operation, on the vector-Jacobian product."""
        places: tuple[Place, ...] = ctx.places
        count = len(places)
        shards, inputs = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        known = [i for i, g in enumerate(gradients) if g is not None]
        seeds = [g for g in gradients if g is not None]
        of_inputs = [
            i for i in range(len(inputs)) if ctx.needs_input_grad[2 + count + i] and _is_wanted(ctx.next_functions[count + i][0])
        ]
        of_parameters = [i for i in range(count) if ctx.needs_input_grad[2 + i] and _is_wanted(ctx.next_functions[i][0])]
        results: list[Tensor | None] = [None] * (count + len(inputs))
        if not known or not (of_inputs or of_parameters):
            return (None, None, *results)
        product = VectorJacobian(ctx.block, len(inputs), known, of_inputs, of_parameters)
        if torch.is_grad_enabled():
            if of_parameters:
                raise TrainingError(
                    "a gradient of sharded parameters is to be differentiated again",
                    needed="create_graph=True with gradients of inputs alone, such as forces and scores",
                    fix="leave create_graph out, or train without sharding",
                )
            found = GatheredCall.apply(product, places, *shards, *inputs, *seeds)
        else:
            found = product(gather(places, shards), [*inputs, *seeds])
        for place, gradient in zip(of_inputs, found[len(of_parameters) :], strict=True):
            results[count + place] = gradient
        wanted = [places[i] for i in of_parameters]
        parts = scatter(wanted, found[: len(of_parameters)], [shards[i] for i in of_parameters])
        for place, part in zip(of_parameters, parts, strict=True):
            results[place] = part
        return (None, None, *results)


class VectorJacobian:
    """A block's vector-Jacobian product: again a block, of the inputs and the output's gradients.

    Parameters
    ----------
    block
        The block.
    num_inputs
        Of the block; gradients of its outputs follow them.
    known
        Which outputs have a gradient.
    of_inputs, of_parameters
        By which inputs and parameters to differentiate. Parameters come first in what it gives.
    """

    def __init__(
        self, block: Block, num_inputs: int, known: Sequence[int], of_inputs: Sequence[int], of_parameters: Sequence[int]
    ) -> None:
        self.block, self.num_inputs, self.known = block, num_inputs, known
        self.of_inputs, self.of_parameters = of_inputs, of_parameters

    def __call__(self, parameters: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        again = torch.is_grad_enabled()  # a product of this product is computed
        at, seeds = inputs[: self.num_inputs], inputs[self.num_inputs :]
        with torch.enable_grad():
            own = _leaves(parameters, self.of_parameters, keep=again)
            at = _leaves(at, self.of_inputs, keep=again)
            outputs = self.block(own, at)
            by = [*(own[i] for i in self.of_parameters), *(at[i] for i in self.of_inputs)]
            pairs = [(outputs[i], seed) for i, seed in zip(self.known, seeds, strict=True) if outputs[i].requires_grad]
            if not pairs:
                return [torch.zeros_like(x) for x in by]
            # A second gradient of a block may not depend on some input at all: zeros then.
            found = torch.autograd.grad(
                [y for y, _ in pairs],
                by,
                [seed.to(y.dtype) for y, seed in pairs],
                create_graph=again,
                allow_unused=True,
                materialize_grads=True,
            )
        return list(found)


def _leaves(tensors: Sequence[Tensor], which: Sequence[int], keep: bool) -> list[Tensor]:
    """The tensors, those named by ``which`` requiring a gradient; ``keep`` those as they are that are part of a graph already."""
    chosen = set(which)
    result = []
    for i, tensor in enumerate(tensors):
        if keep and tensor.requires_grad:
            result.append(tensor)
        else:
            cut = tensor.detach()
            result.append(cut.requires_grad_() if i in chosen else cut)
    return result


def _is_wanted(node: Any) -> bool:
    """Whether the running backward computes this node: ``autograd.grad(energy, x)`` asks for no gradient of parameters."""
    if node is None:
        return False
    # of leaves the engine does not tell
    return hasattr(node, "variable") or torch._C._will_engine_execute_node(node)
