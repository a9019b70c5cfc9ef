"""The loop, drawn: moments (stages), intervals (spans), and the bands in which hooks run.

::

    RUN ┌ SETUP                     wrap models, shard the loader      (then the optimizers are built)
        │ BUILT                     replace the update, clone weights  (then every cross-check, then resume)
        │ TRAINING_START
        │ for each epoch:
        │   EPOCH_START             not on a resume within the epoch
        │   for each optimizer step:
        │     STEP_START
        │     for each micro-batch:
        │       MICROBATCH ┌ FORWARD [ forward and loss ]
        │                  │ LOSS_READY
        │                  └ backward
        │     GRADIENTS_READY       unscaled gradients of the whole step
        │     OPTIMIZER_STEPPED     or OPTIMIZER_SKIPPED
        │     STEP_END              every n steps: VALIDATION [ one pass ], then VALIDATED
        │   EPOCH_END               every n epochs: VALIDATION [ one pass ], then VALIDATED
        └ TRAINING_END
"""

from __future__ import annotations

from enum import Enum, IntEnum


class TrainingStage(Enum):
    """A moment of the loop. It fires on every rank or on none."""

    SETUP = "setup"
    BUILT = "built"
    TRAINING_START = "training_start"
    EPOCH_START = "epoch_start"
    STEP_START = "step_start"
    LOSS_READY = "loss_ready"
    GRADIENTS_READY = "gradients_ready"
    OPTIMIZER_STEPPED = "optimizer_stepped"
    OPTIMIZER_SKIPPED = "optimizer_skipped"
    STEP_END = "step_end"
    EPOCH_END = "epoch_end"
    VALIDATED = "validated"
    TRAINING_END = "training_end"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call on the hot path


class TrainingSpan(Enum):
    """An interval of the loop: entered in hook order, left in reverse, also on an error."""

    RUN = "run"
    MICROBATCH = "microbatch"
    FORWARD = "forward"
    VALIDATION = "validation"

    __hash__ = object.__hash__


AFTER_LOSS = frozenset(
    {
        TrainingStage.GRADIENTS_READY,
        TrainingStage.OPTIMIZER_STEPPED,
        TrainingStage.OPTIMIZER_SKIPPED,
        TrainingStage.STEP_END,
        TrainingStage.VALIDATED,
        TrainingSpan.MICROBATCH,
        TrainingSpan.VALIDATION,
    }
)
"""What runs within a step after the ranks have begun to tell each other its loss."""


class Order(IntEnum):
    """The band in which a hook runs; within a band, the order of the user's list.

    Wrapping comes before anything that computes, guards see raw gradients before they are transformed, observers see
    what the transforms left, and whatever saves sees all.
    """

    WRAP = 0
    COMPUTE = 1
    GUARD = 2
    TRANSFORM = 3
    OBSERVE = 4
    SAVE = 5
