"""Factors of matrices: Cholesky, eigenvalues and vectors of symmetric ones, pseudoinverse.

References
----------
I. Murray, "Differentiation of the Cholesky decomposition", arXiv:1602.07527 (2016), section 2.
M. B. Giles, "Collected matrix derivative results for forward and reverse mode algorithmic differentiation" (2008),
section 3.
G. H. Golub, V. Pereyra, "The differentiation of pseudo-inverses and nonlinear least squares problems whose variables
separate", SIAM J. Numer. Anal. 10 (1973), section 4.
"""

from __future__ import annotations

import autograd.numpy as anp
from autograd.numpy import linalg

from mpiad._typing import Array
from mpiad.differentiation.rules.on_device.constant_arrays import identity, lower_triangle
from mpiad.differentiation.rules.protocol import Argnums, Vjp

__all__ = ["JVPS", "VJPS"]


def cholesky_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Return the symmetric part of L^-T Φ(Lᵀ g) L^-1, where Φ takes the lower triangle and half the diagonal."""
    lower, upper = ans, _transposed(ans)
    half = lower_triangle(ans, ans.shape[-1]) + 0.5 * identity(ans, ans.shape[-1])

    def vjp(g: Array) -> tuple[Array]:
        inner = anp.matmul(upper, g) * half
        right = _transposed(linalg.solve(_transposed(lower), _transposed(inner)))
        part = linalg.solve(_transposed(lower), right)
        return ((part + _transposed(part)) / 2.0,)

    return vjp


def eigh_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Turn what belongs to the eigenvectors by the gaps between eigenvalues, and bring both back to the matrix."""
    values, vectors = ans[0], ans[1]
    n = args[0].shape[-1]
    ones, lower = identity(args[0], n), lower_triangle(args[0], n)
    triangle = lower if (args[1] if len(args) > 1 else kwargs.get("UPLO", "L")) == "L" else _transposed(lower)

    def vjp(g: Array) -> tuple[Array]:
        gaps = values[..., None, :] - values[..., :, None] + ones  # ones on the diagonal, which isn't taken
        turned = anp.matmul(_transposed(vectors), g[1]) * (1.0 - ones)
        # Equal eigenvalues are harmless as long as nothing depends on their vectors.
        turned = anp.where(turned == 0, turned, turned / gaps)
        inner = turned + ones * g[0][..., None, :]
        part = anp.matmul(anp.matmul(anp.conj(vectors), inner), _transposed(vectors))
        # Only one triangle of the matrix was read.
        return (anp.real(part) * ones + (part + anp.conj(_transposed(part))) * triangle,)

    return vjp


def pinv_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Apply the transposed derivative of the pseudoinverse, with its projections on both null spaces."""
    x = args[0]
    if len(args) > 1 or kwargs:
        raise NotImplementedError("on devices the derivative of pinv is available for its default cutoff")

    def vjp(g: Array) -> tuple[Array]:
        turned, back = _transposed(g), _transposed(ans)
        left = identity(x, x.shape[-2]) - anp.matmul(x, ans)
        right = identity(x, x.shape[-1]) - anp.matmul(ans, x)
        part = -anp.matmul(anp.matmul(ans, turned), ans)
        part = part + anp.matmul(anp.matmul(anp.matmul(ans, back), g), left)
        part = part + anp.matmul(anp.matmul(anp.matmul(right, g), back), ans)
        return (_transposed(part),)

    return vjp


def svd_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Put the cotangent of the singular values between their vectors; those of the vectors aren't available."""
    given = dict(zip(("a", "full_matrices", "compute_uv"), args), **kwargs)
    if given.get("compute_uv", True):
        raise NotImplementedError("on devices the derivative of svd is available for compute_uv=False; use eigh of xᵀx")
    left, _, right = linalg.svd(args[0], full_matrices=False)
    return lambda g: (anp.matmul(anp.conj(left) * g[..., None, :], anp.conj(right)),)


def _transposed(x: Array) -> Array:
    return anp.swapaxes(x, -1, -2)


VJPS = {linalg.cholesky: cholesky_vjp, linalg.eigh: eigh_vjp, linalg.pinv: pinv_vjp, linalg.svd: svd_vjp}
JVPS: dict = {}
