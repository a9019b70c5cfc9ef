"""The model that a run ended with, or was best with."""

from __future__ import annotations

from dataclasses import dataclass

from nvalchemi.cli.run_dir import RunDir
from nvalchemi.data.address import Where
from nvalchemi.errors import CheckpointError, ConfigError
from nvalchemi.models import EnergyModel, build_model
from nvalchemi.training import layout
from nvalchemi.training.alive import alive, size_text
from nvalchemi.training.export import weights_of
from nvalchemi.training.reading import at_path, read_shared
from nvalchemi.training.shards import placed
from nvalchemi.training.storage import storage


@dataclass(frozen=True)
class Trained:
    """A model with weights, and where these came from.

    Parameters
    ----------
    model
        In evaluation mode.
    weights
        ``"ema"`` for the averaged, ``"raw"`` for the trained weights as they are.
    checkpoint
        Of which the weights are.
    step
        Optimizer steps taken up to there.
    """

    model: EnergyModel
    weights: str
    checkpoint: Where
    step: int


def load_trained(run: RunDir, *, raw: bool = False, which: str = "best") -> Trained:
    """The model of a run.

    Parameters
    ----------
    run
        Its folder.
    raw
        Take the weights as they were trained, although averaged ones are there.
    which
        ``"best"`` by the run's own metric (the last where no checkpoint has it), ``"last"``, or the path of a checkpoint.

    Raises
    ------
    CheckpointError
        Where there is nothing whole to load.
    """
    saved = find(run, which)
    from nvalchemi.cli.recipe import in_precision

    with alive(f"reading {saved.path}", lambda: size_text(saved.bytes)):
        state, weights = weights_of(read_shared(saved), raw=raw)
        model = in_precision(build_model(run.model_config()), run.config())
        try:
            model.load_state_dict(placed(state))
        except (KeyError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"the weights in {saved.path} do not fit the model in {run.model_file}", found=str(error)[:300]
            ) from None
    return Trained(model.eval(), weights, saved.path, saved.step)


@alive("looking for a whole checkpoint")
def find(run: RunDir, which: str) -> layout.SavedCheckpoint:
    """The checkpoint that ``which`` means."""
    if which not in ("best", "last"):
        return at_path(which)
    store = storage(run.checkpoints)
    if not store.exists():
        raise ConfigError(f"{run.path} has no checkpoints yet", fix="wait for the first one, or train for longer")
    if which == "best":
        best = layout.best(store.place, run.config().checkpoint.metric)
        if best is not None:
            return best
    return at_path(store.place)
