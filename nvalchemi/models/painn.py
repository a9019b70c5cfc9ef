"""PaiNN, the built-in potential (Schütt et al. 2021, arXiv:2102.03150), in plain torch.

Against the paper:

- the radial functions are Gaussians that fade with a quintic step: with the paper's sines, whose higher ones wiggle on the scale of
  0.2 Å, and a cosine, training on 950 structures of ethanol is at 50 meV/Å after 4000 steps, with Gaussians at 36;
- the filters have no bias, so that everything is twice differentiable at the cutoff;
- what the network gives for an atom alone is taken off, so that the energy of one is its reference energy exactly;
- the last layer computes no vectors, for nothing reads them.

Vectors are kept as (3, N, F), the direction first: products over it and with scalars then run over contiguous memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from nvalchemi.errors import ConfigError
from nvalchemi.models.painn_edges import gaussians
from nvalchemi.models.painn_function import EnergyAndGradient
from nvalchemi.models.painn_layer import NORM_EPS
from nvalchemi.models.potential import PotentialNet
from nvalchemi.models.references import MAX_Z, atomic_number, element_rows


class PaiNN(PotentialNet):
    """Polarizable atom interaction network: scalars and vectors on atoms, passed along edges.

    Parameters
    ----------
    elements
        Elements that occur, by symbol or number; None for all 118.
    n_features
        Width of the atomic features.
    n_interactions
        Rounds of passing messages; the reach of the network is this times the cutoff.
    cutoff
        Å.
    n_rbf
        How many radial functions; see `EdgeBasis`.
    """

    gives_gradient = True
    elements: tuple[int, ...]
    row: Tensor

    def __init__(
        self,
        elements: Iterable[int | str] | None = None,
        *,
        n_features: int = 64,
        n_interactions: int = 3,
        cutoff: float = 5.0,
        n_rbf: int = 20,
    ) -> None:
        super().__init__()
        if min(n_features, n_interactions, n_rbf - 1) < 1 or n_features % 2 or not 0 < cutoff < math.inf:
            raise ConfigError(
                "no such PaiNN",
                found=f"n_features={n_features}, n_interactions={n_interactions}, n_rbf={n_rbf}, cutoff={cutoff}",
                needed="positive numbers, n_features even, n_rbf at least 2",
            )
        numbers = range(1, MAX_Z + 1) if elements is None else sorted({atomic_number(e) for e in elements})
        self.elements = tuple(numbers)
        if not self.elements:
            raise ConfigError("a PaiNN of no elements", fix="give elements, or None for all")
        self.cutoff = float(cutoff)
        self.n_features, self.n_interactions, self.n_rbf = n_features, n_interactions, n_rbf
        self.register_buffer("row", element_rows(self.elements), persistent=False)
        self.embedding = nn.Parameter(torch.randn(len(self.elements), n_features))
        self.layers = nn.ModuleList(
            PaiNNLayer(n_features, n_rbf, first=i == 0, last=i == n_interactions - 1) for i in range(n_interactions)
        )
        self.readout = PaiNNReadout(n_features)

    def forward(  # type: ignore[override]
        self, atomic_numbers: Tensor, vectors: Tensor, edge_index: Tensor, gradient: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Per-atom energies (N,), and with ``gradient`` also that of their sum (E, 3); see `PotentialNet`."""
        rows, kind = self.atoms(atomic_numbers)
        if gradient:
            return EnergyAndGradient.apply(self.cutoff, self.n_rbf, rows, kind, vectors, edge_index, *self.parameters())
        radial, direction = self.edge_basis(vectors)
        scalars = self.embedding.index_select(0, rows)
        vector: Tensor | None = None
        for layer in self.layers:
            scalars, vector = layer(scalars, vector, radial, direction, edge_index[0], edge_index[1])
        energies = self.readout(scalars)
        atoms = atomic_numbers.shape[0]
        return energies[:atoms] - energies[atoms:].index_select(0, kind)

    def atoms(self, atomic_numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the embedding, of the atoms and then of one atom of each kind for itself; the kind of each atom."""
        rows = self.row.index_select(0, atomic_numbers)
        kinds, kind = torch.unique(rows, return_inverse=True)
        return torch.cat([rows, kinds]), kind

    def edge_basis(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Radial functions (E, n_rbf) and unit vectors (3, E, 1) of the edges; see `EdgeBasis`."""
        length = vectors.square().sum(1, keepdim=True).sqrt()
        x = (length / self.cutoff).clamp(max=1.0)
        fade = 1.0 - x**3 * (10.0 - 15.0 * x + 6.0 * x**2)
        first, width = gaussians(self.n_rbf, self.cutoff)
        centres = first + width * torch.arange(self.n_rbf, dtype=length.dtype, device=length.device)
        bells = torch.exp(-0.5 * ((length - centres) / width) ** 2)
        return bells * fade, (vectors / length).t().unsqueeze(2)

    def config(self) -> dict[str, Any]:
        """See `PotentialNet.config`."""
        return {
            "net": "painn",
            "elements": None if len(self.elements) == MAX_Z else list(self.elements),
            "n_features": self.n_features,
            "n_interactions": self.n_interactions,
            "cutoff": self.cutoff,
            "n_rbf": self.n_rbf,
        }


class PaiNNLayer(nn.Module):
    """One round: messages from the neighbours, then each atom's scalars and vectors mixed.

    Parameters
    ----------
    width, n_rbf
        F and K below.
    first
        There are no vectors yet, so none are passed on.
    last
        No vectors are computed from the mixed ones.
    """

    def __init__(self, width: int, n_rbf: int, *, first: bool, last: bool) -> None:
        super().__init__()
        passed, mixed = (2 if first else 3), (2 if last else 3)
        self.first, self.last = first, last
        self.message_in = xavier(width, width)
        self.message_in_bias = nn.Parameter(torch.zeros(width))
        self.message_out = xavier(passed, width, width, fan=4 * width)
        self.message_out_bias = nn.Parameter(torch.zeros(passed, 1, width))
        self.filters = xavier(passed, n_rbf, width, fan=n_rbf + 3 * width)
        self.vector_left = xavier(width, width, fan=3 * width)
        self.vector_right = xavier(width, width, fan=3 * width)
        self.mix_in = xavier(2 * width, width)
        self.mix_in_bias = nn.Parameter(torch.zeros(width))
        self.mix_out = xavier(width, mixed * width, fan=4 * width)
        self.mix_out_bias = nn.Parameter(torch.zeros(mixed * width))

    def forward(
        self, scalars: Tensor, vector: Tensor | None, radial: Tensor, direction: Tensor, senders: Tensor, receivers: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """New scalars (N, F) and vectors (3, N, F) (None after the last layer) from the old ones.

        Parameters
        ----------
        scalars, vector
            (N, F) and (3, N, F), None before the first layer.
        radial, direction
            (E, K) and (3, E, 1).
        senders, receivers
            (E,) neighbours and centres.
        """
        n, width = scalars.shape
        hidden = silu(torch.addmm(self.message_in_bias, scalars, self.message_in))
        passed = torch.baddbmm(self.message_out_bias, hidden.expand(len(self.message_out), n, width), self.message_out)
        filters = torch.matmul(radial, self.filters)
        # Under autocast products of matrices are short; sums and norms are taken in the features' own precision.
        sent = (passed[:2].index_select(1, senders) * filters[:2]).to(scalars.dtype)
        pulled = direction * sent[1]
        if vector is not None:
            pulled = pulled + (passed[2] * vector).index_select(1, senders) * filters[2]
        scalars = scalars.index_add(0, receivers, sent[0])
        vector = pulled.new_zeros(3, n, width).index_add(1, receivers, pulled) + (0.0 if vector is None else vector)

        left, right = (torch.matmul(vector, w).to(vector.dtype) for w in (self.vector_left, self.vector_right))
        norm = (right.square().sum(0) + NORM_EPS).sqrt()
        inner = (left * right).sum(0)
        hidden = silu(torch.addmm(self.mix_in_bias, torch.cat([scalars, norm], 1), self.mix_in))
        mixed = torch.addmm(self.mix_out_bias, hidden, self.mix_out)
        scalars = scalars + mixed[:, :width] + mixed[:, width : 2 * width] * inner
        return scalars, None if self.last else vector + mixed[:, 2 * width :] * left


class PaiNNReadout(nn.Module):
    """Energy of an atom from its scalars. The last step has no bias, for it would cancel against the atom alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = xavier(width, width // 2)
        self.hidden_bias = nn.Parameter(torch.zeros(width // 2))
        self.out = xavier(width // 2, 1)

    def forward(self, scalars: Tensor) -> Tensor:
        """(N,) from (N, F)."""
        hidden = silu(torch.addmm(self.hidden_bias, scalars, self.hidden))
        # No product of matrices: under autocast that would round energies to three digits.
        return (hidden * self.out.squeeze(1)).sum(1)


def xavier(*shape: int, fan: int | None = None) -> nn.Parameter:
    """Uniform weights of variance 2 / fan (Glorot & Bengio 2010), fan being fan-in plus fan-out of the whole linear map."""
    bound = math.sqrt(6.0 / (sum(shape[-2:]) if fan is None else fan))
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
