"""Products with the Jacobian and the Hessian of a distributed function.

`linearize` and `make_hvp` evaluate a function once. All later products use the record of this evaluation:

- A reverse pass over the record multiplies the cotangent by the transposed Jacobian: a linear map of the cotangent.
- A record of that reverse pass is therefore a record of a linear map, and a reverse pass over this record multiplies by
  the Jacobian, at the cost of the first reverse pass. Forward mode would evaluate the function again for each product.
- The Hessian is the Jacobian of the gradient, and symmetric. Therefore a reverse pass over the record of the gradient
  multiplies by the Hessian.

References
----------
.. [1] A. Griewank and A. Walther, *Evaluating Derivatives*, 2nd ed., SIAM 2008, sections 3.2 (reverse mode) and 5.2
   (second-order adjoints).
.. [2] J. Nocedal and S. J. Wright, *Numerical Optimization*, 2nd ed., Springer 2006, section 8.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mpiad._typing import Argnum, Array, Comm, Function, Rank, Shared, Tree
from mpiad.differentiation.gradient import (
    cotangents_of_variables,
    grad,
    require_equal_copies,
    several_cotangents_of_variables,
    shared_sum,
    value_and_grad,
)
from mpiad.differentiation.objective import shapes_text
from mpiad.differentiation.trace import (
    Traced,
    Variables,
    arguments_with,
    no_derivative,
    trace_backwards,
    trace_forwards,
    variables_of,
)
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.pytrees import difference, flatten, is_variable, same_form
from mpiad.transport import channel
from mpiad.transport.core.agreement import require_alike
from mpiad.transport.core.tracing import tracing
from mpiad.transport.exits.recovery import recoverable


def make_vjp(fun: Function, argnum: Argnum = 0) -> Callable[..., tuple[Function, Tree]]:
    """Make the function that evaluates `fun` and returns its transposed Jacobian product.

    Parameters
    ----------
    fun : callable
        Runs on every rank and returns any pytree of arrays.
    argnum : int or tuple of int
        Position of the argument to differentiate; for a tuple of positions, products take and return tuples.

    Returns
    -------
    callable
        ``(*args) -> (vjp, value)``. ``vjp(ȳ_r)`` takes the cotangent of this rank's value, and returns the cotangent x̄_r
        of its argument: x̄ = Jᵀȳ, with the Jacobian J of all ranks' values with respect to all ranks' arguments. `vjp` may
        be called repeatedly; with ``batch=True`` it takes several cotangents along a first axis, as `Linearization.vjp`.

    Raises
    ------
    TypeError
        If the argument holds no real or complex floating-point values, or a cotangent doesn't match the value, in shape or
        because it is complex and the value isn't.
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
    >>> size = mpiad.mpi_size()
    >>> vjp, y = mpiad.make_vjp(mpiad.mpi_allreduce)(np.ones(2))
    >>> print(y / size, vjp(np.ones(2)) / size)
    [1. 1.] [1. 1.]
    """
    return _recorded_vjp(fun, argnum, "kept")


def _recorded_vjp(fun: Function, argnum: Argnum, passes: str) -> Callable[..., tuple[Function, Tree]]:
    """Implement `make_vjp` and `linearize`; `passes` as in `Tape`."""

    def evaluate(*args: Any, **kwargs: Any) -> tuple[Function, Tree]:
        variables = variables_of(args, argnum, "linearize" if passes == "recorded" else "make_vjp")
        traced = trace_backwards(lambda x: fun(*arguments_with(args, argnum, x), **kwargs), variables, passes=passes)
        if traced.problem is not None:
            raise traced.problem.kind(traced.problem.text)
        return _pull_of(traced, variables), traced.build(traced.values)

    return evaluate


def _pull_of(traced: Traced, variables: Variables) -> Callable[..., Tree]:
    """Return the function ``vjp(cotangent, batch=False)`` of a record."""

    def vjp(cotangent: Tree, *, batch: bool = False) -> Tree:
        return variables.filled(_reverse_pass((traced, variables), cotangent, batch, "vjp"), lambda leaf: None)

    return vjp


def linearization_of(traced: Traced, variables: Variables) -> Linearization:
    """Return the products of a record."""
    return Linearization(traced.build(traced.values), _pull_of(traced, variables))


def _reverse_pass(record: tuple[Traced, Variables], g: Tree, batch: bool, call: str) -> list[Array]:
    """Return the cotangents of a record's variables, and keep it; `g`: the cotangents of its results."""
    # With `batch`, arrays in `g` have a first axis for several directions; a ValueError is raised if lengths differ.
    if not batch:
        return cotangents_of_variables(record[0], _seeds(g, record[0], call), record[1], keep=True)
    shapes = [spec_like(leaf).shape for leaf in flatten(g)[0] if is_variable(leaf)]
    if () in shapes:
        raise ValueError(f"{call}: with batch=True each array needs a first axis for the directions, but got a number.")
    counts = {shape[0] for shape in shapes}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"{call}: with batch=True all arrays must hold the same number of directions, but hold {counts}.")
    lead = (counts.pop(),)
    seeds = _seeds(g, record[0], call, lead)
    lanes = [[(place, each[k]) for place, each in seeds] for k in range(*lead)]
    return several_cotangents_of_variables(record[0], lanes, record[1])


def _leaves_of(tree: Tree, like: Tree, name: str, of: str) -> list[Array]:
    """Return the leaves; raise a TypeError unless the pytree has the structure of the value or argument `like`."""
    if not same_form(tree, like):
        path, got, expected = difference(tree, like, name)
        raise TypeError(f"{path} is {got}, but {expected} in the {of}. Pass a pytree with the structure of the {of}.")
    return flatten(tree)[0]


def _shaped(g: Array, value: Array, call: str, lead: tuple[int, ...] = ()) -> Array:
    """Convert a cotangent or tangent to the dtype of `value`; raise a TypeError if it is complex, and `value` isn't.

    The shapes after `lead` must be equal.
    """
    spec, (shape, dtype, _) = spec_like(value), spec_like(g)
    got = shape[len(lead) :] if is_variable(g) else shape  # other values are the same in all directions
    if got != spec.shape:
        raise TypeError(f"{call}: expected shape {spec.shape}, like the value or argument, but got {got}.")
    if dtype.kind == "c" and spec.dtype.kind != "c":
        raise TypeError(
            f"{call}: got {dtype} for a value or argument of {spec.dtype}: its imaginary part would be lost. Compute the "
            "products with the real and the imaginary part, and add them: product(v.real) + 1j * product(v.imag)."
        )
    return conform(g, lead + spec.shape, spec.dtype, spec.arrays)


def make_jvp(fun: Function, argnum: Argnum = 0) -> Callable[..., Callable]:
    """Make the function that evaluates `fun` and its Jacobian product.

    Parameters
    ----------
    fun : callable
        Runs on every rank and returns any pytree of arrays.
    argnum : int or tuple of int
        Position of the argument to differentiate; for a tuple of positions, products take and return tuples.

    Returns
    -------
    callable
        ``(*args)(v_r) -> (value, tangent)``: this rank's value, and its derivative along the direction v. Rank r passes
        its part v_r of v.

    Raises
    ------
    TypeError, RequestError
        As in `make_vjp`; and if the argument differs from `v` in structure.

    Ranks
    -----
    All ranks that communicate in `fun` call the result, each with its own v.

    Adjoint
    -------
    Value and tangent can be differentiated again.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> print(*mpiad.make_jvp(lambda x: mpiad.mpi_allreduce(x**2) / size)(3.0)(1.0))
    9.0 6.0
    """
    return _pushed(fun, argnum, "jvp")


def _pushed(fun: Function, argnum: Argnum, call: str) -> Callable[..., Callable]:
    """Implement `make_jvp` and `hvp`; `call` is named in errors."""

    def at(*args: Any, **kwargs: Any) -> Callable:
        variables = variables_of(args, argnum, call)

        def evaluate(v: Tree, *others: Tree) -> tuple[Tree, Tree]:
            if others:
                raise TypeError(
                    f"make_jvp: the product takes one direction v, but got {1 + len(others)}. Pass the directions of "
                    "several arguments as a tuple: make_jvp(fun, (0, 1))(x, y)((v, w))."
                )
            leaves = _leaves_of(v, variables.build(variables.leaves), f"{call}: v", "argument")
            tangents = [_shaped(leaves[place], variables.leaves[place], call) for place in variables.places]
            return trace_forwards(lambda x: fun(*arguments_with(args, argnum, x), **kwargs), variables, tangents)

        return evaluate

    return at


def jvp(fun: Function, x: Tree, v: Tree) -> tuple[Tree, Tree]:
    """Evaluate a function of one argument and its tangent, ``make_jvp(fun)(x)(v)``; see `make_jvp`.

    Parameters
    ----------
    fun : callable
    x, v : pytree of arrays
        This rank's argument and direction.

    Returns
    -------
    (value, tangent)

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> print(*mpiad.jvp(lambda x: mpiad.mpi_allreduce(x**2) / size, 3.0, 1.0))
    9.0 6.0
    """
    return make_jvp(fun)(x)(v)


def hvp(
    fun: Function, argnum: Argnum = 0, *, objective: str = "root", shared: Shared = False, root: Rank = 0, comm: Comm = None
) -> Callable[..., Tree]:
    """Make the function that evaluates the product of the Hessian of the objective with a direction.

    The function computes a tangent of the gradient (forward over reverse), at about twice the cost of the gradient.

    Parameters
    ----------
    fun, argnum, objective, root, comm
        As in `value_and_grad`.
    shared : bool or tuple of bool
        Whether all ranks pass copies of one argument and of one direction; a tuple as in `value_and_grad`.

    Returns
    -------
    callable
        ``(*args, v_r) -> (H v)_r``, the sum over all ranks s of ∂²J/∂x_r∂x_s v_s. Exceptions, ranks and adjoint are as in
        `value_and_grad`.

    Examples
    --------
    >>> print(mpiad.hvp(lambda x: mpiad.mpi_allreduce(np.sum(x**3)))(np.array([1.0, 2.0]), np.ones(2)))
    [ 6. 12.]
    """
    gradient = grad(fun, argnum, objective=objective, shared=shared, root=root, comm=comm)

    @recoverable("hvp", comm)
    def evaluate(*args: Any, **kwargs: Any) -> Tree:
        return _pushed(gradient, argnum, "hvp")(*args[:-1], **kwargs)(args[-1])[1]

    return evaluate


class Linearization:
    """A function's value at a point, and products with its Jacobian there; made by `linearize`.

    Attributes
    ----------
    value : pytree of arrays
        The function's value on this rank.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> linear = mpiad.linearize(lambda x: mpiad.mpi_allreduce(x**2) / size)(np.array([1.0, 2.0]))
    >>> print(linear.value, linear.jvp(np.array([1.0, 0.0])), linear.vjp(np.array([0.0, 1.0])))
    [1. 4.] [2. 0.] [0. 4.]
    """

    def __init__(self, value: Tree, pull: Callable[..., Tree]):
        self.value, self._pull = value, pull
        # The record of a reverse pass, which the first product with the Jacobian makes.
        self._transposed: tuple[Traced, Variables] | None = None

    def vjp(self, w: Tree, *, batch: bool = False) -> Tree:
        """Return the product of the transposed Jacobian with a cotangent.

        Parameters
        ----------
        w : pytree of arrays
            Same structure as the value; with `batch` each array has an additional first axis, for several cotangents.
        batch : bool
            Whether `w` holds several cotangents. One call for several takes less time than separate calls, but
            more memory: `solve_elliptic` and `factorized` solve for all cotangents at once, `solve` and `newton` for up to
            8, a halo exchange or a sum over ranks sends one message for all, and `scan` recomputes its steps once.

        Returns
        -------
        pytree of arrays
            Same structure as the argument; with `batch` each array also has an additional first axis.

        Raises
        ------
        TypeError, ValueError
            If `w` doesn't match the structure of the value, or its arrays hold different numbers of cotangents.

        Ranks
        -----
        All ranks that communicate in the function call it, with the same number of cotangents.

        Adjoint
        -------
        The product can be differentiated with respect to `w` and, in a trace that also contains `linearize`, the arguments.
        """
        return self._pull(w, batch=batch)

    def jvp(self, v: Tree, *, batch: bool = False) -> Tree:
        """Return the product of the Jacobian with a direction.

        `v` has the structure of the argument, and the product has the structure of the value. `batch`, exceptions and ranks
        are as in `vjp`. The first call takes longer than later ones, since it records a reverse pass.
        """
        if self._transposed is None:
            leaves, build = flatten(self.value)
            places = [place for place, leaf in enumerate(leaves) if is_variable(leaf)]
            zeros = [spec_like(leaf).zeros() if is_variable(leaf) else leaf for leaf in leaves]
            outputs = Variables(zeros, places, build)
            # In an enclosing trace, the function's arguments may be variables, in addition to the cotangent.
            self._transposed = trace_backwards(self._pull, outputs, of_cotangents=tracing.tape is None), outputs
        traced, outputs = self._transposed
        return outputs.filled(_reverse_pass((traced, outputs), v, batch, "jvp"), no_derivative)


def _seeds(direction: Tree, traced: Traced, call: str, lead: tuple[int, ...] = ()) -> list[tuple[int, Array]]:
    name, of = ("v", "argument") if call == "jvp" else ("the cotangent", "value")
    leaves = _leaves_of(direction, traced.build(traced.values), f"{call}: {name}", of)
    triples = zip(leaves, traced.values, traced.places)
    # The shape of a direction is checked even if the function doesn't depend on its variable; others have no value.
    known = [x for x in triples if x[2] >= 0 or call == "jvp" and x[1] is not None]
    shaped = [(place, _shaped(g, value, call, lead)) for g, value, place in known]
    return [pair for pair in shaped if pair[0] >= 0]


def linearize(fun: Function, argnum: Argnum = 0) -> Callable[..., Linearization]:
    """Make the function that evaluates `fun` at a point, and keeps its derivative at this point for many products.

    Parameters
    ----------
    fun : callable
        Runs on every rank and returns any pytree of arrays.
    argnum : int or tuple of int
        Position of the argument to differentiate; for a tuple of positions, products take and return tuples.

    Returns
    -------
    callable
        ``(*args) -> Linearization``, with `value`, ``jvp(v)`` and ``vjp(w)``. A product runs only the communications and
        linear solves of the adjoint: one solve for each solve in `fun`.

    Raises
    ------
    TypeError, RequestError
        As in `make_vjp`.

    Ranks
    -----
    All ranks that communicate in `fun` call the result, and its `jvp` and `vjp`.

    Adjoint
    -------
    Products can be differentiated with respect to their direction or cotangent and, in an outer trace, the arguments.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> linear = mpiad.linearize(lambda x: mpiad.mpi_allreduce(x**2) / size)(np.array([1.0, 2.0]))
    >>> print(linear.value, linear.jvp(np.ones(2)))
    [1. 4.] [2. 4.]
    """

    def evaluate(*args: Any, **kwargs: Any) -> Linearization:
        pull, value = _recorded_vjp(fun, argnum, "recorded")(*args, **kwargs)
        return Linearization(value, pull)

    return evaluate


class SecondOrder(NamedTuple):
    """Value, gradient and Hessian product at a point; made by `make_hvp`.

    Attributes
    ----------
    value : float
        The objective J, the same on all ranks.
    gradient : pytree of arrays
        dJ/dx_r.
    product : callable
        ``product(v_r, batch=False) -> (H v)_r``, the sum over all ranks s of ∂²J/∂x_r∂x_s v_s; collective. With
        `batch` arrays have an additional first axis, for several directions.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> at_x = mpiad.make_hvp(lambda x: mpiad.mpi_allreduce(np.sum(x**3)) / size)(np.array([1.0, 2.0]))
    >>> print(at_x.value, at_x.gradient * size, at_x.product(np.ones(2)) * size)
    9.0 [ 3. 12.] [ 6. 12.]
    """

    value: Any
    gradient: Tree
    product: Callable[..., Tree]


def make_hvp(
    fun: Function, argnum: Argnum = 0, *, objective: str = "root", shared: Shared = False, root: Rank = 0, comm: Comm = None
) -> Callable[..., SecondOrder]:
    """Make the function that evaluates the objective and its gradient, and keeps the Hessian for many products.

    Parameters
    ----------
    fun, argnum, objective, root, comm
        As in `value_and_grad`.
    shared : bool or tuple of bool
        Whether all ranks pass copies of one argument and of one direction; a tuple as in `value_and_grad`.

    Returns
    -------
    callable
        ``(*args) -> (value, gradient, product)``. A product runs the record of the gradient backwards, with two linear
        solves for each linear solve in `fun`. `hvp` keeps no record, and needs four solves for each solve.

    Ranks
    -----
    All ranks of `comm` call the result, and `product`. The exceptions are those of `value_and_grad`.

    Adjoint
    -------
    Products can be differentiated with respect to their direction and, in an outer trace, the arguments.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> J, gradient, product = mpiad.make_hvp(lambda x: mpiad.mpi_allreduce(np.sum(x**3)))(np.array([1.0, 2.0]))
    >>> print(J / size, gradient, product(np.ones(2)), product(np.array([1.0, 0.0])))
    9.0 [ 3. 12.] [ 6. 12.] [6. 0.]
    """
    both = value_and_grad(fun, argnum, objective=objective, root=root, comm=comm)

    @recoverable("make_hvp", comm)
    def evaluate(*args: Any, **kwargs: Any) -> SecondOrder:
        variables = variables_of(args, argnum, "make_hvp", shared)
        if shared:
            group = channel(comm, "make_hvp")
            require_equal_copies(variables, shared, group, "make_hvp")
            require_alike(group, None, "make_hvp", shapes_text(variables.shared_shapes()))
        pull, (value, gradient) = make_vjp(both, argnum)(*args, **kwargs)

        def completed(cotangents: Tree) -> Tree:
            leaves = flatten(cotangents)[0]
            parts = [leaves[place] for place in variables.places]
            return variables.filled(shared_sum(parts, variables, comm), no_derivative)

        @recoverable("make_hvp", comm)
        def product(v: Tree, *, batch: bool = False) -> Tree:
            _leaves_of(v, gradient, "make_hvp: v", "argument")
            # All copies of a shared variable have the same direction, and their products are added. The 0 is the
            # cotangent of the objective: an integer, which needs no axis for directions.
            return completed(pull((0, v), batch=batch))

        return SecondOrder(value, completed(gradient), product)

    return evaluate
