"""`fit`: independent least-squares fits of all trajectories of an ensemble, computed together."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Function, Rng, Shape, Tree
from mpiad.differentiation.forward import Bundle
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleVectorized
from mpiad.ensemble.batch import Batch, Parameters, is_on_device, not_finite_entries, save_times, two_at_least
from mpiad.ensemble.compiled.kernel_choice import Compiler
from mpiad.ensemble.consistent_start import consistent_start
from mpiad.ensemble.directions import NO_TIMES, U0, push_directions
from mpiad.ensemble.event import Event
from mpiad.ensemble.levenberg_marquardt import Evaluation, LeastSquares, Stopping, scaled_factor
from mpiad.ensemble.members import as_state, key_of, members, rng_of
from mpiad.ensemble.methods.dormand_prince import RK45
from mpiad.ensemble.outcome import ConvergenceCode, report
from mpiad.ensemble.problem import EnsembleProblem, ODEProblem, digest_of
from mpiad.ensemble.ranks import EnsembleMPI
from mpiad.ensemble.run import Run
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.solution import solution_of
from mpiad.ensemble.solve import GivenTimes, started
from mpiad.ensemble.solve_options import SolveOptions, as_tuple, error_of_unknown, options_of_states, settings_of
from mpiad.ensemble.tableaus import Algorithm
from mpiad.ensemble.trial import first_defined, perturbed
from mpiad.primitives.checks import positive_count
from mpiad.pytrees import flatten
from mpiad.transport import Channel, channel
from mpiad.transport.core.agreement import alike_on_all, raising_together
from mpiad.transport.core.random_keys import generator_of, shared_key
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.devices.device_arrays import is_device_array


@dataclass(frozen=True, repr=False)
class FitStarts:
    """Results of the fits of N trajectories from K starting points each, sorted by cost; failures come last.

    Attributes
    ----------
    p : array, shape (N, K, m)
    cost : array, shape (N, K)
        NaN if the solve failed at the starting point, also after it was drawn again.
    retcode : array of str, shape (N, K)
        Names of return codes, see `ConvergenceCode`.
    nfev : array of int, shape (N, K)
        Numbers of solves, each with all derivatives.

    Examples
    --------
    The solution of u' = p u² ends at t = 1 / p, so that the first solve fails at p = 3.

    >>> from mpiad.ensemble import ODEProblem, fit
    >>> grows = ODEProblem(lambda u, p, t: [p[0] * u[0] ** 2], [1.0], (0.0, 1.0), [0.1])
    >>> options = {"data": np.array([[2.0]]), "saveat": [1.0], "bounds": (0.0, 4.0)}
    >>> found = fit(grows, lambda u, p, data: u[:, 0] - data, np.array([[3.0]]), starts=3, **options)
    >>> print(found.starts, found.starts.p.ravel().round(3))
    FitStarts(1 trajectories, 3 starts each, 3 Success) [0.5 0.5 0.5]
    """

    p: Array
    cost: Array
    retcode: Array
    nfev: Array

    def __repr__(self) -> str:
        count, starts = self.cost.shape
        successes = np.count_nonzero(self.retcode == "Success")
        return f"{type(self).__name__}({count} trajectories, {starts} starts each, {successes} Success)"

    def plot(self, ax: Any = None, *, trajectory: int = 0) -> Any:
        """Draw a waterfall plot with matplotlib: the sorted costs of a trajectory, relative to the lowest one.

        Parameters
        ----------
        ax : matplotlib axes, optional
        trajectory : int
            Its number, from 0.

        Returns
        -------
        matplotlib axes
        """
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.gca()
        cost, success = self.cost[trajectory], self.retcode[trajectory] == "Success"
        number = np.arange(1, len(cost) + 1)
        for chosen, marker, label in ((success, "o", "Success"), (~success & np.isfinite(cost), "x", "other codes")):
            if chosen.any():
                ax.plot(number[chosen], 1 + cost[chosen] - np.nanmin(cost), marker, label=label)
        ax.set_yscale("log")
        ax.set_xlabel("starting points, sorted")
        ax.set_ylabel("1 + cost above the lowest")
        ax.legend()
        return ax


@dataclass(frozen=True, repr=False)
class FitResult:
    """Results of the fits of N trajectories.

    Attributes
    ----------
    p : array, shape (N, m)
        The fitted variables.
    cost : array, shape (N,)
        Half the sum of squared residuals; NaN if the first solve failed.
    optimality : array, shape (N,)
        Largest absolute entry of the gradient of the cost, except for variables whose descent a bound prevents.
    active_mask : array of int, shape (N, m)
        -1 if a variable is at its lower bound, 1 if at its upper bound, 0 otherwise.
    nfev : array of int, shape (N,)
        Number of solves, each with all derivatives.
    njev : array of int, shape (N,)
        Number of Jacobian evaluations: one at the start, and one after each accepted step.
    retcode : array of str, shape (N,)
        Names of return codes, see `ConvergenceCode`.
    indices : array of int, shape (N,)
        The numbers of the trajectories, from 0; this rank's share with ``EnsembleMPI(gather=False)``.
    starts : FitStarts or None
        With ``starts=K``: the fits from all starting points. The other attributes are those of the lowest cost.

    Examples
    --------
    >>> from mpiad.ensemble import ODEProblem, fit
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), [1.0])
    >>> measured = np.array([[0.8, 0.6], [0.3, 0.2]])
    >>> found = fit(decay, lambda u, p, data: u[:, 0] - data, np.ones((2, 1)), data=measured, saveat=[0.5, 1.0])
    >>> print(found.p.ravel().round(2), found.success, found.covariance().shape)
    [0.49 2.08] [ True  True] (2, 1, 1)
    """

    p: Array
    cost: Array
    optimality: Array
    active_mask: Array
    nfev: Array
    njev: Array
    retcode: Array
    indices: Array
    _factor: Array  # shape (N, m + 1, m + 1); see `Evaluation`
    _residual_counts: Array  # int, shape (N,); number of residuals that aren't left out
    _tries: Array  # int, shape (N,); number of steps of all solves, including rejected ones
    starts: FitStarts | None = None

    def _taken(self, rows: Array) -> FitResult:
        """Return the results of some trajectories, given their indices."""
        every = self.starts and FitStarts(*(getattr(self.starts, field.name)[rows] for field in fields(FitStarts)))
        arrays: Any = {name: getattr(self, name)[rows] for name in _ARRAYS}
        return FitResult(**arrays, starts=every)

    def __len__(self) -> int:
        return len(self.p)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} fits, {np.count_nonzero(self.success)} Success)"

    @property
    def success(self) -> Array:
        """Whether each fit converged to a minimum that the data determine: array of bool, shape (N,)."""
        return self.retcode == "Success"

    def covariance(self, absolute_sigma: bool = False) -> Array:
        """Return the covariance of each fit's variables by linearization, (JᵀJ)⁻¹ times the variance of the residuals.

        Parameters
        ----------
        absolute_sigma : bool
            Whether residuals are already divided by their standard deviations, as in `scipy.optimize.curve_fit`. Otherwise
            their variance is estimated as ``2 * cost / (k - m)``, with k residuals and m free variables. Residuals that are
            zero for all x, such as those of missing values, aren't counted.

        Returns
        -------
        array, shape (N, m, m)
            Zeros for variables at a bound. NaN if the fit didn't succeed, or if the variance can't be estimated (k <= m).
        """
        free = self.active_mask == 0
        columns, norms = scaled_factor(self._factor, free)
        _, values, rows = np.linalg.svd(columns, full_matrices=False)
        number = np.count_nonzero(free, axis=1)
        nonzero = np.arange(values.shape[1]) < number[:, None]
        with np.errstate(all="ignore"):
            root = np.where(nonzero[..., None], rows / values[..., None], 0.0) / norms[:, None]
            covariance = np.swapaxes(root, 1, 2) @ root
            if not absolute_sigma:
                excess = self._residual_counts - number
                covariance *= np.where(excess > 0, 2 * self.cost / excess, np.nan)[:, None, None]
        covariance[~self.success] = np.nan
        return covariance


def joined_fits(parts: Sequence[FitResult]) -> FitResult:
    """Return the concatenation of several results."""
    if len(parts) == 1:
        return parts[0]
    arrays: Any = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
    return FitResult(**arrays)


# The names of the arrays of results, in order.
_ARRAYS = tuple(field.name for field in fields(FitResult) if field.name != "starts")


def best_fits(result: FitResult, starts: int) -> FitResult:
    """Return the best fit of each trajectory, given those from all starting points of one trajectory after the other."""
    cost = result.cost.reshape(-1, starts)
    order = np.argsort(cost, axis=1, kind="stable")  # NaN comes last
    rows = order + starts * np.arange(len(cost))[:, None]
    every = FitStarts(*(getattr(result, field.name)[rows] for field in fields(FitStarts)))
    best = result._taken(rows[:, 0])
    return replace(best, indices=best.indices // starts, starts=every)


# The number of solves of a fit that `compile="auto"` expects.
_SOLVES = 10

Generator = Callable[[ODEProblem, Array], ODEProblem]


class States(NamedTuple):
    """Saved states of n trajectories, and their derivatives."""

    u: Array  # shape (n, n_saved, d); NaN if a trajectory failed
    tangents: Array  # shape (m, n, n_saved, d)
    tries: Array  # int, shape (n,); numbers of tried steps


class SensitivitySolve:
    """Solves trajectories of an untraced batch as functions of variables x, by default the parameters p."""

    def __init__(
        self, compiler: Compiler, batch: Batch, settings: Settings, generator: Generator | None, owners: Array | None = None
    ):
        # ``generator(problem, x)`` returns the problem with the variables x, which have one column per trajectory.
        # `owners`: the indices of the batch's trajectories in the ensemble, for messages.
        self._compiler, self._generator, self._checked = compiler, generator, False
        self._owners = np.arange(batch.size) if owners is None else owners
        self._batch, self._settings, self._times = batch, settings, np.asarray(settings.saveat)

    def starting(self, x: Array, batch: Batch) -> Batch:
        """Return a batch, with the variables x, shape (m, n), as parameters if there is no generator."""
        return batch if self._generator else batch._replace(p=Parameters([x], [True], lambda leaves: leaves[0]))

    def states(self, x: Array, ids: Array) -> States:
        """Return the saved states of n trajectories for variables x, shape (n, m), and their tangents per variable."""
        settings = self._settings._replace(saveat=self._times if self._times.ndim == 1 else self._times[ids])
        variables, times, due = np.ascontiguousarray(x.T), None, NO_TIMES
        with restoring_state(), Bundle() as bundle:
            boxed, share = bundle.variable(variables, unit_tangents(variables)), self._batch.share(ids)
            traced = _generated(bundle, self._generator, share, boxed) if self._generator else self.starting(boxed, share)
            if self._generator and not self._checked:
                self._check_uncoupled(self._generator, traced.plain(), variables, ids)
            traced, _ = consistent_start(traced, settings.mass, settings.rtol, settings.atol)
            batch = traced.plain()
            if any(event.acts for event in settings.events):
                times = GivenTimes(settings.events, batch)
                due = times.traced(traced)
            args, along = zip(*map(bundle.parts, (traced.u0, traced.start, traced.end, due, *traced.p.leaves)))
        if times is not None and not self._checked:  # at the start, for all trajectories
            check_schedules(times, batch, settings.saveat, self._owners[ids])
        self._checked = True
        plan = self._compiler.plan(batch, settings, traced)
        begun = (batch, settings) if times is None else started(batch, settings, times, isbox(due))
        outcome = self._compiler.run_planned(plan, *begun, traced)
        tangents = {k: gs for k, gs in enumerate(along) if gs is not None and any(g is not None for g in gs)}
        tangents = tangents or {U0: [None] * len(variables)}  # zeros if the generator uses no variable
        saved, *_ = push_directions(Run(batch, settings, outcome), args, tangents, 1)
        u = solution_of(outcome, batch, settings).u.reshape(len(ids), -1, len(batch.u0))
        return States(u, np.asarray(saved), outcome.naccept + outcome.nreject)

    def _check_uncoupled(self, generator: Generator, batch: Batch, x: Array, ids: Array) -> None:
        """Check that u0 and p of the first and the last trajectory don't depend on other columns of the variables x."""
        for k in {0, len(ids) - 1} if len(ids) > 1 else ():
            copies = _copies(k, len(ids))
            share = self._batch.share(ids[copies])
            alone = first_defined(partial(_plain, generator, share, columns) for columns in _beside_others(x[:, copies]))
            if alone is None:
                continue
            pairs = [(batch.u0, alone.u0, True), *zip(batch.p.leaves, alone.p.leaves, batch.p.varies)]
            for value, copied, varies in pairs:
                one, other = (value[..., k], copied[..., -1]) if varies else (value, copied)
                if not np.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True):
                    raise ValueError(
                        "fit: u0 or p that prob_generator returns for a trajectory depends on other trajectories: it "
                        f"contains {np.ravel(one)[:4]} in a call with all {len(ids)} columns of x, but "
                        f"{np.ravel(other)[:4]} beside columns near its own, {x[:, k]}. It is called with columns, x of "
                        f"shape {x.shape}: write sums as np.sum(x, axis=0)."
                    )


def _plain(generator: Generator, batch: Batch, x: Array) -> Batch:
    """Return the values of `_generated`."""
    with Bundle() as bundle:
        return _generated(bundle, generator, batch, bundle.variable(x, unit_tangents(x))).plain()


def _copies(k: int, count: int) -> Array:
    """Return indices of some copies of column k, not as many as the columns: sums over equal columns would agree."""
    return np.full(4 if count == 3 else 3, k)


def _beside_others(copies: Array) -> Iterator[Array]:
    """Yield copies of a column, all but the last perturbed; then as they are, since functions may be undefined nearby."""
    yield perturbed(copies, np.abs(copies) + 1)
    yield copies


def unit_tangents(x: Array) -> list[Array]:
    """Return m unit tangents of variables of shape (m, n), one for each variable."""
    return list(np.repeat(np.eye(len(x))[..., None], x.shape[1], axis=-1))


def _generated(bundle: Bundle, generator: Generator, batch: Batch, x: Array) -> Batch:
    """Return a batch with the u0 and p that `generator` returns for the variables x, shape (m, n)."""
    count, shape, varies = batch.size, batch.shape, batch.p.varies

    # Constants are also traced, without tangents, so that all values with an axis of trajectories are traced.
    constant = partial(bundle.variable, tangents=[None] * len(x))
    # If all trajectories have the same tspan, it is a pair of numbers, as in the user's problem.
    span: Any = (float(batch.start[0]), float(batch.end[0])) if batch.one_span else (batch.start, batch.end)
    p = batch.p.build([constant(leaf) if each else leaf for leaf, each in zip(batch.p.leaves, varies)])
    problem = generator(ODEProblem(batch.f, constant(batch.u0.reshape(*shape, count)), span, p), x)
    if not isinstance(problem, ODEProblem) or problem.f is not batch.f or problem.tspan is not span:
        raise TypeError(
            "fit: prob_generator must return its problem with another u0 or p, but the same f and tspan, for example "
            f"remake(problem, p=x), but returned {problem!r:.100}."
        )
    leaves, build = flatten(problem.p)
    for leaf in leaves:
        if isbox(leaf) and np.shape(leaf)[-1:] != (count,):
            raise ValueError(
                f"fit: prob_generator returned a part of p of shape {np.shape(leaf)}, without an axis of trajectories. "
                f"It is called with columns, x of shape {x.shape}: write sums as np.sum(x, axis=0)."
            )
    u0, *values = [_with_tangents(bundle, value) for value in (_initial(problem.u0, batch), *leaves)]
    return batch._replace(u0=u0, p=Parameters(values, [*map(isbox, leaves)], build).promoted(u0))


def _with_tangents(bundle: Bundle, x: Array) -> Array:
    """Return a value, untraced if all its tangents are zero."""
    plain, tangents = bundle.parts(x)
    return plain if tangents is None or all(g is None for g in tangents) else x


def _initial(u0: Array, batch: Batch) -> Array:
    """Return initial states, shape (d, n), which may be traced."""
    if isinstance(u0, (list, tuple)) and len({np.shape(part) for part in u0} - {()}) == 1:
        u0 = [part + np.zeros(batch.size) if np.shape(part) == () else part for part in u0]  # also constants as columns
    u0, full = as_state(u0), (*batch.shape, batch.size)
    if u0.shape == batch.shape != full:
        u0 = anp.broadcast_to(u0[..., None], full)
    if u0.shape != full:
        raise ValueError(
            f"fit: prob_generator returned u0 of shape {u0.shape}, but {full} was expected, with an axis of trajectories, "
            "since it is called with columns of variables."
        )
    return u0.reshape(-1, batch.size)


def check_schedules(times: GivenTimes, batch: Batch, saveat: Array, owners: Array) -> None:
    """Raise a ValueError if no given time of a trajectory's events lies between its start and its last saved time."""
    due, start = times.signs * times.times, times.signs * batch.start
    # Rows of saved times may be padded with NaN.
    last = np.nanmax(times.signs[:, None] * (saveat if saveat.size else batch.end[:, None]), axis=1, initial=-np.inf)
    finite, inside = np.isfinite(due), (due >= start) & (due <= last)
    outside = finite.any(axis=0) & ~inside.any(axis=0)
    if outside.any():
        i = int(np.argmax(outside))
        raise ValueError(
            f"fit: the times of events of trajectory {owners[i] + 1}, {times.times[finite[:, i], i]}, lie outside of its "
            f"data, from the start of tspan, {batch.start[i]}, to the last saved time, {times.signs[i] * last[i]}."
        )


_CALLED = (
    "The residuals are called with columns: u of shape (n_saved, d, n), p of shape (m, n), and data with the trajectories "
    "along the last axis. Give constant arrays an axis for trajectories (c[:, None]), and sums an axis (np.sum(u, axis=0))."
)


class Residuals:
    """The residuals ``fun(u, p, data)`` of some trajectories; `shape`: the shape of a state."""

    def __init__(self, fun: Function, data: Tree, shape: Shape, trajectories: int):
        self._fun, self._shape, self._is_checked = fun, shape, False
        self.counts = np.zeros(trajectories, int)  # the numbers of residuals that weren't zero for all x so far
        leaves, self._build = flatten(data)
        self._data = [None if leaf is None else np.ascontiguousarray(np.moveaxis(leaf, 0, -1)) for leaf in leaves]

    def evaluated(self, x: Array, states: States, ids: Array) -> Evaluation:
        """Return half the sums of squares and the triangular factors of [J r] for trajectories `ids`; x: shape (n, m)."""
        count, m = x.shape
        columns = slice(None) if count > 1 else two_at_least(count)
        x, ids = x[columns], ids[columns]
        parts = (part[columns].reshape(len(ids), part.shape[1], *self._shape) for part in (states.u, *states.tangents))
        # With states in the shape of u0, and trajectories along the last axis.
        u, *tangents = (np.ascontiguousarray(np.moveaxis(part, 0, -1)) for part in parts)
        with np.errstate(all="ignore"):
            if not self._is_checked:  # only at the first call, since the check takes two more calls
                self._check(x, u, ids)
            r, jacobian = self._linearized(np.ascontiguousarray(x.T), u, tangents, ids)
            cost = 0.5 * np.add.reduce(r * r, axis=0)[:count]
        matrices = np.empty((count, len(r), m + 1))
        matrices[:, :, m] = r.T[:count]
        for j, column in enumerate(jacobian):
            matrices[:, :, j] = column.T[:count]
        # If the solve failed, the cost is infinite, and the step is rejected. LAPACK needs finite numbers.
        finite = np.isfinite(cost) & np.isfinite(matrices).all(axis=(1, 2))
        matrices[~finite] = 0.0
        self.counts[ids[:count]] = np.maximum(self.counts[ids[:count]], np.count_nonzero(matrices.any(axis=2), axis=1))
        factor = np.zeros((count, m + 1, m + 1))
        # QR instead of JᵀJ, whose condition number is the square of the condition number of J.
        factor[:, : min(len(r), m + 1)] = np.linalg.qr(matrices, mode="r")
        return Evaluation(np.where(finite, cost, np.inf), factor)

    def _called(self, u: Array, x: Array, ids: Array) -> list[Array]:
        data = [None if leaf is None else np.take(leaf, ids, axis=-1) for leaf in self._data]
        value = self._fun(u, x, self._build(data))
        return list(value) if isinstance(value, (list, tuple)) else [value]

    def _linearized(self, x: Array, u: Array, tangents: list[Array], ids: Array) -> tuple[Array, list[Array]]:
        """Return the residuals, shape (k, n), and their derivatives with respect to each variable."""
        with restoring_state(), Bundle() as bundle:
            try:
                parts = self._called(bundle.variable(u, tangents), bundle.variable(x, unit_tangents(x)), ids)
            except TypeError as error:
                advice = "Write them with the functions of autograd.numpy instead of numpy."
                raise TypeError(f"fit: the residuals can't be differentiated ({error}). {advice}") from error
            results = [bundle.parts(part) for part in parts]
        values, columns = [_rows(value) for value, _ in results], []
        for j in range(len(x)):
            parts = [
                np.zeros_like(v) if gs is None or gs[j] is None else _rows(gs[j]) for v, (_, gs) in zip(values, results)
            ]
            columns.append(np.concatenate(parts))
        return np.concatenate(values), columns

    def _check(self, x: Array, u: Array, ids: Array) -> None:
        """Check that columns don't depend on each other, by a call in which the first one is beside others near it."""
        first, copies = self._plain(x, u, ids)[:, 0], _copies(0, len(ids))
        beside = zip(_beside_others(x.T[:, copies]), _beside_others(u[..., copies]))
        near = first_defined(partial(self._plain, columns.T, states, ids[copies]) for columns, states in beside)
        copied = first if near is None else near[:, -1]
        if len(first) != len(copied) or not np.allclose(first, copied, rtol=1e-9, atol=1e-12, equal_nan=True):
            raise ValueError(
                f"fit: the residuals of a trajectory depend on other trajectories: those of the first are {first[:4]} in "
                f"a call with all {len(ids)} columns, but {copied[:4]} beside columns near the first. {_CALLED}"
            )
        self._is_checked = True

    def _plain(self, x: Array, u: Array, ids: Array) -> Array:
        try:
            parts = self._called(u, np.ascontiguousarray(x.T), ids)
        except ValueError as error:
            if "broadcast" not in str(error):
                raise
            raise ValueError(
                f"fit: the residuals can't compute with columns ({str(error).strip()}), u of shape {u.shape}. {_CALLED}"
            ) from error
        for part in parts:
            if np.shape(part)[-1:] != (len(x),):
                expected = f"(..., {len(x)}) was expected, one column per trajectory"
                raise ValueError(f"fit: the residuals have shape {np.shape(part)}, but {expected}. {_CALLED}")
            if np.asarray(part).dtype.kind not in "fiub":
                advice = "For complex r return [np.real(r), np.imag(r)]."
                raise TypeError(f"fit: the residuals must be real numbers, but are {np.asarray(part).dtype}. {advice}")
        return np.concatenate([_rows(part) for part in parts])


def _rows(value: Array) -> Array:
    """Return residuals in shape (k, n)."""
    return np.asarray(value, float).reshape(-1, np.shape(value)[-1])


class FitArguments(NamedTuple):
    """The arguments of `fit`, unchecked."""

    options: SolveOptions
    residuals: Function
    p0: Array
    data: Tree
    prob_generator: Generator | None
    bounds: tuple[Array, Array]
    ftol: float
    xtol: float
    gtol: float
    x_scale: Array | str
    max_nfev: int | None
    starts: int | None
    key: int  # of the starting points


# Arguments that an error message shows completely if they differ between ranks.
_SHORT = ("ftol", "xtol", "gtol", "x_scale", "max_nfev", "starts", "key")
_SHORT_OPTIONS = ("alg", "ensemblealg", "rtol", "dt", "dtmax", "max_steps", "batch_size", "compile")


class FitPlan(NamedTuple):
    """The checked arguments; start, bounds, scale and saved times have one row per fit, `starts` for each trajectory."""

    arguments: FitArguments
    options: SolveOptions
    start: Array
    lower: Array
    upper: Array
    scale: Array | None
    stopping: Stopping
    starts: int
    ensemble_key: int = 0  # of the trajectories' generators

    def redrawn(self, fits: Array, attempt: int) -> Array:
        """Return other starting points of some fits, independent of all other fits."""
        points = [
            generator_of(self.arguments.key, *divmod(fit, self.starts), attempt + 1).uniform(size=lower.shape)
            for fit, lower in zip(fits.tolist(), self.lower[fits])
        ]
        return self.lower[fits] + np.array(points) * (self.upper - self.lower)[fits]


def planned_together(channel: Channel, arguments: FitArguments) -> FitPlan:
    """Return the result of `planned`; errors, also about differences between ranks, are raised on all ranks."""

    def described(plan: FitPlan) -> list[object]:
        options = arguments.options
        names = [(arguments, name) for name in _SHORT] + [(options, name) for name in _SHORT_OPTIONS]
        short = ", ".join(f"{name}={getattr(owner, name)}" for owner, name in names)
        saveat = [] if plan.options.saveat is None else [np.asarray(plan.options.saveat, float)]
        tolerances = [np.asarray(tolerance, float) for tolerance in (plan.options.rtol, plan.options.atol)]
        arrays = plan.start, plan.lower, plan.upper, *tolerances, *saveat
        digest = digest_of(plan.options.problem, plan.options.events)
        short += f", {rng_of(options.problem, 'fit')}"
        shown = {"p0": arguments.p0, "bounds": arguments.bounds, "saveat": options.saveat, "atol": options.atol}
        text = lambda: ", ".join([*(f"{name}={value!r:.60}" for name, value in shown.items()), short])  # noqa: E731
        return [text, short, *arrays, digest]

    return alike_on_all(channel, lambda: planned(arguments), described, "fit")


def planned(arguments: FitArguments) -> FitPlan:
    """Return the checked arguments; raise if one is invalid, traced, or on a device."""
    _check_plain("p0", arguments.p0)
    start = np.asarray(arguments.p0)
    if start.ndim != 2 or not start.shape[1] or start.dtype.kind not in "iuf":
        got = f"shape {start.shape} and dtype {start.dtype}"
        raise ValueError(f"fit: p0 must be real numbers of shape (N, m), one row per trajectory, but has {got}.")
    start, ensemble = start.astype(float), arguments.options.ensemble
    options = options_of_states("fit", arguments.options._replace(problem=ensemble, trajectories=len(start)))
    if not callable(fun := arguments.residuals):
        raise TypeError(f"fit: residuals must be a function residuals(u, p, data), but got {fun!r:.60}.")
    if (fun := arguments.prob_generator) is not None and not callable(fun):
        raise TypeError(f"fit: prob_generator must be a function of a problem and x, but got {fun!r:.60}.")
    for leaf in flatten(arguments.data)[0]:
        _check_plain("data", leaf)
        if leaf is not None and np.shape(leaf)[:1] != (len(start),):
            raise ValueError(
                f"fit: data must have one row per trajectory, {len(start)} rows like p0, but has shape {np.shape(leaf)}. "
                "Data that all trajectories share can be variables of the enclosing function."
            )
    lower, upper = _bounds(arguments.bounds, start)
    scale, stopping = _scale(arguments.x_scale, start), _stopping(arguments, start.shape[1])
    plan = FitPlan(arguments, options, start, lower, upper, scale, stopping, 1)
    return plan if arguments.starts is None else _with_starts(plan, positive_count(arguments.starts, "fit: starts"))


def _with_starts(plan: FitPlan, starts: int) -> FitPlan:
    """Return the plan of fits from several starting points of each trajectory: p0, and a Latin hypercube."""
    infinite = ~(np.isfinite(plan.lower) & np.isfinite(plan.upper))
    if infinite.any():
        i, j = (int(k) for k in np.argwhere(infinite)[0])
        raise ValueError(
            f"fit: starts={starts} draws starting points within the bounds, but variable {j} of trajectory {i + 1} has the "
            f"bounds {plan.lower[i, j]} and {plan.upper[i, j]}. Give finite bounds."
        )
    count, m = plan.start.shape
    points = np.empty((count, starts, m))
    for i in range(count):
        rng = generator_of(plan.arguments.key, i)
        strata = rng.permuted(np.tile(np.arange(starts), (m, 1)), axis=1).T
        fractions = (strata + rng.uniform(size=(starts, m))) / starts
        points[i] = plan.lower[i] + fractions * (plan.upper - plan.lower)[i]
    points[:, 0] = plan.start
    lower, upper = (np.repeat(bound, starts, axis=0) for bound in (plan.lower, plan.upper))
    scale, saveat = None if plan.scale is None else np.repeat(plan.scale, starts, axis=0), plan.options.saveat
    rows = saveat if saveat is None or saveat.ndim < 2 else np.repeat(saveat, starts, axis=0)
    options = plan.options._replace(saveat=rows)
    return plan._replace(options=options, start=points.reshape(-1, m), lower=lower, upper=upper, scale=scale, starts=starts)


def _stopping(arguments: FitArguments, m: int) -> Stopping:
    for name in ("ftol", "xtol", "gtol"):
        value = getattr(arguments, name)
        if not isinstance(value, (int, float, np.number)) or not 0 <= value < math.inf:
            raise ValueError(f"fit: {name} must be a number, zero or more, but got {value!r}.")
    # The same default as SciPy's least_squares.
    most = 100 * m if arguments.max_nfev is None else positive_count(arguments.max_nfev, "fit: max_nfev")
    return Stopping(float(arguments.ftol), float(arguments.xtol), float(arguments.gtol), most)


def _scale(x_scale: Array | str, start: Array) -> Array | None:
    """Return the scales of all variables, or None for those of the Jacobian."""
    if isinstance(x_scale, str) and x_scale == "jac":
        return None
    scale = _by_trajectory("x_scale", x_scale, start)
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise ValueError(f"fit: x_scale must be 'jac' or numbers above zero, but got {x_scale!r:.60}.")
    return scale


def _check_plain(name: str, x: Array) -> None:
    for wrong, problem, remedy in (
        (isbox(x), "traced, but derivatives of fits aren't supported", "stop_gradient"),
        (is_device_array(x), "a device array, but fits run on the host", "device.to_host"),
    ):
        if wrong:
            raise NotImplementedError(f"fit: {name} is {problem}. Pass mpiad.{remedy}({name}).")


def _bounds(bounds: tuple[Array, Array], start: Array) -> tuple[Array, Array]:
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise ValueError(f"fit: bounds must be a pair of lower and upper bounds, but got {bounds!r:.60}.")
    lower, upper = (_by_trajectory(name, bound, start) for name, bound in zip(("lower bounds", "upper bounds"), bounds))
    wrong = ~(lower <= upper) | (start < lower) | (start > upper)
    if wrong.any():
        i, j = (int(k) for k in np.argwhere(wrong)[0])
        raise ValueError(
            f"fit: p0 must lie between lower and upper bounds, but variable {j} of trajectory {i + 1} starts at "
            f"{start[i, j]!r} with the bounds {lower[i, j]!r} and {upper[i, j]!r}."
        )
    return lower, upper


def _by_trajectory(name: str, value: Array, start: Array) -> Array:
    _check_plain(name, value)
    try:
        return np.broadcast_to(np.asarray(value, float), start.shape).copy()
    except (TypeError, ValueError):
        raise ValueError(
            f"fit: {name} must be one number, or have shape ({start.shape[1]},), for all trajectories, or "
            f"{start.shape}, but got {value!r:.60}."
        ) from None


_RK45, _VECTORIZED = RK45(), EnsembleVectorized()


def fit(
    ensemble: ODEProblem | EnsembleProblem,
    residuals: Function,
    p0: Array,
    alg: Algorithm = _RK45,
    ensemblealg: EnsembleAlgorithm = _VECTORIZED,
    *,
    data: Tree = None,
    saveat: float | Array | None = None,
    prob_generator: Generator | None = None,
    bounds: tuple[Array, Array] = (-np.inf, np.inf),
    ftol: float = 1e-8,
    xtol: float = 1e-8,
    gtol: float = 1e-8,
    x_scale: Array | str = "jac",
    max_nfev: int | None = None,
    rtol: float | Array = 1e-6,
    atol: float | Array = 1e-9,
    dt: float | None = None,
    dtmax: float = np.inf,
    max_steps: int = 10_000,
    events: Event | tuple[Event, ...] = (),
    batch_size: int | None = None,
    compile: str | bool = "auto",
    starts: int | None = None,
    rng: Rng = None,
    **others: Any,
) -> FitResult:
    """Fit each trajectory of an ensemble to its own data by least squares, all fits at once.

    Each fit is a Levenberg-Marquardt iteration with its own damping, termination and return code. In each round the active
    trajectories are solved together, with the derivatives with respect to their variables.

    Parameters
    ----------
    ensemble : ODEProblem or EnsembleProblem
        One problem for all fits, or an ensemble whose trajectories differ in u0, tspan or parameters that aren't fitted.
    residuals : callable
        ``residuals(u, p, data)`` returns an array of real numbers, or a list of arrays; half the sum of their squares is
        minimized. It is written for one trajectory with the functions of autograd.numpy: u of shape (n_saved, d), p of
        shape (m,), `data` with one row of each array. Like f, it is called with columns: all arguments have the
        trajectories as an additional last axis.
    p0 : array, shape (N, m)
        Initial variables, one row per trajectory.
    alg : Runge-Kutta or Rosenbrock method
        As for `solve`.
    ensemblealg : EnsembleVectorized, EnsembleSerial, EnsembleThreads or EnsembleMPI
        The backend of the solves. With `EnsembleMPI` each rank fits its share; ranks communicate only before the fits, to
        compare their arguments, and after the fits, to exchange the results.
    data : pytree of arrays, optional
        Data of the residuals, each array with one row per trajectory.
    saveat : number, list of numbers, or array of shape (N, n_saved), optional
        Times at which u is saved, as for `solve`.
    prob_generator : callable, optional
        ``prob_generator(problem, x)`` returns the problem with the variables x, for example ``remake(problem, u0=x[:2],
        p=x[2:])``; written for one trajectory with the functions of autograd.numpy, and called with columns. By default x
        are the parameters p.
    bounds : tuple of two arrays
        Lower and upper bounds, each a number or an array of shape (m,) or (N, m).
    ftol, xtol, gtol : float
        Tolerances for termination. A fit ends if the actual and the predicted change of the cost are at most
        ``ftol * cost``. It also ends if the scaled step is shorter than `xtol` times the scaled x, or if
        `FitResult.optimality` is at most `gtol`.
    x_scale : array or "jac"
        Scales of the variables: a number or an array of shape (m,) or (N, m). By default, the inverse of the largest norm
        so far of each column of the Jacobian.
    max_nfev : int, optional
        Maximum number of solves per trajectory; 100 m by default.
    rtol, atol, dt, dtmax, max_steps
        Options of the solves, as for `solve`. A trial point at which a solve needs more than `max_steps` steps, or fails,
        is rejected.
    events : Event or tuple of Event
        Events of the solves, as for `solve`: for example doses at given times. The variables may include the times and the
        sizes of the state changes. For a schedule per trajectory, give a function ``times(p)``, and let `prob_generator`
        keep the schedule in p; fill up shorter schedules with `numpy.inf`.
    batch_size : int, optional
        Number of fits that run together, which limits the memory; all by default.
    compile : {"auto", True, False}
        As for `solve`; "auto" expects that a fit takes ten solves.
    starts : int, optional
        The number of starting points per trajectory, in a box of finite `bounds`: p0, and points of a Latin hypercube. A
        starting point at which the model fails is drawn again, up to 20 times. All fits run together, and over all ranks.
    rng : Generator, SeedSequence or int, optional
        The source of the starting points, which don't depend on the backend or the number of ranks.

    Returns
    -------
    FitResult
        With `starts`, the fit of the lowest cost per trajectory; ``starts`` contains all of them, sorted.

    Raises
    ------
    NotImplementedError
        If an argument is traced or on a device.
    TypeError, ValueError
        If an argument is invalid, or all times at which the events of a trajectory act lie outside of its data.

    Ranks
    -----
    Each rank fits independently; with `EnsembleMPI`, all ranks of its communicator call `fit` with the same arguments.

    Notes
    -----
    The Jacobian consists of derivatives of the accepted steps of the solves, exact up to rounding. A step of a fit
    minimizes the damped quadratic model within the bounds. If the solve fails at the new point, the step is rejected, and
    the next step is shorter. If f computes each column independently, the results of a fit don't depend on other fits or
    ranks, bit for bit.

    Examples
    --------
    >>> import autograd.numpy as np
    >>> from mpiad.ensemble import ODEProblem, fit
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 2.0), [1.0])
    >>> times, rates = np.linspace(0.0, 2.0, 9), np.array([[0.5], [1.0], [1.5]])
    >>> measured = np.exp(-rates * times)
    >>> found = fit(decay, lambda u, p, data: u[:, 0] - data, np.ones((3, 1)), data=measured, saveat=times)
    >>> print(found.p.ravel().round(4), found.retcode)
    [0.5 1.  1.5] ['Success' 'Success' 'Success']
    """
    options = SolveOptions(
        problem=ensemble,
        alg=alg,
        ensemblealg=ensemblealg,
        trajectories=None,
        rtol=rtol,
        atol=atol,
        dt=dt,
        dtmax=dtmax,
        max_steps=max_steps,
        compile=compile,
        unknown=error_of_unknown(fit, others),
        saveat=saveat,
        events=as_tuple(events),
        batch_size=batch_size,
    )
    stopping = ftol, xtol, gtol, x_scale, max_nfev
    mpi = ensemblealg if isinstance(ensemblealg, EnsembleMPI) else None
    group = None if mpi is None else channel(mpi.comm, "ensemble.fit")
    key = 0 if starts is None else shared_key(rng, group, "fit", compare=False)
    arguments = FitArguments(options, residuals, p0, data, prob_generator, bounds, *stopping, starts, key)
    plan = planned(arguments) if group is None else planned_together(group, arguments)
    plan = plan._replace(ensemble_key=key_of(ensemble, group, "fit"))
    count = len(plan.start)
    compiler = Compiler(plan.options.compile, plan.options.backend, count, group, solves=_SOLVES)
    if mpi is None or group is None:
        result = share = _share(plan, compiler, range(count))
    else:
        bounds_of_shares = mpi.bounds(count, group.size)
        with raising_together(group, Exception), compiler:
            share = _share(plan, compiler, range(*bounds_of_shares[group.rank : group.rank + 2]))
        warnings, not_finite, parts = zip(*group.data.allgather((compiler.warnings, compiler.not_finite, share)))
        compiler.not_finite = dict(ChainMap(*not_finite))
        compiler.log_warnings(warnings, group.rank)
        result = joined_fits(parts)
        # The cost of a trajectory in the next fit is estimated from the steps of all its solves.
        mpi.remember(result._tries, 1, bool(compiler.kernels), traced=True)
        compiler.record(result._tries, result.nfev)
    if starts is not None:
        chosen = share.indices[share.indices % starts == 0] // starts  # this rank has the first of their starting points
        result = best_fits(result, starts)
        share = result._taken(chosen)
    if group is None or group.rank == 0:
        report("fit", "fits", result.retcode, compiler.not_finite)
    return result if mpi is None or mpi.gather else share


def _share(plan: FitPlan, compiler: Compiler, numbers: range) -> FitResult:
    """Fit the trajectories with the indices `numbers`, batch by batch."""
    size = max(1, plan.options.batch_size or len(numbers))
    batches = [numbers[i : i + size] for i in range(0, len(numbers), size)] or [numbers]
    return joined_fits([_fitted(plan, compiler, numbers) for numbers in batches])


def _fitted(plan: FitPlan, compiler: Compiler, numbers: range) -> FitResult:
    ensemble, options, rows = plan.options.ensemble, plan.options, slice(numbers.start, numbers.stop)
    owners = np.arange(numbers.start, numbers.stop) // plan.starts  # the trajectories of the fits
    first, last = (int(owners[0]), int(owners[-1]) + 1) if len(owners) else (0, 0)
    batch = members(ensemble, range(first + 1, last + 1), 1, plan.ensemble_key, len(plan.start) // plan.starts)
    if plan.starts > 1:
        batch = batch.share(owners - first)
    if batch.traced or is_on_device(batch):
        raise NotImplementedError(
            "fit: traced values and device arrays in the ensemble aren't supported. Apply mpiad.stop_gradient or "
            "mpiad.device.to_host to them."
        )
    settings = settings_of(options, batch, save_times(options.saveat, batch, numbers.start), record=True)
    solves = SensitivitySolve(compiler, batch, settings, plan.arguments.prob_generator, owners)
    leaves, build = flatten(plan.arguments.data)
    data = build([None if leaf is None else np.asarray(leaf)[owners] for leaf in leaves])
    misfit = Residuals(plan.arguments.residuals, data, batch.shape, len(numbers))
    tries = np.zeros(len(numbers), int)

    def evaluate(x: Array, ids: Array) -> Evaluation:
        states = solves.states(x, ids)
        tries[ids] += states.tries
        return misfit.evaluated(x, states, ids)

    scale = None if plan.scale is None else plan.scale[rows]
    redraw = None if plan.arguments.starts is None else lambda ids, attempt: plan.redrawn(ids + numbers.start, attempt)
    bounds = plan.lower[rows], plan.upper[rows]
    minima = LeastSquares(evaluate, plan.start[rows], *bounds, scale, plan.stopping, redraw).minimize()
    initial = np.flatnonzero(minima.codes == ConvergenceCode.InitialFailure.code)
    entries = not_finite_entries(solves.starting(plan.start[rows].T, batch), initial, numbers.start)
    compiler.not_finite |= {k // plan.starts: text for k, text in entries.items()}
    return FitResult(
        minima.x,
        minima.cost,
        minima.optimality,
        minima.active_mask,
        minima.nfev,
        minima.njev,
        ConvergenceCode.names_of(minima.codes),
        indices=np.array(numbers, int),
        _factor=minima.factor,
        _residual_counts=misfit.counts,
        _tries=tries,
    )
