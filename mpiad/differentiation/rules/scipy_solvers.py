"""Solvers of `autograd.scipy.linalg`: triangular and banded systems, and the square root of a matrix.

Autograd's rules reject some keyword arguments and several right-hand sides of a banded system with traced bands, ignore
`unit_diagonal`, and are wrong for complex matrices. The rules here are found by the names of the functions, since only
programs that call them import SciPy. A rule gets the call's arguments as they were passed.
"""

from __future__ import annotations

from collections.abc import Callable

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.rules.broadcasting import fitted
from mpiad.differentiation.rules.protocol import SCIPY_VJPS, Argnums, Primitive, Vjp, VjpMaker, refusal


def _passed(rule: Callable[..., Vjp]) -> VjpMaker:
    return lambda argnums, ans, args, kwargs: rule(argnums, ans, *args, **kwargs)


def _require_one(fun: Primitive, matrix: Array, ans: Array) -> None:
    if getattr(matrix, "ndim", 2) > 2 or ans.ndim > 2:
        raise refusal(fun, "for stacks of matrices: call it for each matrix, or call np.linalg.solve")


@_passed
def solve_triangular_vjp(
    argnums: Argnums,
    ans: Array,
    a: Array,
    b: Array,
    trans: int | str = 0,
    lower: bool = False,
    unit_diagonal: bool = False,
    overwrite_b: bool = False,
    check_finite: bool = True,
) -> Vjp:
    """Return the solution w of the transposed system for b; for the triangle of A that is read, -w xᵀ."""
    from autograd.scipy.linalg import solve_triangular  # type: ignore[attr-defined]

    _require_one(solve_triangular, a, ans)
    form = trans if isinstance(trans, str) else "NTC"[trans]

    def vjp(g: Array) -> tuple[Array, ...]:
        matrix, transposed = (anp.conj(a) if form == "C" else a), "T" if form == "N" else "N"
        w = solve_triangular(matrix, g, transposed, lower, unit_diagonal, check_finite=check_finite)
        parts = {1: lambda: fitted(w, b), 0: lambda: fitted(of_matrix(w), a)}
        return tuple([parts[i]() for i in argnums])

    def of_matrix(w: Array) -> Array:
        columns = [anp.reshape(x, (len(a), -1)) for x in (w, ans)]
        part = -anp.dot(columns[0], columns[1].T)
        part = part if form == "N" else part.T if form == "T" else anp.conj(part.T)
        return anp.tril(part, -int(unit_diagonal)) if lower else anp.triu(part, int(unit_diagonal))

    return vjp


@_passed
def solve_banded_vjp(
    argnums: Argnums,
    ans: Array,
    l_and_u: tuple[int, int],
    ab: Array,
    b: Array,
    overwrite_ab: bool = False,
    overwrite_b: bool = False,
    check_finite: bool = True,
) -> Vjp:
    """Return the solution w of the transposed system for b; for the bands, the entries of -w xᵀ on them."""
    from autograd.scipy.linalg import solve_banded  # type: ignore[attr-defined]

    _require_one(solve_banded, ab, ans)
    lower, upper = l_and_u
    n, bands = anp.shape(ab)[1], range(lower + upper + 1)

    # ab[k, j] is the entry in row j + k - upper, column j. Entries of `transposed` outside of the matrix are arbitrary.
    def vjp(g: Array) -> tuple[Array, ...]:
        transposed = anp.stack([anp.roll(ab[-1 - k], lower - k) for k in bands])
        w = solve_banded((upper, lower), transposed, g, check_finite=check_finite)
        parts = {2: lambda: fitted(w, b), 1: lambda: fitted(of_bands(w), ab)}
        return tuple([parts[i]() for i in argnums])

    def of_bands(w: Array) -> Array:
        w, x = (anp.reshape(part, (n, -1)) for part in (w, ans))
        rows = np.arange(n) + np.arange(-upper, lower + 1)[:, None]
        return -anp.stack([anp.sum(anp.roll(w, upper - k, axis=0) * x, axis=1) for k in bands]) * ((rows >= 0) & (rows < n))

    return vjp


@_passed
def sqrtm_vjp(argnums: Argnums, ans: Array, a: Array, *unused: object) -> Vjp:
    """Solve Sylvester's equation with the transposed root."""
    from autograd.scipy.linalg import solve_sylvester  # type: ignore[attr-defined]

    return lambda g: (fitted(solve_sylvester(ans.T, ans.T, g), a),)


SCIPY_VJPS.update(solve_triangular=solve_triangular_vjp, solve_banded=solve_banded_vjp, sqrtm=sqrtm_vjp)
