"""`VIResult`: the fitted posterior, with draws from it, summaries and plots."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiad._typing import Array, Function, Rng, Tree
from mpiad.device import to_device, to_host
from mpiad.optional_packages import optional_package
from mpiad.transport.core.random_keys import generator_from
from mpiad.transport.devices.device_arrays import is_device_array
from mpiad.vi.posterior import Posterior

_MIN_RECENT, _MAX_K_HAT = 10, 0.7  # epochs for a trend; largest shape parameter of a suitable approximation


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
        `dropped` (number of dropped draws) and `seconds` (time since the start).
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
    w : float
        The weight of KL in the objective.
    log_weights : array of shape (n,), or None
        With ``run(..., importance_weights=True)``, the logarithms of the importance weights of the samples,
        -loss/w + log prior - log q, NaN for draws at which the model failed. With ``w=1`` and the negative log likelihood
        as loss, the mean of the weights estimates the evidence.
    failure : str
        The rank and the reason of the first dropped draw, or an empty text.

    References
    ----------
    Yao, Vehtari, Simpson and Gelman, 2018: Yes, but did it work? Evaluating variational inference.

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
    w: float = 1.0
    log_weights: Array | None = None
    failure: str = ""

    @functools.cached_property
    def k_hat(self) -> float | None:
        """The shape parameter of a generalized Pareto distribution fitted by ArviZ to the largest weights (Pareto k-hat).

        Above 0.7 the family doesn't approximate the posterior well. None without weights, or if ArviZ isn't installed.
        """
        if self.log_weights is None:
            return None
        try:
            arviz = optional_package("arviz", "ArviZ", "mpiad[arviz]", "k_hat")
        except ImportError:
            return None
        return float(arviz.psislw(self.log_weights[np.isfinite(self.log_weights)])[1])

    @property
    def trend(self) -> tuple[float, float] | None:
        """The change of the objective during the last fifth of the epochs, and its standard error.

        The change is the slope of a line fitted by least squares to the objectives of these epochs, whose draws are
        independent, times their number. None if the run has fewer than 50 epochs, or an objective isn't finite.
        """
        recent = self._recent
        if len(recent) < _MIN_RECENT or not np.isfinite(recent).all():
            return None
        (slope, _), covariance = np.polyfit(np.arange(len(recent)), recent, 1, cov=True)
        return float(slope * len(recent)), float(np.sqrt(covariance[0, 0]) * len(recent))

    @property
    def warnings(self) -> list[str]:
        """Signs that the result is inaccurate, and what to do, as a list of texts.

        Dropped draws are counted. The objective is reported not to have converged if the change in `trend` exceeds three
        standard errors and 0.1 w, which is 0.1 in units of KL(q‖posterior). The family is reported to be unsuitable if
        `k_hat` is above 0.7; if it can't be computed from `log_weights`, a text says how to install ArviZ.
        """
        dropped = f"{sum(self.history['dropped'])} draws were dropped, since the model failed, first on {self.failure}"
        texts, (change, error) = [dropped] if self.failure else [], self.trend or (0.0, 0.0)
        if abs(change) > max(3 * error, 0.1 * self.w):
            remedy = "run more epochs" if change < 0 else "lower the learning rate, or draw more samples per epoch"
            found = f"changed by {change:+.3g} ± {error:.2g} in the last {len(self._recent)} epochs"
            texts.append(f"the objective hasn't converged: it {found}; {remedy}")
        if self.log_weights is not None and self.k_hat is None:
            texts.append("k-hat is unknown, since ArviZ can't be imported; pip install 'mpiad[arviz]'")
        elif self.k_hat is not None and self.k_hat > _MAX_K_HAT:
            remedy = "use a family with correlations (FullRankGaussian) or other shapes (Flow), or other parameters"
            texts.append(f"the family doesn't fit the posterior: k-hat is {self.k_hat:.2f}, above {_MAX_K_HAT}; {remedy}")
        return texts

    @property
    def _recent(self) -> Array:
        """Return the objectives of the last fifth of the epochs."""
        return np.array(self.history["objective"][-max(1, self.epochs // 5) :])

    def draw(self, count: int, rng: Rng = None, best: bool = False) -> Array:
        """Return draws of shape (count, dim), on the host, from the reported posterior; if `best`, with `best_params`.

        `rng` is a Generator, a SeedSequence or an int; None: other draws in each call and on each rank, since it doesn't
        communicate.
        """
        noise = generator_from(rng, "VIResult.draw").standard_normal((count, self.posterior.dim))
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
        recent = self._recent
        count = f"{len(recent)} epoch{'s' * (len(recent) > 1)}"
        lines.append(f"posterior {which}; mean objective {np.mean(recent):.6g} in the last {count}")
        lines.append(f"{self.epochs} epochs, {sum(self.history['dropped'])} draws dropped; {self.message}")
        if self.log_weights is not None and self.k_hat is not None:
            lines.append(f"k-hat {self.k_hat:.2f}, from {len(self.log_weights)} further evaluations of the model")
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])

    def to_arviz(self, names: list[str] | None = None) -> Any:
        """Return the samples as ArviZ's InferenceData: one chain of independent draws, with `log_weights` if computed.

        Parameters
        ----------
        names : list of str, optional
            Names of the parameters, one variable each; by default the variable "theta" holds all.

        Raises
        ------
        ImportError
            If ArviZ isn't installed.
        ValueError
            If the number of names isn't that of the parameters, or a name occurs twice.

        Ranks
        -----
        Each rank may call it alone.
        """
        arviz = optional_package("arviz", "ArviZ", "mpiad[arviz]", "VIResult.to_arviz")
        if names is not None and not len(set(names)) == len(names) == self.posterior.dim:
            raise ValueError(f"VIResult.to_arviz: names must be {self.posterior.dim} different names, but got {names!r}.")
        columns = {"theta": self.samples[None]} if names is None else dict(zip(names, self.samples.T[:, None]))
        weights = None if self.log_weights is None else {"log_weight": self.log_weights[None]}
        return arviz.from_dict(posterior=columns, sample_stats=weights, posterior_attrs={"inference_library": "mpiad"})

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
        for (i, j), axes in np.ndenumerate(grid):
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
