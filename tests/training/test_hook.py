import pytest

from nvalchemi.errors import ConfigError
from nvalchemi.training.hook import Every, FunctionHook, Hook, PeriodicHook, around, on, snake_case
from nvalchemi.training.stages import TrainingSpan, TrainingStage


def test_a_misspelt_stage_fails_where_it_is_written():
    with pytest.raises(ConfigError, match=r"on\(\) takes a training stage.*STEP_END"):
        on("step_end")
    with pytest.raises(ConfigError, match=r"around\(\) takes a training span.*FORWARD"):
        around("forward")


def test_around_needs_a_generator_function():
    with pytest.raises(ConfigError, match="yield"):

        @around(TrainingSpan.FORWARD)
        def no_generator(ctx):
            return None


@pytest.mark.parametrize(
    "arguments", [{}, {"steps": 1, "epochs": 1}, {"steps": 0}, {"epochs": -1}, {"steps": True}, {"steps": 1.5}]
)
def test_every_takes_exactly_one_positive_number(arguments):
    with pytest.raises(ConfigError, match="Every"):
        Every(**arguments)


def test_an_overridden_method_keeps_its_stage():
    class Base(Hook):
        @on(TrainingStage.STEP_END)
        def act(self, ctx):
            ctx.append("base")

    class Derived(Base):
        def act(self, ctx):
            ctx.append("derived")

    seen = []
    ((stage, method),) = Derived().stage_listeners()
    method(seen)
    assert stage is TrainingStage.STEP_END
    assert seen == ["derived"]


def test_one_method_may_listen_to_several_stages():
    class Both(Hook):
        @on(TrainingStage.EPOCH_END)
        @on(TrainingStage.STEP_END)
        def act(self, ctx):
            pass

    assert {stage for stage, _ in Both().stage_listeners()} == {TrainingStage.STEP_END, TrainingStage.EPOCH_END}


@pytest.mark.parametrize(
    ("name", "snake"),
    [("EMAHook", "ema"), ("DDPHook", "ddp"), ("FSDP2Hook", "fsdp2"), ("GradientClipHook", "gradient_clip"), ("Hook", "hook")],
)
def test_names_come_from_class_names(name, snake):
    assert snake_case(name) == snake


def test_a_function_without_a_stage_is_refused():
    def listener(ctx):
        pass

    with pytest.raises(ConfigError, match="says no stage"):
        FunctionHook(listener)


def test_a_periodic_hook_wants_every_and_act():
    with pytest.raises(ConfigError, match="Every"):
        PeriodicHook(10)
    with pytest.raises(NotImplementedError, match="act"):
        PeriodicHook(Every(steps=1)).act(None)
