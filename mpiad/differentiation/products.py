"""Products with the Jacobian and the Hessian of a distributed function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpiad._typing import Argnum, Array, Comm, Function, Rank, Tree
from mpiad.differentiation.gradient import cotangents_of_variables, grad, several_cotangents_of_variables
from mpiad.differentiation.trace import Traced, Variables, arguments_with, trace_backwards, trace_forwards, variables_of
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.pytrees import flatten, is_variable
from mpiad.transport.recovery import recoverable


def make_vjp(fun: Function, argnum: Argnum = 0) -> Callable[..., tuple[Callable, Any]]:
    """Make the function that evaluates `fun` and returns its transposed Jacobian product.

    Parameters
    ----------
    fun : callable
        Runs on every rank and returns any pytree of arrays.
    argnum : int or tuple of int

    Returns
    -------
    callable
        ``(*args) -> (vjp, value)``. ``vjp(ȳ_r)``, in the form of the value, returns x̄_r on every rank: the transpose of
        the Jacobian of the whole program, from all ranks' results to all ranks' arguments. It may be called repeatedly, and
        takes several cotangents along a first axis with ``batch=True``, as `Linearization.vjp` does.

    Raises
    ------
    TypeError
        If the argument holds no real or complex floating-point values, or a cotangent doesn't match the value.
    RequestError
        If a request is never waited for.

    Ranks
    -----
    All ranks that communicate in `fun` call the result, and its `vjp`.

    Adjoint
    -------
    `vjp` can be differentiated with respect to its cotangent and, in an outer trace, the arguments.

    Examples
    --------
    >>> vjp, y = mpiad.make_vjp(mpiad.mpi_allreduce)(np.ones(2))
    >>> print(y / size, vjp(np.ones(2)) / size)
    [1. 1.] [1. 1.]
    """
    return make_recorded_vjp(fun, argnum, "kept")


def make_recorded_vjp(fun: Function, argnum: Argnum, passes: str) -> Callable[..., tuple[Callable, Any]]:
    """Implement `make_vjp`; `passes` states how the record is run backwards, as in `Tape`."""

    def evaluate(*args: Any, **kwargs: Any) -> tuple[Callable, Any]:
        variables = variables_of(args, argnum, "make_vjp")
        traced = trace_backwards(lambda x: fun(*arguments_with(args, argnum, x), **kwargs), variables, passes=passes)
        if traced.problem is not None:
            raise traced.problem.kind(traced.problem.text)

        def seeds(cotangent: Tree) -> list[tuple[int, Any]]:
            given, values = flatten(cotangent)[0], traced.values
            if len(given) != len(values):
                raise TypeError(f"vjp: the value has {len(values)} leaves, so its cotangent must, but got {len(given)}.")
            return [(place, shaped(g, value, "vjp")) for g, value, place in zip(given, values, traced.places) if place >= 0]

        def vjp(cotangent: Tree, *, batch: bool = False) -> Tree:
            return variables.filled(pulled((traced, variables), seeds, cotangent, batch, "vjp"), lambda leaf: None)

        return vjp, traced.build(traced.values)

    return evaluate


def pulled(
    record: tuple[Traced, Variables], seeds: Callable[[Tree], list[tuple[int, Any]]], given: Tree, batch: bool, call: str
) -> list[Any]:
    """Return the cotangents of the variables of a record; the record is kept.

    `seeds` maps a pytree to the positions of results and their cotangents; `given` is the pytree. With `batch` the first
    axis of each array, also of those returned, counts directions; a ValueError is raised if their numbers differ.
    """
    if not batch:
        return cotangents_of_variables(record[0], seeds(given), record[1], keep=True)
    leaves, build = flatten(given)
    shapes = [spec_like(leaf).shape for leaf in leaves if is_variable(leaf)]
    if () in shapes:
        raise ValueError(f"{call}: with batch=True directions lie along the first axis of each array, but got a number.")
    counts = {shape[0] for shape in shapes}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"{call}: with batch=True all arrays must hold the same number of directions, but hold {counts}.")
    apart = [build([leaf[k] if is_variable(leaf) else leaf for leaf in leaves]) for k in range(counts.pop())]
    return several_cotangents_of_variables(record[0], [seeds(each) for each in apart], record[1])


def shaped(g: Array, value: Array, call: str) -> Array:
    """Convert a cotangent or tangent to the dtype of `value`; raise a TypeError if the shapes differ."""
    spec = spec_like(value)
    if spec_like(g).shape != spec.shape:
        got = spec_like(g).shape
        raise TypeError(f"{call}: expected shape {spec.shape}, that of the value or argument there, but got {got}.")
    return conform(g, *spec)


def make_jvp(fun: Function, argnum: Argnum = 0) -> Callable[..., Callable]:
    """Make the function that evaluates `fun` and its Jacobian product.

    Parameters
    ----------
    fun : callable
        Runs on every rank and returns any pytree of arrays.
    argnum : int or tuple of int

    Returns
    -------
    callable
        ``(*args)(v_r) -> (value, tangent)``: the tangent of this rank's value along all ranks' v.

    Raises
    ------
    TypeError
        If the argument holds no real or complex floating-point values, or `v` doesn't match its structure.
    RequestError
        If a request is never waited for.

    Ranks
    -----
    All ranks that communicate in `fun` call the result, each with its own v.

    Adjoint
    -------
    Value and tangent can be differentiated again.

    Examples
    --------
    >>> print(*mpiad.make_jvp(lambda x: mpiad.mpi_allreduce(x**2) / size)(3.0)(1.0))
    9.0 6.0
    """

    def at(*args: Any, **kwargs: Any) -> Callable:
        variables = variables_of(args, argnum, "make_jvp")

        def along(v: Tree) -> tuple[Any, Any]:
            tangents = _tangents(v, variables)
            return trace_forwards(lambda x: fun(*arguments_with(args, argnum, x), **kwargs), variables, tangents)

        return along

    return at


def _tangents(v: Tree, variables: Variables) -> list[Any]:
    given = flatten(v)[0]
    if len(given) != len(variables.leaves):
        raise TypeError(f"jvp: the argument has {len(variables.leaves)} leaves, so v must, but got {len(given)}.")
    return [shaped(given[place], variables.leaves[place], "jvp") for place in variables.places]


def jvp(fun: Function, x: Tree, v: Tree) -> tuple[Any, Any]:
    """Evaluate a function of one argument and its tangent.

    Parameters
    ----------
    fun : callable
    x, v : pytree of arrays
        This rank's argument and direction.

    Returns
    -------
    (value, tangent)

    Raises
    ------
    TypeError
        If `x` holds no real or complex floating-point values, or `v` doesn't match its structure.

    Ranks
    -----
    All ranks that communicate in `fun`, each with its own `x` and `v`.

    Adjoint
    -------
    Value and tangent can be differentiated again.

    Examples
    --------
    >>> print(*mpiad.jvp(lambda x: mpiad.mpi_allreduce(x**2) / size, 3.0, 1.0))
    9.0 6.0
    """
    return make_jvp(fun)(x)(v)


def hvp(
    fun: Function, argnum: Argnum = 0, *, objective: str = "root", shared: bool = False, root: Rank = 0, comm: Comm = None
) -> Callable[..., Any]:
    """Make the function that evaluates the product of the Hessian of the objective with a direction.

    Forward over reverse: one tangent carried through the gradient, at about twice its cost.

    Parameters
    ----------
    fun, argnum, objective, root, comm
        As in `value_and_grad`.
    shared : bool
        Whether argument and direction are one variable of which every rank holds a copy.

    Returns
    -------
    callable
        ``(*args, v_r) -> (H v)_r``, the sum over all ranks s of ∂²J/∂x_r∂x_s v_s.

    Raises
    ------
    TypeError, ValueError, RequestError
        As in `value_and_grad`.

    Ranks
    -----
    All ranks of `comm` call the result.

    Adjoint
    -------
    The product can be differentiated again.

    Examples
    --------
    >>> print(mpiad.hvp(lambda x: mpiad.mpi_allreduce(np.sum(x**3)))(np.array([1.0, 2.0]), np.ones(2)))
    [ 6. 12.]
    """
    gradient = grad(fun, argnum, objective=objective, shared=shared, root=root, comm=comm)

    @recoverable("hvp", comm)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        return make_jvp(gradient, argnum)(*args[:-1], **kwargs)(args[-1])[1]

    return evaluate
