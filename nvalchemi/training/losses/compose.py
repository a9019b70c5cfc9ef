"""Sums of weighted losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from nvalchemi.errors import ConfigError
from nvalchemi.objective import Count, LossPart, SupervisedLoss
from nvalchemi.training.losses.base import Loss
from nvalchemi.training.losses.weights import Weight, checked, product, weight_at


class ComposedLoss(Loss):
    """A sum of losses, each times its weight; what ``+`` and ``*`` make.

    Parameters
    ----------
    terms
        Pairs of a weight (a number, or a function of the step) and a loss. Sums within sums are laid flat.

    Raises
    ------
    ConfigError
        For a weight that is none, for something that is no loss, for two parts of one name, and for no loss at all.
    """

    def __init__(self, terms: Sequence[tuple[Weight, SupervisedLoss]]) -> None:
        flat: list[tuple[Weight, SupervisedLoss]] = []
        for given, loss in terms:
            weight = checked(given)
            if isinstance(loss, ComposedLoss):
                flat.extend((product(weight, inner), term) for inner, term in loss.terms)
            elif isinstance(loss, SupervisedLoss):
                flat.append((weight, loss))
            else:
                raise ConfigError(
                    "only losses can be added to a loss",
                    found=repr(loss),
                    needed="a loss such as ForceMSELoss(); one of your own derives from nvalchemi.training.losses.Loss",
                )
        if not flat:
            raise ConfigError("a sum of no losses", fix="give at least one, such as EnergyMSELoss()")
        self.terms: tuple[tuple[Weight, SupervisedLoss], ...] = tuple(flat)
        self.requires = frozenset[str]().union(*(t.requires for _, t in flat))
        self.labels = frozenset[str]().union(*(t.labels for _, t in flat))
        named = [t for _, t in flat if isinstance(t, Loss)]
        self.part_names = tuple(n for t in named for n in t.part_names)
        self.targets = {prediction: label for t in named for prediction, label in t.targets.items()}
        for name in self.part_names:
            if self.part_names.count(name) > 1:
                raise _same_name(name)

    def parts(self, predictions: Mapping[str, Tensor], batch: Any, step: int = 0) -> dict[str, LossPart]:
        result: dict[str, LossPart] = {}
        for weight, term in self.terms:
            inner = term.parts(predictions, batch, step) if isinstance(term, Loss) else term(predictions, batch, step).parts
            factor = weight_at(weight, step)
            for name, part in inner.items():
                if name in result:
                    raise _same_name(name)
                part.weight *= factor
                result[name] = part
        return result

    def counts(self, batch: Any) -> dict[str, Count]:
        return {name: count for _, term in self.terms for name, count in term.counts(batch).items()}

    def per_sample(self, predictions: Mapping[str, Tensor], batch: Any) -> dict[str, Tensor]:
        terms = (term for _, term in self.terms if isinstance(term, Loss))
        return {name: values for term in terms for name, values in term.per_sample(predictions, batch).items()}

    def __repr__(self) -> str:
        return " + ".join(f"{weight} * {term!r}" for weight, term in self.terms)


def _same_name(name: str) -> ConfigError:
    return ConfigError(
        f"two parts of the loss are named '{name}'",
        fix="give one of them another name, as in EnergyMAELoss(name='energy_mae'): parts are counted and reported by name",
    )
