"""`VIResult`: the fitted posterior, with draws from it, summaries and plots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiad._typing import Array, Function, Tree
from mpiad.device import to_device, to_host
from mpiad.transport.devices.device_arrays import is_device_array
from mpiad.vi.posterior import Posterior


@dataclass(frozen=True)
class VIResult:
    """The result of `VI.run`, the same on all ranks.

    Attributes
    ----------
    posterior : Posterior
        The posterior that was passed to `VI`.
    params : pytree of arrays
        Reported variational parameters: the average over about the last fifth of the epochs, or, with ``average=False``,
        those after the last epoch. If the root's parameters are on a device, every other rank has a copy on the device of
        its model, or on the host if its model doesn't use a device.
    best_params : pytree of arrays
        Variational parameters of the epoch with the lowest objective. Since the objective is a mean over the random draws
        of one epoch, these need not be the best ones.
    history : dict of list
        Lists with one entry per epoch: `objective`, `loss` (mean over the draws), `divergence` (KL, without its weight),
        `dropped` (number of draws at which the model raised or wasn't finite) and `seconds` (time since the start).
    epochs : int
        The number of completed epochs.
    best_epoch : int
        The index, from 0, of the epoch with the lowest objective.
    message : str
        The reason for the end of the run.
    samples : array of shape (n, dim)
        Draws from the reported posterior, on the host.
    average : bool
        Whether the reported parameters are an average.

    Examples
    --------
    >>> from mpiad.parallel import Adam
    >>> from mpiad.vi import VI, MeanFieldGaussian
    >>> loss = lambda theta, data: np.sum((theta[0] - data) ** 2) / 2
    >>> result = VI(loss, MeanFieldGaussian(1), ("norm", 0.0, 1.0), Adam(0.1)).run(np.array([1.0, 3.0]), n_epochs=20)
    >>> print(result.epochs, len(result.history["objective"]), result.draw(100).shape, result.quantile([0.05, 0.95]).shape)
    20 20 (100, 1) (2, 1)
    """

    posterior: Posterior
    params: Tree
    best_params: Tree
    history: dict[str, list]
    epochs: int
    best_epoch: int
    message: str
    samples: Array
    average: bool = True

    def draw(self, count: int, seed: int = 0, best: bool = False) -> Array:
        """Return draws of shape (count, dim), on the host, from the reported posterior; if `best`, with `best_params`."""
        noise = np.random.default_rng(seed).standard_normal((count, self.posterior.dim))
        return np.asarray(self.posterior.draw(to_host(self._chosen(best)), noise)[0])

    def log_prob(self, theta: Array, best: bool = False) -> Array:
        """Return log densities at points of shape (S, dim), on the points' device; if `best`, with `best_params`."""
        params = self._chosen(best)
        if is_device_array(theta):
            return self.posterior.log_prob(to_device(params, like=theta), theta)
        return np.asarray(self.posterior.log_prob(to_host(params), theta))

    def _chosen(self, best: bool) -> Tree:
        return self.best_params if best else self.params

    def mean(self) -> Array:
        """Return the samples' mean, of shape (dim,)."""
        return self.samples.mean(axis=0)

    def sd(self) -> Array:
        """Return the samples' standard deviation, of shape (dim,)."""
        return self.samples.std(axis=0, ddof=1)

    def quantile(self, q: float | Array) -> Array:
        """Return the samples' quantiles, of shape (*shape of q, dim)."""
        return np.quantile(self.samples, q, axis=0)

    def summary(self, names: list[str] | None = None) -> str:
        """Return a table of the mean, the standard deviation and quantiles of each parameter."""
        names = names or [f"theta[{k}]" for k in range(self.posterior.dim)]
        width = max(map(len, names))
        lines = [f"{'':{width}}  {'mean':>10}  {'sd':>10}  {'5 %':>10}  {'50 %':>10}  {'95 %':>10}"]
        rows = np.vstack([self.mean(), self.sd(), self.quantile([0.05, 0.5, 0.95])]).T
        lines += [f"{name:{width}}  " + "  ".join(f"{x:10.4g}" for x in row) for name, row in zip(names, rows)]
        which = "averaged over the last epochs" if self.average else "after the last epoch"
        # A mean, since the objective of a single epoch is noisy.
        recent = self.history["objective"][-max(1, self.epochs // 5) :]
        count = f"{len(recent)} epoch{'s' * (len(recent) > 1)}"
        lines.append(f"posterior {which}; mean objective {np.mean(recent):.6g} in the last {count}")
        lines.append(f"{self.epochs} epochs, {sum(self.history['dropped'])} draws dropped; {self.message}")
        return "\n".join(lines)

    def plot_corner(self, names: list[str] | None = None, truth: Array | None = None, prior: Array | None = None) -> Any:
        """Plot histograms of each parameter and of each pair; return matplotlib's figure.

        Parameters
        ----------
        names : list of str, optional
            Names of the parameters, shown at the axes.
        truth : array of shape (dim,), optional
            True values, marked by lines.
        prior : array of shape (n, dim), optional
            Draws from the prior, plotted in the background.
        """
        from matplotlib import pyplot

        samples, dim = self.samples, self.samples.shape[1]
        names = names or [f"θ{k}" for k in range(dim)]
        figure, grid = pyplot.subplots(dim, dim, figsize=(2.2 * dim, 2.2 * dim), squeeze=False, layout="constrained")
        for i in range(dim):
            for j in range(dim):
                axes = grid[i, j]
                if j > i:
                    axes.axis("off")
                elif i == j:
                    if prior is not None:
                        axes.hist(prior[:, i], bins=40, density=True, color="0.85")
                    axes.hist(samples[:, i], bins=40, density=True, color="C0", alpha=0.8)
                    axes.set_yticks([])
                else:
                    axes.hist2d(samples[:, j], samples[:, i], bins=40, cmap="Blues")
                if truth is not None and j <= i:
                    axes.axvline(truth[j], color="C3", linewidth=1)
                    if j < i:
                        axes.axhline(truth[i], color="C3", linewidth=1)
                axes.set(xlabel=names[j] if i == dim - 1 else "", ylabel=names[i] if j == 0 and i else "")
        return figure

    def plot_predictive(
        self,
        predict: Function,
        times: Array,
        observed: Array | None = None,
        count: int = 200,
        noise: float | Array | None = None,
    ) -> Any:
        """Plot predictions as bands of 50 and 90 %, with the data; return matplotlib's axes.

        Without `noise` the bands show the model's curves, with the uncertainty of the parameters only, so that data may lie
        outside of the bands. With `noise` the bands show predicted data, including the measurement noise.

        Parameters
        ----------
        predict : callable
            ``predict(theta)`` returns values at the times.
        times, observed : array
            Times of the predictions, and observed data at these times.
        count : int
            The number of draws used for predictions.
        noise : float or array of the shape of times, optional
            Standard deviation of the measurement noise, which is normally distributed.
        """
        from matplotlib import pyplot

        curves = np.array([predict(theta) for theta in self.samples[:count]])
        kind = "the model's curves (posterior of the parameters)"
        if noise is not None:
            kind = "predicted data (parameters and noise)"
            curves = curves + noise * np.random.default_rng(0).standard_normal(curves.shape)
        axes = pyplot.subplots(layout="constrained")[1]
        for percent, shade in ((90, 0.2), (50, 0.4)):
            low, high = np.quantile(curves, [0.5 - percent / 200, 0.5 + percent / 200], axis=0)
            axes.fill_between(times, low, high, color="C0", alpha=shade, linewidth=0, label=f"{percent} % of {kind}")
        axes.plot(times, np.median(curves, axis=0), "C0", label="median")
        if observed is not None:
            axes.plot(times, observed, "k.", label="observed")
        # Above the axes, so that it hides nothing.
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small")
        return axes
