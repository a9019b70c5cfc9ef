"""The four passes through a PaiNN layer, written out by hand; here the first two, in ``painn_adjoint.py`` the others.

Training on forces differentiates the energy twice. Left to autograd that is two thousand small operations a step, and on a CPU most
of the time goes into making and running its graph. Here the same four passes stand as plain tensor code:

1. `forward`: features of a layer from those of the layer before;
2. `gradient`: the gradient of the energy, from the layer's output to its input and to the edges;
3. `adjoint_of_gradient`: the derivative of a loss with respect to everything that `gradient` read, given that with respect to what
   it wrote; it runs from the first layer to the last;
4. `adjoint_of_forward`: the same of `forward`, from the last layer to the first, into which the third pass's results flow.

`PaiNNLayer.forward` in ``painn.py`` says the same as `forward` in a quarter of the lines, and autograd derives the rest from it: a test
holds the two against each other.

Shapes: N atoms, E edges, F features, K radial functions, P = 2 or 3 kinds of messages (scalar, direction, and but for the first layer
vector). Features are (4, N, F): scalars, then the three directions; (N, F) where there are only scalars, before the first layer and
after the last. A leading ``g`` in a name means the gradient of the energy, a trailing ``_`` the derivative of the loss.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvalchemi.models.painn_edges import EdgeBasis, Neighbours

NORM_EPS = 1e-8
"""Added under the root of a vector feature's norm, whose derivatives are finite then where the vector vanishes."""


class Weights(NamedTuple):
    """The parameters of a layer, in the order in which the module declares them."""

    message_in: Tensor
    message_in_bias: Tensor
    message_out: Tensor
    message_out_bias: Tensor
    filters: Tensor
    vector_left: Tensor
    vector_right: Tensor
    mix_in: Tensor
    mix_in_bias: Tensor
    mix_out: Tensor
    mix_out_bias: Tensor


class Pass(SimpleNamespace):
    """What one pass leaves to the next ones: a bag of tensors with names."""


class Activation:
    """``h * sigmoid(h)`` with its first and second derivative."""

    def __init__(self, h: Tensor) -> None:
        self.h = h
        self.gate = torch.sigmoid(h)
        self.value = h * self.gate
        self.rest = 1.0 - self.gate
        self.slope = torch.addcmul(self.gate, self.value, self.rest)

    def bend(self) -> Tensor:
        """Second derivative."""
        return self.h.sub(self.value, alpha=2).add_(2.0).mul_(self.gate).mul_(self.rest)


def forward(w: Weights, x: Tensor, edge: EdgeBasis, to: Neighbours, last: bool) -> tuple[Tensor, Pass]:
    """Features after the layer, and what the other passes need.

    Parameters
    ----------
    w
        The layer's parameters.
    x
        Features before it.
    edge, to
        The edges.
    last
        Make no vectors.
    """
    first = x.ndim == 2
    n, width = x.shape[-2:]
    kinds, edges = w.filters.shape[0], edge.radial.shape[1]
    s = x if first else x[0]
    a1 = Activation(torch.addmm(w.message_in_bias, s, w.message_in))
    phi = torch.baddbmm(w.message_out_bias, a1.value.expand(kinds, n, width), w.message_out)
    filters = torch.bmm(edge.radial.t().expand(kinds, edges, -1), w.filters)
    m = filters.new_empty(4, edges, width)
    mv = m[1:]
    v = turn_in = carried = f2 = None  # there are none of these in the first layer
    if first:
        p, q = phi.index_select(1, to.senders).unbind(0)
        f0, f1 = filters.unbind(0)
    else:
        p, q = phi[:2].index_select(1, to.senders).unbind(0)
        f0, f1, f2 = filters.unbind(0)
        v, turn_in = x[1:], phi[2]
        carried = (turn_in * v).index_select(1, to.senders)
    pulled = q * f1
    torch.mul(p, f0, out=m[0])
    torch.mul(edge.direction, pulled, out=mv)
    if carried is not None and f2 is not None:
        mv.addcmul_(carried, f2)
    state = to.to_receivers(m)
    s1, v1 = state[0], state[1:]
    if first:
        s1.add_(s)
    else:
        state.add_(x)
    flat = v1.view(3 * n, width)
    left, right = torch.mm(flat, w.vector_left).view(3, n, width), torch.mm(flat, w.vector_right).view(3, n, width)
    norm = (right * right).sum(0).add_(NORM_EPS).sqrt_()
    inner = (left * right).sum(0)
    both = torch.cat([s1, norm], 1)
    a2 = Activation(torch.addmm(w.mix_in_bias, both, w.mix_in))
    parts = torch.addmm(w.mix_out_bias, a2.value, w.mix_out).view(n, -1, width).unbind(1)
    gate, turn = parts[1], None
    if last:
        y = (s1 + parts[0]).addcmul_(gate, inner)
    else:
        turn = parts[2]
        y = torch.empty_like(state)
        torch.add(s1, parts[0], out=y[0]).addcmul_(gate, inner)
        torch.addcmul(v1, turn, left, out=y[1:])
    kept = Pass(
        first=first, s=s, v=v, a1=a1, turn_in=turn_in, p=p, q=q, f0=f0, f1=f1, f2=f2, pulled=pulled, carried=carried,
        flat=flat, left=left, right=right, norm=norm, inner=inner, both=both, a2=a2, gate=gate, turn=turn,
    )  # fmt: skip
    return y, kept


def gradient(w: Weights, f: Pass, gy: Tensor, edge: EdgeBasis, to: Neighbours, g_radial: Tensor, g_direction: Tensor) -> Pass:
    """Gradient with respect to the features before the layer; what belongs to the edges is added in place.

    Parameters
    ----------
    w, f
        Parameters, and what `forward` kept.
    gy
        Gradient with respect to the features after the layer.
    edge, to
        The edges.
    g_radial, g_direction
        (P, K, E) to be written, and (3, E, F), still to be summed over F, to be added to.

    Returns
    -------
    Pass
        What the other passes need, with the gradient as ``gx``: None at the first layer.
    """
    last = gy.ndim == 2
    n, width = gy.shape[-2:]
    edges = g_direction.shape[1]
    gs = gy if last else gy[0]
    gv = None if last else gy[1:]
    g_mixed = gs.new_empty(n, w.mix_out.shape[1])
    slots = g_mixed.view(n, -1, width).unbind(1)
    slots[0].copy_(gs)
    torch.mul(gs, f.inner, out=slots[1])
    g_inner = gs * f.gate
    g_left = g_inner * f.right
    if gv is not None:
        torch.sum(gv * f.left, 0, out=slots[2])
        g_left.addcmul_(gv, f.turn)
    ga2 = torch.mm(g_mixed, w.mix_out.t())
    gh2 = ga2 * f.a2.slope
    gs_both, gn = torch.mm(gh2, w.mix_in.t()).view(n, 2, width).unbind(1)
    per_norm = gn / f.norm
    g_right = (g_inner * f.left).addcmul_(f.right, per_norm)
    flat_left, flat_right = g_left.view(3 * n, width), g_right.view(3 * n, width)
    g = gs.new_empty(4, n, width)
    torch.add(gs, gs_both, out=g[0])
    gv1 = g[1:]
    flat = gv1.view(3 * n, width)
    torch.mm(flat_left, w.vector_left.t(), out=flat)
    flat.addmm_(flat_right, w.vector_right.t())
    if gv is not None:
        gv1.add_(gv)

    at = g.index_select(1, to.receivers)
    at_s, at_x, at_y, at_z = at.unbind(0)
    at_v = at[1:]
    x, y, z = edge.axes
    along = torch.mul(at_x, x).addcmul_(at_y, y).addcmul_(at_z, z)
    g_filters = at.new_empty(len(w.filters), edges, width)
    to_filters = g_filters.unbind(0)
    torch.mul(f.p, at_s, out=to_filters[0])
    torch.mul(f.q, along, out=to_filters[1])
    g_direction.addcmul_(at_v, f.pulled)
    kept = Pass(
        gx=None, gs=gs, gv=gv, g_mixed=g_mixed, g_inner=g_inner, g_left=g_left, g_right=g_right,
        flat_left=flat_left, flat_right=flat_right, ga2=ga2, gh2=gh2, per_norm=per_norm,
        at=(at_s, at_x, at_y, at_z), at_v=at_v, along=along, g_filters=g_filters,
    )  # fmt: skip
    if not f.first:
        dot(f.carried.unbind(0), (at_x, at_y, at_z), out=to_filters[2])
        back = at.new_empty(5, edges, width)
        torch.mul(at_v, f.f2, out=back[:3])
        torch.mul(f.f0, at_s, out=back[3])
        torch.mul(f.f1, along, out=back[4])
        g_sent = to.to_senders(back)
        g_carried, g_phi = g_sent[:3], g_sent[3:]
        torch.sum(g_carried * f.v, 0, out=g_sent[5])
        ga1 = torch.bmm(g_phi, w.message_out.mT).sum(0)
        gh1 = ga1 * f.a1.slope
        kept.g_carried, kept.g_phi, kept.ga1, kept.gh1 = g_carried, g_phi, ga1, gh1
        kept.gx = torch.empty_like(g)
        torch.addmm(g[0], gh1, w.message_in.t(), out=kept.gx[0])
        torch.addcmul(gv1, g_carried, f.turn_in, out=kept.gx[1:])
    torch.bmm(w.filters, g_filters.mT, out=g_radial)
    return kept


def dot(a: Any, b: Any, out: Tensor) -> Tensor:
    """Scalar products of two triples, written to ``out``."""
    return torch.mul(a[0], b[0], out=out).addcmul_(a[1], b[1]).addcmul_(a[2], b[2])
