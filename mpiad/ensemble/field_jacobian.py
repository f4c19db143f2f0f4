"""The exact Jacobian of f for many trajectories, computed by a program if f can be traced, otherwise by tangents.

The program (`jacobian_program`) computes only the entries that aren't structurally zero, so a sparse Jacobian costs little
more than f. Tangents need one direction per component of the state.

The adjoint of a Rosenbrock method in a kernel needs second derivatives of f; its program is also derived in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.compiling.derivatives import Wanted, derivatives_by_inputs, jvp, vjp
from mpiad.compiling.program import Builder, Program, Refusal, Untraceable, evaluated, simplify
from mpiad.device.transfer import to_host
from mpiad.ensemble.batch import Batch, is_on_device
from mpiad.ensemble.compiled.trace import ParameterPacking, packing_of, program_of
from mpiad.ensemble.compiled.traced_problem import remembered
from mpiad.ensemble.derivative import Columns
from mpiad.ensemble.linearization import Field, jacobian_by_tangents
from mpiad.pytrees import flatten
from mpiad.transport.devices.device_arrays import is_device_array

_CACHED_PROGRAMS = 32


class JacobianProgram(NamedTuple):
    """The entries of the Jacobian that aren't structurally zero."""

    program: Program  # its outputs are the entries, followed by derivatives of components with respect to time
    places: tuple[tuple[int, int], ...]  # row and column of each entry
    slopes: tuple[int, ...]  # the components whose derivatives with respect to time aren't structurally zero


@lru_cache(_CACHED_PROGRAMS)
def jacobian_program(program: Program) -> JacobianProgram:
    """Return the program that computes the derivatives of f with respect to state and time."""
    d, builder = program.groups["state"], Builder()
    outputs = derivatives_by_inputs(builder, program, {"state": None, "time": None})
    nonzero = {place: number for place, number in outputs.items() if builder.value(number) != 0}
    places, slopes = ([place for place in nonzero if (place[1] == d) is timed] for timed in (False, True))
    derived_program = builder.program(program.groups, [nonzero[place] for place in places + slopes])
    return JacobianProgram(derived_program, tuple(places), tuple(i for i, _ in slopes))


def second_adjoint_program(program: Program, wanted: Wanted | None = None) -> Program:
    """Return the derivative of the vector-Jacobian product of f along a "direction" (of the state, then of time)."""
    gradient = vjp(program, wanted, seeds="cotangent")
    return simplify(jvp(gradient, {"state": None, "time": None}, seeds="direction"))


_Derived = TypeVar("_Derived")
# Number of trajectories for which the values of a program and of f are compared if arrays are on a device.
_COMPARED_TRAJECTORIES = 3


# ``write(out, u, p, t)`` writes ∂f/∂u at n states into `out`, shape (d, d, n), and returns ∂f/∂t, shape (d, n), or None if
# it is zero. Entries that are structurally zero aren't written, so `out` must hold zeros at the first call.
JacobianWriter: TypeAlias = "Callable[[Array, Array, Tree, Array], Array | None]"


def jacobian_of(batch: Batch) -> JacobianWriter:
    """Return a writer of the Jacobian of a batch's f; raise a TypeError if f can be neither traced nor differentiated."""
    found = derived(jacobian_program, batch)
    if isinstance(found, JacobianProgram):
        return _ProgramJacobian(found, packing_of(batch.p)).write
    if is_on_device(batch):
        raise TypeError(
            f"solve: on a device a Rosenbrock method needs the Jacobian of a traced f, but tracing failed ({found}). Write "
            "f with functions of autograd.numpy, without branches on values, or apply mpiad.device.to_host to u0 and p."
        )
    field = Field(batch)

    def write(out: Array, u: Array, p: Tree, t: Array) -> Array | None:
        _, columns, slope = jacobian_by_tangents(field, u, _leaves(p), t)
        np.stack(columns, axis=1, out=out)
        return slope

    if batch.size:
        _check_differentiable(write, batch, str(found))
    return write


def derived(derivative: Callable[[Program], _Derived], batch: Batch) -> _Derived | str:
    """Return `derivative` of the program of f, or the reason why f can't be traced; the result is cached."""
    if is_on_device(batch):  # a few trajectories as host arrays
        batch = batch.share(slice(0, _COMPARED_TRAJECTORIES))
        u0, *leaves = (to_host(x) if is_device_array(x) else x for x in (batch.u0, *batch.p.leaves))
        batch = batch._replace(u0=u0, p=batch.p._replace(leaves=leaves))

    def derive(_: bool) -> _Derived | str:
        try:
            return derivative(program_of(batch))
        except (Untraceable, Refusal) as error:
            return str(error)  # as text, since the exception holds references to f's frames

    found: Any = remembered(derive, batch, (), derivative.__name__)
    return found


def _check_differentiable(write: JacobianWriter, batch: Batch, untraced: str) -> None:
    d, ids = len(batch.u0), np.zeros(2, int)  # f is always called with at least two columns
    p, t = batch.parameters(ids), batch.start[ids].astype(batch.u0.dtype)
    try:
        with np.errstate(all="ignore"):
            write(np.zeros((d, d, 2), batch.u0.dtype), batch.u0[:, ids], p, t)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise TypeError(
            f"solve: a Rosenbrock method needs the Jacobian of f, but f can't be traced ({untraced}) or differentiated "
            f"({str(error).rstrip('.')}). Write f with the functions of autograd.numpy, or take RK45()."
        ) from error


class _ProgramJacobian:
    """The Jacobian computed by a program, whose operations process all columns."""

    def __init__(self, jacobian: JacobianProgram, packing: ParameterPacking):
        self._program, self._places, self._slopes = jacobian
        self._packing, self._p, self._rows = packing, None, {}

    def write(self, out: Array, u: Array, p: Tree, t: Array) -> Array | None:
        if p is not self._p:  # p is a new object if the trajectories have changed
            self._p, self._rows = p, self._packing.numbers(_leaves(p), u.shape[1], u.dtype)
        values = evaluated(self._program, u, self._rows, [t])
        for (i, j), value in zip(self._places, values):
            out[i, j] = value
        if not self._slopes:
            return None
        slope = np.zeros_like(u)
        for i, value in zip(self._slopes, values[len(self._places) :]):
            slope[i] = value
        return slope


def _leaves(p: Tree) -> list:
    return p.leaves if isinstance(p, Columns) else flatten(p)[0]
