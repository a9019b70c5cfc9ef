"""PaiNN's energies together with their gradient, as one operation that can be differentiated once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nvalchemi.models import painn_adjoint, painn_layer
from nvalchemi.models.painn_edges import EdgeBasis, Neighbours
from nvalchemi.models.painn_layer import Activation, Pass, Weights

PER_LAYER = len(Weights._fields)


class EnergyAndGradient(Function):
    """Per-atom energies and the gradient of their sum with respect to the edges' vectors.

    One backward pass goes through both, to the parameters; vectors get none. From outside this is an operation of first order, so the
    wrappers of distributed training need to know nothing of second derivatives, and every parameter gets a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, cutoff: float, n_rbf: int, rows: Tensor, kind: Tensor, vectors: Tensor, edge_index: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Energies (N,) and gradient (E, 3).

        Parameters
        ----------
        ctx
            Autograd's.
        cutoff, n_rbf
            Å, and how many radial functions.
        rows, kind
            Rows of the embedding, of the N atoms and then of one atom of each kind for itself; the kind of each atom.
        vectors, edge_index
            (E, 3) and (2, E).
        *parameters
            Embedding, layers, readout.
        """
        embedding, layers, hidden, hidden_bias, out = split(parameters)
        to = Neighbours(edge_index, rows.shape[0])
        edge = EdgeBasis(vectors, n_rbf, cutoff)
        x = embedding.index_select(0, rows)
        forwards: list[Pass] = []
        for w in layers:
            x, kept = painn_layer.forward(w, x, edge, to, w is layers[-1])
            forwards.append(kept)
        a = Activation(torch.addmm(hidden_bias, x, hidden))
        energies = torch.mm(a.value, out).squeeze(1)

        # Every atom's energy counts once. An atom by itself has no edges, so what it counts does not matter here.
        gh = a.slope * out.t()
        g: Tensor = torch.mm(gh, hidden.t())
        g_radial = vectors.new_empty(sum(len(w.filters) for w in layers), *edge.radial.shape)
        g_direction = vectors.new_zeros(3, vectors.shape[0], x.shape[1])
        gradients: list[Pass] = []
        pieces = g_radial.split([len(w.filters) for w in layers])
        for w, f, piece in zip(reversed(layers), reversed(forwards), reversed(pieces), strict=True):
            kept = painn_layer.gradient(w, f, g, edge, to, piece, g_direction)
            g = kept.gx
            gradients.append(kept)
        atoms = kind.shape[0]
        ctx.save_for_backward(rows, kind, *parameters)
        if any(ctx.needs_input_grad):
            ctx.kept = (edge, to, forwards, gradients[::-1], x, a, gh)
        own, alone = energies[:atoms], energies[atoms:]
        return own - alone.index_select(0, kind), edge.pull_back(g_radial.sum(0), g_direction.sum(2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, energies_: Tensor, gradient_: Tensor) -> tuple[Tensor | None, ...]:
        """Give the loss's derivative with respect to the parameters."""
        rows, kind, *parameters = ctx.saved_tensors
        embedding, layers, hidden, _, out = split(parameters)
        edge, to, forwards, gradients, x, a, gh = ctx.kept
        radial_, direction_ = edge.push_forward(gradient_)
        g_: Tensor | None = None
        adjoints: list[Pass] = []
        for w, f, b in zip(layers, forwards, gradients, strict=True):
            g_, adjoint = painn_adjoint.adjoint_of_gradient(w, f, b, g_, radial_, direction_, edge, to)
            adjoints.append(adjoint)
        assert g_ is not None
        gh_ = torch.mm(g_, hidden)
        d_hidden = torch.mm(g_.t(), gh)
        d_out = (gh_ * a.slope).sum(0).unsqueeze(1)
        h_ = gh_.mul_(out.t()).mul_(a.bend())

        alone_ = energies_.new_zeros(rows.shape[0] - kind.shape[0]).index_add_(0, kind, energies_, alpha=-1)
        all_ = torch.cat([energies_, alone_]).unsqueeze(1)
        d_out.addmm_(a.value.t(), all_)
        h_.addcmul_(torch.mm(all_, out.t()), a.slope)
        d_hidden.addmm_(x.t(), h_)
        x_ = torch.mm(h_, hidden.t())
        found: list[tuple[Tensor, ...]] = []
        for w, f, adjoint in zip(reversed(layers), reversed(forwards), reversed(adjoints), strict=True):
            x_, gradients_ = painn_adjoint.adjoint_of_forward(w, f, adjoint, x_, edge, to)
            found.append(gradients_)
        d_embedding = torch.zeros_like(embedding).index_add_(0, rows, x_)
        flat = [g for of_layer in reversed(found) for g in of_layer]
        return (None, None, None, None, None, None, d_embedding, *flat, d_hidden, h_.sum(0), d_out)


def split(parameters: Sequence[Tensor]) -> tuple[Tensor, list[Weights], Tensor, Tensor, Tensor]:
    """Embedding, layers and the readout's three from the flat list of parameters."""
    layers = [Weights(*parameters[i : i + PER_LAYER]) for i in range(1, len(parameters) - 3, PER_LAYER)]
    return parameters[0], layers, parameters[-3], parameters[-2], parameters[-1]
