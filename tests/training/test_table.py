from types import SimpleNamespace

import pytest

from nvalchemi.errors import ConfigError
from nvalchemi.training.hook import Hook, around, on
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage
from nvalchemi.training.table import HookTable

MANAGER = SimpleNamespace(world_size=1)


def context():
    return SimpleNamespace(seen=[], progress=SimpleNamespace(step=7))


def recorder(name, order, span=TrainingSpan.FORWARD):
    class Recorder(Hook):
        @on(TrainingStage.STEP_END)
        def at_end(self, ctx):
            ctx.seen.append(self.name)

        @around(span)
        def inside(self, ctx):
            ctx.seen.append(f"+{self.name}")
            try:
                yield
            finally:
                ctx.seen.append(f"-{self.name}")

    Recorder.order = order
    hook = Recorder()
    hook.name = name
    return hook


def test_bands_come_before_list_order():
    hooks = [
        recorder("save", Order.SAVE),
        recorder("a", Order.OBSERVE),
        recorder("wrap", Order.WRAP),
        recorder("b", Order.OBSERVE),
    ]
    ctx = context()
    HookTable(hooks, MANAGER).fire(TrainingStage.STEP_END, ctx)
    assert ctx.seen == ["wrap", "a", "b", "save"]


def test_spans_are_left_in_reverse_also_on_an_error():
    table, ctx = HookTable([recorder("a", Order.WRAP), recorder("b", Order.SAVE)], MANAGER), context()
    with pytest.raises(KeyError) as caught, table.around(TrainingSpan.FORWARD, ctx):
        raise KeyError("of the loop")
    assert ctx.seen == ["+a", "+b", "-b", "-a"]
    assert not getattr(caught.value, "__notes__", [])  # no hook is blamed for the loop's own error


def test_a_hook_that_fails_on_entry_is_named_and_the_others_are_left():
    class Broken(Hook):
        order = Order.SAVE

        @around(TrainingSpan.FORWARD)
        def inside(self, ctx):
            raise OSError("no room")
            yield

    table, ctx = HookTable([recorder("a", Order.WRAP), Broken()], MANAGER), context()
    with pytest.raises(OSError, match="no room") as caught, table.around(TrainingSpan.FORWARD, ctx):
        ctx.seen.append("never")
    assert ctx.seen == ["+a", "-a"]
    assert "hook 'broken' (Broken) at FORWARD, step 7" in caught.value.__notes__[0]


def test_a_hook_cannot_swallow_the_loops_error():
    class Swallows(Hook):
        @around(TrainingSpan.FORWARD)
        def inside(self, ctx):
            try:
                yield
            except ValueError:
                pass

    with (
        pytest.raises(ValueError, match="seen by the user"),
        HookTable([Swallows()], MANAGER).around(TrainingSpan.FORWARD, context()),
    ):
        raise ValueError("seen by the user")


def test_an_error_at_a_stage_names_hook_stage_and_step():
    class Broken(Hook):
        @on(TrainingStage.STEP_END)
        def act(self, ctx):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        HookTable([Broken()], MANAGER).fire(TrainingStage.STEP_END, context())
    assert caught.value.__notes__ == ["raised in hook 'broken' (Broken) at STEP_END, step 7"]


def test_an_inactive_hook_is_not_in_the_table():
    class Distributed(Hook):
        def is_active(self, manager):
            return manager.world_size > 1

    assert len(HookTable([Distributed()], MANAGER)) == 0
    assert len(HookTable([Distributed()], SimpleNamespace(world_size=2))) == 1


def test_two_claimants_are_both_named():
    class One(Hook):
        claims = frozenset({"data_parallel"})

    class Other(Hook):
        claims = frozenset({"data_parallel"})

    with pytest.raises(ConfigError, match=r"claim 'data_parallel'.*One and Other"):
        HookTable([One(), Other()], MANAGER)


def test_names_are_unique():
    with pytest.raises(ConfigError, match="two hooks are named 'hook'"):
        HookTable([Hook(), Hook()], MANAGER)


def test_functions_stand_in_the_list_and_strangers_do_not():
    @on(TrainingStage.STEP_END)
    def shout(ctx):
        ctx.seen.append("shout")

    ctx = context()
    HookTable([shout], MANAGER).fire(TrainingStage.STEP_END, ctx)
    assert ctx.seen == ["shout"]
    with pytest.raises(ConfigError, match="with brackets"):
        HookTable([Hook, shout], MANAGER)
    with pytest.raises(ConfigError, match="no hook"):
        HookTable(["ema"], MANAGER)
