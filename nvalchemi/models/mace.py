"""MACE networks (Batatia et al. 2022, arXiv:2206.07697) of the package ``mace-torch`` as potentials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.errors import ConfigError
from nvalchemi.models.potential import PotentialNet


class MACENet(PotentialNet):
    """A MACE model as the network of an `InteratomicPotential`.

    It keeps the isolated-atom energies that it has, so the potential takes no reference energies beside it.

    Parameters
    ----------
    model
        ``mace.modules.MACE`` or ``ScaleShiftMACE``.

    Raises
    ------
    ConfigError
        It is something else.
    """

    own_references = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        missing = [name for name in ("atomic_numbers", "r_max", "interactions") if not hasattr(model, name)]
        if missing:
            raise ConfigError(
                "no MACE model", found=f"{type(model).__name__} without {', '.join(missing)}", needed="a mace-torch model"
            )
        self.model = model
        numbers = [int(z) for z in model.atomic_numbers]  # type: ignore[union-attr]
        self.elements = tuple(numbers)
        self.cutoff = float(model.r_max)  # type: ignore[arg-type]
        row = torch.full((119,), -1, dtype=torch.int64)
        row[numbers] = torch.arange(len(numbers))
        self.register_buffer("row", row, persistent=False)
        self._settings: dict[str, Any] | None = None

    def forward(self, atomic_numbers: Tensor, vectors: Tensor, edge_index: Tensor) -> Tensor:
        """Per-atom energies (N,) float64, isolated-atom energies among them; see `PotentialNet.forward`."""
        atoms = atomic_numbers.shape[0]
        kinds = nn.functional.one_hot(self.row.index_select(0, atomic_numbers), len(self.elements))
        # MACE takes vectors as position of the centre minus position of the neighbour plus a shift: all is put into the shift.
        graph = {
            "positions": vectors.new_zeros(atoms, 3),
            "node_attrs": kinds.to(vectors.dtype),
            "edge_index": edge_index,
            "shifts": -vectors,
            "unit_shifts": torch.zeros_like(vectors),
            "cell": vectors.new_zeros(3, 3),
            "pbc": torch.zeros(3, dtype=torch.bool, device=vectors.device),
            "batch": torch.zeros_like(atomic_numbers),
            "ptr": torch.tensor([0, atoms], device=vectors.device),
            "head": torch.zeros(1, dtype=torch.int64, device=vectors.device),
        }
        out = self.model(graph, training=True, compute_force=False)
        return out["node_energy"]

    def config(self) -> dict[str, Any]:
        """See `PotentialNet.config`.

        Raises
        ------
        ConfigError
            The model was handed over ready-made, so nothing is known of how it is built.
        """
        if self._settings is None:
            raise ConfigError(
                "a MACE model that was handed over cannot be rebuilt from settings", fix="make it by MACENet.from_config"
            )
        return {"net": "mace", **self._settings}

    @classmethod
    def from_config(cls, settings: Mapping[str, Any]) -> MACENet:
        """Make a ``ScaleShiftMACE`` with fresh weights.

        Parameters
        ----------
        settings
            ``elements``, and where wished ``cutoff`` (5 Å), ``channels`` (64), ``max_l`` (1, of the messages), ``max_ell`` (3), ``correlation``
            (3), ``n_interactions`` (2), ``n_rbf`` (8), ``avg_num_neighbors`` (the mean number within the cutoff), ``isolated`` (energies of isolated
            atoms in eV by symbol or number; 0).

        Raises
        ------
        ConfigError
            ``mace-torch`` is not installed, or a setting is unknown.
        """
        raise NotImplementedError
