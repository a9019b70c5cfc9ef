"""The hook table: the active hooks of a run, filtered and sorted once, fired without looking anything up."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any

from nvalchemi.data.address import Where
from nvalchemi.errors import ConfigError
from nvalchemi.training.hook import FunctionHook, Hook
from nvalchemi.training.stages import AFTER_LOSS, TrainingSpan, TrainingStage

if TYPE_CHECKING:
    from nvalchemi.distributed import Manager
    from nvalchemi.training.context import TrainContext

_NOTHING: AbstractContextManager[None] = nullcontext()  # stateless, so one serves every empty span


class HookTable:
    """Who listens to what, in the order in which it runs.

    Parameters
    ----------
    hooks
        Hooks, or bare functions decorated with ``on`` or ``around``, in the user's order.
    manager
        Decides with each hook's ``is_active`` which of them take part.

    Raises
    ------
    ConfigError
        For something that is no hook, for a name used twice, and for a role claimed twice.
    """

    def __init__(self, hooks: Sequence[Hook | Callable[..., Any]], manager: Manager) -> None:
        instances = [as_hook(h) for h in hooks]
        self.hooks: list[Hook] = sorted((h for h in instances if h.is_active(manager)), key=lambda h: h.order)
        check_names_and_claims(self.hooks)
        self._listeners: dict[TrainingStage, tuple[tuple[Hook, Callable[[TrainContext], None]], ...]] = {
            stage: tuple((h, method) for h in self.hooks for s, method in h.stage_listeners() if s is stage)
            for stage in TrainingStage
        }
        self._spans: dict[TrainingSpan, tuple[tuple[Hook, Callable[[TrainContext], Any]], ...]] = {
            span: tuple((h, method) for h in self.hooks for s, method in h.span_listeners() if s is span) for span in TrainingSpan
        }

    def __iter__(self) -> Iterator[Hook]:
        return iter(self.hooks)

    def __len__(self) -> int:
        return len(self.hooks)

    @property
    def checkpoint_dir(self) -> Where | None:
        """Where the run's checkpoints are written, or ``None`` where no hook writes any."""
        return next((h.checkpoint_dir for h in self.hooks if h.checkpoint_dir is not None), None)

    @property
    def stops_late(self) -> bool:
        """Whether some hook may say, by itself on this rank, that the run is to end, when the loss of the step is told already."""
        return any(not hook.agreed and AFTER_LOSS & hook.places() for hook in self.hooks)

    @property
    def skips_late(self) -> bool:
        """Whether some hook may say so of the step's update."""
        late = {TrainingSpan.MICROBATCH, TrainingStage.GRADIENTS_READY}
        return any(not hook.agreed and late & hook.places() for hook in self.hooks)

    def fire(self, stage: TrainingStage, ctx: TrainContext) -> None:
        """Run every listener of ``stage``; an error gets a note (hook, stage, step) and passes through unchanged."""
        for hook, listener in self._listeners[stage]:
            try:
                listener(ctx)
            except BaseException as error:
                _note(error, hook, stage.name, ctx)
                raise

    def around(self, span: TrainingSpan, ctx: TrainContext) -> AbstractContextManager[Any]:
        """A context that enters every listener of ``span`` in order and leaves them in reverse."""
        listeners = self._spans[span]
        return _Span(span, listeners, ctx) if listeners else _NOTHING


class _Span:
    """The generators around a span: entered in order, left in reverse. On the hot path, so it is no ``ExitStack``."""

    __slots__ = ("_ctx", "_entered", "_listeners", "_span")

    def __init__(self, span: TrainingSpan, listeners: tuple[Any, ...], ctx: TrainContext) -> None:
        self._span, self._listeners, self._ctx = span, listeners, ctx
        self._entered: list[tuple[Hook, Generator[Any, None, None]]] = []

    def __enter__(self) -> None:
        for hook, method in self._listeners:
            generator = method(self._ctx)
            try:
                next(generator)
            except BaseException as error:
                # Those already entered are left again, and told of the error.
                self._leave(self._blame(error, hook))
                raise
            self._entered.append((hook, generator))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        left = self._leave(error)
        if left is not None and left is not error:
            raise left

    def _leave(self, error: BaseException | None) -> BaseException | None:
        """Leave every generator; the error that comes out: the given one, or what a hook raised in its place. None is swallowed."""
        for hook, generator in reversed(self._entered):
            trace = None if error is None else error.__traceback__
            try:
                if error is None:
                    next(generator)
                else:
                    generator.throw(error)
                raise RuntimeError("a method under @around yields more than once")
            except StopIteration as stop:
                if stop is error:  # thrown in and not caught there
                    error.__traceback__ = trace
            except BaseException as own:  # noqa: BLE001 - it is handed on, not swallowed
                # a generator turns a StopIteration thrown into it into a RuntimeError
                if own is error or (isinstance(error, StopIteration) and own.__cause__ is error):
                    error.__traceback__ = trace  # passed through; each frame on the way would add a line
                else:
                    error = self._blame(own, hook)
        return error

    def _blame(self, error: BaseException, hook: Hook) -> BaseException:
        _note(error, hook, self._span.name, self._ctx)
        return error


def _note(error: BaseException, hook: Hook, where: str, ctx: TrainContext) -> None:
    error.add_note(f"raised in hook '{hook.name}' ({type(hook).__name__}) at {where}, step {ctx.progress.step}")


def as_hook(candidate: Hook | Callable[..., Any]) -> Hook:
    """A hook stays as it is; a decorated bare function becomes one; anything else is an error."""
    if isinstance(candidate, Hook):
        return candidate
    if isinstance(candidate, FunctionType):
        return FunctionHook(candidate)
    fix = (
        f"write {candidate.__name__}(...), with brackets"
        if isinstance(candidate, type)
        else "derive it from nvalchemi.training.Hook"
    )
    raise ConfigError("the hook list holds something that is no hook", found=repr(candidate), fix=fix)


def check_names_and_claims(hooks: Sequence[Hook]) -> None:
    """Names are unique, and every role has one holder at most."""
    names: dict[str, Hook] = {}
    holders: dict[str, Hook] = {}
    for hook in hooks:
        if hook.name in names:
            raise ConfigError(
                f"two hooks are named '{hook.name}'",
                found=f"{type(names[hook.name]).__name__} and {type(hook).__name__}",
                fix="give one of them another name (name=... or hook.name = ...): states are saved by name",
            )
        names[hook.name] = hook
        for claim in hook.claims:
            if claim in holders:
                raise ConfigError(
                    f"two hooks claim '{claim}'",
                    found=f"{type(holders[claim]).__name__} and {type(hook).__name__}",
                    needed="one of them",
                    fix="remove one from the hook list",
                )
            holders[claim] = hook
