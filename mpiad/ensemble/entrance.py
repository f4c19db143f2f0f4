"""How trajectories enter the working set: their first derivative and step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.derivative import Derivative, derivative_of
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.starting import derivative_at, first_step

__all__ = ["Entrance", "Entrants", "Joint", "least_step"]


def least_step(t: Array) -> Array:
    """Return the smallest steps at times t: ten times what time can resolve there, as in SciPy."""
    return 10 * (np.nextafter(t, np.inf) - t)


class Entrants(NamedTuple):
    """Trajectories as they enter; times are in the direction of the solve.

    Parameters
    ----------
    ids : array of int, shape (n,)
    t, end, h : array, shape (n,)
    u, k : array, shape (d, n)
    """

    ids: Array
    t: Array
    end: Array
    h: Array
    u: Array
    k: Array


class Joint:
    """Puts old and new columns together: `joined(old, new)`.

    Parameters
    ----------
    order : array of int
        Which columns of the old ones followed by the new ones make the next working set.
    in_place : bool
        Whether `order` says instead which of the old columns are replaced by the new ones.
    """

    def __init__(self, order: Array, in_place: bool = False):
        self._order, self._in_place = order, in_place

    def __call__(self, old: Array, new: Array) -> Array:
        """Return the next working set's array."""
        if self._in_place:
            old[..., self._order] = new
            return old
        return np.take(np.concatenate([old, new], axis=-1), self._order, axis=-1)


class Entrance:
    """The trajectories of a batch that wait.

    Parameters
    ----------
    batch : Batch
    settings : Settings
    """

    def __init__(self, batch: Batch, settings: Settings):
        self._batch, self._settings = batch, settings
        self.derivative: Derivative = derivative_of(batch.f, batch.shape)
        self.signs = np.where(batch.end < batch.start, -1.0, 1.0)
        self._backward = bool((self.signs < 0).any())
        # What has no way to go keeps its initial state.
        self._queue = np.flatnonzero(batch.end != batch.start)
        real = batch.u0.real.dtype
        self.rtol, self.atol = np.array(settings.rtol, real), np.array(settings.atol, real)

    def __len__(self) -> int:
        return len(self._queue)

    def sign(self, ids: Array) -> Array | None:
        """Return -1 for trajectories that go backwards, None where none of the batch does."""
        return self.signs[ids] if self._backward else None

    def parameters(self, ids: Array) -> Tree:
        """Return the parameters of some trajectories as f takes them."""
        return self._batch.p.columns(ids, len(self._batch.shape) > 1)

    def admit(self, count: int) -> Entrants:
        """Let the next trajectories enter, `count` of them where so many wait."""
        ids, self._queue = self._queue[:count], self._queue[count:]
        if len(ids) == 1:  # two columns at least, wherever f is called
            return Entrants(*(array[..., :1] for array in self._enter(np.repeat(ids, 2))))
        return self._enter(ids)

    def _enter(self, ids: Array) -> Entrants:
        batch, settings, signs = self._batch, self._settings, self.signs[ids]
        u, t, end = batch.u0[:, ids], batch.start[ids] * signs, batch.end[ids] * signs
        if not len(ids):
            return Entrants(ids, t, end, t, u, u)
        p, sign = self.parameters(ids), self.sign(ids)
        k = derivative_at(self.derivative, u, p, t, sign)
        if settings.dt is not None:
            h = np.full(len(ids), settings.dt)
        else:
            rate = lambda u, t: derivative_at(self.derivative, u, p, t, sign)  # noqa: E731
            h = first_step(rate, u, t, end, k, self.rtol, self.atol, settings.alg.tableau.error_order)
        h = np.maximum(np.minimum(h, settings.dtmax), least_step(t))
        return Entrants(ids, t, end, h, u, k)
