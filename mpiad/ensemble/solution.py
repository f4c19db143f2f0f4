"""The solutions returned by `solve`, and their statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Scalar, Tree
from mpiad.device import to_host
from mpiad.device.numpy import concatenate, stack
from mpiad.device.transfer import array_to_device
from mpiad.ensemble.batch import Batch, times_of
from mpiad.ensemble.events import NO_EVENTS, EventRows
from mpiad.ensemble.outcome import FactorizationCounts, Outcome, ReturnCode, came_through, codes_of, evaluations
from mpiad.ensemble.problem import EnsembleProblem, ODEProblem
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.tableaus import Algorithm
from mpiad.transport.devices.device_arrays import arrays_of, copied


def _root(x: Array) -> Array:
    """Return the square root of a variance, with derivative 0 at x = 0 (equal trajectories)."""
    zero = getval(x) == 0
    # The root of 1 is computed instead of the root of 0, whose infinite derivative times zero would be NaN.
    return anp.where(zero, 0.0, anp.sqrt(anp.where(zero, 1.0, x)))


def quantile(u: Array, q: float | list[float]) -> Array:
    """Return quantiles over the first axis, ignoring NaN; the adjoint distributes cotangents by interpolation weights."""
    fractions = np.asarray(q, float)
    if not len(u):
        return np.full((*fractions.shape, *u.shape[1:]), np.nan)
    if fractions.size and not (fractions.min() >= 0 and fractions.max() <= 1):
        raise ValueError(f"quantile: q must lie between 0 and 1, but got {q}.")
    values = getval(u)
    if values.dtype.kind == "c":
        raise TypeError(f"quantile: the states must be real, but are {values.dtype}: complex numbers have no order.")
    columns = values.reshape(len(values), -1)
    order = np.argsort(columns, axis=0)  # NaN come last
    count = np.sum(~np.isnan(columns), axis=0)
    last, rows = np.maximum(count - 1, 0), anp.reshape(u, columns.shape)
    arrays = arrays_of(values)
    each = np.arange(columns.shape[1]) if arrays is None else arrays.arange(columns.shape[1])
    quantiles = []
    for fraction in fractions.ravel().tolist():  # as Python numbers, since an array would have to be copied to the device
        position = fraction * last
        below = np.floor(position).astype(int)
        ends = (np.take_along_axis(order, end[None], 0)[0] for end in (below, np.minimum(below + 1, last)))
        lower, upper = (rows[end, each] for end in ends)
        quantiles.append(lower + (upper - lower) * (position - below).astype(values.dtype))
    if not quantiles:
        return values.reshape(-1)[:0].reshape(*fractions.shape, *values.shape[1:])
    return anp.reshape(stack(quantiles), (*fractions.shape, *values.shape[1:]))


@dataclass
class ODESolution(FactorizationCounts):
    """The solution of one problem.

    Attributes
    ----------
    u : array, shape (n_saved, d)
        States at the saved times; NaN if a time wasn't reached.
    t : array, shape (n_saved,)
        The saved times.
    u_end : array, shape (d,)
        The state at the end of tspan, at a terminal event, or, after a failure, after the last accepted step.
    retcode : str
        Name of a `ReturnCode`, such as Success or MaxIters.
    t_reached : float
        The time of `u_end`.
    naccept, nreject, nf, njac, nlu : int
        Numbers of accepted steps, rejected steps, calls of f, Jacobians and factorizations. Rosenbrock methods compute one
        Jacobian and one factorization per tried step, other methods none.
    events : list of (int, float)
        The events that occurred, by index in the `events` of the solve, and their times; the times are traced if `u` is.
    problem : ODEProblem or EnsembleProblem
        The problem; its ``kernel_source()`` is the source of the compiled kernel, if there is one.
    alg : Algorithm
        The method.
    execution : str
        How the problem was solved, "arrays" or "kernel", and the reason: see the parameter `compile` of `solve`.

    Examples
    --------
    >>> from mpiad.ensemble import ODEProblem, solve
    >>> decay = ODEProblem(lambda u, p, t: [-u[0]], [1.0], (0.0, 1.0))
    >>> sol = solve(decay, rtol=1e-6, dense_output=True)
    >>> print(sol.retcode, sol.t, sol(0.5).round(4))
    Success [0. 1.] [0.6065]
    """

    u: Array
    t: Array
    u_end: Array
    retcode: str
    t_reached: float
    naccept: int
    nreject: int
    nf: int
    events: list[tuple[int, float]] = field(default_factory=list)
    problem: ODEProblem | EnsembleProblem | None = field(default=None, repr=False)
    dense: Callable[..., Array] | None = field(default=None, repr=False)
    alg: Algorithm | None = field(default=None, repr=False)
    execution: str = field(default="", repr=False, compare=False)

    def __call__(self, t: float | Array) -> Array:
        """Return the states at any times of tspan, as described for `EnsembleSolution`.

        Parameters
        ----------
        t : number, or array of shape (n,)

        Returns
        -------
        array, shape (d,) or (n, d)
        """
        states = _interpolants(self.dense)(times_of(t, None))
        return states[0] if np.ndim(t) == 0 else states


@dataclass
class EnsembleSolution(FactorizationCounts):
    """The solutions of an ensemble of N trajectories.

    Attributes
    ----------
    u : array, shape (N, n_saved, d)
        States at the saved times, NaN if a time wasn't reached; or the results of an `output_func` or a `reduction`.
    t : array, shape (n_saved,) or (N, n_saved)
        The saved times.
    u_end : array, shape (N, d)
        The states at the end of tspan, at a terminal event, or, after a failure, after the last accepted step.
    retcode : array of str, shape (N,)
        Names of `ReturnCode`, such as Success or MaxIters.
    t_reached : array, shape (N,)
        The times of `u_end`.
    naccept, nreject, nf, njac, nlu : array of int, shape (N,)
        Numbers of accepted steps, rejected steps, calls of f, Jacobians and factorizations: see `ODESolution`.
    converged : bool
        Whether the reduction ended the solve early.
    problem : EnsembleProblem
        The problem; its ``kernel_source()`` is the source of the compiled kernel, if there is one.
    alg : Algorithm
        The method.
    execution : str
        How the ensemble was solved, the same on all ranks: see `ODESolution`.

    Examples
    --------
    >>> from mpiad.ensemble import EnsembleProblem, ODEProblem, solve
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), p=[1.0])
    >>> sol = solve(EnsembleProblem(decay, p=np.array([[1.0], [2.0], [3.0]])), saveat=0.5)
    >>> print(sol.u.shape, sol.t, sol.retcode)
    (3, 3, 1) [0.  0.5 1. ] ['Success' 'Success' 'Success']
    >>> print(sol.mean().ravel().round(3), sol.quantile(0.5).ravel().round(3))
    [1.    0.399 0.184] [1.    0.368 0.135]
    """

    u: Tree
    t: Array
    u_end: Array
    retcode: Array
    t_reached: Array
    naccept: Array
    nreject: Array
    nf: Array
    converged: bool = False
    problem: ODEProblem | EnsembleProblem | None = field(default=None, repr=False)
    dense: Callable[..., Array] | None = field(default=None, repr=False)
    alg: Algorithm | None = field(default=None, repr=False)
    execution: str = field(default="", repr=False, compare=False)
    _event_rows: EventRows = field(default_factory=lambda: NO_EVENTS, repr=False, compare=False)
    # The numbers of the return codes, if known.
    _codes: Array | None = field(default=None, repr=False, compare=False)
    # If only initial and final states are saved: returns the initial states, shape (d, N).
    _start: Callable[[], Array] | None = field(default=None, repr=False, compare=False)
    # Functions that compute fields on first access, by name. They don't refer to the solution, since a reference cycle
    # would keep its memory alive until garbage collection.
    _later: ClassVar[dict[str, Callable[[], Any]]] = {}

    @classmethod
    def lazy(cls, later: Mapping[str, Callable[[], object]], **fields: Any) -> Any:
        """Return a solution with the given fields, and with those of `later`, which are computed on first access."""
        # The constructor would require all fields.
        sol = object.__new__(cls)
        defaults = {"_event_rows": NO_EVENTS, "converged": False}
        defaults |= dict.fromkeys(("problem", "dense", "alg", "_codes", "_start"))
        sol.__dict__.update({name: value for name, value in defaults.items() if name not in later}, **fields, _later=later)
        return sol

    def __getattr__(self, name: str) -> Any:
        make = self.__dict__.get("_later", {}).pop(name, None)
        if make is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.__dict__[name] = value = make()
        return value

    def __call__(self, t: float | Array) -> Array:
        """Return the states at any times of tspan, interpolated within steps; requires ``dense_output=True`` in the solve.

        Parameters
        ----------
        t : number, or array of shape (n,) or (N, n)
            Times in any order. With shape (N, n), row i has the times of trajectory i.

        Returns
        -------
        array, shape (N, d) or (N, n, d)
            NaN at times that a trajectory didn't reach.

        Raises
        ------
        NotImplementedError
            If t is traced.
        TypeError, ValueError
            If a time lies outside tspan, t doesn't consist of numbers or has another shape, or the solve stored no steps.

        Ranks
        -----
        If the solution was gathered over ranks, all ranks call this method with the same t. With ``gather=False`` N is the
        number of trajectories of this rank's share.

        Adjoint
        -------
        Cotangents of these states flow back in the same way as cotangents of states saved with ``saveat=t``.
        """
        states = _interpolants(self.dense)(times_of(t, len(self)))
        return states[:, 0] if np.ndim(t) == 0 else states

    def __len__(self) -> int:
        return len(self.u_end)

    def __getstate__(self) -> dict[str, object]:
        names = [name for name in (*self.__dict__, *self._later) if name not in ("_start", "_later")]
        return {name: getattr(self, name) for name in names}

    def __getitem__(self, i: int) -> ODESolution:
        """Return the solution of trajectory i, from 0."""
        i = range(len(self))[i]
        times = self.t[i] if self.t.ndim == 2 else self.t
        reached = self.t_reached[i]
        ending = self.u_end[i], str(self.retcode[i]), reached if isbox(reached) else float(reached)
        counts = (int(count[i]) for count in (self.naccept, self.nreject, self.nf))
        dense = self.dense and partial(self.dense, only=i)
        about = {name: getattr(self, name) for name in ("problem", "alg", "execution")}
        return ODESolution(self.u[i], times, *ending, *counts, events=self.events.get(i, []), dense=dense, **about)

    def __iter__(self) -> Iterator[ODESolution]:
        return (self[i] for i in range(len(self)))

    @cached_property
    def events(self) -> dict[int, list[tuple[int, Scalar]]]:
        """The events: a dict from trajectories, numbered from 0, to lists of (index in `events` of the solve, time).

        Times are traced if `u` is.
        """
        return self._event_rows.by_trajectory()

    @property
    def codes(self) -> Array:
        """The numbers of the return codes: array of int, shape (N,)."""
        return codes_of(self.retcode) if self._codes is None else self._codes

    @property
    def survivors(self) -> Array:
        """A mask of the trajectories that reached the end of tspan or a terminal event, shape (N,)."""
        return came_through(self.codes)

    @property
    def _all_survived(self) -> bool:
        return bool(self.survivors.all())

    def _surviving(self) -> Array:
        states = getval(self.u)
        arrays = arrays_of(states)
        if (arrays is None and not isinstance(states, np.ndarray)) or states.shape[:1] != (len(self),):
            raise TypeError(
                f"{type(self).__name__}: statistics need states, but u is the result of output_func or reduction, of type "
                f"{type(self.u).__name__}. Compute statistics of u or u_end yourself."
            )
        if arrays is not None:
            return self.u if self._all_survived else self.u[arrays.to_device(np.flatnonzero(self.survivors))]
        return self.u[self.survivors]

    def _sum(self, values: Array) -> Array:
        return anp.sum(values, axis=0)

    def _mean_of(self, values: Array) -> Array:
        """Return the mean over trajectories, ignoring NaN (values at times that weren't reached)."""
        valid = ~np.isnan(getval(values))
        total, count = self._sum(anp.where(valid, values, 0.0)), self._sum(valid)
        with np.errstate(invalid="ignore"):  # NaN if there are no survivors
            return total / count.astype(getval(values).real.dtype)

    def mean(self) -> Array:
        """Return the mean over the survivors (trajectories that didn't fail) at each saved time, shape (n_saved, d)."""
        return self._mean_of(self._surviving())

    def std(self) -> Array:
        """Return the standard deviation over the survivors (with their number as the divisor), shape (n_saved, d)."""
        u = self._surviving()
        valid, center = ~np.isnan(getval(u)), self._mean_of(u)
        # The inner calls of `where` prevent derivatives of the form zero times NaN.
        squares = anp.abs(anp.where(valid, u, 0.0) - anp.where(valid, center, 0.0)) ** 2
        return _root(self._mean_of(anp.where(valid, squares, np.nan)))

    def quantile(self, q: float | list[float]) -> Array:
        """Return quantiles over the survivors, shape (n_saved, d), with an additional first axis if q is a list.

        Parameters
        ----------
        q : float or list of float
            Fractions between 0 and 1.
        """
        return quantile(self._surviving(), q)

    def summary(self) -> str:
        """Return a text with the return codes, the numbers of steps, and statistics of the final states."""
        alive = self.survivors
        names, counts = np.unique(self.retcode, return_counts=True)
        codes = ", ".join(f"{count} {name}" for name, count in zip(names, counts))
        lines = [f"{len(self)} trajectories: {codes}" if codes else "0 trajectories"]
        if len(self):
            lines.append(
                f"accepted steps {self.naccept.min()} to {self.naccept.max()}, in the mean {self.naccept.mean():.1f}; "
                f"rejected in the mean {self.nreject.mean():.1f}"
            )
        if alive.any():
            ends = to_host(getval(self.u_end))[alive]
            mean, std = (
                np.array2string(np.asarray(x), precision=6, threshold=8) for x in (ends.mean(axis=0), ends.std(axis=0))
            )
            lines.append(f"final state over {len(ends)}: mean {mean}, std {std}")
        return "\n".join(lines)

    def plot(self, ax: Any = None, *, component: int = 0, band: tuple[float, float] = (0.05, 0.95), lines: int = 10) -> Any:
        """Draw the mean, a band of quantiles and the first trajectories of a component over time, with matplotlib.

        Parameters
        ----------
        ax : matplotlib axes, optional
        component : int
        band : tuple of two float
            The two quantiles between which the band is drawn.
        lines : int
            Number of single trajectories to draw.

        Returns
        -------
        matplotlib axes

        Raises
        ------
        ValueError
            If trajectories have different saved times.
        """
        if self.t.ndim != 1:
            raise ValueError(
                "EnsembleSolution.plot: all trajectories must have the same saved times, but sol.t has shape "
                f"{self.t.shape}. Solve with one saveat for all."
            )
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.gca()
        u = self.u[..., None] if self.u.ndim == 2 else self.u  # the state may be one number
        low, high, mean = (
            x.reshape(u.shape[1:])[:, component] for x in (*to_host(self.quantile(list(band))), to_host(self.mean()))
        )
        filled = ax.fill_between(self.t, low, high, alpha=0.25, label=f"{band[0]:g} to {band[1]:g}")
        for one in to_host(u[:lines]):
            ax.plot(self.t, one[:, component], color="0.6", linewidth=0.6, zorder=1)
        color = filled.get_facecolor()[0][:3]
        ax.plot(self.t, mean, color=color, label=f"mean of {int(self.survivors.sum())}")
        ax.set_xlabel("t")
        ax.legend()
        return ax


def _interpolants(dense: Callable[..., Array] | None) -> Callable[..., Array]:
    if dense is None:
        raise ValueError(
            "sol(t): the solve kept no steps for interpolation. Pass dense_output=True to solve; with an output_func or a "
            "reduction, call the solutions that these functions receive."
        )
    return dense


def solution_of(
    outcome: Outcome, batch: Batch, settings: Settings, events: Callable[[], EventRows] | None = None
) -> EnsembleSolution:
    """Return the solution of an ensemble in the shape of u0; ``events()`` returns the events if they change states."""
    tries, codes = (outcome.naccept, outcome.nreject), outcome.codes
    resumed = 0 if events is None else outcome.resumed  # f is called again after these events
    fields: dict[str, Any] = {name: getattr(outcome, name) for name in ("t_reached", "naccept", "nreject")}
    fields |= {"u_end": outcome.u_end.T.reshape(batch.size, *batch.shape), "_codes": codes, "alg": settings.alg}
    deferred: dict[str, Callable[[], Any]] = {
        "retcode": lambda: ReturnCode.names_of(codes),
        "nf": lambda: evaluations(*tries, settings.alg, settings.dt is not None) + resumed,
    }
    if events is not None:
        deferred["_event_rows"] = events
    elif outcome.event_table is not None:
        ids, event, _, _, when = outcome.event_table
        fields["_event_rows"] = EventRows(ids.astype(int), event.astype(int), when)
    if settings.ends:
        sol = EnsembleSolution.lazy(deferred, t=batch.both_ends(), **fields)
        return at_ends(sol, lambda: batch.u0, sol.u_end)
    if settings.saveat is None:
        times, u = outcome.every_step()
    else:
        saved: Any = outcome.saved
        # A copy, since the user may change sol.t before a gradient is computed, which needs the times.
        times, u = settings.saveat.copy(), saved
    return EnsembleSolution.lazy(deferred, u=u.reshape(*u.shape[:2], *batch.shape), t=times, **fields)


def at_ends(sol: EnsembleSolution, u0: Callable[[], Array], u_end: Array) -> EnsembleSolution:
    """Return a solution with saved states ``u0()``, (d, N), at the start and `u_end`, (N, ...), at the end."""
    return changed(sol, {"u": lambda: _both_ends(u0(), u_end, sol.codes)}, u_end=u_end, _start=u0)


def changed(sol: EnsembleSolution, later: Mapping[str, Callable[[], object]], **fields: Any) -> EnsembleSolution:
    """Return a solution with other fields, of which those in `later` are computed on first access."""
    # dataclasses.replace would compute the deferred fields.
    result = object.__new__(type(sol))
    result.__dict__.update(sol.__dict__, **fields, _later={**sol._later, **later})
    for name in later:
        result.__dict__.pop(name, None)
    return result


def unshared(sol: EnsembleSolution) -> EnsembleSolution:
    """Return a solution whose final states share no memory with deferred saved states."""
    if "u" in sol._later and not isbox(sol.u_end):
        sol.u_end = copied(sol.u_end)
    return sol


def _both_ends(u0: Array, u_end: Array, codes: Array) -> Array:
    """Return the states at both ends of tspan, shape (N, 2, ...); final states of failed trajectories are NaN."""
    arrays = arrays_of(getval(u_end))
    if arrays is not None and arrays_of(getval(u0)) is None:
        u0 = array_to_device(u0, arrays)
    start, end = u0.T.reshape(u_end.shape), u_end
    alive = came_through(codes)
    if not alive.all():
        rows = alive.reshape(-1, *[1] * (u_end.ndim - 1))
        rows = rows if arrays is None else arrays.to_device(rows)
        start, end = anp.where(rows, start, getval(start)), anp.where(rows, end, np.nan)
    # autograd's stack records twice as many operations.
    shape = (len(u_end), 1, *u_end.shape[1:])
    return concatenate([anp.reshape(x, shape) for x in (start, end)], axis=1)
