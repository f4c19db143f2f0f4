"""Tables of data in f: linear interpolation, and cubic splines."""

from __future__ import annotations

from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
import scipy
from autograd.extend import defjvp, defvjp, primitive
from autograd.tracer import getval, isbox

from mpiad._typing import Array
from mpiad.differentiation.rules.interpolation import entries_of, interpolated, interval_of


def interp(x: Array, xp: Array, fp: Array, left: Array = None, right: Array = None) -> Array:
    """Interpolate linearly in a table, as `numpy.interp`; each trajectory may have its own table in p.

    Parameters
    ----------
    x : array, shape (n,)
        Places, one per trajectory: for example t or ``u[0]`` in f.
    xp : array, shape (K,) or (K, n)
        Increasing places of the table's entries.
    fp : array, shape (K,) or (K, n)
        Values of the table's entries.
    left, right : float, optional
        Values for x before ``xp[0]`` and after ``xp[-1]``; by default ``fp[0]`` and ``fp[-1]``.

    Returns
    -------
    array, shape (n,)

    Raises
    ------
    ValueError
        If `xp` and `fp` have different lengths, `xp` isn't increasing, or a table isn't finite.

    Ranks
    -----
    Each rank calls it independently.

    Adjoint
    -------
    x gets the cotangent times the slope of its interval, the right one at an entry. The two entries of `fp` at its ends get
    the cotangent times their weights.

    Examples
    --------
    >>> from mpiad.ensemble import EnsembleProblem, ODEProblem, interp, solve
    >>> times, inflow = np.array([0.0, 1.0, 3.0]), np.array([[0.0, 2.0, 2.0], [0.0, 1.0, 5.0]])
    >>> tank = ODEProblem(lambda u, p, t: [interp(t, times, p)], [0.0], (0.0, 3.0), np.zeros(3))
    >>> print(solve(EnsembleProblem(tank, p=inflow), rtol=1e-8).u_end.ravel().round(3))
    [5.  6.5]
    """
    _check_table("interp", xp, fp, 0, 1)
    if max(anp.ndim(xp), anp.ndim(fp)) < 2:
        return anp.interp(x, xp, fp, left, right)
    return interpolated(x, xp, fp, left, right)


def _check_table(name: str, x: Array, y: Array, axis: int, least: int) -> None:
    """Raise a ValueError for tables of different or too small lengths, and for plain tables unsorted or not finite."""
    lengths = [np.shape(getval(part))[axis] if np.ndim(getval(part)) else 0 for part in (x, y)]
    if lengths[0] != lengths[1] or lengths[0] < least:
        got = f"{lengths[0]} and {lengths[1]}"
        raise ValueError(f"{name}: a table must have as many places as values, at least {least}, but has {got}.")
    for part in map(getval, (x, y)):
        if isinstance(part, (np.ndarray, list, tuple)) and not np.isfinite(part).all():
            raise ValueError(f"{name}: the entries of a table must be finite, but got {part!r:.80}.")
    places = getval(x)
    if isinstance(places, (np.ndarray, list, tuple)) and not (np.diff(places, axis=axis) > 0).all():
        raise ValueError(f"{name}: the places of a table must be increasing, but got {places!r:.80}.")


class _Knots(NamedTuple):
    x: Array
    y: Array
    slopes: Array


class CubicSpline(_Knots):
    """A cubic spline through given values, as `scipy.interpolate.CubicSpline`, to be called in f.

    A spline is a named tuple of arrays, so it can be a part of p. The values y may be traced.

    Parameters
    ----------
    x : array, shape (K,) or (N, K)
        Increasing places of the values (knots).
    y : array, shape (K,) or (N, K)
        Values at x. N rows are the splines of N trajectories, for the p of an `EnsembleProblem`.
    bc_type : {"not-a-knot", "natural", "clamped"}
        Conditions at the ends: the first two cubic polynomials are equal, and the last two; the second derivatives are
        zero; the first derivatives are zero.

    Attributes
    ----------
    x, y : array
        The arguments; x has the shape of y.
    slopes : array, shape of y
        Derivatives at x, a linear function of y.

    Raises
    ------
    NotImplementedError
        If x is traced.
    ValueError
        If tables have different lengths, x isn't increasing, a table isn't real and finite, or `bc_type` is another one.

    Ranks
    -----
    Each rank calls it independently.

    Adjoint
    -------
    y gets its own cotangent, and that of the slopes by a solve with the transposed matrix. In ``spline(x)``, x gets the
    cotangent times the derivative of the spline, and the values and slopes at both ends of the interval get theirs by the
    weights of a cubic Hermite polynomial.

    Examples
    --------
    >>> from mpiad.ensemble import CubicSpline, ODEProblem, solve
    >>> hours = np.linspace(0.0, 24.0, 9)
    >>> light = CubicSpline(hours, np.sin(np.pi * hours / 24.0))
    >>> growth = ODEProblem(lambda u, p, t: [p(t) * u[0]], [1.0], (0.0, 24.0), p=light)
    >>> print(np.log(solve(growth, rtol=1e-8).u_end).round(3), round(48.0 / np.pi, 3))
    [15.279] 15.279
    """

    __slots__ = ()

    def __new__(cls, x: Array, y: Array, bc_type: str = "not-a-knot") -> CubicSpline:
        """Compute the derivatives at x."""
        if isbox(x):
            raise NotImplementedError("CubicSpline: x is traced, but only derivatives with respect to y are supported.")
        try:
            x = np.asarray(x).astype(float, casting="same_kind")
            y = y if isbox(y) else np.asarray(y).astype(float, casting="same_kind")
        except (TypeError, ValueError) as error:
            raise ValueError(f"CubicSpline: all tables must have the same length, and be real, not {y!r:.80}.") from error
        if x.ndim > anp.ndim(y) or anp.ndim(y) > 2:
            raise ValueError(f"CubicSpline: x and y must have shape (K,) or (N, K), but have {x.shape} and {anp.shape(y)}.")
        _check_table("CubicSpline", x, y, -1, 2)
        if bc_type not in ("not-a-knot", "natural", "clamped"):
            raise ValueError(f"CubicSpline: bc_type must be 'not-a-knot', 'natural' or 'clamped', but got {bc_type!r}.")
        if x.ndim == 2:
            slopes = anp.array([_knot_slopes(y[i], x[i], bc_type) for i in range(len(x))])
        else:
            slopes, x = _knot_slopes(y, x, bc_type), x if anp.ndim(y) == 1 else np.broadcast_to(x, anp.shape(y))
        return super().__new__(cls, x, y, slopes)

    def __call__(self, x: Array) -> Array:
        """Return the values at x, shape (n,); outside of the table, the first and the last polynomial are extended."""
        if anp.ndim(self.y) == 2 and anp.shape(self.y)[1:] != anp.shape(x):
            raise ValueError(
                f"CubicSpline: a spline with one table per trajectory is called in f, where its arrays have shape (K, n), "
                f"but x has shape {anp.shape(x)}, and the arrays have shape {anp.shape(self.y)}."
            )
        i = interval_of(self.x, x)
        (x0, x1), (y0, y1), (s0, s1) = ([entries_of(part, i), entries_of(part, i + 1)] for part in self)
        h, distance = x1 - x0, x - x0
        slope = (y1 - y0) / h
        third = (s0 + s1 - 2 * slope) / h
        return ((third / h * distance + ((slope - s0) / h - third)) * distance + s0) * distance + y0


@primitive
def _knot_slopes(y: Array, x: Array, bc_type: str) -> Array:
    """Return the derivatives at x of the splines through y, shape (..., K)."""
    return scipy.interpolate.CubicSpline(x, y, axis=-1, bc_type=bc_type)(x, 1)


@primitive
def _knot_slopes_transposed(g: Array, x: Array, bc_type: str) -> Array:
    if len(x) < 4:  # the conditions at both ends may be the same one
        return g @ _knot_slopes(np.eye(len(x)), x, bc_type).T
    h, n = np.diff(x), len(x)
    # A slopes = C differences / h. Rows inside: the second derivatives of both polynomials at a knot are equal.
    lower, diagonal, upper = np.append(h[1:], 0.0), np.zeros(n), np.append(0.0, h[:-1])
    diagonal[1:-1] = 2 * (h[:-1] + h[1:])
    before, after = np.append(3 * h[1:], 0.0), np.append(0.0, 3 * h[:-1])
    second = np.zeros(2)  # of the first and the last row
    for row, end, off, inner in ((0, after, upper, h[:2]), (-1, before, lower, h[:-3:-1])):
        if bc_type == "natural":
            diagonal[row], off[row], end[row] = 2.0, 1.0, 3.0
        elif bc_type == "clamped":
            diagonal[row] = 1.0
        else:
            total = inner.sum()
            diagonal[row], off[row] = inner[1], total
            end[row], second[row] = (inner[0] + 2 * total) * inner[1] / total, inner[0] ** 2 / total
    diagonals: Any = scipy.sparse.diags
    matrix = diagonals([lower, diagonal, upper], [-1, 0, 1], format="csc")
    right = diagonals([before, after], [-1, 0], shape=(n, n - 1), format="lil")
    right[0, 1], right[-1, -2] = second
    solved = scipy.sparse.linalg.splu(matrix).solve(np.ascontiguousarray(g.reshape(-1, n).T), trans="T")
    differences = (right.T @ solved).T / h
    cotangent = np.zeros((len(differences), n))
    cotangent[:, 1:] += differences
    cotangent[:, :-1] -= differences
    return cotangent.reshape(g.shape)


for _linear, _transposed in ((_knot_slopes, _knot_slopes_transposed), (_knot_slopes_transposed, _knot_slopes)):
    defvjp(_linear, lambda ans, y, x, bc_type, f=_transposed: lambda g: f(g, x, bc_type), argnums=(0,))
    defjvp(_linear, lambda g, ans, y, x, bc_type, f=_linear: f(g, x, bc_type), argnums=(0,))
