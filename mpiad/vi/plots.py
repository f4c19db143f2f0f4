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


def predictive(predicted: Array, times: Array, observed: Array | None) -> Any:
    """Draw the median and the bands of 50 and 90 % of predictions (n, times); return the axes."""
    from matplotlib import pyplot

    axes = pyplot.subplots(layout="constrained")[1]
    for low, high, shade in ((0.05, 0.95, 0.2), (0.25, 0.75, 0.4)):
        axes.fill_between(times, *np.quantile(predicted, [low, high], axis=0), color="C0", alpha=shade, linewidth=0)
    axes.plot(times, np.median(predicted, axis=0), "C0")
    if observed is not None:
        axes.plot(times, observed, "k.")
    return axes
