"""Data-parallel training: a replica of the model and a share of the data on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nvalchemi.distributed.alike import make_alike
from nvalchemi.distributed.replicate import CommHook, Replicas
from nvalchemi.errors import ConfigError
from nvalchemi.training.data_parallel import DataParallelHook
from nvalchemi.training.hook import around, on
from nvalchemi.training.stages import TrainingSpan, TrainingStage

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


class DDPHook(DataParallelHook):
    """Train on many processes as on one: the gradient of a step is that of the mean over the samples of all ranks.

    The models that are trained are wrapped in torch's ``DistributedDataParallel`` (of an :class:`~nvalchemi.models.EnergyModel`
    its ``net``, so that the object stays the user's own), and unwrapped when the run ends, also by an error. Gradients are sent
    once a step, in the backward of its last micro-batch. Each rank gets its share of the training and validation data. Without a
    process group (one plain process) this hook takes no part at all.

    Parameters
    ----------
    model_keys
        Names of the models to wrap; by default all that are trained.
    find_unused_parameters, broadcast_buffers, static_graph, gradient_as_bucket_view
        As in ``torch.nn.parallel.DistributedDataParallel``. ``static_graph`` excludes accumulation. With ``broadcast_buffers`` running
        means and the like are rank 0's: at each forward, in validation and at the end; without, each rank keeps its own.
    process_group
        A group of all ranks to send gradients through; by default the default group.
    comm_hook
        ``hook(state, bucket)``, or a pair ``(state, hook)``, in place of the plain average of gradients.
    sampler_cls, sampler_kwargs
        How the training data are divided: see :func:`nvalchemi.data.datapipes.sharding.shard_loader`. Validation data are divided without
        repeats, so that every sample counts once.

    Raises
    ------
    ConfigError
        In several processes that the strategy was not told of; for a model that does not exist or has nothing to train, learnable
        parameters outside the part that is wrapped, a process group of some ranks only, and data that cannot be divided.
    TrainingError
        Where another rank's error ended the run: naming the rank and its error. Where parameters have no part in a step's loss, so that
        torch sends no gradients: naming them.
    """

    def __init__(
        self,
        model_keys: Sequence[str] | None = None,
        *,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        static_graph: bool = False,
        process_group: Any = None,
        gradient_as_bucket_view: bool = False,
        comm_hook: CommHook | tuple[Any, CommHook] | None = None,
        sampler_cls: Callable[..., Any] | None = None,
        sampler_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model_keys, sampler_cls, sampler_kwargs)
        self.process_group, self.comm_hook = process_group, comm_hook
        self.options = {
            "find_unused_parameters": find_unused_parameters,
            "broadcast_buffers": broadcast_buffers,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._replicas: Replicas | None = None

    @on(TrainingStage.SETUP)
    def wrap(self, ctx: TrainContext) -> None:
        """Divide the data and wrap the models."""
        manager = ctx.manager
        if self.process_group is not None and dist.get_process_group_ranks(self.process_group) != list(range(manager.world_size)):
            raise ConfigError("the process group of DDPHook leaves ranks out", needed=f"all {manager.world_size} ranks, in order")
        self.divide(ctx)
        self._replicas = Replicas(ctx.models, self.names(ctx), self.comm_hook, process_group=self.process_group, **self.options)
        make_alike(ctx.models, self._replicas.wrapped, manager)

    @around(TrainingSpan.MICROBATCH)
    def hold_back(self, ctx: TrainContext) -> Iterator[None]:
        """Send gradients with the step's last micro-batch only; forward and backward must both know."""
        assert self._replicas is not None
        if not ctx.is_last_microbatch and self.options["static_graph"]:
            raise ConfigError("static_graph excludes accumulation", found="a step of several micro-batches", fix="accumulate=1")
        with self._replicas.sync() if ctx.is_last_microbatch else self._replicas.no_sync():
            yield

    @around(TrainingSpan.VALIDATION)
    def alone(self, ctx: TrainContext) -> Iterator[None]:
        """Shares of the validation data differ in size, so nothing may wait for another rank's forward."""
        assert self._replicas is not None
        self._replicas.align_buffers(ctx.manager)
        with self._replicas.bare():
            yield

    @on(TrainingStage.TRAINING_END)
    def align(self, ctx: TrainContext) -> None:
        """End with the same model on every rank, also where it has running means."""
        assert self._replicas is not None
        self._replicas.align_buffers(ctx.manager)

    def release(self) -> None:
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None
