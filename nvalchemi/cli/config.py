"""What a training configuration may say: the schema, reading it from YAML with overrides, and errors that help.

Every setting has a default but the training data; ``examples/configs`` shows the usual ones.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from nvalchemi.errors import ConfigError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(value: Any) -> Any:
    """Seconds of ``"90s"``, ``"10m"``, ``"1h30m"``, ``"2d"`` or a number of seconds."""
    if not isinstance(value, str):
        return value
    text = value.replace(" ", "")
    try:
        return float(text)
    except ValueError:
        pass
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not parts or "".join(n + u for n, u in parts) != text:
        raise ValueError("a duration is written as 90s, 10m, 1h30m or 2d")
    return sum(float(n) * _UNITS[u] for n, u in parts)


Duration = Annotated[float, BeforeValidator(parse_duration), Field(gt=0)]
Positive = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of the configuration: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, validate_default=True)


class DataSection(Section):
    """The stores, and how they are read."""

    train: str
    validation: str | None = None
    in_memory: bool = True
    dtype: Literal["float32", "float64"] = "float32"
    batch_size: Positive = 16
    validation_batch_size: Positive = 64
    drop_last: bool = False
    prefetch_factor: Annotated[int, Field(ge=0)] = 2


class ModelSection(Section):
    """The potential. ``net`` holds the network's own settings."""

    name: str = "painn"
    cutoff: Annotated[float, Field(gt=0)] = 5.0
    net: dict[str, Any] = {}
    reference_energies: Literal["fit", "none"] | dict[str, float] = "fit"
    energy_scale: Literal["force_rms"] | Annotated[float, Field(gt=0)] = "force_rms"


class TermSection(Section):
    """A term of the loss. ``delta`` (where a Huber cost becomes linear) is in the unit of what is compared."""

    kind: Literal["mse", "mae", "huber"] = "mse"
    weight: float = 1.0
    delta: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _delta_is_of_huber(self) -> TermSection:
        if self.delta is not None and self.kind != "huber":
            raise ValueError(f"delta belongs to kind: huber, and this is {self.kind}")
        return self


class EnergyTermSection(TermSection):
    """The energy's term."""

    per_atom: bool = True


class ForceTermSection(TermSection):
    """The forces' term."""

    kind: Literal["mse", "mae", "huber", "l2norm"] = "mse"  # type: ignore[assignment]


class LossSection(Section):
    """The terms; ``null`` leaves one out."""

    energy: EnergyTermSection | None = EnergyTermSection()
    forces: ForceTermSection | None = ForceTermSection(weight=10.0)
    stress: TermSection | None = None

    @model_validator(mode="after")
    def _some_term(self) -> LossSection:
        if self.energy is None and self.forces is None and self.stress is None:
            raise ValueError("the loss has no term; give energy, forces or stress")
        return self


class OptimizerSection(Section):
    """An optimizer of ``torch.optim``; ``options`` go to it as they are.

    ``lr_scaling`` lets the rate grow with the number of processes (``linear``) or its square root (``sqrt``).
    """

    name: Literal["Adam", "AdamW", "NAdam", "RAdam", "SGD"] = "AdamW"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    lr_scaling: Literal["linear", "sqrt"] | None = None
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    options: dict[str, Any] = {}


class ScheduleSection(Section):
    """The learning rate over the run: warm up, hold, fall; see ``nvalchemi.training.schedules.Shape``."""

    kind: Literal["constant", "linear", "cosine"] = "cosine"
    hold: Annotated[float, Field(ge=0, lt=1)] = 0.0
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0


class EarlyStopSection(Section):
    """Stop where a validation metric no longer gets better."""

    metric: str = "loss"
    patience: Positive = 20
    min_delta: Annotated[float, Field(ge=0)] = 0.0


class TrainingSection(Section):
    """The run: it ends after ``epochs``, ``steps`` or ``max_time``, whichever comes first.

    ``threads`` is how many torch computes in on the CPU; ``null`` leaves it to torch. Small molecules train fastest in one.
    """

    epochs: Positive | None = None
    steps: Positive | None = None
    max_time: Duration | None = None
    accumulate: Positive = 1
    seed: int = 0
    clip_norm: Annotated[float, Field(gt=0)] | None = 10.0
    ema_decay: Annotated[float, Field(ge=0, lt=1)] | None = 0.999
    mixed_precision: Literal["bf16", "fp16"] | None = None
    spike_factor: Annotated[float, Field(gt=1)] | None = 10.0
    early_stop: EarlyStopSection | None = None
    threads: Positive | None = None

    @model_validator(mode="after")
    def _has_an_end(self) -> TrainingSection:
        if self.epochs is None and self.steps is None and self.max_time is None:
            raise ValueError("the run has no end; give epochs, steps or max_time (--max-time 10m)")
        return self


class FrequencySection(Section):
    """How often: by epochs or by steps."""

    every_n_epochs: Positive | None = None
    every_n_steps: Positive | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> FrequencySection:
        if self.every_n_epochs is not None and self.every_n_steps is not None:
            raise ValueError("every_n_epochs and every_n_steps exclude each other")
        return self


class ValidationSection(FrequencySection):
    """How often to validate; every epoch where nothing is said."""


class CheckpointSection(FrequencySection):
    """How often to save (with each validation where nothing is said), and how many to keep; the best are those of least ``metric``.

    ``directory`` is where: the run's own folder where nothing is said, or an address such as ``s3://bucket/run``.
    """

    directory: str | None = None
    keep_last: Positive = 2
    keep_best: Positive | None = 1
    metric: str = "loss"


class TrainConfig(Section):
    """All of a training configuration."""

    data: DataSection
    model: ModelSection = ModelSection()
    loss: LossSection = LossSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    report_every_n_steps: Positive = 50
    tensorboard: bool = False

    @model_validator(mode="after")
    def _early_stop_has_something_to_look_at(self) -> TrainConfig:
        if self.training.early_stop is not None and self.data.validation is None:
            raise ValueError("training.early_stop looks at the validation, and there is no data.validation")
        return self


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration in ``path`` with ``key=value`` overrides, checked.

    Parameters
    ----------
    path
        A YAML file.
    overrides
        Such as ``"optimizer.lr=1e-3"``; the value is read as YAML.

    Raises
    ------
    ConfigError
        Naming the file, the key, the value and what it might have been meant to be.
    """
    raw = read_yaml(path)
    for override in overrides:
        apply_override(raw, override)
    return check_config(raw, str(path))


def dump_config(config: TrainConfig) -> str:
    """The whole configuration as YAML, defaults included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read", found=str(error)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML", found=" ".join(str(error).split())) from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no configuration", found=type(raw).__name__, needed="a mapping such as 'data: ...'")
    return raw


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one dotted key of a raw configuration: ``"optimizer.lr=1e-3"``."""
    key, sign, text = override.partition("=")
    if not sign or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise ConfigError(
            "an override has the form key=value", found=override, needed="such as optimizer.lr=1e-3 or data.train=train.zarr"
        )
    try:
        value = yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        value = text  # a path may hold what YAML reads as something else
    *sections, last = key.split(".")
    place = raw
    for i, section in enumerate(sections):
        inner = place.get(section)
        if inner is None:  # absent, or left out with null
            inner = place[section] = {}
        elif not isinstance(inner, dict):
            raise ConfigError(f"'{'.'.join(sections[: i + 1])}' is no section", found=repr(inner), fix=f"drop {override}")
        place = inner
    place[last] = value


def check_config(raw: Mapping[str, Any], source: str) -> TrainConfig:
    """The configuration of a raw mapping, or one ConfigError that names all that is wrong."""
    try:
        return TrainConfig.model_validate(dict(raw))
    except ValidationError as error:
        # A value that fits no branch of a union is complained about once for each: the first one stands for all.
        complaints = {_key(e): _complaint(e) for e in reversed(error.errors(include_url=False))}
        raise ConfigError(f"{source} cannot be used: " + "; ".join(reversed(complaints.values()))) from None


def _key(error: Any) -> str:
    return ".".join(part for part in error["loc"] if isinstance(part, str) and not _is_union_tag(part))


def _complaint(error: Any) -> str:
    key, value = _key(error), error["input"]
    location = key.split(".")
    if error["type"] == "extra_forbidden":
        known = _fields_at(location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=2, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
        return f"unknown key '{key}' (= {_short(value)}); {hint}"
    if error["type"] == "missing":
        inside = _fields_at(location)
        return f"'{key}' is missing; set it in the file or with {key}{'.' + inside[0] if inside else ''}=..."
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error" and isinstance(value, Mapping | BaseModel):
        return f"'{key}': {message}" if key else message
    if error["type"] == "literal_error" and isinstance(value, str):
        near = difflib.get_close_matches(value, re.findall(r"'([^']+)'", error["ctx"]["expected"]), n=1)
        message += f" (did you mean {near[0]}?)" if near else ""
    return f"'{key}' is {_short(value)}: {message[0].lower()}{message[1:]}"


def _is_union_tag(part: str) -> bool:
    # pydantic names the branch of a union within the location; no key of ours looks like that
    return bool(re.search(r"[\[\](-]", part)) or part in ("float", "int", "str") or part.startswith("literal")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _fields_at(location: Sequence[str]) -> list[str]:
    """The keys that the section at ``location`` has."""
    model: type[BaseModel] = TrainConfig
    for part in location:
        field = model.model_fields.get(part)
        inner = None if field is None else _section_in(field.annotation)
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if get_origin(annotation) in (Union, types.UnionType):
        return next((s for a in get_args(annotation) if (s := _section_in(a)) is not None), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
