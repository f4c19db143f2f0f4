"""The exact Jacobian of f for many trajectories, computed by a program if f can be traced, otherwise by tangents.

The program (`jacobian_program`) computes only the entries that aren't structurally zero, so a sparse Jacobian costs little
more than f. Tangents need one direction per component of the state.

The adjoint of a Rosenbrock method in a kernel needs second derivatives of f; its program is also derived in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Tree
from mpiad.compiling.derivatives import Wanted, derivatives_by_inputs, jvp, vjp
from mpiad.compiling.program import Builder, Program, Refusal, Untraceable, simplify
from mpiad.ensemble.batch import Batch, is_on_device
from mpiad.ensemble.column_lu import Places
from mpiad.ensemble.compiled.trace import packing_of, program_of
from mpiad.ensemble.compiled.traced_problem import LARGE, remembered
from mpiad.ensemble.derivative import Columns
from mpiad.ensemble.linearization import Field, check_traceable, jacobian_by_tangents
from mpiad.ensemble.sparse_lu import LEAST_SPARSE
from mpiad.ensemble.sparsity import PatternCheck, given_pattern, groups_of, pattern_of, refuse_missing
from mpiad.ensemble.step_operators import rows_of, values_of
from mpiad.pytrees import flatten


class JacobianProgram(NamedTuple):
    """The entries of the Jacobian that aren't structurally zero."""

    program: Program  # its outputs are the entries, followed by derivatives of components with respect to time
    places: tuple[tuple[int, int], ...]  # row and column of each entry
    slopes: tuple[int, ...]  # the components whose derivatives with respect to time aren't structurally zero

    def parts(self, u: Array, rows: Sequence[Array] | Array, t: Array) -> tuple[Array, Array | None]:
        """Return the entries, and ∂f/∂t, shape (d, n), or None if it is zero; u and the parameters `rows` may be traced."""
        values, count = values_of(self.program, u, rows, t[None]), len(self.places)
        of_time = dict(zip(self.slopes, range(count, count + len(self.slopes))))
        slopes = [values[of_time[i]] if i in of_time else 0.0 for i in range(len(u))]
        return values[:count], rows_of(getval(u), *slopes) if of_time else None


# The maximum number of operations of a Jacobian's program, which limits the time to make and to compile it.
_MOST_OPERATIONS = 50_000


@lru_cache(32)
def jacobian_program(program: Program) -> JacobianProgram:
    """Return the program of the derivatives of f with respect to state and time; raise a Refusal if it is too long."""
    d, builder = program.groups["state"], Builder(_MOST_OPERATIONS)
    outputs = derivatives_by_inputs(builder, program, {"state": None, "time": None})
    nonzero = {place: number for place, number in outputs.items() if builder.value(number) != 0}
    places, slopes = ([place for place in nonzero if (place[1] == d) is timed] for timed in (False, True))
    derived_program = builder.program(program.groups, [nonzero[place] for place in places + slopes])
    return JacobianProgram(derived_program, tuple(places), tuple(i for i, _ in slopes))


def second_adjoint_program(program: Program, wanted: Wanted) -> Program:
    """Return the derivative of the vector-Jacobian product of f along a "direction" (of the state, then of time)."""
    gradient = vjp(program, wanted, seeds="cotangent")
    return simplify(jvp(gradient, {"state": None, "time": None}, seeds="direction"))


# Number of operations of a program that take as much time as one operation of traced arrays.
_PER_TRACED = 8


class FieldJacobian:
    """The Jacobian of a batch's f at the places of its entries, computed by a program or by tangents."""

    def __init__(self, batch: Batch, places: Places, program: JacobianProgram | None, groups: Array | None = None):
        # Tangents are computed along groups of columns, masks of shape (groups, d), or along single columns.
        self.places, self.program, self.groups = places, program, groups
        self.check: PatternCheck | None = None  # for a user's pattern of an f that can't be traced
        self._packing, self.field = packing_of(batch.p), Field(batch)
        self._p: Tree = None
        self._rows: Any = {}
        if groups is not None:
            # The products with groups contain the entries, sorted by group and row. `places` gets the same order.
            group = np.argmax(groups, axis=0)[places.columns]
            order = np.lexsort((places.rows, group))
            self.places = Places(*(indices[order] for indices in places))
            self._in_pattern = np.zeros(groups.size, bool)
            self._in_pattern[group * len(batch.u0) + places.rows] = True

    def chosen(self, products: Array) -> Array:
        """Return the entries among the tangents along all groups, shape (groups · d, n), which may be traced."""
        return products if self.groups is None else products[self._in_pattern]

    def entries(self, u: Array, p: Tree, t: Array) -> tuple[Array, Array | None]:
        """Return the entries at n states, shape (m, n), and ∂f/∂t, shape (d, n), or None if it is zero."""
        if self.program is None:
            _, products, slope = jacobian_by_tangents(self.field, u, _leaves(p), t, self.groups)
            entries = self.chosen(np.concatenate(products))
            if self.check is not None:
                self.check.by_product(u, _leaves(p), t, entries)
            return entries, slope
        if p is not self._p:  # p is a new object if the trajectories have changed
            self._p, self._rows = p, self._packing.numbers(_leaves(p), u.shape[1], u.dtype)
        return self.program.parts(u, self._rows, t)

    def matrices(self, u: Array, p: Tree, t: Array) -> Array:
        """Return the Jacobians at n states, shape (d, d, n)."""
        out = np.zeros_like(u, shape=(len(u), *u.shape))
        out[self.places] = self.entries(u, p, t)[0]
        return out


def jacobian_of(batch: Batch) -> FieldJacobian:
    """Return the Jacobian of a batch's f; raise a TypeError if f can be neither traced nor differentiated.

    Raise a TypeError or a ValueError if the user's pattern of the Jacobian is invalid or lacks an entry.
    """
    d = len(batch.u0)
    pattern = None if batch.sparsity is None else given_pattern(batch.sparsity, d)
    structure = _structure_of(batch)
    if not isinstance(structure, str):
        if pattern is not None:
            refuse_missing(pattern, structure[0], d)
        return FieldJacobian(batch, *structure)
    if is_on_device(batch):
        raise TypeError(
            "solve: on a device a Rosenbrock method needs the Jacobian of a traced f, but tracing failed "
            f"({structure}). Write f with functions of autograd.numpy, without branches on values, or apply "
            "mpiad.device.to_host to u0 and p."
        )
    dense = Places(*np.divmod(np.arange(d * d), d)[::-1])  # column by column
    jacobian = FieldJacobian(batch, dense if pattern is None else pattern, None, pattern and groups_of(pattern, d))
    if batch.size:
        _check_differentiable(jacobian, batch, structure)
    if batch.size and pattern is not None:
        check, (p, u, t) = PatternCheck(jacobian.field, jacobian.places, jacobian.groups), _first_columns(batch)
        with np.errstate(all="ignore"):
            check.by_nan(u, _leaves(p), t)
        jacobian.check = check
    return jacobian


# The places of the entries, and the program or the groups of columns: see `FieldJacobian`.
_Structure: TypeAlias = "tuple[Places, JacobianProgram | None, Array | None]"
_Result = TypeVar("_Result")


def field_program(batch: Batch) -> Program | None:
    """Return the program of f; None if f can't be traced, or if derivatives of f by arrays take less time."""
    # On a device the comparison of the program with f would copy arrays to the host.
    if len(batch.u0) > LARGE or is_on_device(batch) or np.iscomplexobj(batch.u0):
        return None

    def faster(traced: Batch) -> Program | str:
        most = _traced_cost(traced)
        # A program has at least about one operation per number that f uses: a network's needn't be traced.
        if len(traced.u0) + packing_of(traced.p).size > most:
            return "slow"
        program = program_of(traced)
        return program if program.cost <= most else "slow"

    program = _remembered(batch, "field", faster)
    return program if isinstance(program, Program) else None


def _structure_of(batch: Batch) -> _Structure | str:
    """Return the structure of the Jacobian, or the reason why f can't be traced; the result is cached."""
    # A rank without trajectories has no state at which f could be called.
    sparse = batch.size > 0 and not is_on_device(batch) and len(batch.u0) >= LEAST_SPARSE

    def structure(batch: Batch) -> _Structure:
        program = program_of(batch)
        if sparse:
            places = pattern_of(program)
            groups = groups_of(places, len(batch.u0))
            if _traced_cost(batch) * (2 + len(groups)) < program.cost:
                return places, None, groups
        jacobian = jacobian_program(program)
        return Places(*np.array(jacobian.places, int).reshape(-1, 2).T), jacobian, None

    return _remembered(batch, f"Jacobian, sparse: {sparse}", structure)


def _remembered(batch: Batch, name: str, make: Callable[[Batch], _Result]) -> _Result | str:
    """Return ``make(batch on the host)``, or the reason why f can't be traced; the result is cached."""
    if is_on_device(batch):  # a few trajectories as host arrays, for which the values of the program and of f are compared
        batch = batch.share(slice(0, 3)).on_host()

    def find(_: bool) -> _Result | str:
        try:
            return make(batch)
        except (Untraceable, Refusal) as error:
            return str(error)  # as text, since the exception holds references to f's frames

    # Without trajectories the program isn't compared with f.
    return remembered(find, batch, (), name, batch.size > 0)  # type: ignore[return-value]


def _traced_cost(batch: Batch) -> float:
    """Return the time of f for traced arrays in operations of a program; infinity if f can't be differentiated so."""
    p, u, t = _first_columns(batch)
    try:
        with np.errstate(all="ignore"):
            return _PER_TRACED * check_traceable(batch, u, _leaves(p), t)
    except (TypeError, NotImplementedError):
        return np.inf


def _first_columns(batch: Batch) -> tuple[Tree, Array, Array]:
    """Return parameters, state and time of the first trajectory, twice: f is always called with at least two columns."""
    ids = np.zeros(2, int)
    return batch.parameters(ids), batch.u0[:, ids], batch.start[ids].astype(batch.u0.dtype)


def _check_differentiable(jacobian: FieldJacobian, batch: Batch, untraced: str) -> None:
    p, u, t = _first_columns(batch)
    try:
        with np.errstate(all="ignore"):
            jacobian.entries(u, p, t)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise TypeError(
            f"solve: a Rosenbrock method needs the Jacobian of f, but f can't be traced ({untraced}) or differentiated "
            f"({str(error).rstrip('.')}). Write f with the functions of autograd.numpy, or take RK45()."
        ) from error


def _leaves(p: Tree) -> list[Any]:
    return list(p.leaves) if isinstance(p, Columns) else flatten(p)[0]
