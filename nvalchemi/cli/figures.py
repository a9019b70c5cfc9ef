"""The pictures of a run: loss, validation errors, learning rate, and predictions against labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nvalchemi.cli.quantities import MILLI, QUANTITIES

if TYPE_CHECKING:  # matplotlib makes folders and draws random numbers when imported: that waits until something is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[Mapping[str, Any]]

# Okabe and Ito's colours, told apart by colour-blind readers as well.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#9aa0a6"
_PART_COLOURS = {"energy": ORANGE, "forces": GREEN, "stress": RED}


def loss_figure(train: Records, validation: Records) -> Figure:
    """The training and validation loss, and the training loss's parts, over the optimizer steps."""
    parts = [p for p in _names(train, "loss/") if any(_finite(r.get(p)) for r in train)]
    columns = 2 if len(parts) > 1 else 1
    figure = _figure(columns)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    _curve(axes[0], train, "loss", BLUE, "training")
    _points(axes[0], validation, "loss", RED, "validation")
    _log_axis(axes[0], "loss")
    axes[0].legend(frameon=False)
    if len(parts) > 1:
        for i, part in enumerate(parts):
            name = part.removeprefix("loss/")
            colour = _PART_COLOURS.get(name, f"C{i}")
            _curve(axes[1], train, part, colour, name)
            _points(axes[1], validation, part, colour, None)
        _log_axis(axes[1], "part of the loss, unweighted\n(line: training, points: validation)")
        axes[1].legend(frameon=False)
    return figure


def error_figure(validation: Records) -> Figure | None:
    """The validation errors over the optimizer steps; ``None`` where there are none."""
    metrics = {f"{quantity.name}_mae": quantity for quantity in QUANTITIES}
    shown = [m for m in metrics if any(_finite(r.get(m)) for r in validation)]
    if "energy_mae" in shown and "energy_per_atom_mae" in shown:
        shown.remove("energy_per_atom_mae")
    if not shown:
        return None
    figure = _figure(len(shown))
    for axis, metric in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        steps, values = _series(validation, metric)
        axis.plot(steps, MILLI * values, color=BLUE, lw=1.2, marker="o", ms=2.5 if len(steps) < 80 else 0)
        best = int(np.argmin(values))
        axis.plot(steps[best], MILLI * values[best], "o", mfc="none", mec=RED, ms=9, mew=1.5)
        text = f"best {MILLI * values[best]:.3g} at step {steps[best]:.0f}\nlast {MILLI * values[-1]:.3g}"
        axis.text(0.97, 0.97, text, transform=axis.transAxes, ha="right", va="top", color=RED, fontsize=9)
        _log_axis(axis, f"{metrics[metric].short} MAE ({metrics[metric].unit})")
    return figure


def rate_figure(train: Records) -> Figure | None:
    """The learning rate over the optimizer steps; ``None`` where no record has one."""
    names = _names(train, "lr")
    if not names:
        return None
    figure = _figure(1)
    axis = figure.subplots()
    for i, name in enumerate(names):
        steps, values = _series(train, name)
        axis.plot(steps, values, color=f"C{i}" if len(names) > 1 else BLUE, lw=1.5, label=name.removeprefix("lr/"))
    axis.set_ylim(bottom=0)
    _dress(axis, "optimizer step", "learning rate")
    axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    if len(names) > 1:
        axis.legend(frameon=False)
    return figure


def parity_figure(
    label: NDArray[np.float64], prediction: NDArray[np.float64], name: str, unit: str, small: str, what: str
) -> Figure:
    """Predictions against labels, and the distribution of the errors.

    Parameters
    ----------
    label, prediction
        Numbers of equal shape, in ``unit``.
    name
        Of the quantity: ``"energy"``.
    unit, small
        The unit of the axes, and the thousandth of it in which errors are given.
    what
        Which data these are, for the title.
    """
    label, prediction = label.ravel(), prediction.ravel()
    error = 1000.0 * (prediction - label)
    figure = _figure(2)
    left, right = figure.subplots(1, 2)
    low, high = float(min(label.min(), prediction.min())), float(max(label.max(), prediction.max()))
    margin = 0.04 * (high - low) or 1.0
    limits = (low - margin, high + margin)
    left.plot(limits, limits, color="black", lw=0.8, zorder=3)
    if len(label) > 4000:  # points would hide each other
        image = left.hexbin(
            label, prediction, gridsize=90, bins="log", cmap="viridis", mincnt=1, extent=(*limits, *limits), lw=0.1
        )
        figure.colorbar(image, ax=left, label="count", pad=0.02)
    else:
        left.plot(label, prediction, "o", color=BLUE, ms=3, alpha=0.5, mew=0)
    left.set(xlim=limits, ylim=limits, aspect="equal")
    left.ticklabel_format(useOffset=False, style="plain")
    _dress(left, f"reference {name} ({unit})", f"predicted {name} ({unit})")
    mae, rmse = np.abs(error).mean(), np.sqrt((error**2).mean())
    left.text(
        0.04, 0.96, f"MAE  {mae:.3g} {small}\nRMSE {rmse:.3g} {small}", transform=left.transAxes, va="top", family="monospace"
    )
    widest = max(float(np.quantile(np.abs(error), 0.995)), 1e-12)
    right.hist(np.clip(error, -widest, widest), bins=min(61, max(11, len(error) // 10)), color=BLUE)
    right.axvline(0.0, color="black", lw=0.8)
    right.axvline(float(error.mean()), color=RED, lw=1.2, ls="--", label=f"mean {error.mean():.2g} {small}")
    right.legend(frameon=False)
    _dress(right, f"error ({small}); the outermost 0.5 % are in the end bins", "count")
    figure.suptitle(f"{name} of {what}, n = {len(label)}", fontsize=11)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
    return path


def _figure(columns: int) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(5.4 * columns, 4.2), dpi=130, layout="constrained")


def _curve(axis: Axes, records: Records, key: str, colour: str, label: str) -> None:
    """A noisy series: faint as it is, and its running mean."""
    steps, values = _series(records, key)
    if len(steps) < 40:
        axis.plot(steps, values, color=colour, lw=1.3, label=label)
        return
    axis.plot(steps, values, color=colour, lw=0.6, alpha=0.3)
    axis.plot(steps, _running_mean(values, max(len(values) // 30, 3)), color=colour, lw=1.6, label=label)


def _points(axis: Axes, records: Records, key: str, colour: str, label: str | None) -> None:
    steps, values = _series(records, key)
    if len(steps):
        axis.plot(steps, values, "o", color=colour, ms=3.5, mec="white", mew=0.4, label=label, zorder=3)


def _series(records: Records, key: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rows = [(float(r["step"]), float(r[key])) for r in records if _finite(r.get(key))]
    table = np.array(rows).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _finite(value: Any) -> bool:
    return value is not None and np.isfinite(float(value))


def _running_mean(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """The mean over ``width`` neighbours, over fewer at the ends."""
    kernel = np.ones(width)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same")


def _names(records: Records, prefix: str) -> list[str]:
    whole = prefix.rstrip("/")
    return list(dict.fromkeys(k for r in records for k in r if k.startswith(whole + "/") or (k == whole and whole == prefix)))


def _log_axis(axis: Axes, label: str) -> None:
    from matplotlib.ticker import LogLocator

    lines = [np.asarray(line.get_ydata(), dtype=float) for line in axis.get_lines()]
    if any((values > 0).any() for values in lines) and all((values > 0).all() for values in lines):
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        if high / low < 1e3:  # so few powers of ten need the numbers between them
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5) if high / low > 8 else (2, 3, 4, 5, 6, 8)))
            axis.yaxis.set_minor_formatter("{x:g}")
            axis.tick_params(axis="y", which="minor", labelsize="small")
    _dress(axis, "optimizer step", label)


def _dress(axis: Axes, x: str, y: str) -> None:
    from matplotlib.ticker import AutoMinorLocator

    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_axisbelow(True)
    axis.grid(True, which="major", alpha=0.25, lw=0.6)
    if axis.get_xscale() == "linear":
        axis.xaxis.set_minor_locator(AutoMinorLocator())
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
