"""Plots of a posterior, by matplotlib where it is installed."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array

__all__ = ["corner", "predictive"]


def corner(samples: Array, names: list[str] | None, truth: Array | None, prior: Array | None) -> Any:
    """Draw histograms of each parameter on the diagonal and of each pair below it; return the figure."""
    from matplotlib import pyplot

    dim = samples.shape[1]
    names = names or [f"θ{k}" for k in range(dim)]
    figure, grid = pyplot.subplots(dim, dim, figsize=(2.2 * dim, 2.2 * dim), squeeze=False, layout="constrained")
    for i in range(dim):
        for j in range(dim):
            axes = grid[i, j]
            if j > i:
                axes.axis("off")
            elif i == j:
                _marginal(axes, samples[:, i], None if prior is None else prior[:, i])
            else:
                axes.hist2d(samples[:, j], samples[:, i], bins=40, cmap="Blues")
            if truth is not None and j <= i:
                axes.axvline(truth[j], color="C3", linewidth=1)
                if j < i:
                    axes.axhline(truth[i], color="C3", linewidth=1)
            axes.set(xlabel=names[j] if i == dim - 1 else "", ylabel=names[i] if j == 0 and i else "")
    return figure


def _marginal(axes: Any, samples: Array, prior: Array | None) -> None:
    if prior is not None:
        axes.hist(prior, bins=40, density=True, color="0.85")
    axes.hist(samples, bins=40, density=True, color="C0", alpha=0.8)
    axes.set_yticks([])


def predictive(curves: Array, times: Array, observed: Array | None, noise: float | Array | None) -> Any:
    """Draw the median and the bands of 50 and 90 % of curves (n, times), or of data around them; return the axes."""
    from matplotlib import pyplot

    kind = "the model's curves (posterior of the parameters)"
    if noise is not None:
        kind = "the data to expect (parameters and noise)"
        curves = curves + noise * np.random.default_rng(0).standard_normal(curves.shape)
    axes = pyplot.subplots(layout="constrained")[1]
    for percent, shade in ((90, 0.2), (50, 0.4)):
        low, high = np.quantile(curves, [0.5 - percent / 200, 0.5 + percent / 200], axis=0)
        axes.fill_between(times, low, high, color="C0", alpha=shade, linewidth=0, label=f"{percent} % of {kind}")
    axes.plot(times, np.median(curves, axis=0), "C0", label="their median")
    if observed is not None:
        axes.plot(times, observed, "k.", label="observed")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small")  # above, where nothing is hidden
    return axes
