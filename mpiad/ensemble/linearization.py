"""The function f of a batch, called with columns (trajectories) that may be traced, and its derivatives.

f is traced again at each call, because its control flow may depend on values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.backward import run_backward
from mpiad.differentiation.forward import Bundle
from mpiad.differentiation.tape import trace_list
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.derivative import derivative_of
from mpiad.ensemble.step_operators import rows_of
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.transport.core.tracing import restoring_state


def pulled(fun: Callable[[list[Array]], Iterable[tuple[Array, Array]]], variables: Sequence[Array]) -> list[Array]:
    """Return the cotangents of variables, None for zeros, if ``fun(variables)`` returns results with their cotangents."""
    cotangents: list[Array] = []

    def results(traced: list[Array]) -> list[Array]:
        pairs = [(value, g) for value, g in fun(traced) if g is not None]
        cotangents.extend(g for _, g in pairs)
        return [value for value, _ in pairs]

    values, places, recording = trace_list(results, variables)
    seeds = [(k, conform(g, *spec_like(value))) for k, value, g in zip(places, values, cotangents) if k >= 0]
    return run_backward(recording, seeds, len(variables))


def with_leaves(leaves: Sequence[Any], places: Iterable[int], values: Iterable[Array]) -> list[Any]:
    """Return the leaves of the parameters with those at `places` replaced."""
    filled = list(leaves)
    for place, value in zip(places, values):
        filled[place] = value
    return filled


def check_traceable(batch: Batch, u: Array, leaves: Sequence[Any], t: Array) -> int:
    """Return the number of operations of f, traced with respect to the states; raise a TypeError if it can't be traced."""
    try:
        values, _, recording = trace_list(lambda variables: [Field(batch).array(variables[0], leaves, t)], [u])
        np.copyto(np.empty_like(u), values[0], casting="same_kind")  # raises for NumPy's arrays of traced values
        return len(recording.nodes)
    except (TypeError, ValueError) as error:
        advice = "Write it with the functions of autograd.numpy instead of numpy."
        raise TypeError(f"solve: f can't be differentiated ({error}). {advice}") from error


def jacobian_by_tangents(
    field: Field, u: Array, leaves: Sequence[Any], t: Array, directions: Array | None = None
) -> tuple[Array, list[Array], Array | None]:
    """Return f, the columns of ∂f/∂u, and ∂f/∂t or None if it is zero, each of shape (d, n); arguments may be traced.

    With `directions`, shape (c, d), return the products of ∂f/∂u with these vectors instead of the columns.
    """
    zeros = np.zeros_like(getval(u))
    units = (np.eye(len(u)) if directions is None else directions).astype(zeros.dtype)[:, :, None] + zeros
    with restoring_state(), Bundle() as bundle:
        state = bundle.variable(u, [*units, None])
        time = bundle.variable(t, [None] * len(units) + [np.ones_like(getval(t))])
        value, tangents = bundle.parts(field.array(state, leaves, time))
    *columns, slope = tangents or [None] * (len(units) + 1)
    return value, [zeros if column is None else column for column in columns], slope


class Field:
    """The function f of a batch, called with columns that may be traced; `one_by_one`: whether one column per call."""

    def __init__(self, batch: Batch):
        self._p, self.one_by_one, self._f = batch.p, len(batch.shape) > 1, derivative_of(batch.f, batch.shape).f

    def array(self, u: Array, leaves: Sequence[Any], t: Array) -> Array:
        """Return the derivative of each column, shape (d, n)."""
        value = self._f(u, self._p.of_columns(leaves, self.one_by_one), t)
        rows = value if isinstance(value, (list, tuple)) else [value]
        return rows[0] if len(rows) == 1 and np.shape(rows[0]) == u.shape else rows_of(getval(u), *rows)
