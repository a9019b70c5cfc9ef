"""Show how a run is getting on: a live line on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from nvalchemi.distributed import Manager
from nvalchemi.errors import ConfigError
from nvalchemi.training.hook import Hook, around, on
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext

MEMORY = 30.0  # seconds of the past that the rate is taken over


class ProgressHook(Hook):
    """Show step, epoch, rate, time left, loss, learning rate and the last validation, on stderr.

    On a terminal a live display is redrawn a few times a second; elsewhere a plain line is printed now and then. The loss is fetched
    from the device only when something is shown, never once a step. Only rank 0 shows anything. What is left is known where the run
    ends by steps, by epochs, or by a time budget (``ctx.metrics["budget_used"]``).

    Parameters
    ----------
    refresh
        Seconds between two redraws on a terminal.
    interval
        Seconds between two plain lines; 0, here and above, shows every step.
    stream
        Where to write; stderr by default.

    Raises
    ------
    ConfigError
        For negative intervals.
    """

    order = Order.OBSERVE
    agreed = True

    def __init__(self, *, refresh: float = 0.25, interval: float = 10.0, stream: IO[str] | None = None) -> None:
        if not (refresh >= 0 and interval >= 0):
            raise ConfigError(
                "progress cannot be shown like this",
                found=f"refresh={refresh!r}, interval={interval!r}",
                needed="seconds, 0 for every step",
            )
        self.refresh, self.interval, self.stream = refresh, interval, stream
        self._display: Display | None = None
        self._pace = Pace()
        self._next = math.inf

    def is_active(self, manager: Manager) -> bool:
        return manager.rank == 0

    @around(TrainingSpan.RUN)
    def display(self, ctx: TrainContext) -> Iterator[None]:
        """Whatever happens, the terminal is left in order."""
        try:
            yield
        finally:
            if self._display is not None:
                self._display.close()
                self._display = None

    @on(TrainingStage.TRAINING_START)
    def start(self, ctx: TrainContext) -> None:
        """Open the display where the run stands."""
        if self._display is not None:
            return
        stream = sys.stderr if self.stream is None else self.stream
        self._display = Live(stream) if stream.isatty() else Lines(stream)
        self._pace = Pace()
        self._pace.look(ctx)
        # The first line comes early: a start that looks dead is the worst kind.
        self._next = time.monotonic() + min(self._display.period(self), 1.0)

    @on(TrainingStage.STEP_END)
    def step(self, ctx: TrainContext) -> None:
        """Show, if it is time."""
        if time.monotonic() >= self._next:
            self._show(ctx)

    @around(TrainingSpan.VALIDATION)
    def validating(self, ctx: TrainContext) -> Iterator[None]:
        """Say that a validation runs; its time does not slow the rate."""
        before = time.monotonic()
        self.start(ctx)  # a validation before the first step comes before this hook's turn
        if self._display is not None:
            self._display.note("validating")
        yield
        self._pace.pause(time.monotonic() - before)

    @on(TrainingStage.VALIDATED)
    def validated(self, ctx: TrainContext) -> None:
        """Show the result at once."""
        if self._display is not None:
            self._display.result(f"validation at step {ctx.progress.step}: {numbers(ctx.validation or {})}")

    @on(TrainingStage.TRAINING_END)
    def end(self, ctx: TrainContext) -> None:
        """Show the last state, and why the run ended early if it did."""
        self._show(ctx)
        if self._display is not None and ctx.stop_reason is not None:
            self._display.result(f"stopped: {ctx.stop_reason}")
        self._next = math.inf

    def _show(self, ctx: TrainContext) -> None:
        if self._display is None:
            return
        self._pace.look(ctx)
        self._display.show(status(ctx, self._pace), self._pace.fraction)
        self._next = time.monotonic() + self._display.period(self)


@dataclass(slots=True)
class _Look:
    """Where a run was: ``worked`` leaves out the time of validations, ``fraction`` is by steps or epochs, ``budget`` by the clock."""

    time: float
    worked: float
    step: int
    samples: int
    fraction: float | None
    budget: float | None


class Pace:
    """How fast a run goes and how far it is, from looks at it that are some time apart."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._paused = 0.0
        self._looks: deque[_Look] = deque()

    def pause(self, seconds: float) -> None:
        """So long nothing was trained."""
        self._paused += seconds

    def look(self, ctx: TrainContext) -> None:
        """Note where the run is now."""
        now, budget = time.monotonic(), ctx.metrics.get("budget_used")
        worked = now - self._paused
        known = None if budget is None else float(budget)
        self._looks.append(_Look(now, worked, ctx.progress.step, ctx.progress.samples, ctx.fraction_done, known))
        while len(self._looks) > 2 and worked - self._looks[0].worked > MEMORY:
            self._looks.popleft()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def rates(self) -> tuple[float, float] | None:
        """Steps and samples a second, or ``None`` before there are two looks."""
        first, last = self._ends()
        seconds = last.worked - first.worked
        return ((last.step - first.step) / seconds, (last.samples - first.samples) / seconds) if seconds > 0 else None

    @property
    def fraction(self) -> float | None:
        """How much of the run is done, earlier sittings included, from 0 to 1, or ``None`` where its end is not known."""
        last = self._ends()[1]
        return max((part for part in (last.fraction, last.budget) if part is not None), default=None)

    @property
    def left(self) -> float | None:
        """Seconds to go, or ``None`` where that is not known."""
        first, last = self._ends()
        ends = [
            _rest(first.fraction, last.fraction, last.worked - first.worked),
            _rest(first.budget, last.budget, last.time - first.time),
        ]
        return min((end for end in ends if end is not None), default=None)

    def _ends(self) -> tuple[_Look, _Look]:
        return self._looks[0], self._looks[-1]


def _rest(before: float | None, after: float | None, seconds: float) -> float | None:
    """Seconds to go of something that went from one share to another in ``seconds``."""
    if before is None or after is None or not after > before:
        return None
    return (1.0 - after) * seconds / (after - before)


def status(ctx: TrainContext, pace: Pace) -> str:
    """One line of where the run stands; this is where the loss is fetched."""
    p = ctx.progress
    parts = [f"step {p.step}" + (f"/{ctx.num_steps}" if ctx.num_steps else "")]
    parts.append(f"epoch {p.epoch}" + (f"/{ctx.num_epochs}" if ctx.num_epochs else ""))
    if pace.rates is not None:
        steps, samples = pace.rates
        parts.append(f"{steps:.3g} steps/s, {samples:.4g} structures/s")
    if ctx.loss is not None:
        parts.append(f"loss {float(ctx.loss.total):.4g}")
    if ctx.learning_rates:
        parts.append(f"lr {next(iter(ctx.learning_rates.values())):.3g}")
    if p.skipped:
        parts.append(f"{p.skipped} skipped")
    left = pace.left
    parts.append(f"{clock(pace.elapsed)} gone" + (f", {clock(left)} left" if left is not None else ""))
    return " | ".join(parts)


def numbers(metrics: dict[str, float]) -> str:
    """``"loss 0.0123, forces_mae 0.0456"``: counts are left out."""
    shown = [f"{name} {value:.4g}" for name, value in metrics.items() if name != "n" and not name.startswith("n_")]
    return ", ".join(shown) or "no metrics"


def clock(seconds: float) -> str:
    """``"1:02:03"`` or ``"2:03"``."""
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


class Display(ABC):
    """Where the lines go."""

    @abstractmethod
    def period(self, hook: ProgressHook) -> float:
        """Seconds between two lines."""

    @abstractmethod
    def show(self, line: str, fraction: float | None) -> None:
        """The present status."""

    def note(self, line: str) -> None:  # noqa: B027 - a default, not a gap
        """Something that is going on; of no interest afterwards."""

    @abstractmethod
    def result(self, line: str) -> None:
        """Something that stays."""

    def close(self) -> None:  # noqa: B027 - likewise
        """The run is over."""


class Lines(Display):
    """Plain lines, for files and pipes."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def period(self, hook: ProgressHook) -> float:
        return hook.interval

    def show(self, line: str, fraction: float | None) -> None:
        self.result(line if fraction is None else f"{100 * fraction:3.0f}% | {line}")

    def result(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class Live(Display):
    """A live display on a terminal: a bar and the status, results above it."""

    def __init__(self, stream: IO[str]) -> None:
        import rich.console
        import rich.live

        self._console = rich.console.Console(file=stream)
        # Redrawn by the loop itself: a thread of its own would take time from the training. What others print appears above it.
        self._live = rich.live.Live(
            console=self._console,
            auto_refresh=False,
            redirect_stderr=stream is sys.stderr,
            redirect_stdout=stream is sys.stderr and sys.stdout.isatty(),
        )
        self._live.start()
        self._last: tuple[str, float | None] = ("", None)

    def period(self, hook: ProgressHook) -> float:
        return hook.refresh

    def show(self, line: str, fraction: float | None) -> None:
        self._last = (line, fraction)
        self._draw(line)

    def note(self, line: str) -> None:
        self._draw(f"{self._last[0]} | {line}" if self._last[0] else line)

    def result(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _draw(self, line: str) -> None:
        import rich.console
        import rich.progress_bar
        import rich.text

        fraction = self._last[1]
        bar = rich.progress_bar.ProgressBar(total=1.0, completed=0.0 if fraction is None else fraction, pulse=fraction is None)
        self._live.update(rich.console.Group(rich.text.Text(line), bar), refresh=True)
