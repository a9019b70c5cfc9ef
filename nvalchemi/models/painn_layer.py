"""The four passes through a PaiNN layer, written out by hand.

Training on forces differentiates the energy twice. Left to autograd that is about two thousand small operations a step, and on a CPU
most of the time goes into making and running its graph. Here the same four passes stand as plain tensor code:

1. `forward`: features of a layer from those of the layer before;
2. `gradient`: the gradient of the energy, from the layer's output to its input and to the edges;
3. `adjoint_of_gradient`: the derivative of a loss with respect to everything that `gradient` read, given that with respect to what
   it wrote; it runs from the first layer to the last;
4. `adjoint_of_forward`: the same of `forward`, from the last layer to the first, into which the third pass's results flow.

`PaiNNLayer.forward` in ``painn.py`` says the same as `forward` in a quarter of the lines, and autograd derives the rest from it: a test
holds the two against each other.

Shapes: N atoms, E edges, F features, K radial functions, P = 2 or 3 kinds of messages (scalar, direction, and but for the first layer
vector). Direction-first layout: (3, N, F). A trailing ``_`` in a name means the derivative of the loss with respect to that quantity;
a leading ``g`` the derivative of the energy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

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


class Neighbours:
    """Where messages come from and go to, prepared for sums over the edges of an atom.

    Parameters
    ----------
    edge_index
        (2, E): neighbours above centres, sorted by centre.
    n
        Number of atoms.
    """

    def __init__(self, edge_index: Tensor, n: int) -> None:
        self.senders, self.receivers = edge_index[0], edge_index[1]
        self.n = n
        edges = self.senders.shape[0]
        device = edge_index.device
        order = torch.argsort(self.senders, stable=True)
        starts = torch.searchsorted(
            torch.stack([self.receivers, self.senders.index_select(0, order)]), torch.arange(n, device=device).repeat(2, 1)
        )
        blocks = torch.arange(0, 6 * edges, max(edges, 1), device=device)[:6].unsqueeze(1)
        # Five blocks of E rows summed into five blocks of N: one call for scalars, messages and three directions.
        self._in_order = torch.arange(5 * edges, device=device)
        self._by_sender = (blocks[:5] + order).flatten()
        self._starts = (blocks + starts.unsqueeze(1)).flatten(1) if edges else starts.new_zeros(2, 6 * n)

    def to_receivers(self, x: Tensor) -> Tensor:
        """Sums (C, N, F) of rows (C, E, F) over the edges of each centre."""
        return self._sum(x, self._in_order, self._starts[0])

    def to_senders(self, x: Tensor) -> Tensor:
        """Sums (C, N, F) of rows (C, E, F) over the edges of each neighbour."""
        return self._sum(x, self._by_sender, self._starts[1])

    def _sum(self, x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
        blocks, edges, width = x.shape
        if edges == 0:
            return x.new_zeros(blocks, self.n, width)
        rows = torch.embedding_bag(
            x.view(blocks * edges, width), order[: blocks * edges], starts[: blocks * self.n + 1], include_last_offset=True
        )
        return rows[0].view(blocks, self.n, width)


class Pass:
    """What one pass leaves to the next ones: a bag of tensors with names."""

    def __init__(self, **tensors: Any) -> None:
        self.__dict__.update(tensors)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def forward(
    w: Weights, s: Tensor, v: Tensor | None, radial: Tensor, direction: Tensor, to: Neighbours, last: bool
) -> tuple[Tensor, Tensor | None, Pass]:
    """Scalars (N, F) and vectors (3, N, F) after the layer, and what the other passes need.

    Parameters
    ----------
    w
        The layer's parameters.
    s, v
        Features before it; no vectors before the first.
    radial, direction
        (K, E) and (3, E, 1).
    to
        The neighbours.
    last
        Make no vectors.
    """
    n, width = s.shape
    kinds, edges = w.filters.shape[0], radial.shape[1]
    h1 = torch.addmm(w.message_in_bias, s, w.message_in)
    a1 = torch.nn.functional.silu(h1)
    phi = torch.baddbmm(w.message_out_bias, a1.expand(kinds, n, width), w.message_out)
    filters = torch.bmm(radial.t().expand(kinds, edges, -1), w.filters)
    sent = phi[:2].index_select(1, to.senders)
    pulled = sent[1] * filters[1]
    m = filters.new_empty(4, edges, width)
    torch.mul(sent[0], filters[0], out=m[0])
    torch.mul(direction, pulled, out=m[1:])
    carried = None
    if v is not None:
        carried = (phi[2] * v).index_select(1, to.senders)
        m[1:].addcmul_(carried, filters[2])
    state = to.to_receivers(m)
    s1, v1 = state[0].add_(s), state[1:]
    if v is not None:
        v1.add_(v)
    flat = v1.view(3 * n, width)
    left, right = torch.mm(flat, w.vector_left).view(3, n, width), torch.mm(flat, w.vector_right).view(3, n, width)
    norm = (right * right).sum(0).add_(NORM_EPS).sqrt_()
    inner = (left * right).sum(0)
    both = torch.cat([s1, norm], 1)
    h2 = torch.addmm(w.mix_in_bias, both, w.mix_in)
    a2 = torch.nn.functional.silu(h2)
    mixed = torch.addmm(w.mix_out_bias, a2, w.mix_out)
    gate = mixed[:, width : 2 * width]
    s2 = (s1 + mixed[:, :width]).addcmul_(gate, inner)
    turn = None if last else mixed[:, 2 * width :]
    v2 = None if turn is None else torch.addcmul(v1, turn, left)
    kept = Pass(
        s=s, v=v, h1=h1, a1=a1, phi=phi, filters=filters, sent=sent, pulled=pulled, carried=carried,
        flat=flat, left=left, right=right, norm=norm, inner=inner, both=both, h2=h2, a2=a2, gate=gate, turn=turn,
    )  # fmt: skip
    return s2, v2, kept


def gradient(
    w: Weights, f: Pass, gs: Tensor, gv: Tensor | None, direction: Tensor, to: Neighbours, g_radial: Tensor, g_direction: Tensor
) -> tuple[Tensor | None, Tensor | None, Pass]:
    """Gradient with respect to the features before the layer; what belongs to the edges is added in place.

    Parameters
    ----------
    w, f
        Parameters, and what `forward` kept.
    gs, gv
        Gradient with respect to the features after the layer, gv None of the last.
    direction, to
        As in `forward`.
    g_radial, g_direction
        (K, E), and (3, E, F) still to be summed over F; changed in place.
    """
    n, width = gs.shape
    edges = direction.shape[1]
    gy = gs.new_empty(n, w.mix_out.shape[1])
    gy[:, :width].copy_(gs)
    torch.mul(gs, f.inner, out=gy[:, width : 2 * width])
    g_inner = gs * f.gate
    g_left = g_inner * f.right
    if gv is not None:
        torch.sum(gv * f.left, 0, out=gy[:, 2 * width :])
        g_left.addcmul_(gv, f.turn)
    ga2 = torch.mm(gy, w.mix_out.t())
    gh2 = torch.ops.aten.silu_backward(ga2, f.h2)
    g_both = torch.mm(gh2, w.mix_in.t())
    per_norm = g_both[:, width:] / f.norm
    g_right = (g_inner * f.left).addcmul_(f.right, per_norm)
    g = gs.new_empty(4, n, width)
    torch.add(gs, g_both[:, :width], out=g[0])
    flat = g[1:].view(3 * n, width)
    torch.mm(g_left.view(3 * n, width), w.vector_left.t(), out=flat)
    flat.addmm_(g_right.view(3 * n, width), w.vector_right.t())
    if gv is not None:
        g[1:].add_(gv)

    at = g.index_select(1, to.receivers)
    along = torch.mul(at[1], direction[0]).addcmul_(at[2], direction[1]).addcmul_(at[3], direction[2])
    g_filters = torch.empty_like(f.filters)
    torch.mul(f.sent[0], at[0], out=g_filters[0])
    torch.mul(f.sent[1], along, out=g_filters[1])
    if f.v is not None:
        dot(f.carried, at[1:], out=g_filters[2])
    for k in range(len(w.filters)):
        g_radial.addmm_(w.filters[k], g_filters[k].t())
    g_direction.addcmul_(at[1:], f.pulled)
    kept = Pass(
        gs=gs, gv=gv, gy=gy, g_inner=g_inner, g_left=g_left, g_right=g_right, ga2=ga2, gh2=gh2, per_norm=per_norm,
        at=at, along=along, g_filters=g_filters,
    )  # fmt: skip
    if f.v is None:
        return None, None, kept
    back = f.filters.new_empty(5, edges, width)
    torch.mul(f.filters[0], at[0], out=back[0])
    torch.mul(f.filters[1], along, out=back[1])
    torch.mul(at[1:], f.filters[2], out=back[2:])
    g_sent = to.to_senders(back)
    g_phi = [g_sent[0], g_sent[1], (g_sent[2:] * f.v).sum(0)]
    ga1 = torch.mm(g_phi[0], w.message_out[0].t()).addmm_(g_phi[1], w.message_out[1].t()).addmm_(g_phi[2], w.message_out[2].t())
    gh1 = torch.ops.aten.silu_backward(ga1, f.h1)
    kept.g_carried, kept.g_phi, kept.ga1, kept.gh1 = g_sent[2:], g_phi, ga1, gh1
    return torch.addmm(g[0], gh1, w.message_in.t()), torch.addcmul(g[1:], g_sent[2:], f.phi[2]), kept


def adjoint_of_gradient(
    w: Weights,
    f: Pass,
    b: Pass,
    gs_: Tensor | None,
    gv_: Tensor | None,
    radial_: Tensor,
    direction: Tensor,
    direction_: Tensor,
    to: Neighbours,
) -> tuple[Tensor, Tensor | None, Pass]:
    """The loss's derivative with respect to what `gradient` was given, and to all that it read.

    Parameters
    ----------
    w, f, b
        Parameters, and what `forward` and `gradient` kept.
    gs_, gv_
        With respect to what `gradient` returned, None at the first layer.
    radial_, direction_
        With respect to ``g_radial`` (K, E) and the sum of ``g_direction`` (3, E, 1).
    direction, to
        As in `forward`.

    Returns
    -------
    tuple
        With respect to gs and gv, and the rest for `adjoint_of_forward`.
    """
    n, width = f.s.shape
    kinds, edges = f.filters.shape[0], f.filters.shape[1]
    out = Pass(h1_=None, turn_=None, v_=None, phi2_=None, d_message_in=None, d_message_out=None)
    lifted = torch.bmm(radial_.t().expand(kinds, edges, -1), w.filters)
    out.d_filters = torch.bmm(radial_.expand(kinds, -1, edges), b.g_filters)
    along_ = torch.mul(b.at[1], direction_[0]).addcmul_(b.at[2], direction_[1]).addcmul_(b.at[3], direction_[2])
    m = f.filters.new_empty(4, edges, width)
    filters_ = torch.empty_like(f.filters)
    back = f.filters.new_empty(2 if f.v is None else 5, edges, width)
    turned = lifted[1] * f.sent[1]
    torch.mul(lifted[0], f.sent[0], out=m[0])
    torch.mul(f.sent[1], along_, out=filters_[1])
    torch.mul(lifted[0], b.at[0], out=back[0])
    torch.mul(lifted[1], b.along, out=back[1]).addcmul_(f.filters[1], along_)
    if f.v is None:
        filters_[0].zero_()
        torch.mul(direction, turned, out=m[1:])
    else:
        gh1_ = torch.mm(gs_, w.message_in)
        out.d_message_in = torch.mm(gs_.t(), b.gh1)
        ga1_ = torch.ops.aten.silu_backward(gh1_, f.h1)
        out.h1_ = gh1_.mul_(b.ga1).mul_(silu_second(f.h1, f.a1))
        g_phi_ = torch.bmm(ga1_.expand(kinds, n, width), w.message_out)
        out.d_message_out = torch.stack([torch.mm(ga1_.t(), g) for g in b.g_phi])
        g_carried_ = (gv_ * f.phi[2]).addcmul_(g_phi_[2], f.v)
        out.phi2_ = (gv_ * b.g_carried).sum(0)
        out.v_ = g_phi_[2] * b.g_carried
        sent_, carried_ = g_phi_[:2].index_select(1, to.senders), g_carried_.index_select(1, to.senders)
        turned.addcmul_(sent_[1], f.filters[1])
        m[0].addcmul_(sent_[0], f.filters[0])
        torch.mul(direction, turned, out=m[1:])
        m[1:].addcmul_(f.carried, lifted[2]).addcmul_(carried_, f.filters[2])
        torch.mul(sent_[0], b.at[0], out=filters_[0])
        filters_[1].addcmul_(sent_[1], b.along)
        dot(carried_, b.at[1:], out=filters_[2])
        torch.mul(b.at[1:], lifted[2], out=back[2:])
    m[1:].addcmul_(direction_, f.pulled)
    out.filters_, out.back = filters_, back

    g_ = to.to_receivers(m)
    if gs_ is not None:
        g_[0].add_(gs_)
        g_[1:].add_(gv_)
    flat = g_[1:].view(3 * n, width)
    g_left_, g_right_ = torch.mm(flat, w.vector_left).view(3, n, width), torch.mm(flat, w.vector_right).view(3, n, width)
    turned_around = flat.t()
    out.d_left = torch.mm(turned_around, b.g_left.view(3 * n, width))
    out.d_right = torch.mm(turned_around, b.g_right.view(3 * n, width))
    g_inner_ = (g_left_ * f.right).addcmul_(g_right_, f.left).sum(0)
    out.left_ = g_right_ * b.g_inner
    out.right_ = (g_left_ * b.g_inner).addcmul_(g_right_, b.per_norm)
    g_norm_ = (g_right_ * f.right).sum(0).div_(f.norm)
    out.norm_ = (g_norm_ * b.per_norm).neg_()
    g_both_ = torch.cat([g_[0], g_norm_], 1)
    gh2_ = torch.mm(g_both_, w.mix_in)
    out.d_mix_in = torch.mm(g_both_.t(), b.gh2)
    ga2_ = torch.ops.aten.silu_backward(gh2_, f.h2)
    out.h2_ = gh2_.mul_(b.ga2).mul_(silu_second(f.h2, f.a2))
    gy_ = torch.mm(ga2_, w.mix_out)
    out.d_mix_out = torch.mm(ga2_.t(), b.gy)
    gate_slot = gy_[:, width : 2 * width]
    out.gate_ = g_inner_ * b.gs
    out.inner_ = gate_slot * b.gs
    new_gs = g_[0].add_(gy_[:, :width]).addcmul_(g_inner_, f.gate).addcmul_(gate_slot, f.inner)
    if b.gv is None:
        return new_gs, None, out
    turn_slot = gy_[:, 2 * width :]
    out.turn_ = (g_left_ * b.gv).sum(0)
    out.left_.addcmul_(b.gv, turn_slot)
    return new_gs, g_[1:].addcmul_(g_left_, f.turn).addcmul_(f.left, turn_slot), out


def adjoint_of_forward(
    w: Weights, f: Pass, a: Pass, s_: Tensor, v_: Tensor | None, radial: Tensor, direction: Tensor, to: Neighbours
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """The loss's derivative with respect to the features before the layer, and to its parameters.

    Parameters
    ----------
    w, f, a
        Parameters, what `forward` kept, and what `adjoint_of_gradient` gave (used up here).
    s_, v_
        With respect to the features after the layer, v_ None at the last.
    radial, direction, to
        As in `forward`.

    Returns
    -------
    tuple
        With respect to s and v (None at the first layer), and to the parameters in their order.
    """
    n, width = s_.shape
    y_ = s_.new_empty(n, w.mix_out.shape[1])
    y_[:, :width].copy_(s_)
    torch.addcmul(a.gate_, s_, f.inner, out=y_[:, width : 2 * width])
    inner_ = a.inner_.addcmul_(s_, f.gate)
    left_ = a.left_.addcmul_(inner_, f.right)
    if v_ is not None:
        torch.add((v_ * f.left).sum(0), a.turn_, out=y_[:, 2 * width :])
        left_.addcmul_(v_, f.turn)
    d_mix_out = a.d_mix_out.addmm_(f.a2.t(), y_)
    h2_ = a.h2_.add_(torch.ops.aten.silu_backward(torch.mm(y_, w.mix_out.t()), f.h2))
    both_ = torch.mm(h2_, w.mix_in.t())
    d_mix_in = a.d_mix_in.addmm_(f.both.t(), h2_)
    norm_ = a.norm_.add_(both_[:, width:]).div_(f.norm)
    right_ = a.right_.addcmul_(f.right, norm_).addcmul_(inner_, f.left)
    g = s_.new_empty(4, n, width)
    torch.add(s_, both_[:, :width], out=g[0])
    flat = g[1:].view(3 * n, width)
    left_, right_ = left_.view(3 * n, width), right_.view(3 * n, width)
    torch.mm(left_, w.vector_left.t(), out=flat)
    flat.addmm_(right_, w.vector_right.t())
    if v_ is not None:
        g[1:].add_(v_)
    turned_around = f.flat.t()
    d_left, d_right = a.d_left.addmm_(turned_around, left_), a.d_right.addmm_(turned_around, right_)

    at = g.index_select(1, to.receivers)
    along = torch.mul(at[1], direction[0]).addcmul_(at[2], direction[1]).addcmul_(at[3], direction[2])
    a.filters_[0].addcmul_(f.sent[0], at[0])
    a.filters_[1].addcmul_(f.sent[1], along)
    a.back[0].addcmul_(f.filters[0], at[0])
    a.back[1].addcmul_(f.filters[1], along)
    if f.v is not None:
        for c in range(3):
            a.filters_[2].addcmul_(f.carried[c], at[1 + c])
        a.back[2:].addcmul_(at[1:], f.filters[2])
    kinds, edges = f.filters.shape[0], f.filters.shape[1]
    d_filters = a.d_filters.baddbmm_(radial.expand(kinds, -1, edges), a.filters_)
    sent_ = to.to_senders(a.back)
    phi_ = sent_
    before: Tensor | None = None
    if f.v is not None:
        carried_ = sent_[2:]
        before = torch.add(a.v_, g[1:]).addcmul_(carried_, f.phi[2])
        phi_ = torch.cat([sent_[:2], a.phi2_.add_((carried_ * f.v).sum(0)).unsqueeze(0)])
    a1_ = torch.mm(phi_[0], w.message_out[0].t())
    for k in range(1, kinds):
        a1_.addmm_(phi_[k], w.message_out[k].t())
    d_message_out = torch.bmm(f.a1.t().expand(kinds, width, n), phi_)
    if a.d_message_out is not None:
        d_message_out.add_(a.d_message_out)
    h1_ = torch.ops.aten.silu_backward(a1_, f.h1)
    if a.h1_ is not None:
        h1_.add_(a.h1_)
    d_message_in = torch.mm(f.s.t(), h1_)
    if a.d_message_in is not None:
        d_message_in.add_(a.d_message_in)
    gradients = [
        d_message_in, h1_.sum(0), d_message_out, phi_.sum(1, keepdim=True), d_filters,
        d_left, d_right, d_mix_in, h2_.sum(0), d_mix_out, y_.sum(0),
    ]  # fmt: skip
    return torch.addmm(g[0], h1_, w.message_in.t()), before, gradients


def dot(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Scalar products over the leading axis of length 3, written to ``out``."""
    return torch.mul(a[0], b[0], out=out).addcmul_(a[1], b[1]).addcmul_(a[2], b[2])


def silu_second(h: Tensor, a: Tensor) -> Tensor:
    """Second derivative of ``a = h * sigmoid(h)``."""
    gate = torch.sigmoid(h)
    return (h - 2.0 * a).add_(2.0).mul_(gate).mul_(1.0 - gate)
