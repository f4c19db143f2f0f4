"""The derivatives of f at one stage of a block of columns: vector-Jacobian products, and tangents along a few directions.

A column is a trajectory. f is traced again at each stage, because its control flow may depend on values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.device.assembly import array, concatenate
from mpiad.differentiation.backward import run_backward
from mpiad.differentiation.forward import Bundle
from mpiad.differentiation.shortcuts import shortened
from mpiad.differentiation.tape import trace_list
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.step_operators import rows_of
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.transport import Spec


class Tracing:
    """Differentiates f with respect to states, the leaves of the parameters with indices `places` and, if `timed`, time."""

    def __init__(self, field: Field, places: Sequence[int], timed: bool):
        self._field, self._places, self._timed = field, tuple(places), timed
        self._count = 1 + len(self._places) + timed

    def transposed(
        self, out: Array, u: Array, leaves: Sequence[Any], t: Array, keep: bool = False
    ) -> Callable[[Array], list[Any]]:
        """Write f at u, (d, n), and t, (n,), to `out`, and return the transposed derivative.

        The returned function maps a cotangent of f to the cotangents of u, of the leaves and, if `timed`, of t, or None for
        zeros. It may be called only once unless `keep` is true.
        """

        def called(variables: list[Array]) -> Sequence[Array]:
            variables = list(map(shortened, variables))
            field = self._field.bound(self._filled(leaves, variables[1:]))
            return field(variables[0], variables[-1] if self._timed else t)

        given = [u, *[leaves[place] for place in self._places]]
        values, places, recording = trace_list(called, given + [t] if self._timed else given)
        whole = is_whole(values, out.shape)
        for i, value in zip([slice(None)] if whole else range(len(out)), values):
            np.copyto(out[i], value, casting="same_kind")
        specs = [(place, spec_like(value)) for place, value in zip(places, values)]
        # Release the memory of the values before the reverse pass, which needs only the specs.
        del values

        def pull(g: Array) -> list[Array]:
            # Device arrays aren't iterable.
            parts = (g,) if whole else [g[i] for i in range(len(g))]
            seeds = [(place, _seed(part, spec)) for part, (place, spec) in zip(parts, specs) if place >= 0]
            return run_backward(recording, seeds, self._count, keep)

        return pull

    def along(
        self, bundle: Bundle, leaves: Sequence[Any], tangents: Sequence[Sequence[Any]]
    ) -> Callable[[Array, Array, Array], None]:
        """Return a function ``write(out, u, t)`` that writes f and its tangents to `out`.

        u and `out`, shape (1 + directions, d, n), contain values and then tangents. `tangents`: for each leaf in `places`
        its tangents, or None for zeros. `bundle`: an open trace.
        """
        variable, parts = bundle.variable, bundle.parts
        # Parameters are the same for all stages.
        given = [shortened(variable(leaves[place], list(gs))) for place, gs in zip(self._places, tangents)]
        called = self._field.bound(self._filled(leaves, given))

        def write(out: Array, u: Array, t: Array) -> None:
            gs = [u[j] for j in range(1, len(u))]
            rows = called(shortened(variable(u[0], gs)), t)
            for i, row in zip([slice(None)] if is_whole(rows, u.shape[1:]) else range(len(rows)), rows):
                value, found = parts(row)
                np.copyto(out[0, i], value, casting="same_kind")
                for j, g in enumerate(found or [None] * len(gs), 1):
                    out[j, i] = 0 if g is None else g

        return write

    def _filled(self, leaves: Sequence[Any], variables: list[Array]) -> Sequence[Any]:
        if not self._places:
            return leaves
        filled = list(leaves)
        for place, variable in zip(self._places, variables):
            filled[place] = variable
        return filled


def transposed_columns(
    field: Field, places: Sequence[int], timed: bool, out: Array, u: Array, leaves: Sequence[Any], t: Array
) -> Callable[[Array], list[Any]]:
    """Return the transposed derivative of a function of columns (see `Tracing.transposed`); it may be called repeatedly.

    A single column is duplicated, and the copy gets a zero cotangent. Without `timed` the cotangent of t is zero.
    """
    count, varies = len(t), field.varies
    if count == 1:
        out, u, t = (np.concatenate([x, x], axis=-1) for x in (out, u, t))
        leaves = [np.concatenate([x, x], axis=-1) if vary else x for x, vary in zip(leaves, varies)]
    pull = Tracing(field, places, timed).transposed(out, u, leaves, t, keep=True)

    def pulled(g: Array) -> list[Array]:
        by_u, *parts = pull(g if count > 1 else np.concatenate([g, np.zeros_like(g)], axis=-1))
        by_t = parts.pop() if timed else None
        parts = [x[..., :count] if varies[place] and x is not None else x for place, x in zip(places, parts)]
        by_u, by_t = (np.zeros_like(x) if bar is None else bar for x, bar in ((u, by_u), (t, by_t)))
        return [by_u[:, :count], *parts, by_t[:count]]

    return pulled


def check_traceable(field: Field, u: Array, leaves: Sequence[Any], t: Array) -> None:
    """Trace f once with respect to the states; raise a TypeError if f uses functions that can't be traced."""
    try:
        Tracing(field, (), False).transposed(np.empty_like(u), u, leaves, t)
    except (TypeError, ValueError) as error:
        advice = "Write it with the functions of autograd.numpy instead of numpy."
        raise TypeError(f"solve: f can't be differentiated ({error}). {advice}") from error


def _seed(part: Array, spec: Spec) -> Array:
    """Return the cotangent of a component, summed over the columns if the component is one number for all columns."""
    if part.shape != spec.shape:
        part = part.sum()
    return part if part.dtype == spec.dtype else conform(part, *spec)


class Field:
    """The function f of a batch, called with columns that may be traced; `one_by_one`: whether one column per call."""

    def __init__(self, batch: Batch):
        self._f, self._shape, self._build, self.varies = batch.f, batch.shape, batch.p.build, batch.p.varies
        self.one_by_one = len(batch.shape) > 1

    def bound(self, leaves: Sequence[Any]) -> Callable[[Array, Array], Sequence[Array]]:
        """Return f with these leaves as a function of u and t.

        It returns the derivative as a list of its components, or a list of one array with all of them.
        """
        if self.one_by_one:
            return lambda u, t: [self._each(u, leaves, t)]
        f, p = self._f, self._build(leaves)
        if not self._shape:
            return lambda u, t: [f(u[0], p, t)]

        def rows(u: Array, t: Array) -> Sequence[Array]:
            value = f(u, p, t)
            return value if isinstance(value, (list, tuple)) else [value]

        return rows

    def array(self, u: Array, leaves: Sequence[Any], t: Array) -> Array:
        """Return the derivative of each column, shape (d, n)."""
        rows = self.bound(leaves)(u, t)
        if is_whole(rows, u.shape):
            return rows[0]
        return rows_of(getval(u), *rows)

    def _each(self, u: Array, leaves: Sequence[Any], t: Array) -> Array:
        """Return the derivatives of flattened states, by one call of f per trajectory."""
        columns = []
        for j in range(u.shape[1]):
            p = self._build([leaf[..., j] if varies else leaf for leaf, varies in zip(leaves, self.varies)])
            value = self._f(anp.reshape(u[:, j], self._shape), p, t[j])
            columns.append(anp.reshape(array(value) if isinstance(value, (list, tuple)) else value, (-1, 1)))
        return columns[0] if len(columns) == 1 else concatenate(columns, axis=1)


def is_whole(rows: Sequence[Array], shape: tuple[int, int]) -> bool:
    """Return whether the function of `Field.bound` has returned one array with all components."""
    return len(rows) == 1 and anp.shape(rows[0]) == shape
