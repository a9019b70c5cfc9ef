"""What data-parallel hooks have in common: the data are divided between the ranks, and no rank waits for one that has left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from nvalchemi.data.datapipes.sharding import shard_loader
from nvalchemi.data.datapipes.share import share_for_validation
from nvalchemi.distributed import Manager, failures
from nvalchemi.errors import ConfigError
from nvalchemi.training.chosen import check_model_keys
from nvalchemi.training.cursor import Cursor
from nvalchemi.training.hook import Hook, around
from nvalchemi.training.stages import Order, TrainingSpan

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext

logger = logging.getLogger("nvalchemi")

BYTES = 16  # of a float32 parameter with its gradient and Adam's two moments
ROOM = 20  # a model whose training state fits so many times on its device needs no sharding

_runs = count()  # runs are begun by all ranks together, so each has the same number everywhere


class DataParallelHook(Hook):
    """Base of the hooks that train one model on many processes, each with its share of the data.

    Parameters
    ----------
    model_keys
        Names of the models to wrap; by default all that are trained.
    sampler_cls, sampler_kwargs
        How the training data are divided: see :func:`nvalchemi.data.datapipes.sharding.shard_loader`. Validation data are divided without
        repeats, so that every sample counts once.
    """

    order = Order.WRAP
    claims = frozenset({"data_parallel"})
    agreed = True

    def __init__(
        self,
        model_keys: Sequence[str] | None = None,
        sampler_cls: Callable[..., Any] | None = None,
        sampler_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_model_keys(model_keys)
        self.model_keys = model_keys
        self.sampler_cls, self.sampler_kwargs = sampler_cls, dict(sampler_kwargs or {})

    def is_active(self, manager: Manager) -> bool:
        return manager.distributed

    def release(self) -> None:
        """Give up what was wrapped, at the end of the run or after an error."""

    @around(TrainingSpan.RUN)
    def unwrap(self, ctx: TrainContext) -> Iterator[None]:
        """Give the models back, and let no rank wait for one that has left."""
        run = next(_runs)
        try:
            yield
        except BaseException as error:
            self.release()
            failures.tell(error, run, ctx.manager)
            raise
        finally:
            self.release()

    def divide(self, ctx: TrainContext) -> None:
        """Give this rank its share of the data."""
        manager, cursor = ctx.manager, ctx.cursor
        loader = shard_loader(cursor.loader, manager.rank, manager.world_size, self.sampler_cls, self.sampler_kwargs)
        ctx.cursor = Cursor(loader, cursor.device, cursor.seed)
        if ctx.validation_data is not None:
            ctx.validation_data = share_for_validation(ctx.validation_data, manager.rank, manager.world_size)

    def names(self, ctx: TrainContext) -> list[str]:
        """The models to wrap."""
        trained = [name for name, model in ctx.models.items() if any(p.requires_grad for p in model.parameters())]
        if self.model_keys is None:
            return trained
        kind = type(self).__name__
        unknown = [key for key in self.model_keys if key not in trained]
        if unknown:
            raise ConfigError(f"{kind} wraps models that are not trained", found=", ".join(unknown), needed=", ".join(trained))
        left = [name for name in trained if name not in self.model_keys]
        if left:
            raise ConfigError(
                "a model is trained and not wrapped: its replicas would drift apart",
                found=", ".join(left),
                fix=f"add it to {kind}(model_keys=...), or leave model_keys out",
            )
        return list(self.model_keys)

    @staticmethod
    def say_if_it_fits(ctx: TrainContext, names: Sequence[str]) -> None:
        """Tell, once, where weights are to be divided that fit many times on each device."""
        if not ctx.manager.cuda or ctx.manager.rank != 0:
            return
        state = BYTES * sum(p.numel() for name in names for p in ctx.models[name].parameters())
        room = torch.cuda.get_device_properties(ctx.device).total_memory
        if state * ROOM < room:
            logger.warning(
                "the models' training state is about %.2g GB and the device has %.3g: DDPHook() would communicate less",
                state / 1e9,
                room / 1e9,
            )
