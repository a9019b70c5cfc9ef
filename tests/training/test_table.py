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


class Entered(Hook):
    """Says what it was told, and may raise on the way out."""

    def __init__(self, name, raises=None):
        self.name, self.raises, self.told = name, raises, "nothing"

    @around(TrainingSpan.FORWARD)
    def inside(self, ctx):
        try:
            yield
        except BaseException as error:
            self.told = error
            raise
        finally:
            if self.raises is not None:
                raise self.raises


def test_a_hook_that_fails_on_the_way_out_is_named_and_the_outer_ones_are_told():
    outer, inner = Entered("outer"), Entered("inner", OSError("disk"))
    table, ctx = HookTable([outer, inner], MANAGER), context()
    with pytest.raises(OSError, match="disk") as caught, table.around(TrainingSpan.FORWARD, ctx):
        pass
    assert outer.told is caught.value
    assert caught.value.__notes__ == ["raised in hook 'inner' (Entered) at FORWARD, step 7"]


def test_an_error_on_the_way_out_of_another_keeps_both():
    first = ValueError("of the loop")
    table = HookTable([Entered("outer"), Entered("inner", OSError("disk"))], MANAGER)
    with pytest.raises(OSError, match="disk") as caught, table.around(TrainingSpan.FORWARD, context()):
        raise first
    assert caught.value.__context__ is first


@pytest.mark.parametrize("error", [StopIteration(), KeyboardInterrupt(), GeneratorExit(), RuntimeError("plain")])
def test_any_error_of_the_loop_passes_through_unchanged(error):
    outer, inner = Entered("outer"), Entered("inner")
    with pytest.raises(type(error)) as caught, HookTable([outer, inner], MANAGER).around(TrainingSpan.FORWARD, context()):
        raise error
    assert caught.value is error
    assert outer.told is inner.told is error
    assert not getattr(error, "__notes__", [])


def test_a_hook_may_put_its_own_error_in_the_place_of_the_loops():
    class Explains(Hook):
        @around(TrainingSpan.FORWARD)
        def inside(self, ctx):
            try:
                yield
            except ValueError as error:
                raise OSError("what it means") from error

    with (
        pytest.raises(OSError, match="what it means") as caught,
        HookTable([Explains()], MANAGER).around(TrainingSpan.FORWARD, context()),
    ):
        raise ValueError
    assert isinstance(caught.value.__cause__, ValueError)
    assert "hook 'explains'" in caught.value.__notes__[0]


def test_a_method_that_yields_twice_is_told():
    class Twice(Hook):
        @around(TrainingSpan.FORWARD)
        def inside(self, ctx):
            yield
            yield

    with (
        pytest.raises(RuntimeError, match="yields more than once"),
        HookTable([Twice()], MANAGER).around(TrainingSpan.FORWARD, context()),
    ):
        pass
