"""Sharded training: a share of the model and a share of the data on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from nvalchemi.distributed.alike import make_alike
from nvalchemi.distributed.blocks import is_redirected
from nvalchemi.distributed.meta import Initialise
from nvalchemi.distributed.shard import Sharding, Shards
from nvalchemi.distributed.trial import check_steps
from nvalchemi.distributed.wrap import Wrap
from nvalchemi.errors import ConfigError
from nvalchemi.training.data_parallel import DataParallelHook
from nvalchemi.training.hook import around, on
from nvalchemi.training.seeds import derive_seed
from nvalchemi.training.stages import TrainingSpan, TrainingStage
from nvalchemi.training.update import ScaledUpdate

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


logger = logging.getLogger("nvalchemi")


class FSDP2Hook(DataParallelHook):
    """Train on many processes as on one, with parameters, gradients and optimizer state divided between them.

    The models that are trained go through torch's ``fully_shard`` (of an :class:`~nvalchemi.models.EnergyModel` its ``net``, so that the
    object stays the user's own) and stay sharded after the run: :func:`~nvalchemi.distributed.unsharded` gathers them for evaluation. A part
    of the network at a time is gathered, used and freed. Losses on forces and scores work as they are: calls whose input requires a
    gradient go through :mod:`nvalchemi.distributed.gathered`. Rank 0's first weights and buffers are everybody's. Each rank gets its share
    of the training and validation data. Without a process group (one plain process) this hook takes no part at all.

    Running means and other buffers are each rank's own in training; rank 0's are validated with, saved, and everybody's at the end.

    Gradients of calls of first order are divided with a step's last micro-batch, those of second order with each, so that no rank ever has
    all of them.

    All ranks must call a model equally often, batch by batch. Losses and samplers of this package do; what a ``training_fn`` calls only
    sometimes belongs inside ``unsharded(model)``.

    Parameters
    ----------
    shard
        Over how many ranks parameters are divided, a divisor of the number of ranks: groups of so many are replicas of each other (hybrid
        sharding). By default over all.
    wrap
        Which parts of a network are gathered each by itself: a class or several, a smallest number of parameters, or a function of a module.
        By default the largest parts with at most a quarter of the parameters: see :func:`nvalchemi.distributed.wrap.units`.
    mesh
        A ``DeviceMesh`` of all ranks in place of ``shard``: one dimension (shards), or two (replicas, shards).
    reshard_after_forward
        Whether parts are freed between forward and backward, as in ``fully_shard``. It is about first-order losses; calls that are
        differentiated again free each part in any case.
    param_dtype, reduce_dtype, output_dtype
        In which dtype parts are computed, gradients are summed over the ranks, and outputs are given (``MixedPrecisionPolicy``). Parameters
        keep their own on each rank.
    cpu_offload
        Keep parameters, gradients and optimizer state in host memory between their uses. On a CPU that is where they are.
    meta_init
        How modules of a model that was built under ``torch.device("meta")`` get their first weights: ``meta_init(module)`` sets the
        module's own parameters and buffers in place. By default ``module.reset_parameters()``. Weights follow from the strategy's
        ``seed``, the same on any number of ranks and in one process.
    sampler_cls, sampler_kwargs
        How the training data are divided: see :func:`nvalchemi.data.datapipes.sharding.shard_loader`. Validation data are divided without
        repeats, so that every sample counts once.

    Raises
    ------
    ConfigError
        For ranks that cannot be divided as asked, parts that cannot be sharded by themselves, learnable parameters outside the part
        that is sharded, optimizers that cannot step on shards, weights that are read without their part being called, and data that
        cannot be divided.
    TrainingError
        Where another rank's error ended the run: naming the rank and its error.
    """

    def __init__(
        self,
        shard: int | None = None,
        *,
        wrap: Wrap = None,
        mesh: Any = None,
        reshard_after_forward: bool | int | None = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
        cpu_offload: bool = False,
        meta_init: Initialise | None = None,
        sampler_cls: Callable[..., Any] | None = None,
        sampler_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(None, sampler_cls, sampler_kwargs)
        if shard is not None and mesh is not None:
            raise ConfigError("shard and mesh exclude each other", fix="the mesh says over how many ranks parameters are divided")
        dtypes: dict[str, Any] = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "output_dtype": output_dtype}
        for name, dtype in dtypes.items():
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ConfigError(f"{name} is wrong", found=repr(dtype), needed="such as torch.bfloat16, or None")
        ranks: Any = shard
        if ranks is not None and (type(ranks) is not int or ranks < 1):
            raise ConfigError("shard is wrong", found=repr(shard), needed="a number of ranks, or None for all")
        others: dict[str, tuple[Any, bool, str]] = {
            "mesh": (mesh, mesh is None or hasattr(mesh, "mesh_dim_names"), "a torch DeviceMesh, or None"),
            "reshard_after_forward": (reshard_after_forward, isinstance(reshard_after_forward, int | None), "True, False, a number of ranks, or None"),
            "cpu_offload": (cpu_offload, isinstance(cpu_offload, bool), "True or False"),
            "meta_init": (meta_init, meta_init is None or callable(meta_init), "a function of a module, or None"),
        }  # fmt: skip
        for name, (given, right, needed) in others.items():
            if not right:
                raise ConfigError(f"{name} is wrong", found=repr(given), needed=needed)
        self.meta_init = meta_init
        self.sharding = Sharding(shard, mesh, wrap, reshard_after_forward, param_dtype, reduce_dtype, output_dtype, cpu_offload)
        self._shards: Shards | None = None

    @on(TrainingStage.SETUP)
    def wrap(self, ctx: TrainContext) -> None:
        """Divide the data and the models."""
        self.divide(ctx)
        inside = [name for name, model in ctx.models.items() if any(map(is_redirected, model.modules()))]
        if inside:
            raise ConfigError(
                "a model is gathered by unsharded(...), where its parameters are constants",
                found=", ".join(inside),
                fix="leave the with block before training",
            )
        names = self.names(ctx)
        self.say_if_it_fits(ctx, names)
        self._shards = Shards(
            ctx.models, names, self.sharding, ctx.manager, derive_seed(ctx.cursor.seed, "weights"), self.meta_init
        )
        make_alike(ctx.models, self._shards.nets, ctx.manager)
        ctx.calls_communicate = True

    @on(TrainingStage.BUILT)
    def check(self, ctx: TrainContext) -> None:
        """Whether the optimizers can step on shards."""
        for name, optimizer in ctx.optimizers.items():
            check_steps(name, optimizer)

    @on(TrainingStage.TRAINING_START)
    def say_what_is_lost(self, ctx: TrainContext) -> None:
        """Tell where parts are computed in fp16 and the loss is not scaled."""
        if self.sharding.param_dtype is torch.float16 and not isinstance(ctx.update, ScaledUpdate) and ctx.manager.rank == 0:
            logger.warning(
                "parts are computed in fp16, where small gradients vanish unless the loss is scaled: "
                "param_dtype=torch.bfloat16, or MixedPrecisionHook('fp16') beside it"
            )

    @around(TrainingSpan.MICROBATCH)
    def hold_back(self, ctx: TrainContext) -> Iterator[None]:
        """Divide gradients with the step's last micro-batch."""
        assert self._shards is not None
        with self._shards.sync() if ctx.is_last_microbatch else self._shards.no_sync(), self._shards.explained():
            yield

    @around(TrainingSpan.VALIDATION)
    def leave_nothing(self, ctx: TrainContext) -> Iterator[None]:
        """Free what validation gathered: whoever looks at the parameters next is to see the sharded ones."""
        assert self._shards is not None
        self._shards.align_buffers()
        try:
            with self._shards.explained():
                yield
        finally:
            self._shards.reshard()

    @on(TrainingStage.TRAINING_END)
    def align(self, ctx: TrainContext) -> None:
        """End with the same model on every rank, also where it has running means."""
        assert self._shards is not None
        self._shards.align_buffers()

    def release(self) -> None:
        if self._shards is not None:
            self._shards.close()
            self._shards = None
