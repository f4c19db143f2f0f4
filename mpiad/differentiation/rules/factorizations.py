"""Factorizations and inverses of matrices, norms, traces and singular values, on the host and on devices.

A cotangent g of a complex matrix x stands for the change Re Σ g dx, without conjugation. Therefore the formulas here and in
the references differ by conjugates.

References
----------
I. Murray, "Differentiation of the Cholesky decomposition", arXiv:1602.07527 (2016), section 2.
M. B. Giles, "Collected matrix derivative results for forward and reverse mode algorithmic differentiation" (2008),
section 3.
G. H. Golub, V. Pereyra, "The differentiation of pseudo-inverses and nonlinear least squares problems whose variables
separate", SIAM J. Numer. Anal. 10 (1973), section 4.
"""

from __future__ import annotations

from functools import partial

import autograd.numpy as anp
import numpy as np
from autograd.numpy import linalg

from mpiad._typing import Array
from mpiad.differentiation.rules.broadcasting import fitted
from mpiad.differentiation.rules.expansion import kept_shape
from mpiad.differentiation.rules.moments import nonzero_divisor, slope_jvp, slope_vjp
from mpiad.differentiation.rules.protocol import (
    DEVICE_VJPS,
    Argnums,
    Primitive,
    Vjp,
    bound,
    checked,
    identity,
    lower_triangle,
    refusal,
)


def cholesky_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Return the Hermitian part of L^-T Φ(Lᵀ g) conj(L)^-1; Φ selects the lower triangle with half of the diagonal."""
    bound(linalg.cholesky, "a", args, kwargs)
    lower, n = ans, anp.shape(ans)[-1]
    half = lower_triangle(ans, n) + 0.5 * identity(ans, n)

    def vjp(g: Array) -> tuple[Array]:
        inner = anp.matmul(_transposed(lower), g) * half
        right = _transposed(linalg.solve(anp.conj(_transposed(lower)), _transposed(inner)))
        part = linalg.solve(_transposed(lower), right)
        return ((part + anp.conj(_transposed(part))) / 2.0,)

    return vjp


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
        rotated = anp.matmul(_transposed(vectors), g[1]) * (1.0 - ones)
        inner = _over_gaps(rotated, ans[0], ones) + ones * g[0][..., None, :]
        part = anp.matmul(anp.matmul(anp.conj(vectors), inner), _transposed(vectors))
        # eigh reads only one triangle of the matrix.
        return (anp.real(part) * ones + (part + anp.conj(_transposed(part))) * triangle,)

    return vjp


def eigh_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> tuple[Array, Array]:
    """Rotate the change of the matrix to the eigenvectors; its diagonal is that of the eigenvalues."""
    ones, triangle = _diagonal_and_triangle(args, kwargs)
    lower = gs[0] * triangle
    change = anp.real(gs[0]) * ones + lower + anp.conj(_transposed(lower))
    rotated = anp.matmul(anp.matmul(anp.conj(_transposed(ans[1])), change), ans[1])
    values = anp.real(anp.sum(rotated * ones, axis=-1))
    return values, anp.matmul(ans[1], _over_gaps(rotated * (1.0 - ones), ans[0], ones))


def _diagonal_and_triangle(args: tuple, kwargs: dict) -> tuple[Array, Array]:
    """Return matrices with ones on the diagonal, and in the triangle that eigh reads."""
    n = args[0].shape[-1]
    lower = lower_triangle(args[0], n)
    named = bound(linalg.eigh, "a UPLO", args, kwargs)
    return identity(args[0], n), lower if named.get("UPLO", "L") in "Ll" else _transposed(lower)


def _over_gaps(rotated: Array, values: Array, ones: Array) -> Array:
    """Divide by differences of eigenvalues; zeros of equal ones, of which an objective reads only invariants, stay zero."""
    gaps = values[..., None, :] - values[..., :, None] + ones  # with ones on the diagonal, which is irrelevant
    return rotated / anp.where((gaps == 0) & (rotated == 0), 1.0, gaps)


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


def _transposed(x: Array) -> Array:
    return anp.swapaxes(x, -1, -2)


def _slope_of_norm(fun: Primitive, ans: Array, args: tuple, kwargs: dict) -> tuple[Array, dict]:
    """Return the derivative of a norm with respect to each element, and the arguments by name."""
    named = bound(fun, "x ord axis keepdims", args, kwargs)
    x, order, axis = named["x"], named.get("ord"), named.get("axis")
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
        raise refusal(fun, f"with ord={order!r} of a {'matrix' if of_matrix else 'vector'}")
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
    """Multiply the cotangents of singular values by singular vectors; derivatives of the vectors aren't supported."""
    named = dict(zip(("a", "full_matrices", "compute_uv"), args), **kwargs)
    if named.get("compute_uv", True):
        what = (
            "with singular vectors of device arrays and in compiled functions: pass compute_uv=False, or call eigh of xᵀx"
        )
        raise refusal(linalg.svd, what)
    left, _, right = linalg.svd(args[0], full_matrices=False)
    return lambda g: (anp.matmul(anp.conj(left) * g[..., None, :], anp.conj(right)),)


VJPS = {
    linalg.cholesky: cholesky_vjp,
    linalg.eigh: eigh_vjp,
    linalg.pinv: pinv_vjp,
    linalg.slogdet: slogdet_vjp,
    linalg.solve: solve_vjp,
    anp.trace: trace_vjp,
    _NORM: partial(slope_vjp, _NORM, _slope_of_norm),
}
JVPS = {
    linalg.eigh: eigh_jvp,
    linalg.slogdet: slogdet_jvp,
    _NORM: partial(slope_jvp, _NORM, _slope_of_norm),
}
DEVICE_VJPS[linalg.svd] = svd_vjp
