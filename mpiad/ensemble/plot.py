"""An ensemble over time, drawn with matplotlib."""

from __future__ import annotations

from typing import Any

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
    low, high, mean = (x[:, None] if single else x for x in (*sol.quantile(list(band)), sol.mean()))
    filled = ax.fill_between(sol.t, low[:, component], high[:, component], alpha=0.25, label=f"{band[0]:g} to {band[1]:g}")
    for i in range(min(lines, len(sol))):
        ax.plot(sol.t, sol.u[i] if single else sol.u[i, :, component], color="0.6", linewidth=0.6, zorder=1)
    colour = filled.get_facecolor()[0][:3]
    ax.plot(sol.t, mean[:, component], color=colour, label=f"mean of {int(sol.survivors.sum())}")
    ax.set_xlabel("t")
    ax.legend()
    return ax
