"""Custom operators that communicate, and their derivatives.

`custom_operator` turns a function into an operator like the operators of the library. A call is one node of the tape: the
node is recorded on every rank even if no input is traced, and the reverse pass always visits it. The function receives
plain arrays, and may use mpi4py directly. `defvjp` and `defjvp` define the derivatives of an operator, and `defadjoint`
the derivatives of a linear operator. Rules that consist of communicating operators can be differentiated. An `InPlace`
describes the variant of an operator that compiled programs run. `library` makes operators of the functions of a shared
library in Fortran or C, with derivatives from the library.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike

from mpiad._typing import Array, Function
from mpiad.primitives.cotangents import spec_like, tangent_of
from mpiad.primitives.custom_operator import CustomOperator, InPlace
from mpiad.primitives.library_function import (
    Argument,
    Communicator,
    Cotangent,
    InOut,
    Input,
    Library,
    LibraryFunction,
    Output,
    Tangent,
    Value,
)
from mpiad.transport.shared_library import mpi_library

__all__ = ["Argument", "Communicator", "Cotangent", "CustomOperator", "InOut", "InPlace", "Input", "Library"]
__all__ += ["LibraryFunction", "Output", "Tangent", "Value", "custom_operator", "library", "mpi_library"]
__all__ += ["defadjoint", "defjvp", "defjvp_together", "defvjp", "defvjp_together"]
__dir__ = __all__.copy


def custom_operator(fun: Function) -> CustomOperator:
    """Turn a function that communicates into an operator.

    Parameters
    ----------
    fun : callable
        A function of positional arguments (arrays or other objects), and of keyword arguments, which are constants. It is
        called with plain arrays, and returns an array, a number or None.

    Returns
    -------
    CustomOperator
        A callable with the same arguments. Its derivatives are defined by `defvjp`, `defjvp` or `defadjoint`.

    Ranks
    -----
    All ranks that communicate in `fun` call the operator, and all these ranks run its adjoint.

    Adjoint
    -------
    Defined by `defvjp` or `defadjoint`.

    Examples
    --------
    A sum over the ranks with mpi4py; this linear operator equals its transpose:

    >>> from mpi4py import MPI
    >>> from mpiad.extend import custom_operator, defadjoint
    >>> size = mpiad.mpi_size()
    >>> @custom_operator
    ... def total(x):
    ...     return MPI.COMM_WORLD.allreduce(x)
    >>> _ = defadjoint(total, lambda y: total(y))
    >>> print(mpiad.grad(lambda x: total(x) ** 2 / size)(1.0))
    2.0
    """
    return CustomOperator(fun)


def defvjp(operator: CustomOperator, *makers: Callable | None) -> None:
    """Define the adjoint of an operator by one rule for each argument.

    Parameters
    ----------
    operator : CustomOperator
        A result of `custom_operator`.
    *makers : callable or None
        ``maker(ans, *args, **kwargs) -> vjp``, and ``vjp(g)`` returns the cotangent of the argument; None for an argument
        without a rule. All rules run on every rank, in this order, even for untraced arguments and zero `g`.

    Raises
    ------
    TypeError
        If `operator` wasn't made by `custom_operator`.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from mpiad.extend import custom_operator, defvjp
    >>> @custom_operator
    ... def scaled_total(x, c):
    ...     return c * MPI.COMM_WORLD.allreduce(x)
    >>> defvjp(scaled_total, lambda ans, x, c: lambda g: scaled_total(g, c), None)
    >>> print(mpiad.grad(lambda x: scaled_total(x, 3.0))(1.0))
    3.0
    """

    def backward(ans: Array, args: tuple, kwargs: dict) -> Callable:
        # All rules run, in a fixed order, since other ranks may trace other arguments and wait for a rule's messages.
        rules = [None if maker is None else maker(ans, *args, **kwargs) for maker in makers]
        return lambda g: [None if rule is None else rule(g) for rule in rules]

    _checked(operator, "defvjp").backward = backward


def defvjp_together(operator: CustomOperator, maker: Callable) -> None:
    """Define the adjoint of an operator by one rule for all arguments, for example to share a costly part.

    Parameters
    ----------
    operator : CustomOperator
        A result of `custom_operator`; a TypeError is raised for another object.
    maker : callable
        ``maker(ans, *args, **kwargs) -> vjp``, and ``vjp(g)`` returns a sequence with the cotangent of each argument
        (None for an argument without a cotangent).

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from mpiad.extend import custom_operator, defvjp_together
    >>> @custom_operator
    ... def weighted_total(x, c):
    ...     return MPI.COMM_WORLD.allreduce(c * x)
    >>> def maker(ans, x, c):
    ...     def vjp(g):
    ...         total = MPI.COMM_WORLD.allreduce(g)  # one sum for both cotangents
    ...         return c * total, x * total
    ...     return vjp
    >>> defvjp_together(weighted_total, maker)
    >>> print(mpiad.grad(lambda x, c: weighted_total(x, c), (0, 1))(2.0, 3.0))
    (np.float64(3.0), np.float64(2.0))
    """
    _checked(operator, "defvjp_together").backward = lambda ans, args, kwargs: maker(ans, *args, **kwargs)


def defjvp(operator: CustomOperator, *rules: Callable | None) -> None:
    """Define the tangent of an operator by one rule for each argument; the results are added.

    Parameters
    ----------
    operator : CustomOperator
        A result of `custom_operator`; a TypeError is raised for another object.
    *rules : callable or None
        ``rule(g, ans, *args, **kwargs)`` returns the tangent of the result for the tangent `g` of the argument; None for an
        argument without a rule. All rules run on every rank, in this order; `g` is zero for untraced arguments.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from mpiad.extend import custom_operator, defjvp
    >>> size = mpiad.mpi_size()
    >>> @custom_operator
    ... def total_square(x):
    ...     return MPI.COMM_WORLD.allreduce(x**2)
    >>> defjvp(total_square, lambda g, ans, x: MPI.COMM_WORLD.allreduce(2 * x * g))
    >>> print(mpiad.make_jvp(total_square)(3.0)(1.0)[1] / size)
    6.0
    """

    def forward(tangents: dict[int, Array], ans: Array, args: tuple, kwargs: dict) -> Array:
        total = None
        for k, rule in enumerate(rules):
            if rule is not None:
                part = rule(tangent_of(args[k], tangents.get(k)), ans, *args, **kwargs)
                total = part if total is None else total + part
        return spec_like(ans).zeros() if total is None and hasattr(ans, "dtype") else total

    _checked(operator, "defjvp").forward = forward


def defjvp_together(operator: CustomOperator, rule: Callable) -> None:
    """Define the tangent of an operator by one rule for all arguments, for example to share a costly part.

    Parameters
    ----------
    operator : CustomOperator
        A result of `custom_operator`; a TypeError is raised for another object.
    rule : callable
        ``rule(gs, ans, *args, **kwargs)`` returns the tangent of the result; `gs` are the tangents of the arguments,
        None for arguments that aren't traced on this rank. The rule runs on every rank.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from mpiad.extend import custom_operator, defjvp_together
    >>> size = mpiad.mpi_size()
    >>> @custom_operator
    ... def inner(x, y):
    ...     return MPI.COMM_WORLD.allreduce(x @ y)
    >>> def rule(gs, ans, x, y):
    ...     g, h = (np.zeros_like(x) if each is None else each for each in gs)
    ...     return MPI.COMM_WORLD.allreduce(g @ y + x @ h)  # one sum for both terms
    >>> defjvp_together(inner, rule)
    >>> print(mpiad.make_jvp(lambda x: inner(x, np.ones(2)))(np.ones(2))(np.ones(2))[1] / size)
    2.0
    """

    def forward(tangents: dict[int, Array], ans: Array, args: tuple, kwargs: dict) -> Array:
        return rule([tangents.get(k) for k in range(len(args))], ans, *args, **kwargs)

    _checked(operator, "defjvp_together").forward = forward


def defadjoint(operator: CustomOperator, adjoint: Function) -> CustomOperator:
    """Define all derivatives of an operator that is linear in its first argument, from its adjoint.

    Parameters
    ----------
    operator : CustomOperator
        A result of `custom_operator`: ``operator(x, *rest)``, linear in x. A TypeError is raised for another object.
    adjoint : callable
        ``adjoint(y, *rest)`` applies the transpose, without conjugation, of `operator`, as a linear map between the arrays
        of all ranks. There are no derivatives with respect to `rest`.

    Returns
    -------
    CustomOperator
        The adjoint as an operator, whose adjoint is `operator`. `mpiad.testing.check_adjoint` checks that the two operators
        are adjoint to each other.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from mpiad.extend import custom_operator, defadjoint
    >>> @custom_operator
    ... def total(x):
    ...     return MPI.COMM_WORLD.allreduce(x)
    >>> _ = defadjoint(total, lambda y: total(y))
    >>> _ = mpiad.testing.check_adjoint(total, np.ones(2))
    """
    transpose = adjoint if isinstance(adjoint, CustomOperator) else custom_operator(adjoint)
    _checked(operator, "defadjoint")
    for forward, backward in ((operator, transpose), (transpose, operator)):
        defvjp(forward, lambda ans, x, *rest, backward=backward, **kwargs: lambda g: backward(g, *rest, **kwargs))
        defjvp(forward, lambda g, ans, x, *rest, forward=forward, **kwargs: forward(g, *rest, **kwargs))
    return transpose


def library(path: str | PathLike[str]) -> Library:
    """Load a shared library of Fortran or C, whose functions may communicate.

    Parameters
    ----------
    path : str or path
        The file, or a name that the system's loader finds.

    Returns
    -------
    Library
        `Library.function` makes operators of its functions.

    Raises
    ------
    OSError
        If the library can't be loaded.
    RuntimeError
        If the library was linked to another MPI library than mpi4py. A process must contain one: link the library to that
        of mpi4py.

    Ranks
    -----
    Each rank loads the library. All ranks that communicate in a function call it; its adjoint runs on the same ranks.

    Adjoint
    -------
    Defined by `LibraryFunction.adjoint`, or in Python by `defvjp`.

    Examples
    --------
    The function of the mathematical library that writes sine and cosine:

    >>> from mpiad.extend import Output, Value, library
    >>> sincos = library("libm.so.6").function("sincos", x=Value(), sine=Output(), cosine=Output())
    >>> print(sincos(0.0))
    (np.float64(0.0), np.float64(1.0))
    """
    return Library(path)


def _checked(operator: object, call: str) -> CustomOperator:
    if isinstance(operator, CustomOperator):
        return operator
    raise TypeError(
        f"{call}: expected an operator made by mpiad.extend.custom_operator, but got {type(operator).__name__} "
        f"{operator!r}."
    )
