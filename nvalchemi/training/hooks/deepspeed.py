"""Training by DeepSpeed's engine: optimizer state, gradients and weights divided between the ranks (ZeRO stages 1 to 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nvalchemi.distributed.alike import make_alike
from nvalchemi.distributed.manager import as_launched
from nvalchemi.distributed.targets import Target
from nvalchemi.errors import CheckpointError, ConfigError
from nvalchemi.training.data_parallel import DataParallelHook
from nvalchemi.training.engine import Carrier, filled, read_config
from nvalchemi.training.hook import Scope, around, on
from nvalchemi.training.stages import TrainingSpan, TrainingStage
from nvalchemi.training.update import EngineUpdate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvalchemi.training.context import TrainContext

INSTEAD = "DeepSpeedHook(stage=2), which keeps weights whole, or FSDP2Hook(), which differentiates to any order"


class DeepSpeedHook(DataParallelHook):
    """Train on many processes through DeepSpeed's engine (Rajbhandari et al. 2020, arXiv:1910.02054), extra ``deepspeed``.

    Stage 1 divides the optimizer's state between the ranks, stage 2 the gradients too, stage 3 the weights too. The engine owns backward and
    step: it averages gradients over the ranks, adds up micro-batches and clips (``"gradient_clipping"`` of its configuration). Optimizer,
    schedulers, data, counters and validation are the strategy's as ever. Without a process group this hook takes no part at all.

    At stages 1 and 2 each rank has all weights, the network is called as it is, and losses of any order, samplers, averages and
    checkpoints work; a checkpoint resumes on the same number of ranks. At stage 3 the network is the engine's: a call with an input that
    requires a gradient (forces, scores, samplers) is refused, and so are checkpoints and averages of the strategy; the run ends with the
    whole network in host memory.

    Parameters
    ----------
    config
        DeepSpeed's configuration, a dict or a JSON file. ``"auto"`` stands for what the strategy says: batch sizes, accumulation, no clipping;
        sizes of buckets are the engine's own defaults.
    stage
        1, 2 or 3, in place of a configuration.
    sampler_cls, sampler_kwargs
        As in :class:`~nvalchemi.training.hooks.DDPHook`.

    Raises
    ------
    ConfigError
        Without the package; for a configuration that says what the strategy decides; for more than one model that is trained; for
        weights that are not float32, to which the engine would cast them; for hooks that need gradients; and at stage 3 as said above.
    """

    name = "deepspeed"
    claims = frozenset({"data_parallel", "update"})
    scope = Scope.RANK_LOCAL

    def __init__(
        self,
        config: Mapping[str, Any] | str | PathLike[str] | None = None,
        *,
        stage: int | None = None,
        sampler_cls: Callable[..., Any] | None = None,
        sampler_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(None, sampler_cls, sampler_kwargs)
        self.config = read_config(config, stage)
        self.stage: int = self.config["zero_optimization"]["stage"]
        self.engine: Any = None
        self._target: Target | None = None
        self._whole: list[tuple[nn.Module, str, nn.Parameter]] = []

    @around(TrainingSpan.RUN)
    def launched(self, ctx: TrainContext) -> Iterator[None]:
        """Whoever started the processes: the engine asks the environment, now and again."""
        with as_launched(ctx.manager):
            yield

    @on(TrainingStage.SETUP)
    def wrap(self, ctx: TrainContext) -> None:
        """Divide the data, and look at the model."""
        _import()
        names = self.names(ctx)
        if len(names) != 1:
            raise ConfigError("the engine trains one model", found=", ".join(names), fix="FSDP2Hook() trains several")
        self._target = Target(ctx.models, names[0])
        other = {key: p.dtype for key, p in self._target.original.named_parameters() if p.dtype is not torch.float32}
        if other:
            raise ConfigError(
                "weights are not float32, and the engine would cast them",
                found=", ".join(f"{key} ({dtype})" for key, dtype in list(other.items())[:5]),
                fix="model.float(), or another data-parallel hook",
            )
        if self.stage == 3 and ctx.hooks.checkpoint_dir is not None:
            raise ConfigError(
                "at stage 3 no rank has the weights that a checkpoint of the strategy holds", fix=f"write {INSTEAD}"
            )
        if self.stage == 3:
            self.say_if_it_fits(ctx, names)
        self.divide(ctx)
        make_alike(ctx.models, [], ctx.manager)

    @on(TrainingStage.BUILT)
    def start(self, ctx: TrainContext) -> None:
        """Make the engine, and hand it the update."""
        target = self._target
        assert target is not None
        if len(ctx.optimizers) != 1:
            raise ConfigError("the engine has one optimizer", found=", ".join(ctx.optimizers), fix="FSDP2Hook() takes several")
        (optimizer,) = ctx.optimizers.values()
        config = filled(
            self.config,
            batch_size=getattr(ctx.cursor.loader, "batch_size", None) or 1,
            accumulate=ctx.accumulate,
            world_size=ctx.manager.world_size,
        )
        module = target.original if self.stage == 3 else Carrier(target.original)
        training = module.training
        self.engine, *_ = _import().initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
        if self.stage == 3:
            self.engine.register_forward_pre_hook(_refuse_gradients, with_kwargs=True)
            self.engine.train(training)
            target.put(self.engine)
            ctx.calls_communicate = True
        ctx.update = EngineUpdate(self.engine, ctx.optimizers, carries=self.stage != 3)

    @around(TrainingSpan.MICROBATCH)
    def tell(self, ctx: TrainContext) -> Iterator[None]:
        """Say before the forward whether the micro-batch completes the step."""
        self.engine.set_gradient_accumulation_boundary(ctx.is_last_microbatch)
        yield

    @on(TrainingStage.TRAINING_END)
    def gather(self, ctx: TrainContext) -> None:
        """Bring the weights together that stage 3 has divided, in host memory, one at a time."""
        if self.stage != 3:
            return
        assert self._target is not None
        for module in self._target.original.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    with _import().zero.GatheredParameters([parameter]):
                        whole = parameter.detach().cpu().clone()
                    self._whole.append((module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad)))

    def release(self) -> None:
        if self.engine is not None:
            assert self._target is not None
            self._target.restore()
            self.engine.destroy()
            self.engine = None
        for module, name, parameter in self._whole:
            module._parameters[name] = parameter
        self._whole = []

    def state_dict(self) -> dict[str, Any]:
        """Give this rank's part of the optimizer's state and of the weights that the engine steps."""
        if self.engine is None:
            return {}
        if self.stage == 3:
            raise CheckpointError("at stage 3 no rank has the weights", fix=f"write {INSTEAD}")
        optimizer = self.engine.optimizer
        return {
            "stage": self.stage,
            "optimizer": optimizer.optimizer.state_dict(),
            "weights": [part.detach() for part in optimizer.single_partition_of_fp32_groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        optimizer = self.engine.optimizer
        optimizer.optimizer.load_state_dict(state["optimizer"])
        for part, saved in zip(optimizer.single_partition_of_fp32_groups, state["weights"], strict=True):
            part.copy_(saved)

    def divide_anew(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any] | None:
        raise CheckpointError(
            "the engine's state is divided between the ranks that saved it",
            found=f"{world_size} ranks",
            needed=f"{len(states)}",
            fix="resume on as many, or take the weights alone with init_from",
        )


def _import() -> Any:
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError("DeepSpeedHook needs the package deepspeed", fix="pip install 'nvalchemi[deepspeed]'") from error
    return deepspeed


def _refuse_gradients(engine: nn.Module, args: Any, kwargs: Any) -> None:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if kwargs.get("gradient") or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        raise ConfigError(
            "at stage 3 the engine frees weights that a gradient by the network's input still needs",
            found="a loss of forces or scores, or a sampler",
            fix=f"write {INSTEAD}",
        )
