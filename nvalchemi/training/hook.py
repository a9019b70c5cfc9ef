"""The hook contract: a base class with defaults, and two decorators that say when a method runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from nvalchemi.data.address import Where
from nvalchemi.errors import ConfigError
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage

if TYPE_CHECKING:
    from nvalchemi.distributed import Manager
    from nvalchemi.training.context import TrainContext

F = TypeVar("F", bound=Callable[..., Any])


class Scope(Enum):
    """Whether a hook's state is the same on all ranks (or sharded), or each rank's own."""

    SHARED = "shared"
    RANK_LOCAL = "rank_local"


def on(stage: TrainingStage) -> Callable[[F], F]:
    """Run the decorated method (or bare function) of one argument, the context, at ``stage``.

    Raises
    ------
    ConfigError
        At import, where ``stage`` is not a :class:`TrainingStage`.
    """
    if not isinstance(stage, TrainingStage):
        names = ", ".join(s.name for s in TrainingStage)
        raise ConfigError("on() takes a training stage", found=repr(stage), needed=f"TrainingStage.<one of {names}>")

    def mark(function: F) -> F:
        function.__dict__["_stages"] = (*function.__dict__.get("_stages", ()), stage)
        return function

    return mark


def around(span: TrainingSpan) -> Callable[[F], F]:
    """Run the decorated generator method around ``span``: up to its one ``yield`` on entry, the rest on the way out.

    Raises
    ------
    ConfigError
        At import, where ``span`` is not a :class:`TrainingSpan` or the function is no generator.
    """
    if not isinstance(span, TrainingSpan):
        names = ", ".join(s.name for s in TrainingSpan)
        raise ConfigError("around() takes a training span", found=repr(span), needed=f"TrainingSpan.<one of {names}>")

    def mark(function: F) -> F:
        if not inspect.isgeneratorfunction(function):
            raise ConfigError(
                f"around() needs a generator function, and {function.__qualname__} is none",
                fix="write one `yield` where the span runs, inside try/finally if something must be undone",
            )
        function.__dict__["_spans"] = (*function.__dict__.get("_spans", ()), span)
        return function

    return mark


@dataclass(frozen=True, slots=True)
class Every:
    """A frequency: every so many optimizer steps taken, or every so many epochs. Exactly one of the two is given."""

    steps: int | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.steps, self.epochs) if v is not None]
        if len(given) != 1 or type(given[0]) is not int or given[0] < 1:
            raise ConfigError(
                "Every takes one positive whole number",
                found=f"steps={self.steps!r}, epochs={self.epochs!r}",
                fix="write Every(steps=1000) or Every(epochs=1)",
            )


def snake_case(name: str) -> str:
    """``"EMAHook"`` -> ``"ema"``: the class name in snake case without its suffix ``Hook``."""
    stem = name.removesuffix("Hook") or name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", stem).lower()


class Hook:
    """Base of every hook: the whole contract, with defaults.

    Methods are attached with :func:`on` and :func:`around`; nothing else is looked for.

    Attributes
    ----------
    name
        Unique among the hooks of a run: states are saved under it. The class's in snake case unless given.
    order
        The band in which this hook's methods run.
    claims
        Roles that only one active hook may hold, such as ``"data_parallel"`` or ``"update"``. Of one that holds ``"chains"``,
        :meth:`divide_anew` is given the loss's states.
    scope
        Whether :meth:`state_dict` is the same on all ranks.
    agreed
        Whether this hook skips steps and stops the run, if it does, from numbers that are the same on all ranks, on all of them; most never do
        either. Of one that does not say so, ranks ask each other after each of its stages past the backward: before the update, if it
        listens at GRADIENTS_READY, whether one of them skips it, and before the next step whether one of them is to stop.
    needs_gradients
        Whether this hook reads or changes gradients, which not every owner of the update gives.
    checkpoint_dir
        Where this hook writes checkpoints, for ``resume_from="latest"``; ``None`` for all others.
    meta_init
        ``meta_init(module)`` gives a module of a model built on the meta device its first weights, also in one process, where the hook takes
        no part; ``None`` for all others.
    """

    order: ClassVar[Order] = Order.OBSERVE
    claims: frozenset[str] = frozenset()
    scope: ClassVar[Scope] = Scope.SHARED
    agreed: ClassVar[bool] = False
    needs_gradients: ClassVar[bool] = False
    checkpoint_dir: Where | None = None
    meta_init: Callable[[Any], None] | None = None
    name: str = "hook"
    _stage_methods: ClassVar[tuple[tuple[TrainingStage, str], ...]] = ()
    _span_methods: ClassVar[tuple[tuple[TrainingSpan, str], ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = snake_case(cls.__name__)
        stages: dict[str, tuple[TrainingStage, ...]] = {}
        spans: dict[str, tuple[TrainingSpan, ...]] = {}
        # Base classes first; a method overridden without the decorator keeps its base's stages.
        for klass in reversed(cls.__mro__):
            for attribute, value in vars(klass).items():
                if inspect.isfunction(value):
                    if "_stages" in value.__dict__:
                        stages[attribute] = value.__dict__["_stages"]
                    if "_spans" in value.__dict__:
                        spans[attribute] = value.__dict__["_spans"]
        cls._stage_methods = tuple((stage, name) for name, marks in stages.items() for stage in marks)
        cls._span_methods = tuple((span, name) for name, marks in spans.items() for span in marks)

    def is_active(self, manager: Manager) -> bool:
        """Whether this hook takes part in a run under ``manager``; an inactive hook is not in the table at all."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """What training changed: plain data and tensors. Settings belong to the code and stay out."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""

    def divide_anew(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any] | None:
        """The state of this rank, of a hook of scope RANK_LOCAL, in a run that goes on with another number of ranks.

        By default a rank that was there before keeps its own, and one that is new begins afresh.

        Parameters
        ----------
        states
            What :meth:`state_dict` gave on each rank of the run that was saved, in order.
        rank, world_size
            Of this run.

        Returns
        -------
        dict or None
            The state to load, or ``None`` to begin afresh.
        """
        return states[rank] if rank < len(states) else None

    def stage_listeners(self) -> Iterator[tuple[TrainingStage, Callable[[TrainContext], None]]]:
        """Each stage with the bound method that listens to it."""
        for stage, name in self._stage_methods:
            yield stage, getattr(self, name)

    def span_listeners(self) -> Iterator[tuple[TrainingSpan, Callable[[TrainContext], Any]]]:
        """Each span with the bound generator method around it."""
        for span, name in self._span_methods:
            yield span, getattr(self, name)

    def places(self) -> set[TrainingStage | TrainingSpan]:
        """The stages and spans that it listens to."""
        return {stage for stage, _ in self.stage_listeners()} | {span for span, _ in self.span_listeners()}


class FunctionHook(Hook):
    """A bare function decorated with :func:`on` or :func:`around`, as a hook."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        marks = function.__dict__
        if "_stages" not in marks and "_spans" not in marks:
            raise ConfigError(
                f"the function {function.__qualname__} in the hook list says no stage",
                fix="decorate it with @on(TrainingStage.<...>) or @around(TrainingSpan.<...>)",
            )

    def stage_listeners(self) -> Iterator[tuple[TrainingStage, Callable[[TrainContext], None]]]:
        for stage in self.function.__dict__.get("_stages", ()):
            yield stage, self.function

    def span_listeners(self) -> Iterator[tuple[TrainingSpan, Callable[[TrainContext], Any]]]:
        for span in self.function.__dict__.get("_spans", ()):
            yield span, self.function


class PeriodicHook(Hook):
    """A hook that acts every so many steps or epochs: the only place where the modulus is taken.

    Subclasses write :meth:`act`. It runs at STEP_END or EPOCH_END, never on a skipped step; without a frequency it never runs.
    """

    def __init__(self, every: Every | None) -> None:
        if not isinstance(every, Every | None):
            raise ConfigError(
                f"{type(self).__name__} takes a frequency", found=repr(every), needed="Every(steps=...) or Every(epochs=...)"
            )
        self.every = every

    def act(self, ctx: TrainContext) -> None:
        """What is done each time."""
        raise NotImplementedError(f"{type(self).__name__} must define act(ctx)")

    @on(TrainingStage.STEP_END)
    def _after_step(self, ctx: TrainContext) -> None:
        if (
            self.every is not None
            and self.every.steps is not None
            and ctx.step_taken
            and ctx.progress.step % self.every.steps == 0
        ):
            self.act(ctx)

    @on(TrainingStage.EPOCH_END)
    def _after_epoch(self, ctx: TrainContext) -> None:
        if self.every is not None and self.every.epochs is not None and ctx.progress.epoch % self.every.epochs == 0:
            self.act(ctx)
