"""PaiNN's energies together with their gradient, as one operation that can be differentiated once more."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nvalchemi.models import painn_layer
from nvalchemi.models.painn_layer import Neighbours, Pass, Weights

PER_LAYER = len(Weights._fields)


class EnergyAndGradient(Function):
    """Per-atom energies and the gradient of their sum with respect to the edges' vectors.

    One backward pass goes through both, to the parameters; vectors get none. From outside this is an operation of first order, so the
    wrappers of distributed training need to know nothing of second derivatives, and every parameter gets a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        cutoff: float,
        rows: Tensor,
        kind: Tensor,
        vectors: Tensor,
        edge_index: Tensor,
        wave: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Energies (N,) and gradient (E, 3).

        Parameters
        ----------
        ctx
            Autograd's.
        cutoff
            Å.
        rows, kind
            Rows of the embedding, of the N atoms and then of one atom of each kind for itself; the kind of each atom.
        vectors, edge_index
            (E, 3) and (2, E).
        wave
            (K,) wave numbers of the radial functions.
        *parameters
            Embedding, layers, readout.
        """
        embedding, layers, hidden, hidden_bias, out = split(parameters)
        ends = range(len(layers))
        to = Neighbours(edge_index, rows.shape[0])
        edge = edge_basis(vectors, wave, cutoff)
        s, v = embedding.index_select(0, rows), None
        forwards: list[Pass] = []
        for i in ends:
            s, v, kept = painn_layer.forward(layers[i], s, v, edge.radial, edge.direction, to, i == ends[-1])
            forwards.append(kept)
        h = torch.addmm(hidden_bias, s, hidden)
        a = torch.nn.functional.silu(h)
        energies = torch.mm(a, out).squeeze(1)

        # Every atom's energy counts once. An atom by itself has no edges, so what it counts does not matter here.
        gh = torch.ops.aten.silu_backward(out.t().expand_as(h), h)
        gs, gv = torch.mm(gh, hidden.t()), None
        g_radial = torch.zeros_like(edge.radial)
        g_direction = vectors.new_zeros(3, vectors.shape[0], s.shape[1])
        gradients: list[Pass] = []
        for i in reversed(ends):
            gs, gv, kept = painn_layer.gradient(layers[i], forwards[i], gs, gv, edge.direction, to, g_radial, g_direction)
            gradients.append(kept)
        atoms = kind.shape[0]
        ctx.save_for_backward(rows, kind, *parameters)
        if any(ctx.needs_input_grad):
            ctx.kept = (edge, to, forwards, gradients[::-1], Pass(s=s, h=h, a=a, gh=gh))
        return energies[:atoms] - energies[atoms:].index_select(0, kind), edge.pull_back(
            g_radial, g_direction.sum(2, keepdim=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, energies_: Tensor, gradient_: Tensor) -> tuple[Tensor | None, ...]:
        """Give the loss's derivative with respect to the parameters."""
        rows, kind, *parameters = ctx.saved_tensors
        embedding, layers, hidden, _, out = split(parameters)
        edge, to, forwards, gradients, read = ctx.kept
        radial_, direction_ = edge.push_forward(gradient_)
        gs_, gv_ = None, None
        adjoints: list[Pass] = []
        for w, f, b in zip(layers, forwards, gradients, strict=True):
            gs_, gv_, adjoint = painn_layer.adjoint_of_gradient(w, f, b, gs_, gv_, radial_, edge.direction, direction_, to)
            adjoints.append(adjoint)
        assert gs_ is not None
        gh_ = torch.mm(gs_, hidden)
        d_hidden = torch.mm(gs_.t(), read.gh)
        d_out = torch.ops.aten.silu_backward(gh_, read.h).sum(0).unsqueeze(1)
        h_ = gh_.mul_(out.t()).mul_(painn_layer.silu_second(read.h, read.a))

        alone_ = energies_.new_zeros(rows.shape[0] - kind.shape[0]).index_add_(0, kind, energies_, alpha=-1)
        all_ = torch.cat([energies_, alone_]).unsqueeze(1)
        d_out.addmm_(read.a.t(), all_)
        h_.add_(torch.ops.aten.silu_backward(torch.mm(all_, out.t()), read.h))
        d_hidden.addmm_(read.s.t(), h_)
        s_, v_ = torch.mm(h_, hidden.t()), None
        result: list[list[Tensor]] = []
        for w, f, adjoint in zip(reversed(layers), reversed(forwards), reversed(adjoints), strict=True):
            s_, v_, found = painn_layer.adjoint_of_forward(w, f, adjoint, s_, v_, edge.radial, edge.direction, to)
            result.append(found)
        d_embedding = torch.zeros_like(embedding).index_add_(0, rows, s_)
        flat = [g for found in reversed(result) for g in found]
        return (None, None, None, None, None, None, d_embedding, *flat, d_hidden, h_.sum(0), d_out)


class edge_basis:  # noqa: N801
    """Radial functions (K, E) and directions (3, E, 1) of vectors (E, 3), and how derivatives pass through them."""

    def __init__(self, vectors: Tensor, wave: Tensor, cutoff: float) -> None:
        length = vectors.square().sum(1).sqrt_()
        self.inverse = length.reciprocal()
        step = math.pi / cutoff
        inside = (length < cutoff).to(length.dtype)
        fade = torch.cos(length * step).add_(1.0).mul_(0.5 * inside).mul_(self.inverse)
        slope = torch.sin(length * step).mul_(-0.5 * step * inside).sub_(fade).mul_(self.inverse)
        phase = torch.outer(wave, length)
        sine = torch.sin(phase)
        self.radial = sine * fade
        self.slopes = (torch.cos(phase) * fade).mul_(wave.unsqueeze(1)).addcmul_(sine, slope)
        self.unit = vectors * self.inverse.unsqueeze(1)
        self.direction = self.unit.t().contiguous().unsqueeze(2)

    def pull_back(self, g_radial: Tensor, g_direction: Tensor) -> Tensor:
        """Gradient with respect to the vectors (E, 3) from that with respect to radial functions and directions."""
        g = g_direction.squeeze(2).t()
        along = (g_radial * self.slopes).sum(0).addcmul_((g * self.unit).sum(1), self.inverse, value=-1)
        return (g * self.inverse.unsqueeze(1)).addcmul_(self.unit, along.unsqueeze(1))

    def push_forward(self, g_: Tensor) -> tuple[Tensor, Tensor]:
        """Adjoint of `pull_back`: (K, E) and (3, E, 1) from (E, 3)."""
        along = (g_ * self.unit).sum(1)
        across = (g_ - self.unit * along.unsqueeze(1)).mul_(self.inverse.unsqueeze(1))
        return self.slopes * along, across.t().contiguous().unsqueeze(2)


def split(parameters: Any) -> tuple[Tensor, list[Weights], Tensor, Tensor, Tensor]:
    """Embedding, layers and the readout's three from the flat list of parameters."""
    layers = [Weights(*parameters[i : i + PER_LAYER]) for i in range(1, len(parameters) - 3, PER_LAYER)]
    return parameters[0], layers, *parameters[-3:]  # type: ignore[return-value]
