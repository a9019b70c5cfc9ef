"""What the ranks do in test_together.py."""

from __future__ import annotations

import signal
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from nvalchemi.data import datapipes as ours
from nvalchemi.data.datapipes import InMemoryDataset
from nvalchemi.distributed import failures
from nvalchemi.distributed.collectives import Reduction
from nvalchemi.errors import ConfigError
from nvalchemi.training import Hook, OptimizerConfig, TrainingSpan, TrainingStage, TrainingStrategy, ValidationConfig, around, on
from nvalchemi.training.hooks import (
    DDPHook,
    EarlyStopHook,
    GradientClipHook,
    MetricsHook,
    SpikeHook,
    StopOnSignalHook,
    TimeBudgetHook,
)
from nvalchemi.training.schedules import Shape
from tests.multiprocess.ddp_cases import Aware, Stored, own


def line() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(2, 1).double()


def batches(count: int, rank: int, size: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, 3, generator=generator, dtype=torch.float64) for _ in range(count)]


def predict(model, batch):
    return model(batch[:, :2]).squeeze(1)


def squared(prediction, batch):
    return (prediction - batch[:, 2]).square().mean()


class Record(Hook):
    agreed = True

    def __init__(self) -> None:
        self.steps, self.skips, self.losses = 0, [], []

    @on(TrainingStage.STEP_END)
    def end(self, ctx) -> None:
        self.steps += 1
        self.skips.append(ctx.skip_reason)
        self.losses.append(float(ctx.loss.total))


def run(manager, data, *hooks, model=None, **settings):
    """Run; what happened as plain data."""
    record = Record()
    model = line() if model is None else model
    declared: dict[str, Any] = {
        "num_epochs": 1,
        "training_fn": predict,
        "loss_fn": squared,
        "optimizer_configs": OptimizerConfig(torch.optim.SGD, {"lr": 0.01}),
        **settings,
    }
    strategy = TrainingStrategy(
        models=model,
        distributed_manager=manager,
        hooks=[record, *hooks, DDPHook()],
        **declared,
    )
    error, ctx = None, None
    try:
        ctx = strategy.run(data if isinstance(data, DataLoader | ours.DataLoader) else own(data, manager))
    except Exception as raised:  # noqa: BLE001 - compared by the test
        error = f"{type(raised).__name__}: {raised}"
    return {
        "steps": record.steps,
        "skips": record.skips,
        "losses": record.losses,
        "error": error,
        "stop": None if ctx is None else ctx.stop_reason,
        "interrupted": ctx is not None and ctx.interrupted,
        "epoch": None if ctx is None else ctx.progress.epoch,
        "weights": [p.detach() for p in model.parameters()],
        "plain": not any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()),
        "validation": None if ctx is None else ctx.validation,
    }


def unknown(manager):
    """The strategy is not told of the ranks that there are."""
    try:
        TrainingStrategy(
            models=line(),
            optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 0.01}),
            training_fn=predict,
            loss_fn=squared,
            num_epochs=1,
            hooks=[DDPHook()],
        ).run(batches(1, manager.rank))
    except ConfigError as error:
        return str(error)
    return None


def unlike(manager, what):
    """One rank declares something else."""
    data = InMemoryDataset(torch.zeros(20 + (what == "samples") * manager.rank, 3, dtype=torch.float64))
    loader = ours.DataLoader(data, batch_size=3, shuffle=True, seed=manager.rank if what == "seed" else 0)
    settings = {what: 1 + manager.rank} if what in ("num_steps", "num_epochs", "accumulate") else {}
    return run(manager, loader, **settings)["error"]


def held(manager):
    """Whether what went round is still there when nobody here wants it any more."""
    work = Reduction(torch.ones(3), manager)
    tensor = weakref.ref(work.result())
    del work
    return tensor() is not None


def exhausted(manager):
    """7 batches on one rank, 5 on the other, then a run more, to see that the group still works."""
    first = run(manager, batches(7 - 2 * manager.rank, manager.rank), num_epochs=2)
    return first, run(manager, batches(2, manager.rank))


def spoilt(manager, guard):
    """One rank's third batch has a label that is not finite."""
    data = batches(6, manager.rank)
    if manager.rank == 1:
        data[2][0, 2] = float("nan")
    return run(manager, data, *([SpikeHook()] if guard else []))


class StopOnOne(Hook):
    @on(TrainingStage.STEP_END)
    def end(self, ctx) -> None:
        if ctx.manager.rank == 1 and ctx.progress.step == 3:
            ctx.stop("rank 1 has seen enough")


class SkipOnOne(Hook):
    """Rank 1 alone wants its third step skipped."""

    agreed = False

    @on(TrainingStage.LOSS_READY)
    def early(self, ctx) -> None:
        if self.stage is TrainingStage.LOSS_READY:
            self.decide(ctx)

    @on(TrainingStage.GRADIENTS_READY)
    def late(self, ctx) -> None:
        if self.stage is TrainingStage.GRADIENTS_READY:
            self.decide(ctx)

    @around(TrainingSpan.MICROBATCH)
    def later(self, ctx):
        """When the backward is over, and the loss told."""
        yield
        if self.stage is TrainingSpan.MICROBATCH:
            self.decide(ctx)

    def __init__(self, stage) -> None:
        self.stage = stage

    def decide(self, ctx) -> None:
        if ctx.manager.rank == 1 and ctx.progress.step == 2 and not ctx.progress.skipped:
            ctx.skip_step("rank 1 does not like it")
            ctx.skip_step("a second reason")


def skipped(manager, stage, spoilt):
    """One rank skips; its batch may also have a label that is not finite, which ends the run of those who do not skip."""
    data = batches(6, manager.rank)
    if spoilt and manager.rank == 1:
        data[2][0, 2] = float("nan")
    return run(manager, data, SkipOnOne(TrainingSpan.MICROBATCH if stage == "MICROBATCH" else TrainingStage[stage]))


class SaysAgreed(SkipOnOne):
    agreed = True


def skipped_alone(manager):
    """A hook that says that it decides as all others do, and does not."""
    return run(manager, batches(6, manager.rank), SaysAgreed(TrainingSpan.MICROBATCH))


class Count(Hook):
    """How many collectives each step has asked for in Python; those of DDP are not among them."""

    agreed = True

    def __init__(self, calls) -> None:
        self.calls, self.per_step = calls, []

    @on(TrainingStage.STEP_END)
    def end(self, ctx) -> None:
        self.per_step.append(len(self.calls))
        self.calls.clear()


class Undeclared(Hook):
    @on(TrainingStage.GRADIENTS_READY)
    def look(self, ctx) -> None: ...


def collectives(manager, *names):
    """Collectives of each step of an epoch, with hooks by name."""
    calls: list[str] = []
    before = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast")}

    def counting(name):
        def call(*args, **kwargs):
            calls.append(name)
            return before[name](*args, **kwargs)

        return call

    known = {"spike": SpikeHook, "clip": lambda: GradientClipHook(1.0), "undeclared": Undeclared, "signals": StopOnSignalHook}
    count = Count(calls)
    try:
        for name in before:
            setattr(dist, name, counting(name))
        run(manager, batches(4, manager.rank), count, *(known[name]() for name in names), accumulate=1)
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
    return count.per_step


def stopped(manager):
    return run(manager, batches(6, manager.rank), StopOnOne(), num_epochs=5)


class StopAtLoss(Hook):
    """Stops at LOSS_READY, which is told with the loss."""

    @on(TrainingStage.LOSS_READY)
    def look(self, ctx) -> None:
        if ctx.manager.rank == 1 and ctx.progress.step == 2:
            ctx.stop("rank 1 has seen enough")


class StopAgreed(Hook):
    agreed = True

    @on(TrainingStage.STEP_END)
    def end(self, ctx) -> None:
        if ctx.progress.step == 3:
            ctx.stop("all have seen enough", agreed=True)


class Counting(Aware):
    """Keeps how many batches were asked for."""

    read = 0

    def __iter__(self):
        for index in range(self.length):
            self.read += 1
            yield index


class Reads(Hook):
    """How many batches had been read when each step began."""

    agreed = True

    def __init__(self, sampler) -> None:
        self.sampler, self.at_start = sampler, []

    @on(TrainingStage.STEP_START)
    def begin(self, ctx) -> None:
        self.at_start.append(self.sampler.read)


def read_ahead(manager, how):
    """What was read when each step of an epoch began, and how the run ended."""
    data = batches(6, manager.rank)
    sampler = Counting(6, manager.rank, manager.world_size)
    loader = DataLoader(
        data if how == "drawing" else Stored(data), batch_size=1, sampler=sampler, collate_fn=lambda items: items[0]
    )
    reads = Reads(sampler)
    hooks = {"loss": [StopAtLoss()], "agreed": [StopAgreed()], "late": [StopOnOne()]}.get(how, [])
    return run(manager, loader, reads, *hooks) | {"read": reads.at_start}


class SignalOnOne(Hook):
    @on(TrainingStage.STEP_START)
    def start(self, ctx) -> None:
        if ctx.manager.rank == 1 and ctx.progress.step == 2:
            signal.raise_signal(signal.SIGTERM)


def signalled(manager):
    return run(manager, batches(6, manager.rank), StopOnSignalHook(), SignalOnOne(), num_epochs=5)


def early(manager):
    """A validation that never gets better: shares of unlike sizes, so that a local decision would differ."""
    frozen = batches(3, 9)
    config = ValidationConfig(validation_data=frozen, every_n_steps=1)
    return run(
        manager, batches(6, manager.rank), EarlyStopHook(patience=2, min_delta=1e9), validation_config=config, num_epochs=5
    )


class Unreadable(Stored):
    """Batches of which the fourth cannot be read."""

    def __getitem__(self, number):
        if number == 3:
            raise OSError("the disk is gone")
        return super().__getitem__(number)


def unreadable(manager):
    data = batches(6, manager.rank)
    return run(manager, Unreadable(data) if manager.rank == 1 else data), run(manager, batches(2, manager.rank))


class Broken(Hook):
    """Rank 1 raises at a stage of its third step."""

    def __init__(self, stage, rank) -> None:
        self.stage, self.rank = stage, rank

    def fail(self, ctx, stage) -> None:
        if stage == self.stage and ctx.manager.rank == self.rank and ctx.progress.step >= 2:
            raise KeyError("a hook that fails")

    @on(TrainingStage.STEP_START)
    def start(self, ctx) -> None:
        self.fail(ctx, "STEP_START")

    @on(TrainingStage.GRADIENTS_READY)
    def gradients(self, ctx) -> None:
        self.fail(ctx, "GRADIENTS_READY")

    @on(TrainingStage.STEP_END)
    def end(self, ctx) -> None:
        self.fail(ctx, "STEP_END")

    @on(TrainingStage.EPOCH_END)
    def epoch(self, ctx) -> None:
        self.fail(ctx, "EPOCH_END")


def broken(manager, stage, rank):
    """An exception on one rank alone: in a hook at a stage, or in the forward."""
    calls, patience = 0, failures.GRACE
    failures.GRACE = 0.3

    def failing(model, batch):
        nonlocal calls
        calls += 1
        if stage == "forward" and manager.rank == rank and calls == 3:
            raise ValueError("a forward that fails")
        return predict(model, batch)

    try:
        return run(manager, batches(4, manager.rank), Broken(stage, rank), training_fn=failing, num_epochs=3)
    finally:
        failures.GRACE = patience


def metrics(manager, folder):
    from nvalchemi.training import Every

    hook = MetricsHook(folder, Every(steps=2))
    return run(manager, batches(4, manager.rank, size=2 + 3 * manager.rank), hook)


def validated(manager, losses, size):
    """Validation over structures whose losses are known, by a loader of this package."""
    from nvalchemi.data.datapipes import DataLoader, InMemoryDataset

    data = InMemoryDataset(torch.tensor(losses, dtype=torch.float64)[:, None])
    config = ValidationConfig(validation_data=DataLoader(data, batch_size=size))
    model = nn.Linear(1, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return run(
        manager,
        [torch.zeros(1, 1, dtype=torch.float64)],
        model=model,
        training_fn=lambda m, x: m(x),
        loss_fn=lambda prediction, x: (prediction + x).mean(),
        validation_config=config,
    )


def resumed(manager, folder):
    """Four steps at once, and two, a checkpoint and two more; noise drawn from the rank's own generator."""
    from nvalchemi.training import Every
    from nvalchemi.training.hooks import CheckpointHook, EMAHook

    class Noise(Hook):
        drawn: list[float]

        def __init__(self):
            self.drawn = []

        @on(TrainingStage.STEP_START)
        def draw(self, ctx):
            self.drawn.append(float(torch.rand((), generator=ctx.generator)))

    def part(steps, where, **settings):
        noise, saver = Noise(), CheckpointHook(f"{folder}/{where}", every=Every(steps=1))
        seen = run(
            manager,
            batches(4, manager.rank, size=2 + manager.rank),
            noise,
            saver,
            EMAHook(0.5),
            num_steps=steps,
            num_epochs=None,
            **settings,
        )
        return seen | {"noise": noise.drawn}

    whole = part(4, "whole")
    part(2, "parts")
    rest = part(4, "parts", resume_from="latest")
    return whole, rest


class Draws(Hook):
    """What each rank draws at each step: from the run's generator (noise, times, starts of chains) and from torch's own stream."""

    def __init__(self) -> None:
        self.own, self.torch = [], []

    @on(TrainingStage.STEP_START)
    def draw(self, ctx) -> None:
        self.own.append(float(torch.randn((), generator=ctx.generator)))
        self.torch.append(float(torch.rand(())))


def random_streams(manager, folder):
    """Ten steps with dropout at once, and five, a kill and the rest; the script has seeded all ranks alike."""
    from nvalchemi.training import Every
    from nvalchemi.training.hooks import CheckpointHook

    def part(where, *hooks, **settings):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        at_start = [p.detach().clone() for p in model.parameters()]
        draws = Draws()
        saver = CheckpointHook(f"{folder}/{where}", every=Every(steps=5))
        seen = run(
            manager, batches(4, manager.rank), draws, saver, *hooks, model=model, num_steps=10, num_epochs=None, **settings
        )
        return seen | {"own": draws.own, "torch": draws.torch, "at_start": at_start}

    class Kill(Hook):
        @on(TrainingStage.STEP_START)
        def die(self, ctx) -> None:
            if ctx.progress.step == 7:
                raise KeyboardInterrupt

    whole, again = part("whole"), part("again")
    try:
        part("broken", Kill())
    except KeyboardInterrupt:
        pass
    return whole, again, part("broken", resume_from="latest")


def unsaveable(manager, folder):
    """One rank cannot write its file."""
    from nvalchemi.training import Every
    from nvalchemi.training.hooks import CheckpointHook

    class Bad(Hook):
        from nvalchemi.training.hook import Scope

        scope = Scope.RANK_LOCAL

        def state_dict(self):
            return {"a lock": object()} if manager.rank == 1 else {"a lock": 1}

    return run(manager, batches(3, manager.rank), Bad(), CheckpointHook(folder, every=Every(steps=2)))


def clocked(manager, accumulate):
    """A budget of time with a shape, where the ranks' clocks differ: the rates of each step, and what each step asks."""
    rates: list[float] = []
    elapsed = TimeBudgetHook.elapsed.fget

    class Budget(TimeBudgetHook):
        name = "budget"

        @property
        def elapsed(self):
            return elapsed(self) * (1.0 + 3.0 * manager.rank)

    @on(TrainingStage.LOSS_READY)
    def note(ctx):
        time.sleep(0.02)
        if ctx.is_last_microbatch:
            rates.append(float(ctx.optimizers["model"].param_groups[0]["lr"]))

    done = run(manager, batches(8, manager.rank), note, Budget(0.8, Shape("linear")), num_epochs=1000, accumulate=accumulate)
    return {**done, "rates": rates}
