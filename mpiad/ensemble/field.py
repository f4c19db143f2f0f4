"""The right-hand side f as derivatives see it: a function of traced columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import autograd.numpy as anp
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.device.assembly import array, concatenate, stack
from mpiad.ensemble.batch import Batch

__all__ = ["Field"]


class Field:
    """f of a batch, called with columns that may be traced.

    Parameters
    ----------
    batch : Batch
        Of which only f, the shape of a state, and the nest of the parameters are used.
    """

    def __init__(self, batch: Batch):
        self._f, self._shape, self._build, self._varies = batch.f, batch.shape, batch.p.build, batch.p.varies
        self.one_by_one = len(batch.shape) > 1

    def rows(self, u: Array, leaves: Sequence[Any], t: Array) -> Sequence[Any]:
        """Return the derivative as f gives it: its components, or a list of one array that holds all.

        Parameters
        ----------
        u : array, shape (d, n)
        leaves : sequence
            Of the parameters of these columns.
        t : array, shape (n,)
        """
        return self.bound(leaves)(u, t)

    def bound(self, leaves: Sequence[Any]) -> Callable[[Array, Array], Sequence[Any]]:
        """Return `rows` with the leaves given, as a function of u and t: their nest is built once."""
        if self.one_by_one:
            return lambda u, t: [self._each(u, leaves, t)]
        f, p = self._f, self._build(leaves)
        if not self._shape:
            return lambda u, t: [f(u[0], p, t)]

        def rows(u: Array, t: Array) -> Sequence[Any]:
            value = f(u, p, t)
            return value if isinstance(value, (list, tuple)) else [value]

        return rows

    def array(self, u: Array, leaves: Sequence[Any], t: Array) -> Array:
        """Return the derivative of each column, shape (d, n); arguments as for `rows`."""
        rows = self.rows(u, leaves, t)
        if is_whole(rows, u.shape):
            return rows[0]
        # A component may be one number, the same for all columns.
        return stack([row if anp.shape(row) else row * anp.ones_like(getval(u)[0]) for row in rows])

    def _each(self, u: Array, leaves: Sequence[Any], t: Array) -> Array:
        """Return the derivatives of flattened states, for which f is called one after the other."""
        columns = []
        for j in range(u.shape[1]):
            own = [leaf[..., j] if varies else leaf for leaf, varies in zip(leaves, self._varies)]
            value = self._f(anp.reshape(u[:, j], self._shape), self._build(own), t[j])
            columns.append(anp.reshape(array(value) if isinstance(value, (list, tuple)) else value, (-1, 1)))
        return columns[0] if len(columns) == 1 else concatenate(columns, axis=1)


def is_whole(rows: Sequence[Any], shape: tuple[int, int]) -> bool:
    """Tell whether f gave one array that holds all components."""
    return len(rows) == 1 and anp.shape(rows[0]) == shape
