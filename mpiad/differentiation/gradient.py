"""`value_and_grad` and `grad`: the objective of all ranks and its gradient with respect to each rank's own variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Argnum, Array, Comm, Function, Rank, Scalar, Shared, Tree
from mpiad.device import to_host
from mpiad.device.assembly import stack
from mpiad.device.transfer import array_to_host
from mpiad.differentiation.backward import run_backward, run_backward_together
from mpiad.differentiation.concatenation import Concatenation
from mpiad.differentiation.objective import check_objective, problem_with, reduce_objective, weight_of
from mpiad.differentiation.trace import Traced, Variables, arguments_with, no_derivative, trace_backwards, variables_of
from mpiad.primitives.allreduce import mpi_allreduce
from mpiad.primitives.checks import root_of
from mpiad.primitives.cotangents import conform, conformed, spec_like
from mpiad.pytrees import named_leaves
from mpiad.transport import Channel, channel
from mpiad.transport.core.replication import require_replicated
from mpiad.transport.core.tracing import checked_on_replay
from mpiad.transport.devices.device_arrays import is_device_array
from mpiad.transport.exits.recovery import recoverable
from mpiad.transport.watch import watch_settings

P = ParamSpec("P")
X = TypeVar("X", bound=Any)  # without the bound, lambdas would get arguments without operators


@overload
def value_and_grad(
    fun: Callable[Concatenate[X, P], Scalar],
    argnum: Literal[0] = 0,
    *,
    objective: str = "root",
    shared: Shared = False,
    root: Rank = 0,
    comm: Comm = None,
) -> Callable[Concatenate[X, P], tuple[float, X]]: ...
@overload
def value_and_grad(
    fun: Callable[P, Scalar],
    argnum: Argnum,
    *,
    objective: str = "root",
    shared: Shared = False,
    root: Rank = 0,
    comm: Comm = None,
) -> Callable[P, tuple[float, Tree]]: ...
def value_and_grad(
    fun: Function, argnum: Argnum = 0, *, objective: str = "root", shared: Shared = False, root: Rank = 0, comm: Comm = None
) -> Callable[..., tuple[Tree, Tree]]:
    """Make the function that evaluates the objective J and its gradient with respect to each rank's own argument.

    Parameters
    ----------
    fun : callable
        Runs on every rank r and returns L_r, a real number. With ``objective="root"``, ranks other than root may return
        None.
    argnum : int or tuple of int
        Positions of the differentiated arguments, which are nested dicts, lists and tuples of arrays and numbers.
    objective : {"root", "sum", "mean"}
        J = L_root, the sum of all L_r, or their mean.
    shared : bool or tuple of bool
        Whether all ranks hold copies of one variable x as the argument. Each rank then gets dJ/dx, the sum over all copies.
        With several arguments, or one that is a tuple, a tuple has an entry for each of them.
    root : int
    comm : mpi4py intracommunicator, optional
        The ranks over which J is computed.

    Returns
    -------
    callable
        ``(*args) -> (J, dJ/dx_r)`` with the same J on all ranks; the gradient has the structure of the argument. With
        respect to a complex variable a + ib it is ∂J/∂a - i ∂J/∂b, whose conjugate is the direction of steepest ascent.

    Raises
    ------
    TypeError
        On all ranks, if `fun` doesn't return a real number on a rank. Also if the argument has no real or complex floats.
    ValueError
        If `objective` is unknown, `root` isn't a rank of `comm`, or a tuple `shared` has another length than the
        arguments. On all ranks, if copies of a shared variable differ in number, shape or dtype.
    RequestError
        On all ranks, if a rank never waits for a request.

    Ranks
    -----
    All ranks of `comm` call the result; without `shared`, arguments may differ between ranks, also in structure.

    Adjoint
    -------
    J and the gradient can be differentiated again: another function passed to `value_and_grad` may call the result.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> J, gradient = mpiad.value_and_grad(lambda x: mpiad.mpi_allreduce(np.sum(x**2)))(np.array([1.0, 2.0]))
    >>> print(J / size, gradient)
    5.0 [2. 4.]
    """
    return _evaluator(fun, argnum, objective, shared, root, comm, "value_and_grad")


@overload
def grad(
    fun: Callable[Concatenate[X, P], Scalar],
    argnum: Literal[0] = 0,
    *,
    objective: str = "root",
    shared: Shared = False,
    root: Rank = 0,
    comm: Comm = None,
) -> Callable[Concatenate[X, P], X]: ...
@overload
def grad(
    fun: Callable[P, Scalar],
    argnum: Argnum,
    *,
    objective: str = "root",
    shared: Shared = False,
    root: Rank = 0,
    comm: Comm = None,
) -> Callable[P, Tree]: ...
def grad(
    fun: Function, argnum: Argnum = 0, *, objective: str = "root", shared: Shared = False, root: Rank = 0, comm: Comm = None
) -> Callable[..., Tree]:
    """Make the function that evaluates the gradient of the objective with respect to each rank's own argument.

    Parameters
    ----------
    fun, argnum, objective, shared, root, comm
        As in `value_and_grad`.

    Returns
    -------
    callable
        ``(*args) -> dJ/dx_r``, for a complex variable a + ib the conjugate of the direction of steepest ascent, ∂J/∂a - i
        ∂J/∂b. Exceptions, ranks and adjoint are as in `value_and_grad`.

    Examples
    --------
    One variable, with a copy on each rank:

    >>> size = mpiad.mpi_size()
    >>> print(mpiad.grad(lambda p: mpiad.mpi_allreduce(p**2), shared=True)(3.0) / size)
    6.0
    """
    return gradient_of(fun, argnum, objective, shared, root, comm, "grad")


def gradient_of(
    fun: Function, argnum: Argnum, objective: str, shared: Shared, root: Rank, comm: Comm, call: str
) -> Callable[..., Tree]:
    """Make the function of `grad` for a public function `call`, which errors name."""
    both = _evaluator(fun, argnum, objective, shared, root, comm, call)
    return lambda *args, **kwargs: both(*args, **kwargs)[1]


def _evaluator(
    fun: Function, argnum: Argnum, objective: str, shared: Shared, root: Rank, comm: Comm, call: str
) -> Callable[..., tuple[Tree, Tree]]:
    check_objective(objective, call)

    @recoverable(call, comm)
    def evaluate(*args: Any, **kwargs: Any) -> tuple[Tree, Tree]:
        group = channel(comm, call)
        weight = weight_of(objective, group, root_of(root, group, call))
        variables = variables_of(args, argnum, call, shared)
        require_equal_copies(variables, shared, group, call)
        traced = trace_backwards(lambda x: fun(*arguments_with(args, argnum, x), **kwargs), variables, passes="one")
        value = traced.build(traced.values)
        # J is checked before the reverse pass, so that no rank starts this pass if the value of any rank is invalid.
        problem = traced.problem or problem_with(value, weight, call)
        total = reduce_objective(value, weight, problem, group, variables.shared_shapes(), call)
        require_equal_objective(total, group, call)
        # The seed is the weight of this rank's term, but the result is the gradient of the sum over ranks, since the
        # adjoints of messages exchange cotangents. A rank with weight zero has no seed, but must run these adjoints.
        gradients = cotangents_of_variables(traced, seeds_of_term(traced, weight), variables)
        return total, variables.filled(shared_sum(gradients, variables, comm), no_derivative)

    return evaluate


def seeds_of_term(traced: Traced, weight: Array) -> list[tuple[int, Array]]:
    """Return a traced result's position on the tape with `weight` as its cotangent; nothing for a constant or weight 0."""
    if traced.places[0] < 0 or not np.any(weight):
        return []
    spec = spec_like(traced.values[0])
    seed = spec.dtype.type(weight)
    if spec.arrays is not None:
        return [(traced.places[0], spec.arrays.full(spec.shape, seed, spec.dtype))]
    return [(traced.places[0], spec.zeros() + seed if spec.shape else seed)]


def cotangents_of_variables(
    traced: Traced, seeds: list[tuple[int, Array]], variables: Variables, keep: bool = False
) -> list[Array]:
    """Run the record backwards; return cotangents with the variables' shapes and dtypes; `keep`: don't free the record."""
    cotangents = run_backward(traced.recording, seeds, len(variables.places), keep)
    return [_writable(g, variables.leaves[place]) for g, place in zip(cotangents, variables.places)]


def several_cotangents_of_variables(
    traced: Traced, seeds: list[list[tuple[int, Array]]], variables: Variables
) -> list[Array]:
    """Return the cotangents of the variables for several sets of seeds, stacked along a new first axis; keep the record."""
    cotangents = run_backward_together(traced.recording, seeds, len(variables.places))
    specs = [spec_like(variables.leaves[place]) for place in variables.places]
    return [stack([conformed(g, spec) for g in several]) for several, spec in zip(zip(*cotangents), specs)]


def _writable(g: Array, leaf: Array) -> Array:
    spec = spec_like(leaf)
    if g is None:
        return spec.zeros()
    g = conform(g, *spec)
    if spec.arrays is not None and spec.arrays.takes_host_arrays:  # in a trace
        x = leaf
        while isbox(x):
            x = x._value
        return array_to_host(g) if spec.arrays.is_on_host(x) else g  # type: ignore[attr-defined]
    # A cotangent may be a read-only view of one number, but users expect writable arrays.
    if type(g) is np.ndarray:
        return g if g.flags.writeable else g.copy()
    return g.copy() if is_device_array(g) and g.size > 1 and 0 in g.strides else g


def shared_sum(gradients: list[Array], variables: Variables, comm: Comm) -> list[Array]:
    """Sum the gradients with respect to shared variables over all ranks, with one message per dtype."""
    specs = {i: spec_like(gradients[i]) for i in variables.shared}
    out = list(gradients)
    # The leaves, and therefore the messages, have the same order on all ranks.
    for kind in dict.fromkeys((spec.dtype, spec.arrays) for spec in specs.values()):
        members = [i for i, spec in specs.items() if (spec.dtype, spec.arrays) == kind]
        if len(members) == 1:
            out[members[0]] = mpi_allreduce(gradients[members[0]], comm=comm)
            continue
        # One message instead of many small messages saves more time than copying takes.
        whole = Concatenation([specs[i] for i in members])
        total = mpi_allreduce(whole.vector([gradients[i] for i in members]), comm=comm)
        for i, part in zip(members, whole.parts(total)):
            out[i] = part if specs[i].shape else part[()]
    return out


# Checks that a shared variable and the objective are the same on all ranks.
#
# The checks run only under ``MPIAD_DEBUG=1``, since each check needs an additional reduction. If the copies of a variable
# differ, for example after initialization with different random seeds, the gradient is wrong for all copies.

_BROADCAST = "Broadcast the variable once before the first step, and make the same updates on all ranks."


def require_equal_copies(variables: Variables, shared: Shared, channel: Channel, call: str) -> None:
    """Under ``MPIAD_DEBUG=1``, raise a ReplicationError on all ranks if the copies of a shared argument differ."""
    if shared and watch_settings.debug():
        claim = f"{call}: shared=True says that all ranks hold the same variable x"
        x = variables.build(variables.leaves)
        parts = [("x", x)]
        if isinstance(shared, (tuple, list)):
            parts = [(f"x[{i}]", part) for i, part in enumerate(x) if shared[i]]
        leaves = [(path, to_host(leaf)) for name, part in parts for path, leaf in named_leaves(part, name)]
        checked_on_replay(require_replicated, channel, leaves, claim, _BROADCAST)


def require_equal_objective(value: Array, channel: Channel, call: str) -> None:
    """Under ``MPIAD_DEBUG=1``, raise a ReplicationError on all ranks if J differs between ranks."""
    if watch_settings.debug():
        claim = f"{call}: J must be the same on all ranks"
        advice = (
            "Reductions of this MPI round differently on different ranks. If the program branches on J, let one rank "
            "choose, and broadcast its choice."
        )
        checked_on_replay(require_replicated, channel, named_leaves(value, "J"), claim, advice)
