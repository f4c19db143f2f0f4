"""`linearize` and `make_hvp`: a function is evaluated once, and its derivative is applied to any number of directions.

All products use one record. A product with the transposed Jacobian runs it backwards. That is a linear map of the
cotangent, so a record of it, run backwards in turn, multiplies with the Jacobian, at the cost of the adjoint alone; a
forward pass would evaluate the function again for each product. The Hessian is the Jacobian of the gradient and its own
transpose: the record of the gradient, run backwards, multiplies with it.

References
----------
.. [1] A. Griewank and A. Walther, *Evaluating Derivatives*, 2nd ed., SIAM 2008, sections 3.2 (reverse mode) and 5.2
   (second-order adjoints).
.. [2] J. Nocedal and S. J. Wright, *Numerical Optimization*, 2nd ed., Springer 2006, section 8.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mpiad._typing import Argnum, Comm, Function, Rank, Tree
from mpiad.differentiation.copies import require_equal_copies
from mpiad.differentiation.gradient import shared_sum, value_and_grad
from mpiad.differentiation.objective import described
from mpiad.differentiation.products import make_recorded_vjp, make_vjp, pulled, shaped
from mpiad.differentiation.trace import Traced, Variables, no_derivative, trace_backwards, variables_of
from mpiad.primitives.cotangents import spec_like
from mpiad.pytrees import flatten, is_variable
from mpiad.transport import channel
from mpiad.transport.agreement import require_alike
from mpiad.transport.recovery import recoverable
from mpiad.transport.tracing import tracing


class Linearization:
    """A function's value at a point, and products with its Jacobian there; made by `linearize`.

    Attributes
    ----------
    value : pytree of arrays
        The function's value on this rank.

    Examples
    --------
    >>> linear = mpiad.linearize(lambda x: mpiad.mpi_allreduce(x**2) / size)(np.array([1.0, 2.0]))
    >>> print(linear.value, linear.jvp(np.array([1.0, 0.0])), linear.vjp(np.array([0.0, 1.0])))
    [1. 4.] [2. 0.] [0. 4.]
    """

    def __init__(self, value: Tree, pull: Callable[..., Tree]):
        self.value, self._pull = value, pull
        # Made by the first product with the Jacobian, so that transposed products alone don't pay for it.
        self._transposed: tuple[Traced, Variables] | None = None

    def vjp(self, w: Tree, *, batch: bool = False) -> Tree:
        """Return the product of the transposed Jacobian with a cotangent.

        Parameters
        ----------
        w : pytree of arrays
            Same structure as the value; with `batch` each array has an additional first axis, for several cotangents.
        batch : bool
            Whether `w` holds several cotangents. They take the memory of as many reverse passes, but less time:
            `solve_elliptic` solves for all at once, and each halo exchange or sum over ranks is one message for all.

        Returns
        -------
        pytree of arrays
            Same structure as the argument; with `batch` with that axis.

        Raises
        ------
        TypeError, ValueError
            If `w` doesn't match the structure of the value, or its arrays hold different numbers of cotangents.

        Ranks
        -----
        All ranks that communicate in the function call it, with the same number of cotangents.

        Adjoint
        -------
        It can be differentiated with respect to `w` and, in a trace around `linearize` and this, the arguments.
        """
        return self._pull(w, batch=batch)

    def jvp(self, v: Tree, *, batch: bool = False) -> Tree:
        """Return the product of the Jacobian with a direction; otherwise as `vjp`, from argument to value.

        The first call runs the record backwards once more, with zeros, to record this reverse pass: it is collective.
        """
        if self._transposed is None:
            leaves, build = flatten(self.value)
            places = [place for place, leaf in enumerate(leaves) if is_variable(leaf)]
            zeros = [spec_like(leaf).zeros() if is_variable(leaf) else leaf for leaf in leaves]
            outputs = Variables(zeros, places, build)
            # Within another trace the arguments of the function may be variables, too.
            self._transposed = trace_backwards(self._pull, outputs, of_cotangents=tracing.tape is None), outputs
        traced, outputs = self._transposed
        found = pulled((traced, outputs), lambda each: _seeds(each, traced), v, batch, "jvp")
        return outputs.filled(found, no_derivative)


def _seeds(v: Tree, traced: Traced) -> list[tuple[int, Any]]:
    given, found = flatten(v)[0], []
    if len(given) != len(traced.values):
        raise TypeError(f"linearize: the argument has {len(traced.values)} leaves, so v must, but got {len(given)}.")
    for g, value, place in zip(given, traced.values, traced.places):
        if value is None:  # an argument that is no variable
            continue
        seed = shaped(g, value, "linearize")
        if place >= 0:
            found.append((place, seed))
    return found


def linearize(fun: Function, argnum: Argnum = 0) -> Callable[..., Linearization]:
    """Make the function that evaluates `fun` and keeps its derivative there, for many products.

    Parameters
    ----------
    fun : callable
        Runs on every rank and returns any pytree of arrays.
    argnum : int or tuple of int

    Returns
    -------
    callable
        ``(*args) -> Linearization``, with `value`, ``jvp(v)`` and ``vjp(w)``. A product takes the adjoint's communications
        and solves: one linear solve for each that `fun` makes, none of them again for the value.

    Raises
    ------
    TypeError
        If the argument holds no real or complex floating-point values.
    RequestError
        If a request is never waited for.

    Ranks
    -----
    All ranks that communicate in `fun` call the result, and its `jvp` and `vjp`.

    Adjoint
    -------
    Products can be differentiated with respect to their direction or cotangent and, in an outer trace, the arguments.

    Examples
    --------
    >>> linear = mpiad.linearize(lambda x: mpiad.mpi_allreduce(x**2) / size)(np.array([1.0, 2.0]))
    >>> print(linear.value, linear.jvp(np.ones(2)))
    [1. 4.] [2. 4.]
    """

    def evaluate(*args: Any, **kwargs: Any) -> Linearization:
        pull, value = make_recorded_vjp(fun, argnum, "recorded")(*args, **kwargs)
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
    >>> found = mpiad.make_hvp(lambda x: mpiad.mpi_allreduce(np.sum(x**3)) / size)(np.array([1.0, 2.0]))
    >>> print(found.value, found.gradient * size, found.product(np.ones(2)) * size)
    9.0 [ 3. 12.] [ 6. 12.]
    """

    value: Any
    gradient: Tree
    product: Callable[..., Tree]


def make_hvp(
    fun: Function, argnum: Argnum = 0, *, objective: str = "root", shared: bool = False, root: Rank = 0, comm: Comm = None
) -> Callable[..., SecondOrder]:
    """Make the function that evaluates the objective, its gradient, and keeps its Hessian there for many products.

    Parameters
    ----------
    fun, argnum, objective, root, comm
        As in `value_and_grad`.
    shared : bool
        Whether argument and direction are one variable of which every rank holds a copy.

    Returns
    -------
    callable
        ``(*args) -> (value, gradient, product)``. A product runs the record of the gradient backwards: it takes two linear
        solves for each one in `fun`; `hvp`, which keeps nothing, takes four.

    Raises
    ------
    TypeError, ValueError, RequestError
        As in `value_and_grad`.

    Ranks
    -----
    All ranks of `comm` call the result, and `product`.

    Adjoint
    -------
    Products can be differentiated with respect to their direction and, in an outer trace, the arguments.

    Examples
    --------
    >>> J, gradient, product = mpiad.make_hvp(lambda x: mpiad.mpi_allreduce(np.sum(x**3)))(np.array([1.0, 2.0]))
    >>> print(J / size, gradient, product(np.ones(2)), product(np.array([1.0, 0.0])))
    9.0 [ 3. 12.] [ 6. 12.] [6. 0.]
    """
    both = value_and_grad(fun, argnum, objective=objective, root=root, comm=comm)

    @recoverable("make_hvp", comm)
    def evaluate(*args: Any, **kwargs: Any) -> SecondOrder:
        variables = variables_of(args, argnum, "make_hvp")
        if shared:
            used = channel(comm, "make_hvp")
            require_equal_copies(variables, used, "make_hvp")
            require_alike(used, None, "make_hvp", described(variables.shapes()))
        pull, (value, gradient) = make_vjp(both, argnum)(*args, **kwargs)

        def completed(found: Tree) -> Tree:
            leaves = flatten(found)[0]
            parts = [leaves[place] for place in variables.places]
            return variables.filled(shared_sum(parts, comm) if shared else parts, no_derivative)

        @recoverable("make_hvp", comm)
        def product(v: Tree, *, batch: bool = False) -> Tree:
            # For a shared variable: the direction is that of all copies, and the products of all copies are added up. The
            # cotangent of the objective is an integer, which `pulled` uses for every direction.
            return completed(pull((0, v), batch=batch))

        return SecondOrder(value, completed(gradient), product)

    return evaluate
