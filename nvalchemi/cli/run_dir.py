"""The folder of a run: what lies where."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvalchemi.cli.config import TrainConfig, check_config, dump_config, read_yaml
from nvalchemi.errors import ConfigError

if TYPE_CHECKING:
    from nvalchemi.data.address import Where


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    os.replace(temporary, path)


def has_checkpoints(place: Path | str) -> bool:
    """Whether there may be checkpoints in a folder or at an address."""
    if "://" not in str(place):
        return any(Path(place).glob("step-*"))
    from nvalchemi.training.storage import storage  # slow to import

    return bool(storage(place).appeared())


class RunDir:
    """A run's folder.

    ``config.yaml`` (all settings), ``model.json`` (how to rebuild the model), ``checkpoints/``, ``metrics.jsonl`` and
    ``metrics.csv``, ``evaluation/`` (a JSON of errors and an npz of predictions a store), ``plots/``, and under a launcher
    ``launched-by.txt``. The settings may name another place for the checkpoints.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.model_file = path / "model.json"
        self.launch_file = path / "launched-by.txt"
        self.metrics = path / "metrics.jsonl"
        self.evaluation = path / "evaluation"
        self.plots = path / "plots"

    @classmethod
    def new(cls, path: Path, config: TrainConfig | None = None) -> RunDir:
        """A folder for a new run with some settings.

        Raises
        ------
        ConfigError
            Where a run has begun there already, or has its checkpoints where this one would.
        """
        run = cls(path)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is no folder", fix="give another --run-dir")
        if run.holds_a_run():
            raise ConfigError(
                f"{path} holds a run already", fix=f"go on with it: nvalchemi resume {path}; or give another --run-dir"
            )
        if config is not None and has_checkpoints(run.checkpoints_of(config)):
            raise ConfigError(
                f"{run.checkpoints_of(config)} holds another run's checkpoints", fix="give another checkpoint.directory"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder {path} cannot be made", found=str(error)) from None
        return run

    def holds_a_run(self) -> bool:
        """Whether a run was begun here that has saved a checkpoint."""
        before = read_yaml(self.config_file).get("checkpoint") if self.config_file.is_file() else None
        elsewhere = before.get("directory") if isinstance(before, dict) else None
        return has_checkpoints(elsewhere or self.path / "checkpoints")

    def was_begun_by_this_launch(self) -> bool:
        """Whether what started this process has started the run in here, so that this is a restart and no other run."""
        if not (self.launch_file.is_file() and self.holds_a_run()):
            return False
        from nvalchemi.distributed import launched_by  # slow to import

        return not launched_by(again=True).isdisjoint(self.launch_file.read_text().splitlines())

    def write_launch(self, names: Collection[str]) -> None:
        """Keep what has started the run."""
        self.launch_file.unlink(missing_ok=True)
        if names:
            write_whole(self.launch_file, "\n".join(sorted(names)) + "\n")

    def check_model_stays(self, config: TrainConfig) -> None:
        """Refuse settings under which the run would go on with another model."""
        before = self.config()
        changed = [key for key, value in config.model if value != getattr(before.model, key)]
        if changed:
            raise ConfigError(
                "the model of a run stays as it is",
                found=f"other settings of {', '.join(f'model.{key}' for key in changed)}",
                fix="start a new run: nvalchemi train with another --run-dir",
            )

    def checkpoints_of(self, config: TrainConfig) -> Path | str:
        """The folder of the checkpoints under some settings, or its address."""
        return config.checkpoint.directory or self.path / "checkpoints"

    @property
    def checkpoints(self) -> Where:
        """The folder of the run's checkpoints, or its address."""
        from nvalchemi.data.address import where

        return where(self.checkpoints_of(self.config()))

    @classmethod
    def existing(cls, path: Path) -> RunDir:
        """The folder of a run that was started with ``nvalchemi train``."""
        run = cls(path)
        if not run.config_file.is_file():
            found = ", ".join(sorted(p.name for p in path.iterdir())[:6]) if path.is_dir() else "no such folder"
            raise ConfigError(
                f"{path} is no run folder", found=found or "an empty folder", needed="config.yaml, as nvalchemi train writes it"
            )
        return run

    def config(self) -> TrainConfig:
        """The settings that the run was started with."""
        return check_config(read_yaml(self.config_file), str(self.config_file))

    def write_config(self, config: TrainConfig) -> None:
        """Keep the settings."""
        write_whole(self.config_file, dump_config(config))

    def model_config(self) -> dict[str, Any]:
        """How to rebuild the model: names of what is registered, which are looked up and never imported.

        Raises
        ------
        ConfigError
            Where it cannot be read, names something unknown, or is not of the network that the settings name.
        """
        from nvalchemi.models import check_model

        try:
            config = json.loads(self.model_file.read_text())
            net = config["net"]["net"]
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.model_file} cannot be read", found=str(error), needed="the model of the run") from None
        except (KeyError, TypeError):
            raise ConfigError(f"{self.model_file} describes no model", needed='{"model": ..., "net": {"net": ...}}') from None
        check_model(config)
        named = self.config().model.name
        if named != net:
            raise ConfigError(
                f"{self.config_file} names another network than {self.model_file.name}",
                found=f"model.name={named!r}",
                needed=repr(net),
                fix="mend model.name; a name is looked up among the networks that are registered, and nothing is imported by it",
            )
        return config

    def write_model_config(self, config: Mapping[str, Any]) -> None:
        """Keep how to rebuild the model."""
        write_whole(self.model_file, json.dumps(config, indent=1))

    def records(self) -> list[dict[str, Any]]:
        """The metrics written so far, in order."""
        if not self.metrics.is_file():
            raise ConfigError(f"{self.path} holds no metrics yet", needed=self.metrics.name)
        whole, _, _ = self.metrics.read_text().rpartition("\n")  # the last line of a killed run may be torn
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise ConfigError(f"{self.metrics} is damaged", found=str(error)) from None
