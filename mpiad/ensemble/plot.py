"""An ensemble over time, drawn with matplotlib."""

from __future__ import annotations

from typing import Any

from mpiad.device import to_host

__all__ = ["draw"]


def draw(sol: Any, ax: Any, component: int, band: tuple[float, float], lines: int) -> Any:
    """Draw mean, band and single trajectories; see `EnsembleSolution.plot`."""
    if sol.t.ndim != 1:
        raise ValueError(
            "EnsembleSolution.plot: trajectories have saved times of their own, so they have no common mean and band. "
            f"Solve with one saveat for all (sol.t has shape {sol.t.shape})."
        )
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.gca()
    single = sol.u.ndim == 2  # the state is one number
    statistics = (*to_host(sol.quantile(list(band))), to_host(sol.mean()))
    low, high, mean = (x[:, None] if single else x for x in statistics)
    drawn = to_host(sol.u[: min(lines, len(sol))])
    filled = ax.fill_between(sol.t, low[:, component], high[:, component], alpha=0.25, label=f"{band[0]:g} to {band[1]:g}")
    for u in drawn:
        ax.plot(sol.t, u if single else u[:, component], color="0.6", linewidth=0.6, zorder=1)
    colour = filled.get_facecolor()[0][:3]
    ax.plot(sol.t, mean[:, component], color=colour, label=f"mean of {int(sol.survivors.sum())}")
    ax.set_xlabel("t")
    ax.legend()
    return ax
