"""The energy a x²/2 + b of the closed forms, and how a loss is compared with one."""

from __future__ import annotations

import torch
from torch import nn

from nvalchemi.models import EnergyModel

COUNT = 100_000


class Square(nn.Module):
    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a, dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(b, dtype=torch.float64))

    def forward(self, x):
        return 0.5 * self.a * x.flatten(1).square().sum(1) + self.b


class Quadratic(EnergyModel):
    """a |x|²/2 + b."""

    def __init__(self, a: float = 1.0, b: float = 0.3) -> None:
        super().__init__()
        self.net = Square(a, b)

    def forward(self, x):
        return self.net(x)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def standard_normal(dim: int = 1, count: int = COUNT, seed: int = 5) -> torch.Tensor:
    return torch.randn(count, dim, generator=seeded(seed), dtype=torch.float64)


def visited(loss, model):
    """Names of the parameters that the backward pass of ``loss`` visits, as a wrapper of distributed training counts them."""
    seen = set()
    for name, parameter in model.named_parameters():
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, name=name: seen.add(name))
    loss.backward()
    return seen


def assert_closed_form(make, a, loss, slope, *, x=None, errors=3.0, seed=0, slack=0.0, bias=0.0, **call):
    """``make(model)`` at ``a`` has the loss and dL/da of the closed form, within 3 standard errors of the samples' own spread.

    ``loss``, ``slope`` and ``bias`` are the closed forms of L, dL/da and dL/db; ``slack`` is what an estimate may be off by besides.
    dL/da of each sample comes from differences at equal noise, and the gradient that autograd gives must be its mean.
    """
    x = standard_normal() if x is None else x

    def per_sample(value):
        model = Quadratic(value)
        terms = make(model).terms(model, x, generator=seeded(seed), step=None, conditions=call).values
        present = [value for value in terms.values() if value is not None]
        return sum(value.flatten(1).mean(1) if value.ndim > 1 else value for value in present), model

    values, model = per_sample(a)
    values.mean().backward()
    values = values.detach()
    h = 1e-4
    slopes = (per_sample(a + h)[0] - per_sample(a - h)[0]).detach() / (2 * h)
    gradient = float(model.net.a.grad)
    assert abs(gradient - float(slopes.mean())) < 1e-5 * (1 + abs(gradient))
    count = len(x)
    for got, wanted, spread in ((float(values.mean()), loss, values), (gradient, slope, slopes)):
        allowed = errors * float(spread.std()) / count**0.5
        assert allowed < 0.05 * (1 + abs(wanted)), f"the test could not fail: {allowed}"
        assert abs(got - wanted) <= allowed + slack + 1e-9, f"{got} and {wanted}, {allowed / errors} a standard error"
    found = 0.0 if model.net.b.grad is None else float(model.net.b.grad)  # None: the loss does not depend on it
    assert abs(found - bias) < (5 * count**-0.5 if bias else 1e-9)
