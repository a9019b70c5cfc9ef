"""What DeepSpeed's engine is given: its configuration and its module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nvalchemi.errors import ConfigError

AUTO = "auto"
OURS = {
    "optimizer": "optimizer_configs of the strategy",
    "scheduler": "scheduler_cls of its optimizer_configs",
    "fp16": 'float32 weights; MixedPrecisionHook("bf16") computes in bf16',
    "bf16": 'float32 weights; MixedPrecisionHook("bf16") computes in bf16',
    "amp": 'float32 weights; MixedPrecisionHook("bf16") computes in bf16',
}
"""Sections of a configuration that are said elsewhere."""


def read_config(config: Mapping[str, Any] | str | PathLike[str] | None, stage: int | None) -> dict[str, Any]:
    """A configuration of one's own: a dict, a JSON file, or a stage alone.

    Raises
    ------
    ConfigError
        For both or neither, a file that is none, a stage that there is not, and sections that the strategy decides.
    """
    if (config is None) == (stage is None):
        raise ConfigError("DeepSpeedHook takes a configuration or a stage", found=f"config={config!r}, stage={stage!r}")
    if config is None:
        own: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    elif isinstance(config, Mapping):
        own = json.loads(json.dumps(dict(config)))
    else:
        try:
            own = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("DeepSpeedHook cannot read its configuration", found=f"{config}: {error}") from error
    zero = own.setdefault("zero_optimization", {})
    if zero.get("stage", 0) not in (1, 2, 3):
        raise ConfigError("there is no such stage of DeepSpeedHook", found=zero.get("stage", 0), needed="1, 2 or 3")
    for section, place in OURS.items():
        given = own.get(section)
        if given and not (isinstance(given, Mapping) and given.get("enabled", True) in (False, AUTO)):
            raise ConfigError(f"the configuration has a section '{section}'", needed=place, fix=f"leave '{section}' out")
        own.pop(section, None)
    return own


def filled(config: Mapping[str, Any], *, batch_size: int, accumulate: int, world_size: int) -> dict[str, Any]:
    """The configuration with its ``"auto"`` values, and what is not there, filled from the run.

    Raises
    ------
    ConfigError
        For an ``"auto"`` that nothing here knows, or a number of micro-batches that is not the strategy's.
    """
    known = {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": accumulate,
        "train_batch_size": batch_size * accumulate * world_size,
        "gradient_clipping": 0.0,
    }
    own = {**config, **{key: value for key, value in known.items() if config.get(key, AUTO) == AUTO}}
    if own["gradient_accumulation_steps"] != accumulate:
        raise ConfigError(
            "the configuration accumulates otherwise than the strategy",
            found=f"gradient_accumulation_steps={own['gradient_accumulation_steps']}",
            needed=f"accumulate={accumulate}",
            fix="write 'auto'",
        )
    # sizes of buckets: the engine has defaults
    own["zero_optimization"] = {key: value for key, value in own["zero_optimization"].items() if value != AUTO}
    left = [key for key, value in own.items() if value == AUTO]
    if left:
        raise ConfigError(
            "nobody knows what is to stand for 'auto'", found=", ".join(left), fix="write values, or leave them out"
        )
    return {"zero_allow_untested_optimizer": True, "steps_per_print": 10**12} | own


class Carrier(nn.Module):
    """What the engine is given in place of a network whose weights are whole on every rank: the loss passes through it.

    The network is called as ever, by samplers and losses of any order; the engine hears of the gradients of its parameters alone.

    Parameters
    ----------
    net
        The network.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, loss: Tensor) -> Tensor:
        """The loss."""
        return loss.clone()
