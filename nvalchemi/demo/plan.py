"""How much of everything the demonstration does in the time that it is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nvalchemi.demo.molecules import SEEN, UNSEEN
from nvalchemi.errors import ConfigError

SHORTEST = 0.5


@dataclass(frozen=True)
class Plan:
    """What to label, train and run.

    Attributes
    ----------
    seconds
        For all of it, from the first label to the last word.
    seen, unseen
        Molecules to learn from, and molecules kept back.
    train_frames, valid_frames, test_frames, unseen_frames
        Structures of each molecule. Training, validation and test come from different trajectories.
    temperature
        Of the dynamics that draws the structures, K.
    labellers
        Labelling processes at a time, of one thread each.
    dynamics_steps
        Of half a femtosecond, with the trained model.
    reserve
        Seconds kept for what comes after training.
    settings
        Changes to the training configuration.
    """

    seconds: float = 300.0
    seen: tuple[str, ...] = tuple(SEEN)
    unseen: tuple[str, ...] = tuple(UNSEEN)
    train_frames: int = 100
    valid_frames: int = 8
    test_frames: int = 10
    unseen_frames: int = 30
    temperature: float = 400.0
    labellers: int = 2
    dynamics_steps: int = 2000
    reserve: float = 40.0
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, minutes: float) -> Plan:
        """The plan for a number of minutes: less time, less of everything.

        Raises
        ------
        ConfigError
            For less than half a minute.
        """
        if not minutes >= SHORTEST:
            raise ConfigError(
                "too little time for the demonstration", found=f"{minutes:g} minutes", needed=f"at least {SHORTEST:g}"
            )
        share = min(minutes / 5.0, 4.0)
        return cls(
            seconds=60.0 * minutes,
            train_frames=max(10, round(100 * share)),
            test_frames=max(4, round(10 * min(share, 1.0))),
            unseen_frames=max(6, round(30 * min(share, 1.0))),
            dynamics_steps=max(200, round(2000 * min(share, 1.0))),
            reserve=12.0 + 28.0 * min(share, 1.0),
        )
