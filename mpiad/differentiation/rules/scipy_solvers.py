"""Solvers of `autograd.scipy.linalg`, of triangular and banded systems and roots of matrices, and normal distributions.

Autograd's rules reject some keyword arguments and several right-hand sides of a banded system with traced bands, ignore
`unit_diagonal`, and are wrong for complex matrices. The rules here are found by the names of the functions, since only
programs that call them import SciPy. A rule gets the call's arguments as they were passed.

Autograd differentiates arguments that are passed by position, and many of its distributions have no `loc` and `scale`.
`bind_keywords` lets distributions take traced arguments by keyword, and a location and a scale.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Array, Function
from mpiad.differentiation.rules.broadcasting import fitted
from mpiad.differentiation.rules.factorizations import of_triangle
from mpiad.differentiation.rules.protocol import SCIPY_VJPS, Argnums, Primitive, Vjp, VjpMaker, holds_box, refusal


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


def _normal_density_vjp(is_logarithm: bool) -> VjpMaker:
    """Return the rule of the density of a normal distribution: the gradients of its logarithm with d = x - mean."""

    def rule(
        argnums: Argnums, ans: Array, x: Array, mean: Array = None, cov: Array = 1, allow_singular: bool = False
    ) -> Vjp:
        center = 0.0 if mean is None else mean
        inverse = (anp.linalg.pinv if allow_singular else anp.linalg.inv)(_covariance(cov, center))
        points = anp.reshape(x, (*anp.shape(x), 1)) if len(inverse) == 1 and anp.ndim(x) < 2 else x
        d = points - center
        solved = anp.matmul(d, inverse)

        def vjp(g: Array) -> tuple[Array, ...]:
            scale = anp.reshape(g if is_logarithm else g * ans, (*anp.shape(d)[:-1], 1))
            parts = {
                0: lambda: anp.reshape(-scale * solved, anp.shape(x)),
                1: lambda: anp.reshape(fitted(scale * solved, anp.reshape(mean, (-1,))), anp.shape(mean)),
                2: lambda: of_covariance(scale),
            }
            return tuple([parts[i]() for i in argnums])

        def of_covariance(scale: Array) -> Array:
            if allow_singular:
                from autograd.scipy.stats import multivariate_normal

                density = multivariate_normal.logpdf if is_logarithm else multivariate_normal.pdf
                raise refusal(density, "with respect to the covariance with allow_singular=True")
            w = anp.reshape(solved, (-1, len(inverse)))
            outer = anp.dot(w.T, anp.reshape(scale, (-1, 1)) * w)
            return _of_covariance((outer - anp.sum(scale) * inverse) / 2, cov)

        return vjp

    return _passed(rule)


@_passed
def normal_entropy_vjp(argnums: Argnums, ans: Array, mean: Array = None, cov: Array = 1) -> Vjp:
    """Return half of the inverse of the covariance, and zero for the mean."""
    inverse = anp.linalg.inv(_covariance(cov, 0.0 if mean is None else mean))
    parts = {0: lambda g: anp.zeros_like(mean), 1: lambda g: _of_covariance(g * inverse / 2, cov)}
    return lambda g: tuple([parts[i](g) for i in argnums])


def _covariance(cov: Array, mean: Array) -> Array:
    """Return a covariance, given by a number, variances or a matrix, as the symmetric matrix that SciPy reads."""
    if anp.ndim(cov) == 2:
        lower = anp.tril(cov, -1)
        return lower + lower.T + anp.diag(anp.diagonal(cov))
    return anp.diag(cov * np.ones(anp.size(mean)))


def _of_covariance(part: Array, cov: Array) -> Array:
    """Return the cotangent of a covariance from that of the symmetric matrix."""
    n = len(part)
    if anp.ndim(cov) == 2:
        return of_triangle(part, np.eye(n), np.tri(n, k=-1))
    return fitted(anp.diagonal(part), cov)


SCIPY_VJPS["multivariate_normal.logpdf"] = _normal_density_vjp(True)
SCIPY_VJPS["multivariate_normal.pdf"] = _normal_density_vjp(False)
SCIPY_VJPS["multivariate_normal.entropy"] = normal_entropy_vjp
SCIPY_VJPS.update(solve_triangular=solve_triangular_vjp, solve_banded=solve_banded_vjp, sqrtm=sqrtm_vjp)

# The parameters of distributions, in SciPy's order; those with a location and a scale have functions of (x - loc) / scale.
_STANDARD = {"norm": "x", "t": "x df", "gamma": "x a", "beta": "x a b", "chi2": "x df", "poisson": "k mu"}
_OF_VECTORS = {"multivariate_normal": "x mean cov allow_singular", "dirichlet": "x alpha"}
_DEFAULTS = {"mean": None, "cov": 1, "allow_singular": False}
_BOUND: set[Any] = set()


def _with_keywords(fun: Primitive, names: list[str], is_standard: bool) -> Function:
    """Let a function of a distribution take traced arguments by keyword; with `loc` and `scale`, by its standard form."""
    of_standard = ["loc", "scale"] if names[0] == "x" else ["loc"]  # of whole numbers k
    known = [*names, *of_standard] if is_standard else names
    by_position = known if names == ["x"] or not is_standard else names  # autograd's rules for `norm` have both

    @wraps(fun)
    def function(*args: Any, **kwargs: Any) -> Array:
        if (not kwargs and len(args) <= len(by_position)) or not holds_box((*args, *kwargs.values())):
            return fun(*args, **kwargs)
        named = {**dict(zip(known, args)), **kwargs}
        needed = [name for name in names if name in named or name not in _DEFAULTS]
        if not set(needed) <= named.keys() <= set(known) or len(args) > len(known):
            return fun(*args, **kwargs)  # SciPy's error
        loc, scale = named.pop("loc", 0.0), named.pop("scale", 1.0)
        if names == ["x"]:
            return fun(named["x"], loc, scale)
        if not is_standard:
            last = max(map(names.index, named))
            return fun(*[named[name] if name in named else _DEFAULTS[name] for name in names[: last + 1]])
        scale = anp.where(scale > 0, scale, np.nan)
        value = fun((named[names[0]] - loc) / scale, *[named[name] for name in names[1:]])
        return value - anp.log(scale) if fun.__name__ == "logpdf" else value / scale if fun.__name__ == "pdf" else value

    function.in_place_of = fun  # type: ignore[attr-defined]  # for fingerprints, which don't change by the binding
    return function


def bind_keywords() -> None:
    """Let the functions of `autograd.scipy.stats` take traced arguments by keyword, once a program has imported it."""
    stats: Any = sys.modules.get("autograd.scipy.stats")
    if stats is None or stats in _BOUND:
        return
    _BOUND.add(stats)
    for distribution, names in (_STANDARD | _OF_VECTORS).items():
        module = getattr(stats, distribution)
        for name, fun in list(vars(module).items()):
            if type(getattr(getattr(fun, "fun", None), "__self__", None)).__module__.startswith("scipy.stats."):
                kept = names.split()[1:3] if name == "entropy" else names.split()
                setattr(module, name, _with_keywords(fun, kept, distribution in _STANDARD))
