"""The errors of the package: each says what was found, what was needed and what to do."""

from __future__ import annotations


class NvalchemiError(Exception):
    """Base of every error that the package raises on purpose.

    Parameters
    ----------
    message
        What is wrong, in one clause.
    found, needed
        What was met and what would have been right; left out where the message says it already.
    fix
        What the user can do about it.
    """

    def __init__(self, message: str, *, found: object = None, needed: object = None, fix: str | None = None) -> None:
        self.message, self.found, self.needed, self.fix = message, found, needed, fix
        parts = [message]
        if found is not None:
            parts.append(f"found: {found}")
        if needed is not None:
            parts.append(f"needed: {needed}")
        if fix is not None:
            parts.append(f"do this: {fix}")
        super().__init__("; ".join(parts))


class ConfigError(NvalchemiError, ValueError):
    """A declaration that cannot work: settings, hooks or models that do not fit together."""


class DataError(NvalchemiError, ValueError):
    """Data that are wrong, damaged, missing or not what was declared."""


class CheckpointError(NvalchemiError, RuntimeError):
    """A checkpoint that is missing, damaged, unsafe or made for something else."""


class TrainingError(NvalchemiError, RuntimeError):
    """A run that cannot go on: a non-finite loss, too many skipped steps, an empty epoch."""
