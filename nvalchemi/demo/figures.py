"""The picture of the demonstration's dynamics."""

from __future__ import annotations

from matplotlib.figure import Figure

from nvalchemi.demo.dynamics import Dynamics


def dynamics_figure(path: Dynamics, molecule: str) -> Figure:
    """Potential and total energy over time, meV an atom, each less its first value."""
    figure = Figure(figsize=(6.4, 4.2), dpi=130, layout="constrained")
    axis = figure.subplots()
    for name, values, colour in (("potential", path.potential, "#E69F00"), ("total", path.total, "#0072B2")):
        axis.plot(1000.0 * path.time, 1000.0 * (values - values[0]) / path.atoms, color=colour, lw=1.2, label=name)
    axis.set_xlabel("time (fs)")
    axis.set_ylabel("energy, less its first value (meV/atom)")
    axis.set_title(f"{molecule} at constant energy: drift {path.drift:+.2f} meV/atom/ps", fontsize=11)
    axis.grid(True, alpha=0.25, lw=0.6)
    axis.legend(frameon=False)
    return figure
