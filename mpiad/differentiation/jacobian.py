"""`jacobian` and `hessian`: derivatives of array-valued objectives and of gradients.

A Jacobian J is computed by one reverse pass per entry, or by columns: if the variables have few numbers compared with the
entries of J, the columns are products of the linearized function with unit vectors of one number of one rank, or of a
shared variable on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import Box

from mpiad._typing import Argnum, Array, Comm, Function, Rank, Shared, Tree
from mpiad.device.assembly import concatenate, stack
from mpiad.differentiation.gradient import cotangents_of_variables, gradient_of, require_equal_copies, shared_sum
from mpiad.differentiation.objective import PendingError, Shapes, check_objective, copies_error, shapes_text, weight_of
from mpiad.differentiation.products import Linearization, linearization_of
from mpiad.differentiation.trace import Traced, Variables, arguments_with, trace_backwards, variables_of
from mpiad.primitives import mpi_allreduce
from mpiad.primitives.checks import root_of
from mpiad.primitives.cotangents import spec_like
from mpiad.transport import Channel, Spec, channel
from mpiad.transport.core.agreement import agreed
from mpiad.transport.devices.device_arrays import is_device_array
from mpiad.transport.exits.recovery import recoverable


def jacobian(
    fun: Function, argnum: Argnum = 0, *, objective: str = "root", shared: Shared = False, root: Rank = 0, comm: Comm = None
) -> Callable[..., Tree]:
    """Make the function that evaluates the Jacobian of an array-valued objective with respect to each rank's argument.

    Parameters
    ----------
    fun : callable
        Runs on every rank and returns a real array F_r. With ``objective="root"``, ranks other than root may return None.
    argnum, objective, shared, root, comm
        As in `value_and_grad`; J = F_root, the sum of all F_r, or their mean.

    Returns
    -------
    callable
        ``(*args) -> dJ/dx_r``, each leaf of shape ``(*J.shape, *x.shape)``.

    Raises
    ------
    TypeError, ValueError, RequestError
        As in `value_and_grad`. On all ranks, if the returned arrays aren't real or differ in shape.

    Ranks
    -----
    All ranks of `comm` call the result.

    Adjoint
    -------
    The Jacobian can be differentiated again.

    Examples
    --------
    >>> print(mpiad.jacobian(lambda x: mpiad.mpi_allreduce(x**2))(np.array([1.0, 2.0])))
    [[2. 0.]
     [0. 4.]]
    """
    return _evaluator(fun, argnum, objective, shared, root, comm, "jacobian")


def hessian(
    fun: Function, argnum: int = 0, *, objective: str = "root", shared: bool = True, root: Rank = 0, comm: Comm = None
) -> Callable[..., Array]:
    """Make the function that evaluates the Hessian of the objective with respect to a few variables of all ranks.

    It takes one reverse pass for each variable, through a record of the gradient. For many variables, `hvp` computes
    products with the Hessian.

    Parameters
    ----------
    fun : callable
        As in `value_and_grad`. All ranks pass copies of one variable, a real array or number.
    argnum : int
        Position of the variable.
    objective, root, comm
        As in `value_and_grad`.
    shared : bool
        True, since the variable is shared by all ranks.

    Returns
    -------
    callable
        ``(*args) -> ∂²J/∂x∂x``, an array of shape ``(*x.shape, *x.shape)``, the same on all ranks. Exceptions, ranks and
        adjoint are as in `jacobian`.

    Raises
    ------
    ValueError
        If `shared` isn't True.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> print(mpiad.hessian(lambda x: mpiad.mpi_allreduce(x[0] ** 2 * x[1]) / size)(np.array([1.0, 3.0])))
    [[6. 2.]
     [2. 0.]]
    """
    if shared is not True:
        own = "for variables of each rank compute products with the Hessian: mpiad.hvp(fun)(x, v)"
        raise ValueError(f"hessian: shared must be True, since x is one variable of all ranks, but got {shared!r}; {own}.")
    gradient = gradient_of(fun, argnum, objective, True, root, comm, "hessian")
    return _evaluator(gradient, argnum, "root", True, root, comm, "hessian")


def _evaluator(
    fun: Function, argnum: Argnum, objective: str, shared: Shared, root: Rank, comm: Comm, call: str
) -> Callable[..., Tree]:
    check_objective(objective, call)

    @recoverable(call, comm)
    def evaluate(*args: Any, **kwargs: Any) -> Tree:
        group = channel(comm, call)
        weight = weight_of(objective, group, root_of(root, group, call))
        variables = variables_of(args, argnum, call, shared)
        require_equal_copies(variables, shared, group, call)
        run = lambda x: fun(*arguments_with(args, argnum, x), **kwargs)  # noqa: E731
        traced = trace_backwards(run, variables, passes="recorded")  # a column differentiates the reverse pass
        sizes = tuple(_sizes(variables, is_shared) for is_shared in (False, True))
        spec, sizes_of_ranks = _agreed_spec(traced, weight, group, variables.shared_shapes(), sizes, call)
        count = sum(own for own, _ in sizes_of_ranks) + sizes[1]
        if count * _ROWS_PER_COLUMN <= int(np.prod(spec.shape)):
            first = sum(own for own, _ in sizes_of_ranks[: group.rank])
            columns = _Columns(linearization_of(traced, variables), variables, spec, first, count - sizes[1])
            return variables.filled(columns.leaves(weight, count, comm), lambda leaf: None)
        rows = [_row(traced, k, spec, weight, variables) for k in range(int(np.prod(spec.shape)))]
        leaves = [_stacked(rows, i, spec, variables) for i in range(len(variables.places))]
        # For a shared variable, the derivatives of all entries of J are summed over the ranks together, not row by row.
        return variables.filled(shared_sum(leaves, variables, comm), lambda leaf: None)

    return evaluate


# A column is computed from several values, a row from one cotangent, and the first column takes longer than later ones.
_ROWS_PER_COLUMN = 4
_COLUMNS = 16  # the maximum number of columns that are computed together


def _sizes(variables: Variables, is_shared: bool) -> int:
    """Return the number of real numbers in the variables that are shared, or aren't."""
    specs = [spec_like(variables.leaves[place]) for place in variables.places]
    return sum(_number(spec) for k, spec in enumerate(specs) if (k in variables.shared) == is_shared)


def _number(spec: Spec) -> int:
    return int(np.prod(spec.shape)) * (2 if spec.dtype.kind == "c" else 1)


class _Columns:
    """The columns of J; those of this rank's variables begin with `first`, those of shared variables with `shared`."""

    def __init__(self, linear: Linearization, variables: Variables, spec: Spec, first: int, shared: int):
        self._linear, self._variables, self._spec = linear, variables, spec
        # Per variable: its spec and its first column.
        self._places: list[tuple[Spec, int]] = []
        next_columns = {False: first, True: shared}
        for k, place in enumerate(variables.places):
            leaf, is_shared = spec_like(variables.leaves[place]), k in variables.shared
            self._places.append((leaf, next_columns[is_shared]))
            next_columns[is_shared] += _number(leaf)

    def leaves(self, weight: float, count: int, comm: Comm) -> list[Array]:
        """Return the derivatives with respect to the variables, of shape ``(*J.shape, *x.shape)``; collective."""
        groups = [self._tangents(weight, range(k, min(count, k + _COLUMNS))) for k in range(0, count, _COLUMNS)]
        columns = mpi_allreduce(concatenate(groups, axis=0), comm=comm)
        leaves = []
        for leaf, first in self._places:
            part = columns[first : first + _number(leaf)]
            if leaf.dtype.kind == "c":
                # In autograd's convention the gradient with respect to a + ib is ∂/∂a - i ∂/∂b.
                part = part[::2] - 1j * part[1::2]
            axes = (*range(1, 1 + len(self._spec.shape)), 0)
            leaves.append(anp.reshape(anp.transpose(part, axes), (*self._spec.shape, *leaf.shape)))
        return leaves

    def _tangents(self, weight: float, columns: range) -> Array:
        """Return this rank's terms of some columns, with the columns along the first axis."""
        along = []
        for leaf, first in self._places:
            units, width = (
                Spec((len(columns), *leaf.shape), leaf.dtype, leaf.arrays).zeros(),
                2 if leaf.dtype.kind == "c" else 1,
            )
            for row, column in enumerate(columns):
                if first <= column < first + _number(leaf):
                    entry, part = divmod(column - first, width)
                    units.reshape(len(columns), -1)[row, entry] = 1j if part else 1.0
            along.append(units)
        tangents = self._linear.jvp(self._variables.filled(along), batch=True)
        if weight == 0.0 or tangents is None:
            return Spec((len(columns), *self._spec.shape), self._spec.dtype, self._spec.arrays).zeros()
        return weight * tangents


def _agreed_spec(
    traced: Traced, weight: float, channel: Channel, shapes: Shapes, sizes: tuple[int, ...], call: str
) -> tuple[Spec, list[tuple[int, ...]]]:
    """Return the spec of J, and the `sizes` of all ranks.

    Raise on all ranks if the spec is invalid, or if spec or `shapes` differ between ranks.
    """
    value = traced.build(traced.values)
    problem = traced.problem
    spec = None
    if value is not None and weight != 0.0:
        is_array = isinstance(value, (np.ndarray, np.generic, int, float)) or is_device_array(value)
        if is_array or type(value) in Box.types:
            spec = spec_like(value)
        else:
            problem = problem or PendingError(TypeError, f"the function returned {type(value).__name__}")
        if spec is not None and spec.dtype.kind not in "fiu":
            problem = problem or PendingError(TypeError, f"the function returned dtype {spec.dtype}")
    local_spec = problem, spec and spec.shape, spec and spec.dtype.str, weight != 0.0
    specs, copies, every = zip(*channel.data.allgather((local_spec, shapes_text(shapes), sizes)))
    problems = [f"rank {rank}: {problem.text}" for rank, (problem, *_) in enumerate(specs) if problem]
    kinds = [problem.kind for problem, *_ in specs if problem and problem.kind is not TypeError]
    if kinds:  # requests that weren't waited for, or arrays that changed
        raise agreed(channel, kinds[0](f"{call}: {'; '.join(problems)}"))
    if len(set(copies)) > 1:
        raise agreed(channel, copies_error(copies, call))
    forms = {(shape, dtype) for _, shape, dtype, contributes in specs if contributes}
    if problems or len(forms) != 1 or None in next(iter(forms)):
        listed = "; ".join(problems) or f"shapes and dtypes {sorted(map(str, forms))}"
        text = f"{call}: ranks with a term in J must return real arrays of the same shape and dtype, but got {listed}."
        raise agreed(channel, TypeError(text))
    shape, dtype = forms.pop()
    return Spec(shape, np.dtype(dtype), None if spec is None else spec.arrays), list(every)


def _row(traced: Traced, k: int, spec: Spec, weight: float, variables: Variables) -> list[Array]:
    seeds = []
    if traced.places[0] >= 0 and weight != 0.0:
        # A new array for each row, since the reverse pass keeps a reference to the seed.
        seed = spec.zeros()
        if spec.shape:
            seed.reshape(-1)[k] = weight
        else:
            seed = seed + spec.dtype.type(weight)
        seeds.append((traced.places[0], seed))
    return cotangents_of_variables(traced, seeds, variables, keep=True)


def _stacked(rows: list[list[Array]], i: int, spec: Spec, variables: Variables) -> Array:
    leaf = spec_like(variables.leaves[variables.places[i]])
    if not rows:
        return Spec((*spec.shape, *leaf.shape), leaf.dtype, leaf.arrays).zeros()
    return anp.reshape(stack([row[i] for row in rows]), (*spec.shape, *leaf.shape))
