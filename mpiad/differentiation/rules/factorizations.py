"""Factorizations and inverses of matrices, norms, traces and singular values, on the host and on devices.

A cotangent g of a complex matrix x stands for the change Re Σ g dx, without conjugation. Therefore the formulas here and in
the references differ by conjugates.

References
----------
I. Murray, "Differentiation of the Cholesky decomposition", arXiv:1602.07527 (2016), section 2.
M. B. Giles, "Collected matrix derivative results for forward and reverse mode algorithmic differentiation" (2008),
section 3.
S. F. Walter, L. Lehmann, R. Lamour, "On evaluating higher-order derivatives of the QR decomposition of tall matrices with
full column rank in forward and reverse mode algorithmic differentiation", Optim. Methods Softw. 27 (2012), section 3.
G. H. Golub, V. Pereyra, "The differentiation of pseudo-inverses and nonlinear least squares problems whose variables
separate", SIAM J. Numer. Anal. 10 (1973), section 4.
"""

from __future__ import annotations

from functools import partial

import autograd.numpy as anp
import numpy as np
from autograd.core import JVPNode, VJPNode, make_vjp
from autograd.extend import defjvp, defvjp, primitive
from autograd.numpy import linalg
from autograd.tracer import register_notrace

from mpiad._typing import Array
from mpiad.differentiation.rules.broadcasting import fitted
from mpiad.differentiation.rules.expansion import kept_shape
from mpiad.differentiation.rules.moments import nonzero_divisor, slope_jvp, slope_vjp
from mpiad.differentiation.rules.protocol import (
    Argnums,
    Primitive,
    Vjp,
    bound,
    checked,
    composition,
    exact_integer,
    identity,
    inherited_vjp,
    lower_triangle,
    recorder_of,
    refusal,
)
from mpiad.transport.core.tracing import tracing
from mpiad.transport.devices.device_arrays import arrays_of


def cholesky_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Compute P = L^-T Φ(Lᵀ g) conj(L)^-1; Φ selects the lower triangle with half of the diagonal."""
    bound(linalg.cholesky, "a", args, kwargs)
    lower, n = ans, anp.shape(ans)[-1]
    ones, triangle = identity(ans, n), lower_triangle(ans, n)
    half = triangle + 0.5 * ones

    def vjp(g: Array) -> tuple[Array]:
        inner = anp.matmul(_transposed(lower), g) * half
        right = _transposed(linalg.solve(anp.conj(_transposed(lower)), _transposed(inner)))
        return (of_triangle(linalg.solve(_transposed(lower), right), ones, triangle),)

    return vjp


@primitive
def adjugate(a: Array) -> Array:
    """Return det(A) A⁻¹, a polynomial of the entries, also of singular matrices."""
    recorder = recorder_of(a)
    if recorder is not None:  # a compiled program calls this function
        return recorder.call(adjugate, (a,), {})
    inverse, n = _regular_inverse(a), a.shape[-1]
    if inverse is not None:
        return np.linalg.det(a)[..., None, None] * inverse
    return adjugate_tangent(a, a) / (n - 1) if n > 1 else np.ones_like(a)  # homogeneous, of degree n - 1


@primitive
def adjugate_tangent(a: Array, da: Array) -> Array:
    """Return the tangent of the adjugate, det(A) (tr(A⁻¹ dA) A⁻¹ - A⁻¹ dA A⁻¹), also of singular matrices."""
    recorder = recorder_of(a, da)
    if recorder is not None:
        return recorder.call(adjugate_tangent, (a, da), {})
    if _regular_inverse(a) is not None:
        return _regular_adjugate_tangent(a, da)
    # In the bases of the singular vectors, the derivatives are products of all singular values but two.
    u, s, vh = np.linalg.svd(a)
    left, right = np.conj(np.swapaxes(vh, -1, -2)), np.conj(np.swapaxes(u, -1, -2))
    one = np.ones_like(s[..., :1])
    after = np.cumprod(np.concatenate([one, s[..., :0:-1]], -1), -1)[..., ::-1]
    all_but_one = np.cumprod(np.concatenate([one, s[..., :-1]], -1), -1) * after
    quotients = all_but_one[..., :, None] / np.where(s > 0, s, np.inf)[..., None, :]
    all_but_two = np.where(s[..., None, :] > 0, quotients, np.swapaxes(quotients, -1, -2))
    all_but_two[..., -1, -2:-1] = all_but_two[..., -2:-1, -1] = np.prod(s[..., :-2], axis=-1, keepdims=True)
    all_but_two = all_but_two * (1 - np.eye(s.shape[-1]))
    inner = right @ da @ left
    diagonal = all_but_two @ np.diagonal(inner, axis1=-2, axis2=-1)[..., None]
    sign = (np.linalg.det(u) * np.linalg.det(vh))[..., None, None]
    return sign * (left @ (np.eye(s.shape[-1]) * diagonal - all_but_two * inner) @ right)


def _regular_adjugate_tangent(a: Array, da: Array) -> Array:
    inverse = linalg.inv(a)
    trace = anp.sum(inverse * _transposed(da), axis=(-2, -1), keepdims=True)
    determinant = anp.reshape(linalg.det(a), (*anp.shape(a)[:-2], 1, 1))
    return determinant * (trace * inverse - anp.matmul(anp.matmul(inverse, da), inverse))


def _regular_inverse(a: Array) -> Array | None:
    """Return the inverses; None if a matrix on the host is close to singular, where formulas with inverses cancel."""
    try:
        inverse = np.linalg.inv(a)
    except np.linalg.LinAlgError:
        return None
    if arrays_of(a) is not None:
        return inverse
    conditions = np.linalg.norm(a, axis=(-2, -1)) * np.linalg.norm(inverse, axis=(-2, -1))
    return None if np.any(conditions > np.finfo(inverse.dtype).eps ** -0.4) else inverse


def _through_tangent(g: Array, a: Array) -> Array:
    return _transposed(adjugate_tangent(a, _transposed(g)))


# The derivatives of a determinant are symmetric multilinear forms of the directions.
def _third_derivative(g: Array, a: Array, da: Array) -> Array:
    return make_vjp(lambda a: _regular_adjugate_tangent(a, da), a)[0](g)


defvjp(adjugate, lambda ans, a: lambda g: _through_tangent(g, a))
defjvp(adjugate, lambda g, ans, a: adjugate_tangent(a, g))
defvjp(
    adjugate_tangent,
    lambda ans, a, da: lambda g: _third_derivative(g, a, da),
    lambda ans, a, da: lambda g: _through_tangent(g, a),
)
defjvp(
    adjugate_tangent,
    lambda g, ans, a, da: _transposed(_third_derivative(_transposed(g), a, da)),
    lambda g, ans, a, da: adjugate_tangent(a, g),
)


def det_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the transposed adjugate by the cotangent."""
    bound(linalg.det, "a", args, kwargs)
    cofactors = _transposed(adjugate(args[0]))
    return lambda g: (anp.reshape(g, (*anp.shape(g), 1, 1)) * cofactors,)


def slogdet_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the transposed inverse by the cotangent of the logarithm, and of the phase if the matrix is complex."""
    inverse_t = _transposed(linalg.inv(args[0]))

    def vjp(g: Array) -> tuple[Array]:
        factor = g[1] if not anp.iscomplexobj(args[0]) else g[1] + 1j * anp.imag(g[0] * ans[0])
        return (anp.reshape(factor, (*anp.shape(factor), 1, 1)) * inverse_t,)

    return vjp


def slogdet_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> tuple[Array, Array]:
    """Return the tangents of the phase and of the logarithm, from the trace of A⁻¹ dA."""
    change = anp.einsum("...ij,...ji->...", linalg.inv(args[0]), gs[0])
    return ans[0] * 1j * anp.imag(change) if anp.iscomplexobj(args[0]) else ans[0] * 0.0, anp.real(change)


def solve_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Return the solution w of Aᵀ w = g for the right-hand side, and -w xᵀ for the matrix A."""
    a, b = args
    column = len(anp.shape(b)) == 1 or (not _VECTORS_ONLY and len(anp.shape(b)) == len(anp.shape(a)) - 1)

    def vjp(g: Array) -> tuple[Array, ...]:
        w = linalg.solve(_transposed(a), g[..., None] if column else g)
        parts = {
            0: lambda: fitted(-anp.matmul(w, _transposed(ans[..., None] if column else ans)), a),
            1: lambda: fitted(w[..., 0] if column else w, b),
        }
        return tuple([parts[i]() for i in argnums])

    return vjp


def eigh_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Divide the eigenvectors' cotangents by differences of eigenvalues, add the eigenvalues' cotangents, and rotate."""
    vectors = ans[1]
    ones, triangle = _diagonal_and_triangle(args, kwargs)

    def vjp(g: Array) -> tuple[Array]:
        inner = over_gaps(anp.matmul(_transposed(vectors), g[1]), ans[0], None, "eigenvalues") + ones * g[0][..., None, :]
        part = anp.matmul(anp.matmul(anp.conj(vectors), inner), _transposed(vectors))
        return (of_triangle(part, ones, triangle),)

    return vjp


def eigh_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> tuple[Array, Array]:
    """Rotate the change of the matrix to the eigenvectors; its diagonal is that of the eigenvalues."""
    ones, triangle = _diagonal_and_triangle(args, kwargs)
    lower = gs[0] * triangle
    change = anp.real(gs[0]) * ones + lower + anp.conj(_transposed(lower))
    rotated = anp.matmul(anp.matmul(anp.conj(_transposed(ans[1])), change), ans[1])
    values = anp.real(anp.sum(rotated * ones, axis=-1))
    return values, anp.matmul(ans[1], over_gaps(rotated, ans[0], None, ""))


def eigvalsh_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Call the rule of `eigh` with the cotangents of the values only."""

    def vjp(g: Array) -> tuple[Array]:
        pairs = linalg.eigh(*args, **kwargs)
        return eigh_vjp(argnums, pairs, args, kwargs)((g, anp.zeros_like(pairs[1])))

    return vjp


def eigvalsh_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Return the tangent of the values by the rule of `eigh`."""
    return eigh_jvp(argnums, gs, linalg.eigh(*args, **kwargs), args, kwargs)[0]


def eig_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Call autograd's rule, unless it would divide by differences of equal eigenvalues."""
    pull, (values, vectors) = inherited_vjp(linalg.eig, argnums, ans, args, kwargs), ans

    def vjp(g: Array) -> tuple[Array]:
        rotated = anp.matmul(_transposed(vectors), g[1])
        scaled = anp.real(rotated) * identity(vectors, anp.shape(vectors)[-1])  # vectors of norm 1
        overlaps = anp.matmul(_transposed(vectors), anp.conj(vectors))
        over_gaps(rotated - anp.matmul(overlaps, scaled), values, None, "eigenvalues")
        return pull(g)

    return vjp


def of_triangle(part: Array, ones: Array, triangle: Array) -> Array:
    """Return the cotangent of the triangle, since `cholesky` and `eigh` read no other entries of a Hermitian matrix."""
    return anp.real(part) * ones + (part + anp.conj(_transposed(part))) * triangle


def _diagonal_and_triangle(args: tuple, kwargs: dict) -> tuple[Array, Array]:
    """Return matrices with ones on the diagonal, and in the triangle that eigh reads."""
    n = args[0].shape[-1]
    lower = lower_triangle(args[0], n)
    named = bound(linalg.eigh, "a UPLO", args, kwargs)
    return identity(args[0], n), lower if named.get("UPLO", "L") in "Ll" else _transposed(lower)


_EQUAL = 10  # times the rounding error of a matrix, by which computed values that are equal may differ
_ADVICE = """Write a function of the matrix without vectors: np.linalg.solve, inv, cholesky, slogdet. Instead of eigh of
YᵀY + cI, take np.linalg.svd(Y, full_matrices=False), whose vectors don't include the null space. Or add a small matrix
that separates the values.""".replace("\n", " ")


@primitive
def over_gaps(x: Array, columns: Array, rows: Array | None, refused: str) -> Array:
    """Return x_ij / (c_j - r_i), by default with r = c and zeros on the diagonal, where c are eigen- or singular values.

    If c_j and r_i are equal up to rounding, the quotient is zero for an x_ij that is zero: the function depends on other
    vectors only, or the matrix changes without mixing these. Otherwise a quotient of cotangents raises a LinAlgError;
    `refused` is the name of the values. If it is "", x is a tangent, and the quotient is NaN: the function may read the
    eigenvalues only. On devices it is always NaN, since the host doesn't wait for the values.
    """
    recorder = recorder_of(x, columns)
    if recorder is not None:  # a compiled program calls this function
        return recorder.call(over_gaps, (x, columns, rows, refused), {})
    if not x.size:
        return x
    gaps = columns[..., None, :] - (columns if rows is None else rows)[..., :, None]
    rounding = max(x.shape[-2:]) * np.finfo(columns.dtype).eps
    equal = np.abs(gaps) <= _EQUAL * rounding * np.abs(columns).max(-1)[..., None, None]
    # The entry Vᴴ dA V of two vectors that a change dA of the matrix doesn't mix, as in the null space of YᵀY, is a
    # rounding error. A cotangent is zero exactly if the function doesn't depend on vector j. In a function V h(λ) Vᵀ of the
    # matrix it does, and the rounding error S_ij (h_j - h_i) of the antisymmetric part stands for the quotient S_ij h'.
    zero = equal & (np.abs(x) <= (0.0 if refused else rounding * np.abs(x).max((-2, -1), keepdims=True)))
    if rows is None:
        zero = zero | (identity(x, x.shape[-1]) == 1)
    undefined = equal & ~zero
    if refused and not tracing.is_abstract and isinstance(x, np.ndarray) and undefined.any():
        *batch, i, _ = np.argwhere(undefined)[0]
        row = (*batch, i, np.flatnonzero(np.broadcast_to(equal, x.shape)[(*batch, i)]))
        values = np.broadcast_to(columns[..., None, :], x.shape)[row].tolist()
        alike = f"the {refused} {row[-1].tolist()}, {values}, are {'equal' if rows is None else 'zero'} up to rounding"
        derivative = "there their vectors have no derivative, and that of a function of the vectors can't be computed"
        raise np.linalg.LinAlgError(f"{alike}: {derivative}. {_ADVICE}")
    return np.where(undefined, np.nan, np.where(zero, 0, x) / np.where(zero | equal, 1, gaps))


def _over_gaps_vjp(argnum: int, ans: Array, x: Array, columns: Array, rows: Array | None, refused: str) -> Vjp:
    name = refused or "eigenvalues"

    def vjp(g: Array) -> Array:
        if argnum == 0:
            return fitted(over_gaps(g, columns, rows, name), x)
        inner = over_gaps(g * ans, columns, rows, name)
        of_rows, of_columns = anp.sum(inner, axis=-1), -anp.sum(inner, axis=-2)
        if argnum == 2:
            return fitted(of_rows, rows)
        return fitted(of_columns + of_rows if rows is None else of_columns, columns)

    return vjp


def _over_gaps_jvp(argnum: int, g: Array, ans: Array, x: Array, columns: Array, rows: Array | None, refused: str) -> Array:
    change = 0.0
    if argnum == 1:
        change = g[..., None, :]
    if argnum == 2 or rows is None:
        change = change - g[..., :, None]
    return over_gaps(g if argnum == 0 else -ans * change, columns, rows, refused)


defvjp(over_gaps, *[partial(_over_gaps_vjp, k) for k in range(3)], argnums=(0, 1, 2))
defjvp(over_gaps, *[partial(_over_gaps_jvp, k) for k in range(3)], argnums=(0, 1, 2))


def pinv_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Apply the transposed derivative of the pseudoinverse (Golub and Pereyra)."""
    x = bound(linalg.pinv, "a", args, kwargs)["a"]

    def vjp(g: Array) -> tuple[Array]:
        ans_h = anp.conj(_transposed(ans))
        left = identity(x, x.shape[-2]) - anp.matmul(x, ans)
        right = identity(x, x.shape[-1]) - anp.matmul(ans, x)
        # The transpose of each term of d(A⁺) = -A⁺ dA A⁺ + A⁺A⁺ᴴ dAᴴ (I - AA⁺) + (I - A⁺A) dAᴴ A⁺ᴴA⁺.
        part = -anp.matmul(anp.matmul(ans, _transposed(g)), ans)
        part = part + anp.matmul(anp.matmul(anp.matmul(ans, ans_h), anp.conj(g)), left)
        part = part + anp.matmul(anp.matmul(anp.matmul(right, anp.conj(g)), ans_h), ans)
        return (_transposed(part),)

    return vjp


def qr_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Apply the transpose of `qr_jvp`: the coefficients of C = Qᴴ dA R^-1 in both tangents are in one Hermitian matrix."""
    q, r = _factors(ans, args, kwargs)

    def vjp(g: Array) -> tuple[Array]:
        inner = anp.matmul(r, _transposed(g[1])) - anp.matmul(_transposed(g[0]), q)
        lower = inner * lower_triangle(r, r.shape[-1])
        inner = _transposed(lower) + anp.conj(lower) + anp.real(inner) * identity(r, r.shape[-1])
        return (_transposed(linalg.solve(r, _transposed(g[0] + anp.matmul(anp.conj(q), inner)))),)

    return vjp


def qr_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> tuple[Array, Array]:
    """Split C = Qᴴ dA R^-1 into an antihermitian D, the rotation of Q, and an upper triangle with a real diagonal."""
    q, r = _factors(ans, args, kwargs)
    change = _transposed(linalg.solve(_transposed(r), _transposed(gs[0])))
    inner = anp.matmul(anp.conj(_transposed(q)), change)
    lower = inner * lower_triangle(r, r.shape[-1])
    rotation = lower - anp.conj(_transposed(lower)) + (inner - anp.real(inner)) * identity(r, r.shape[-1])
    return change + anp.matmul(q, rotation - inner), anp.matmul(inner - rotation, r)


def _factors(ans: Array, args: tuple, kwargs: dict) -> Array:
    """Return Q and R; raise an error unless R is square, so that they have derivatives."""
    named = bound(linalg.qr, "a mode", args, kwargs)
    if named.get("mode", "reduced") != "reduced":
        raise refusal(linalg.qr, f"with mode={named['mode']!r}: leave it out, and take q or r of q, r = np.linalg.qr(x)")
    rows, columns = named["a"].shape[-2:]
    if rows < columns:
        raise refusal(
            linalg.qr, "for fewer rows than columns: with m rows, write q, _ = np.linalg.qr(x[..., :m]) and r = q.T @ x"
        )
    return ans


@composition(linalg.lstsq)
def lstsq(a: Array, b: Array, rcond: float | None = None) -> tuple[Array, Array, Array, Array]:
    """Return `numpy.linalg.lstsq`."""
    (rows, columns), values = anp.shape(a), linalg.svd(a, compute_uv=False)
    eps = np.finfo(values.dtype).eps
    least = eps * max(rows, columns) if rcond is None else eps if rcond == -1 else rcond
    rank = anp.sum(values > least * values[:1])
    x, squares = least_squares(a, b, least)
    return x, squares if rows > columns else squares[:0], rank, values


@primitive
def least_squares(a: Array, b: Array, rcond: float) -> tuple[Array, Array]:
    """Return the solutions and sums of squares of `numpy.linalg.lstsq`, which has no sums (here NaN) for some matrices."""
    recorder = recorder_of(a, b)
    if recorder is not None:  # a compiled program calls this function
        return recorder.call(least_squares, (a, b, rcond), {})
    x, squares = np.linalg.lstsq(a, b, rcond)[:2]
    return x, squares if len(squares) else np.full(np.shape(b)[1:] or 1, np.nan, squares.dtype)


@primitive
def of_independent_columns(r: Array, rcond: float) -> Array:
    """Return the factor R of a matrix; raise a NotImplementedError if the columns are linearly dependent."""
    recorder = recorder_of(r)
    if recorder is not None:  # a compiled program calls this function
        return recorder.call(of_independent_columns, (r, rcond), {})
    values = np.linalg.svd(r, compute_uv=False)
    if values.size and values[-1] <= rcond * values[0] and not tracing.is_abstract:
        raise refusal(linalg.lstsq, _DEPENDENT)
    return r


defvjp(of_independent_columns, lambda ans, r, rcond: lambda g: g)
defjvp(of_independent_columns, lambda g, ans, r, rcond: g)
_DEPENDENT = "for linearly dependent columns: write np.dot(np.linalg.pinv(a), b)"


def least_squares_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Apply the transpose of `least_squares_jvp`."""
    x, residual, q, r = _normal_equations(ans, *args)

    def vjp(g: Array) -> tuple[Array, ...]:
        y = linalg.solve(r.T, anp.reshape(g[0], x.shape))
        of_b = anp.dot(anp.conj(q), y) + (2.0 * anp.conj(residual) * g[1] if len(q) > len(r) else 0.0)
        parts = {
            0: lambda: fitted(anp.dot(anp.conj(residual), linalg.solve(r, anp.conj(y)).T) - anp.dot(of_b, x.T), args[0]),
            1: lambda: fitted(anp.reshape(of_b, anp.shape(args[1])), args[1]),
        }
        return tuple([parts[i]() for i in argnums])

    return vjp


def least_squares_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> tuple[Array, Array]:
    """Return A⁺ (db - dA x) + (Aᴴ A)^-1 dAᴴ (b - A x), and the change of the sums of squares."""
    x, residual, q, r = _normal_equations(ans, *args)
    tangents = dict(zip(argnums, gs))
    change, y = anp.reshape(tangents.get(1, 0.0 * args[1]), residual.shape), 0.0
    if 0 in tangents:
        change = change - anp.dot(tangents[0], x)
        y = linalg.solve(anp.conj(r.T), anp.dot(anp.conj(tangents[0].T), residual))
    of_x = linalg.solve(r, anp.dot(anp.conj(q.T), change) + y)
    return anp.reshape(of_x, anp.shape(ans[0])), 2.0 * anp.real(anp.sum(anp.conj(residual) * change, axis=0))


def _normal_equations(ans: Array, a: Array, b: Array, rcond: float) -> tuple[Array, ...]:
    """Return the solution and the residual as matrices, and the factors Q and R of a matrix of full column rank."""
    if anp.shape(a)[0] < anp.shape(a)[1]:
        raise refusal(linalg.lstsq, _DEPENDENT)
    x, b = (y[:, None] if anp.ndim(y) == 1 else y for y in (ans[0], anp.asarray(b)))
    q, r = linalg.qr(a)
    return x, b - anp.dot(a, x), q, of_independent_columns(r, rcond)


def _transposed(x: Array) -> Array:
    return anp.swapaxes(x, -1, -2)


# Norms of matrices without a rule.
_IN_PLACE_OF_NORMS = {
    1: ": write np.max(np.sum(np.abs(x), axis=0)), or for one column np.sum(np.abs(x))",
    2: ": write np.max(np.linalg.svd(x, compute_uv=False)), or for one column np.linalg.norm(x)",
    np.inf: ": write np.max(np.sum(np.abs(x), axis=1)), or for one row np.sum(np.abs(x))",
}


def _slope_of_norm(fun: Primitive, ans: Array, args: tuple, kwargs: dict) -> tuple[Array, dict]:
    """Return the derivative of a norm with respect to each element, and the arguments by name."""
    named = bound(fun, "x ord axis keepdims", args, kwargs)
    x, order, axis = named["x"], exact_integer(named.get("ord")), named.get("axis")
    shape = anp.shape(x)
    of_matrix = order is not None and len(shape if axis is None else np.ravel(axis)) == 2
    kept = anp.reshape(ans, kept_shape(shape, axis))
    norm = nonzero_divisor(kept)
    if order is None or order == "fro" or (order == 2 and not of_matrix):
        return anp.conj(x) / norm, named
    if order == "nuc":
        axes = (-2, -1) if axis is None else axis
        left, _, right = checked(fun, partial(linalg.svd, full_matrices=False), anp.moveaxis(x, axes, (-2, -1)))
        return anp.moveaxis(anp.conj(anp.matmul(left, right)), (-2, -1), axes) * (kept / norm), named
    if of_matrix or not order >= 1:
        advice = _IN_PLACE_OF_NORMS.get(order, "") if of_matrix else ""
        raise refusal(fun, f"with ord={order!r} of a {'matrix' if of_matrix else 'vector'}{advice}")
    if order == np.inf:
        largest = anp.abs(x) == kept
        return anp.conj(x) / norm * (largest / anp.sum(largest, axis=axis, keepdims=True)), named
    # At zeros the power may be infinite, and give 0·∞. The second derivative there is infinite for 1 < ord < 2.
    at_zeros = float(np.finfo(norm.dtype).max) if 1 < order < 2 else 0.0
    power = anp.where(x == 0, at_zeros, anp.abs(anp.where(x == 0, 1, x)) ** (order - 2))
    return anp.conj(x) * power / norm ** (order - 1), named


_NORM: Primitive = getattr(linalg, "_primitive_norm", linalg.norm)
# From NumPy 2 on, `solve` takes a right-hand side as a vector only if it has one axis.
_VECTORS_ONLY = np.lib.NumpyVersion(np.__version__) >= "2.0.0"


def trace_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Repeat the cotangent along the diagonal."""
    named = bound(anp.trace, "a offset axis1 axis2", args, kwargs)
    x, shape = named["a"], anp.shape(named["a"])
    first, second = named.get("axis1", 0) % len(shape), named.get("axis2", 1) % len(shape)
    ones = identity(x, shape[first], shape[second], k=named.get("offset", 0))
    ones = np.reshape(ones if first < second else ones.T, [n if i in (first, second) else 1 for i, n in enumerate(shape)])
    kept = kept_shape(shape, (first, second))
    return lambda g: (anp.reshape(g, kept) * ones,)


def svd_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Divide the singular vectors' cotangents by differences and sums of singular values, add theirs, and rotate."""
    named = bound(linalg.svd, "a full_matrices compute_uv", args, kwargs)
    x = named["a"]
    if not named.get("compute_uv", True):

        def values_vjp(g: Array) -> tuple[Array]:
            left, _, right = linalg.svd(x, full_matrices=False)
            return (anp.matmul(anp.conj(left) * g[..., None, :], anp.conj(right)),)

        return values_vjp
    left, values, right_h = _thin(ans, named)
    right = anp.conj(_transposed(right_h))
    rows, columns = x.shape[-2:]

    def complement(vectors: Array, g: Array) -> Array:
        """Divide by the singular values, and project to the complement of the vectors."""
        quotient = over_gaps(g, values, values[..., :1] * 0.0, "singular values")
        return quotient - anp.matmul(anp.conj(vectors), anp.matmul(_transposed(vectors), quotient))

    def vjp(g: Array) -> tuple[Array]:
        g_right = anp.conj(_transposed(g[2]))
        of_left, of_right = anp.matmul(_transposed(left), g[0]), anp.matmul(_transposed(right), g_right)
        # 1 / (s_j² - s_i²) is a sum of the reciprocals of s_j - s_i and s_j + s_i, with the antisymmetric parts of both.
        by_differences = over_gaps(of_left + of_right, values, None, "singular values")
        difference = of_left - of_right
        by_sums = over_gaps(difference - anp.conj(_transposed(difference)), values, -values, "singular values")
        inner = (by_differences + anp.conj(_transposed(by_differences)) + by_sums) / 2
        inner = inner + identity(x, inner.shape[-1]) * g[1][..., None, :]
        part = anp.matmul(anp.matmul(anp.conj(left), inner), _transposed(right))
        if rows < columns:
            part = part + anp.matmul(anp.conj(left), anp.conj(_transposed(complement(right, g_right))))
        elif rows > columns:
            part = part + anp.matmul(complement(left, g[0]), _transposed(right))
        return (part,)

    return vjp


def svd_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array | tuple[Array, ...]:
    """Rotate the change of the matrix to the singular vectors; both rotations of the vectors follow from its parts."""
    named = bound(linalg.svd, "a full_matrices compute_uv", args, kwargs)
    with_vectors = named.get("compute_uv", True)
    left, values, right_h = _thin(ans, named) if with_vectors else linalg.svd(named["a"], full_matrices=False)
    left_h, right = anp.conj(_transposed(left)), anp.conj(_transposed(right_h))
    inner = anp.matmul(anp.matmul(left_h, gs[0]), right)
    of_values = anp.real(anp.sum(inner * identity(left, inner.shape[-1]), axis=-1))
    if not with_vectors:
        return of_values
    inner_h = anp.conj(_transposed(inner))
    by_differences = over_gaps(inner + inner_h, values, None, "")
    by_sums = over_gaps(inner - inner_h, values, -values, "")
    of_left, of_right = anp.matmul(left, by_differences + by_sums) / 2, anp.matmul(right, by_differences - by_sums) / 2
    rows, columns = named["a"].shape[-2:]
    if rows > columns:
        change = anp.matmul(gs[0], right) - anp.matmul(left, inner)
        of_left = of_left + over_gaps(change, values, values[..., :1] * 0.0, "")
    elif rows < columns:
        change = anp.matmul(anp.conj(_transposed(gs[0])), left) - anp.matmul(right, inner_h)
        of_right = of_right + over_gaps(change, values, values[..., :1] * 0.0, "")
    return of_left, of_values, anp.conj(_transposed(of_right))


def _thin(ans: Array, named: dict[str, object]) -> Array:
    """Return the factors; raise an error for those that the matrix doesn't determine."""
    if named.get("full_matrices", True):
        raise refusal(linalg.svd, "with these arguments: pass full_matrices=False, or compute_uv=False")
    return ans


for _kind in (VJPNode, JVPNode):
    register_notrace(_kind, linalg.matrix_rank)  # an integer
VJPS = {
    linalg.cholesky: cholesky_vjp,
    linalg.eig: eig_vjp,
    linalg.eigh: eigh_vjp,
    linalg.eigvalsh: eigvalsh_vjp,
    least_squares: least_squares_vjp,
    linalg.pinv: pinv_vjp,
    linalg.qr: qr_vjp,
    linalg.det: det_vjp,
    linalg.slogdet: slogdet_vjp,
    linalg.solve: solve_vjp,
    linalg.svd: svd_vjp,
    anp.trace: trace_vjp,
    _NORM: partial(slope_vjp, _NORM, _slope_of_norm),
}
JVPS = {
    linalg.eigh: eigh_jvp,
    linalg.eigvalsh: eigvalsh_jvp,
    least_squares: least_squares_jvp,
    linalg.qr: qr_jvp,
    linalg.slogdet: slogdet_jvp,
    linalg.svd: svd_jvp,
    _NORM: partial(slope_jvp, _NORM, _slope_of_norm),
}
