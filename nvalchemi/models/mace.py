"""MACE networks (Batatia et al. 2022, arXiv:2206.07697) of the package ``mace-torch`` as potentials.

>>> from nvalchemi.models.mace import mace_potential  # doctest: +SKIP
>>> potential = mace_potential(torch.load("my.model", weights_only=False))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.errors import ConfigError
from nvalchemi.models.potential import InteratomicPotential, PotentialNet
from nvalchemi.models.references import atomic_number, element_rows


class MACENet(PotentialNet):
    """A MACE model as the network of an `InteratomicPotential`: its energies without those of isolated atoms.

    Parameters
    ----------
    model
        ``mace.modules.MACE`` or ``ScaleShiftMACE``. Of several heads the first is used.

    Attributes
    ----------
    isolated
        The model's energies of isolated atoms, eV by atomic number: the potential's ``reference_energies``.

    Raises
    ------
    ConfigError
        It is something else.
    """

    elements: tuple[int, ...]
    row: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        missing = [name for name in ("atomic_numbers", "r_max", "atomic_energies_fn") if not hasattr(model, name)]
        if missing:
            raise ConfigError(
                "no MACE model", found=f"{type(model).__name__} without {', '.join(missing)}", needed="a mace-torch model"
            )
        mace: Any = model
        self.model = model
        self.elements = tuple(int(z) for z in mace.atomic_numbers)
        self.cutoff = float(mace.r_max)
        energies = mace.atomic_energies_fn.atomic_energies.double().reshape(-1, len(self.elements))[0]
        self.isolated = dict(zip(self.elements, energies.tolist(), strict=True))
        self.register_buffer("row", element_rows(self.elements), persistent=False)
        self._settings: dict[str, Any] | None = None

    def forward(self, atomic_numbers: Tensor, vectors: Tensor, edge_index: Tensor) -> Tensor:
        """Per-atom energies (N,) float64; see `PotentialNet.forward`."""
        atoms = atomic_numbers.shape[0]
        kinds = nn.functional.one_hot(self.row.index_select(0, atomic_numbers), len(self.elements)).to(vectors.dtype)
        # MACE makes its vectors as position of the centre less that of the neighbour plus a shift: all of it is put into the shift.
        graph = {
            "positions": vectors.new_zeros(atoms, 3),
            "node_attrs": kinds,
            "edge_index": edge_index,
            "shifts": -vectors,
            "unit_shifts": torch.zeros_like(vectors),
            "cell": vectors.new_zeros(3, 3),
            "batch": torch.zeros_like(atomic_numbers),
            "ptr": torch.tensor([0, atoms], device=vectors.device),
            "head": torch.zeros(1, dtype=torch.int64, device=vectors.device),
        }
        mace: Any = self.model
        energies = mace(graph, training=True, compute_force=False)["node_energy"].double()
        return energies - mace.atomic_energies_fn(kinds)[:, 0].double()

    def config(self) -> dict[str, Any]:
        """See `PotentialNet.config`.

        Raises
        ------
        ConfigError
            The model was handed over ready-made, so nothing is known of how it is built.
        """
        if self._settings is None:
            raise ConfigError(
                "a MACE model that was handed over cannot be rebuilt from settings", fix="make it by MACENet.new(...)"
            )
        return {"net": "mace", **self._settings}

    @classmethod
    def new(
        cls,
        elements: Iterable[int | str],
        *,
        cutoff: float = 5.0,
        channels: int = 64,
        max_l: int = 1,
        max_ell: int = 3,
        correlation: int = 3,
        n_interactions: int = 2,
        n_rbf: int = 8,
        avg_num_neighbors: float = 10.0,
    ) -> MACENet:
        """Make a network with fresh weights and no energies of isolated atoms.

        Parameters
        ----------
        elements
            Elements that occur, by symbol or number.
        cutoff
            Å.
        channels, max_l
            Width of the messages, and their highest angular momentum.
        max_ell
            Highest angular momentum of the spherical harmonics.
        correlation
            Body order of a message, less one.
        n_interactions, n_rbf
            Rounds of messages, and radial functions.
        avg_num_neighbors
            Mean number of neighbours within the cutoff, by which sums over them are divided.

        Raises
        ------
        ConfigError
            ``mace-torch`` is not installed.
        """
        modules = mace_modules()
        from e3nn import o3

        numbers = sorted({atomic_number(e) for e in elements})
        hidden = "+".join(f"{channels}x{l}{'o' if l % 2 else 'e'}" for l in range(max_l + 1))  # noqa: E741
        net = cls(
            modules.ScaleShiftMACE(
                r_max=cutoff,
                num_bessel=n_rbf,
                num_polynomial_cutoff=5,
                max_ell=max_ell,
                interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
                # Without a skip connection at the start an atom by itself gives exactly nothing.
                interaction_cls_first=modules.interaction_classes["RealAgnosticInteractionBlock"],
                num_interactions=n_interactions,
                num_elements=len(numbers),
                hidden_irreps=o3.Irreps(hidden),
                MLP_irreps=o3.Irreps("16x0e"),
                gate=torch.nn.functional.silu,
                atomic_energies=torch.zeros(len(numbers)).numpy(),
                avg_num_neighbors=avg_num_neighbors,
                atomic_numbers=numbers,
                correlation=correlation,
                radial_MLP=[64, 64, 64],
                atomic_inter_scale=1.0,
                atomic_inter_shift=0.0,
            )
        )
        net._settings = {
            "elements": numbers,
            "cutoff": cutoff,
            "channels": channels,
            "max_l": max_l,
            "max_ell": max_ell,
            "correlation": correlation,
            "n_interactions": n_interactions,
            "n_rbf": n_rbf,
            "avg_num_neighbors": avg_num_neighbors,
        }
        return net


def mace_potential(model: nn.Module) -> InteratomicPotential:
    """A trained MACE model as a potential, its energies of isolated atoms as reference energies in float64."""
    net = MACENet(model)
    return InteratomicPotential(net, reference_energies=net.isolated)


def mace_modules() -> Any:
    """``mace.modules``.

    Raises
    ------
    ConfigError
        ``mace-torch`` is not installed.
    """
    try:
        from mace import modules
    except ImportError as error:
        raise ConfigError("mace-torch is not installed", found=str(error), fix="pip install nvalchemi[mace]") from error
    return modules
