"""Whether a traced program computes what f does where a solve begins."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array, Function
from mpiad.compiling.complex_parts import from_row_parts, is_complex, real_dtype, row_parts
from mpiad.compiling.program import Program, evaluated
from mpiad.compiling.trace_errors import Untraceable, place_of
from mpiad.compiling.tracing import first_difference
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.parameter_layout import layout_of
from mpiad.ensemble.derivative import derivative_of
from mpiad.ensemble.events import Event
from mpiad.ensemble.trial import MOVED

__all__ = ["verify", "verify_condition"]

_COLUMNS = 5


def verify(program: Program, batch: Batch) -> None:
    """Compare a program with f at the initial states of a few trajectories.

    Parameters
    ----------
    program : Program
        What was traced.
    batch : Batch
        Of plain arrays.

    Raises
    ------
    Untraceable
        Where they differ by more than rounding.
    """
    if not batch.size:
        return
    ids, u, t = _columns(batch)
    expected = np.empty_like(u)
    with np.errstate(all="ignore"):
        derivative_of(batch.f, batch.shape).write(expected, u, batch.p.columns(ids, len(batch.shape) > 1), t)
    _compare(program, batch, expected, batch.f)


def verify_condition(program: Program, batch: Batch, event: Event) -> None:
    """Compare a program with an event's condition at the initial states of a few trajectories.

    Parameters
    ----------
    program : Program
        What was traced, of one output.
    batch : Batch
        Of plain arrays.

    Raises
    ------
    Untraceable
        Where they differ by more than rounding.
    """
    if batch.size:
        ids, u, t = _columns(batch)
        with np.errstate(all="ignore"):
            value = event.value(u, batch.p.columns(ids), t)
        _compare(program, batch, value.astype(u.real.dtype)[None], event.written)


def _columns(batch: Batch) -> tuple[Array, Array, Array]:
    ids = np.resize(np.arange(batch.size), _COLUMNS)
    u, t = batch.u0[:, ids], batch.start[ids].astype(real_dtype(batch.u0.dtype))
    if is_complex(u):
        # Away from the real axis, where a trace that has lost imaginary parts would be right: as those of NumPy's arrays
        # of objects, which are zero whatever the objects are.
        u[:, 1:] += MOVED * (1 + np.abs(u[:, 1:])) * np.exp(1j * np.arange(u[:, 1:].size)).reshape(u[:, 1:].shape)
    u.flags.writeable = t.flags.writeable = False
    return ids, u, t


def _compare(program: Program, batch: Batch, expected: Array, fun: Function) -> None:
    """Compare a program's outputs with what a function has returned for the same columns."""
    ids, u, t = _columns(batch)
    rows = np.empty((len(program.outputs), u.shape[1]), u.real.dtype)
    for row, value in zip(rows, evaluated(program, row_parts(u), _parameters(batch, ids), [t])):
        row[:] = value
    found = from_row_parts(rows, expected.dtype)
    place = first_difference(found, expected, u)
    if place is not None:
        i, j = place
        raise Untraceable(
            f"it returns {expected[i, j]} for component {i} of u = {u[:, j].tolist()}, but {found[i, j]} was traced: does "
            "it look at the types of its arguments, or keep something from call to call?",
            place_of(fun),
        )


def _parameters(batch: Batch, ids: Array) -> list[Any]:
    layout = layout_of(batch.p)
    leaves = [leaf[..., ids] if varies else leaf for leaf, varies in zip(batch.p.leaves, batch.p.varies)]
    varying, shared = layout.split(leaves, len(ids), real_dtype(batch.u0.dtype))
    rows = dict(zip(layout.varying, varying)) | dict(zip(layout.shared, shared))
    return [rows[j] for j in range(layout.size)]
