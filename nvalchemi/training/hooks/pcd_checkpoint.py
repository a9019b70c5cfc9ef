"""The persistent chains of every rank, over the ranks and over a change of their number."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from nvalchemi.errors import CheckpointError, ConfigError
from nvalchemi.training.hook import Every, PeriodicHook, Scope, on
from nvalchemi.training.stages import Order, TrainingStage

if TYPE_CHECKING:
    from nvalchemi.objective import Objective
    from nvalchemi.training.context import TrainContext

logger = logging.getLogger("nvalchemi")

OnChange = Literal["redistribute", "reinitialize", "error"]


class PCDCheckpointHook(PeriodicHook):
    """Say what becomes of the chains of persistent contrastive divergence on many ranks.

    Each rank has chains of its own. They are part of the loss's state, and a checkpoint has them whole, in a file a rank; where the run goes
    on with as many ranks each gets its own back, also where its loss has not started any yet. This hook mixes them during the run, and deals
    them out where the number of ranks changes.

    Parameters
    ----------
    mix_every
        After so many steps each time, deal the chains of all ranks out anew, in one collective; drawn by the runs' generators.
        ``None`` never does.
    on_world_size_change
        ``"redistribute"`` deals the chains of all ranks out to those that there are now: none is lost, none is doubled, and the number of
        slots of a rank changes accordingly. ``"reinitialize"`` begins all chains anew, as a new run does, with the loss's ``init_steps``;
        the log says so. ``"error"`` refuses.

    Raises
    ------
    ConfigError
        For settings that are none; at start, for a loss without persistent chains, and without a hook that saves checkpoints.
    CheckpointError
        On another number of ranks with ``"error"``.
    """

    order = Order.OBSERVE  # chains are mixed before a checkpoint of the same step is saved
    scope = Scope.RANK_LOCAL
    claims = frozenset({"chains"})
    agreed = True
    name = "pcd_checkpoint"

    def __init__(self, mix_every: int | None = None, on_world_size_change: OnChange = "redistribute") -> None:
        if on_world_size_change not in get_args(OnChange):
            raise ConfigError(
                "on_world_size_change is wrong",
                found=repr(on_world_size_change),
                needed=" or ".join(map(repr, get_args(OnChange))),
            )
        if mix_every is not None and (type(mix_every) is not int or mix_every < 1):
            raise ConfigError("mix_every is wrong", found=repr(mix_every), needed="a number of steps, or None")
        super().__init__(None if mix_every is None else Every(steps=mix_every))
        self.on_world_size_change = on_world_size_change
        self._objective: Objective | None = None

    @on(TrainingStage.BUILT)
    def look(self, ctx: TrainContext) -> None:
        """Hold the loss whose chains these are."""
        self._objective = ctx.objective

    def act(self, ctx: TrainContext) -> None:
        """Deal the chains out anew."""
        ctx.objective.chains.mix_across_ranks(ctx.manager, ctx.generator)

    def divide_anew(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> Any:
        """The state of the loss of a rank, from those of all ranks of a run on another number of them.

        Parameters
        ----------
        states
            What the loss's ``state_dict`` gave on each rank.
        rank, world_size
            Of this run.

        Returns
        -------
        mapping or None
            The state to load; ``None`` to begin anew.

        Raises
        ------
        CheckpointError
            Where the hook is told to refuse.
        """
        assert self._objective is not None
        if self.on_world_size_change == "error":
            raise CheckpointError(
                "the chains are those of another number of ranks",
                found=f"{world_size} now",
                needed=f"{len(states)}",
                fix='PCDCheckpointHook(on_world_size_change="redistribute") deals them out anew',
            )
        if self.on_world_size_change == "redistribute":
            return self._objective.divide_anew(states, rank, world_size)
        self._objective.chains.clear()
        if rank == 0:
            logger.warning("the chains of %d ranks are left out: those of %d ranks begin anew", len(states), world_size)
        return None
