"""The third and fourth pass through a PaiNN layer: how a loss of energies and forces depends on the parameters.

See ``painn_layer.py`` for the passes and the names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvalchemi.models.painn_edges import EdgeBasis, Neighbours
from nvalchemi.models.painn_layer import Pass, Weights, dot


def adjoint_of_gradient(
    w: Weights, f: Pass, b: Pass, gx_: Tensor | None, radial_: Tensor, direction_: Tensor, edge: EdgeBasis, to: Neighbours
) -> tuple[Tensor, Pass]:
    """The loss's derivative with respect to what `gradient` was given, and to all that it read.

    Parameters
    ----------
    w, f, b
        Parameters, and what `forward` and `gradient` kept.
    gx_
        With respect to the gradient that `gradient` returned, None at the first layer.
    radial_, direction_
        With respect to ``g_radial`` (K, E) and to the sum of ``g_direction`` (3, E, 1).
    edge, to
        The edges.

    Returns
    -------
    tuple
        With respect to ``gy``, and the rest for `adjoint_of_forward`.
    """
    n, width = f.s.shape
    kinds, edges = w.filters.shape[0], radial_.shape[1]
    at_s, at_x, at_y, at_z = b.at
    out = Pass()
    lifted = torch.bmm(radial_.t().expand(kinds, edges, -1), w.filters)
    out.d_filters = torch.bmm(radial_.expand(kinds, -1, edges), b.g_filters)
    x_, y_, z_ = direction_.unbind(0)
    along_ = torch.mul(at_x, x_).addcmul_(at_y, y_).addcmul_(at_z, z_)
    m = at_s.new_empty(4, edges, width)
    ms, mv = m[0], m[1:]
    filters_ = torch.empty_like(b.g_filters)
    if f.first:
        l0, l1 = lifted.unbind(0)
        f0_, f1_ = filters_.unbind(0)
        back = torch.empty_like(filters_)
        back_p, back_q = back.unbind(0)
        f0_.zero_()
        torch.mul(f.q, along_, out=f1_)
        torch.mul(l0, f.p, out=ms)
        torch.mul(edge.direction, l1 * f.q, out=mv)
    else:
        l0, l1, l2 = lifted.unbind(0)
        f0_, f1_, f2_ = filters_.unbind(0)
        gs_, gv_ = gx_[0], gx_[1:]  # type: ignore[index]
        gh1_ = torch.mm(gs_, w.message_in)
        out.d_message_in = torch.mm(gs_.t(), b.gh1)
        ga1_ = gh1_ * f.a1.slope
        out.h1_ = gh1_.mul_(b.ga1).mul_(f.a1.bend())
        g_phi_ = torch.bmm(ga1_.expand(kinds, n, width), w.message_out)
        out.d_message_out = torch.bmm(ga1_.t().expand(kinds, width, n), b.g_phi)
        turned_ = g_phi_[2]
        g_carried_ = (gv_ * f.turn_in).addcmul_(turned_, f.v)
        out.turn_in_ = (gv_ * b.g_carried).sum(0)
        out.v_ = turned_ * b.g_carried
        p_, q_ = g_phi_[:2].index_select(1, to.senders).unbind(0)
        carried_ = g_carried_.index_select(1, to.senders)
        back = at_s.new_empty(5, edges, width)
        back_p, back_q = back[3], back[4]
        torch.mul(l0, f.p, out=ms).addcmul_(p_, f.f0)
        torch.mul(edge.direction, (l1 * f.q).addcmul_(q_, f.f1), out=mv)
        mv.addcmul_(f.carried, l2).addcmul_(carried_, f.f2)
        torch.mul(p_, at_s, out=f0_)
        torch.mul(f.q, along_, out=f1_).addcmul_(q_, b.along)
        dot(carried_.unbind(0), (at_x, at_y, at_z), out=f2_)
        torch.mul(b.at_v, l2, out=back[:3])
    mv.addcmul_(direction_, f.pulled)
    torch.mul(l0, at_s, out=back_p)
    torch.mul(l1, b.along, out=back_q).addcmul_(f.f1, along_)
    out.filters_, out.back, out.slots = filters_, back, (f0_, f1_, None if f.first else f2_, back_p, back_q)

    g_ = to.to_receivers(m)
    if gx_ is not None:
        g_.add_(gx_)
    s1_, v1_ = g_[0], g_[1:]
    flat = v1_.view(3 * n, width)
    g_left_, g_right_ = torch.mm(flat, w.vector_left).view(3, n, width), torch.mm(flat, w.vector_right).view(3, n, width)
    turned = flat.t()
    out.d_left, out.d_right = torch.mm(turned, b.flat_left), torch.mm(turned, b.flat_right)
    g_inner_ = (g_left_ * f.right).addcmul_(g_right_, f.left).sum(0)
    out.left_ = g_right_ * b.g_inner
    out.right_ = (g_left_ * b.g_inner).addcmul_(g_right_, b.per_norm)
    g_norm_ = (g_right_ * f.right).sum(0).div_(f.norm)
    out.less_norm_ = g_norm_ * b.per_norm
    g_both_ = torch.cat([s1_, g_norm_], 1)
    gh2_ = torch.mm(g_both_, w.mix_in)
    out.d_mix_in = torch.mm(g_both_.t(), b.gh2)
    ga2_ = gh2_ * f.a2.slope
    out.h2_ = gh2_.mul_(b.ga2).mul_(f.a2.bend())
    slots = torch.mm(ga2_, w.mix_out).view(n, -1, width).unbind(1)
    out.d_mix_out = torch.mm(ga2_.t(), b.g_mixed)
    out.gate_ = g_inner_ * b.gs
    out.inner_ = slots[1] * b.gs
    s1_.add_(slots[0]).addcmul_(g_inner_, f.gate).addcmul_(slots[1], f.inner)
    if b.gv is None:
        return s1_, out
    out.turn_ = (g_left_ * b.gv).sum(0)
    out.left_.addcmul_(b.gv, slots[2])
    v1_.addcmul_(g_left_, f.turn).addcmul_(f.left, slots[2])
    return g_, out


def adjoint_of_forward(
    w: Weights, f: Pass, a: Pass, y_: Tensor, edge: EdgeBasis, to: Neighbours
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss's derivative with respect to the features before the layer, and to its parameters.

    Parameters
    ----------
    w, f, a
        Parameters, what `forward` kept, and what `adjoint_of_gradient` gave (used up here).
    y_
        With respect to the features after the layer.
    edge, to
        The edges.

    Returns
    -------
    tuple
        With respect to the features before, and to the parameters in their order.
    """
    last = y_.ndim == 2
    n, width = y_.shape[-2:]
    kinds, edges = w.filters.shape[0], edge.radial.shape[1]
    s_ = y_ if last else y_[0]
    v_ = None if last else y_[1:]
    mixed_ = s_.new_empty(n, w.mix_out.shape[1])
    slots = mixed_.view(n, -1, width).unbind(1)
    slots[0].copy_(s_)
    torch.addcmul(a.gate_, s_, f.inner, out=slots[1])
    inner_ = a.inner_.addcmul_(s_, f.gate)
    left_ = a.left_.addcmul_(inner_, f.right)
    if v_ is not None:
        torch.add((v_ * f.left).sum(0), a.turn_, out=slots[2])
        left_.addcmul_(v_, f.turn)
    d_mix_out = a.d_mix_out.addmm_(f.a2.value.t(), mixed_)
    h2_ = a.h2_.addcmul_(torch.mm(mixed_, w.mix_out.t()), f.a2.slope)
    s1_, n_ = torch.mm(h2_, w.mix_in.t()).view(n, 2, width).unbind(1)
    d_mix_in = a.d_mix_in.addmm_(f.both.t(), h2_)
    right_ = a.right_.addcmul_(f.right, (n_ - a.less_norm_).div_(f.norm)).addcmul_(inner_, f.left)
    g = s_.new_empty(4, n, width)
    g0, gv = g[0], g[1:]
    torch.add(s_, s1_, out=g0)
    flat = gv.view(3 * n, width)
    left_, right_ = left_.view(3 * n, width), right_.view(3 * n, width)
    torch.mm(left_, w.vector_left.t(), out=flat)
    flat.addmm_(right_, w.vector_right.t())
    if v_ is not None:
        gv.add_(v_)
    turned = f.flat.t()
    d_left, d_right = a.d_left.addmm_(turned, left_), a.d_right.addmm_(turned, right_)

    at = g.index_select(1, to.receivers)
    at_s, at_x, at_y, at_z = at.unbind(0)
    x, y, z = edge.axes
    along = torch.mul(at_x, x).addcmul_(at_y, y).addcmul_(at_z, z)
    f0_, f1_, f2_, back_p, back_q = a.slots
    f0_.addcmul_(f.p, at_s)
    f1_.addcmul_(f.q, along)
    back_p.addcmul_(f.f0, at_s)
    back_q.addcmul_(f.f1, along)
    if not f.first:
        carried = f.carried.unbind(0)
        f2_.addcmul_(carried[0], at_x).addcmul_(carried[1], at_y).addcmul_(carried[2], at_z)
        a.back[:3].addcmul_(at[1:], f.f2)
    d_filters = a.d_filters.baddbmm_(edge.radial.expand(kinds, -1, edges), a.filters_)
    phi_ = to.to_senders(a.back)
    x_: Tensor | None = None
    if not f.first:
        carried_, slot = phi_[:3], phi_[5]
        x_ = torch.empty_like(g)
        torch.add(a.v_, gv, out=x_[1:]).addcmul_(carried_, f.turn_in)
        torch.add((carried_ * f.v).sum(0), a.turn_in_, out=slot)
        phi_ = phi_[3:]
    h1_ = torch.bmm(phi_, w.message_out.mT).sum(0).mul_(f.a1.slope)
    value = f.a1.value.t().expand(kinds, width, n)
    if f.first:
        d_message_out, d_message_in = torch.bmm(value, phi_), torch.mm(f.s.t(), h1_)
        x_ = torch.addmm(g0, h1_, w.message_in.t())
    else:
        h1_.add_(a.h1_)
        d_message_out, d_message_in = a.d_message_out.baddbmm_(value, phi_), a.d_message_in.addmm_(f.s.t(), h1_)
        torch.addmm(g0, h1_, w.message_in.t(), out=x_[0])  # type: ignore[index]
    assert x_ is not None
    gradients = (
        d_message_in, h1_.sum(0), d_message_out, phi_.sum(1, keepdim=True), d_filters,
        d_left, d_right, d_mix_in, h2_.sum(0), d_mix_out, mixed_.sum(0),
    )  # fmt: skip
    return x_, gradients
