"""The trajectories that enter the working set, with f at the initial states and the sizes of the first steps.

"In the direction of the solve" means multiplied by -1 for trajectories that are integrated backwards in time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch, on_device_of
from mpiad.ensemble.controller import mean_square
from mpiad.ensemble.derivative import Derivative, derivative_of, locked
from mpiad.ensemble.settings import Settings
from mpiad.transport.devices.device_arrays import arrays_of


def least_step(t: Array) -> Array:
    """Return the sizes of the smallest steps at times t: ten times the spacing of floating-point numbers, as in SciPy."""
    return 10 * (np.nextafter(t, np.inf) - t)


class Entrants(NamedTuple):
    """Trajectories that enter the working set; times and derivatives are in the direction of the solve."""

    ids: Array  # int, shape (n,)
    t: Array  # start, shape (n,)
    end: Array  # shape (n,)
    h: Array  # size of the first step, shape (n,)
    u: Array  # states, shape (d, n)
    k: Array  # derivatives, shape (d, n)
    sign: Array | None  # -1 for trajectories integrated backwards in time, else 1; None if all are 1


# ``joined(old, new)`` returns an array of the next working set, given the arrays of the current one and of the entrants.
Joint: TypeAlias = Callable[[Array, Array], Array]


class Initialization:
    """The queue of the trajectories that haven't entered the working set, and properties of all trajectories."""

    def __init__(self, batch: Batch, settings: Settings):
        self._batch, self._settings, self._xp = batch, settings, arrays_of(batch.u0)
        self._derivative: Derivative = derivative_of(batch.f, batch.shape)
        self.signs = np.where(batch.end < batch.start, -1.0, 1.0)
        self._backward = bool((self.signs < 0).any())
        # Trajectories with an empty tspan take no steps.
        self._queue = np.flatnonzero(batch.end != batch.start)
        real = np.zeros(0, batch.u0.dtype).real.dtype
        tolerances = (np.asarray(tolerance, real)[()] for tolerance in (settings.rtol, settings.atol))
        self.rtol, self.atol = (x if self._xp is None or not x.ndim else self._xp.to_device(x) for x in tolerances)

    def goal(self, ids: Array) -> Array:
        """Return the ends of tspan for some trajectories, in the direction of the solve."""
        return self._batch.end[ids] * self.signs[ids]

    def admit(self, count: int) -> Entrants:
        """Return the next trajectories of the queue, at most `count`."""
        batch, settings, width = self._batch, self._settings, min(count, len(self._queue))
        ids, self._queue = self._queue[:width], self._queue[width:]
        if width == 1 and self._xp is None:  # f is always called with at least two columns: see `controller`
            ids = np.repeat(ids, 2)
        signs = self.signs[ids]
        t, end = batch.start[ids] * signs, self.goal(ids)
        sign = signs if self._backward else None
        if settings.acting is not None:
            end = settings.acting.until(end, settings.acting.first, ids, signs)
        if not width:
            return Entrants(ids, t, end, t, batch.u0[:, :0], batch.u0[:, :0], sign)
        if self._xp is not None:
            t, end = on_device_of(t, batch.u0), on_device_of(end, batch.u0)
            sign = None if sign is None else on_device_of(sign, batch.u0)
            ids = self._xp.arange(width) if width == batch.size else self._xp.to_device(ids)
        u, p = batch.u0[:, ids], batch.parameters(ids)
        rate = lambda u, t: derivative_at(self._derivative, u, p, t, sign)  # noqa: E731
        h, k = started(rate, u, t, end, settings, self.rtol, self.atol)
        u, k, *rows = (array[..., :width] for array in (u, k, ids, t, end, h))
        return Entrants(*rows, u, k, None if sign is None else sign[:width])


def derivative_at(derivative: Derivative, u: Array, p: Tree, t: Array, sign: Array | None) -> Array:
    """Return sign * f(u, p, sign * t), shape (d, n)."""
    k = np.empty_like(u)
    time = (t if sign is None else t * sign).astype(u.real.dtype)
    derivative.write(k, locked(u), p, locked(time))
    return k if sign is None else np.multiply(k, sign, out=k)


def started(
    rate: Callable, u: Array, t: Array, end: Array, settings: Settings, rtol: Array | float, atol: Array | float
) -> tuple[Array, Array]:
    """Return the first step sizes, (n,), and f at the initial states, (d, n); times are in the solve's direction."""
    # ``rate(u, t)`` returns f in the direction of the solve.
    # The sizes are those of SciPy: E. Hairer, S. P. Nørsett, G. Wanner, Solving Ordinary Differential Equations I, II.4.
    k, order = rate(u, t), settings.alg.tableau.error_order
    if settings.dt is not None:
        return np.maximum(np.minimum(np.full_like(t, settings.dt), settings.dtmax), least_step(t)), k
    span, scale = end - t, atol + rtol * np.abs(u)
    d0, d1 = np.sqrt(mean_square(u / scale)), np.sqrt(mean_square(k / scale))
    h0 = np.where((d0 < 1e-5) | (d1 < 1e-5), 1e-6, 0.01 * d0 / d1)
    h0 = np.minimum(h0, span)
    # The difference of f after an Euler step estimates the second derivative.
    probe = u + h0.astype(u.real.dtype) * k
    d2 = np.sqrt(mean_square((rate(probe, t + h0) - k) / scale)) / h0
    steepest = np.maximum(d1, d2)
    h1 = np.where((d1 <= 1e-15) & (d2 <= 1e-15), np.maximum(1e-6, h0 * 1e-3), np.power(0.01 / steepest, 1 / order))
    # If f isn't finite, there is no estimate, and the first step will fail.
    h = np.minimum(np.minimum(100 * h0, h1), span)
    h = np.where(np.isfinite(h), h, span)
    return np.maximum(np.minimum(h, settings.dtmax), least_step(t)), k
