"""Skip the steps whose loss or gradients are not finite, or whose loss jumps."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nvalchemi.distributed import Manager
from nvalchemi.distributed.collectives import any_rank
from nvalchemi.distributed.tensors import norms
from nvalchemi.errors import ConfigError, TrainingError
from nvalchemi.training.hook import Hook, on
from nvalchemi.training.stages import Order, TrainingStage
from nvalchemi.training.structures import name_structures_of_ranks

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext

logger = logging.getLogger("nvalchemi")


class SpikeHook(Hook):
    """A guard: steps with a non-finite loss or gradient, or with a loss far above the recent ones, are not taken.

    A loss is far above when it exceeds ``median + (factor - 1) * max(|median|, spread)`` of the last ``window`` accepted losses,
    their spread being the distance between the quartiles. For the usual positive losses that is ``factor`` times the median; the
    spread makes it hold for losses around zero too, as energy-based training has them. The structures of the batch are
    named by data set and index, in the log and in the reason of the skip. The decision needs the loss on the host: one number is
    fetched a step.

    Parameters
    ----------
    factor
        How many times the median is a spike; ``None`` looks at non-finite values only.
    window
        How many accepted losses the median is taken of; nothing is a spike before there are ``window // 4`` (at least 5).
    max_consecutive
        So many skips in a row by this hook are too many: the run ends. The strategy's ``max_consecutive_skips`` counts those for any
        reason, an overflow under loss scaling among them, which is why it is the larger.

    Raises
    ------
    ConfigError
        For settings that cannot work.
    TrainingError
        During the run, at more than ``max_consecutive`` skips in a row.
    """

    order = Order.GUARD
    needs_gradients = True
    agreed = True

    def __init__(self, factor: float | None = 10.0, window: int = 100, max_consecutive: int = 10) -> None:
        if (factor is not None and not factor > 1) or window < 5 or max_consecutive < 1:
            raise ConfigError(
                "the spike guard cannot work like this",
                found=f"factor={factor!r}, window={window!r}, max_consecutive={max_consecutive!r}",
                needed="factor > 1 or None, window >= 5, max_consecutive >= 1",
            )
        self.factor, self.window, self.max_consecutive = factor, window, max_consecutive
        self._enough = max(5, window // 4)
        self._reset()

    def _reset(self) -> None:
        self.consecutive = 0
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._losses: list[Tensor] = []

    @on(TrainingStage.BUILT)
    def start(self, ctx: TrainContext) -> None:
        """A new run has no past losses."""
        self._reset()

    @on(TrainingStage.LOSS_READY)
    def keep(self, ctx: TrainContext) -> None:
        """Remember each micro-batch's own loss, to say later which one it was."""
        if ctx.counts is not None:
            assert ctx.loss is not None
            self._losses.append(ctx.loss.total.detach())

    @on(TrainingStage.GRADIENTS_READY)
    def judge(self, ctx: TrainContext) -> None:
        """Accept or skip the step."""
        losses, self._losses = self._losses, []
        if ctx.skip_reason is not None:  # an overflow under loss scaling says nothing about the data
            return
        loss, finite = self._measure(ctx)
        if not math.isfinite(loss):
            reason = f"the loss is {loss}"
        elif not finite:
            reason = f"a gradient is not finite, and the loss is {loss:.6g}"
        elif self._is_spike(loss):
            reason = f"the loss {loss:.6g} is far above its recent median {self._median():.6g}"
        else:
            self.consecutive = 0
            self._accept(loss)
            return
        self._skip(ctx, reason, losses)

    def _measure(self, ctx: TrainContext) -> tuple[float, bool]:
        """The step's loss and whether its gradients are finite, both those of all ranks together: one transfer."""
        assert ctx.loss is not None
        gradients = ctx.update.gradients()
        numbers = [ctx.loss.total, *(norms(gradients) if gradients else ())]
        loss, *found = torch.stack(numbers).tolist()
        return loss, math.isfinite(sum(found))

    def _skip(self, ctx: TrainContext, reason: str, losses: list[Tensor]) -> None:
        self.consecutive += 1
        batches = offending(ctx.group, losses, ctx.manager)
        names = name_structures_of_ranks(batches, ctx.manager)
        logger.warning("step after %d skipped: %s; structures of the batch: %s", ctx.progress.step, reason, names)
        short = name_structures_of_ranks(batches, ctx.manager, limit=8)
        if self.consecutive > self.max_consecutive:
            raise TrainingError(
                f"{self.consecutive} steps in a row would have been skipped",
                found=f"{reason}; structures of the last batch: {short}",
                needed=f"at most {self.max_consecutive} in a row (SpikeHook's max_consecutive)",
                fix="look at those structures' labels and geometry, or lower the learning rate",
            )
        ctx.skip_step(f"{reason}; structures: {short}", agreed=True)

    def _is_spike(self, loss: float) -> bool:
        if self.factor is None or len(self._sorted) < self._enough:
            return False
        ordered = self._sorted
        count = len(ordered)
        spread = ordered[(3 * count) // 4] - ordered[count // 4]
        median = self._median()
        return loss > median + (self.factor - 1.0) * max(abs(median), spread)

    def _median(self) -> float:
        return self._sorted[len(self._sorted) // 2]

    def _accept(self, loss: float) -> None:
        if self.factor is None:
            return
        if len(self._recent) == self.window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(loss)
        insort(self._sorted, loss)

    def state_dict(self) -> dict[str, Any]:
        return {"recent": torch.tensor(list(self._recent), dtype=torch.float64), "consecutive": self.consecutive}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reset()
        self.consecutive = int(state["consecutive"])
        for loss in torch.as_tensor(state["recent"]).tolist()[-self.window :]:
            self._recent.append(loss)
            insort(self._sorted, loss)


def offending(group: list[Any], losses: list[Tensor], manager: Manager) -> list[Any]:
    """The micro-batches with a non-finite loss of their own; all of the step's where none has on any rank."""
    if len(losses) != len(group):
        return group
    bad = [batch for batch, loss in zip(group, losses, strict=True) if not bool(loss.isfinite())]
    return bad if any_rank(bool(bad), manager) else group
