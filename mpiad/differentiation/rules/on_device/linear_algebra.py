"""Products that sum over axes, for any numbers of axes; diagonals; factors of matrices.

References
----------
I. Murray, "Differentiation of the Cholesky decomposition", arXiv:1602.07527 (2016), section 2.
M. B. Giles, "Collected matrix derivative results for forward and reverse mode algorithmic differentiation" (2008),
section 3.
G. H. Golub, V. Pereyra, "The differentiation of pseudo-inverses and nonlinear least squares problems whose variables
separate", SIAM J. Numer. Anal. 10 (1973), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import autograd.numpy as anp
from autograd.numpy import linalg

from mpiad._typing import Array
from mpiad.differentiation.rules.on_device.constant_arrays import identity, lower_triangle
from mpiad.differentiation.rules.protocol import Argnums, Vjp, VjpMaker

Axes = tuple[tuple[int, ...], tuple[int, ...]]


def _contraction_vjp(axes_of: Callable[[tuple, dict, int, int], Axes]) -> VjpMaker:
    def contraction_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
        """Contract the cotangent with the other factor, over the axes which that one gave to the result."""
        x, y = args[0], args[1]
        rank_x, rank_y = len(anp.shape(x)), len(anp.shape(y))
        if rank_x == 0 or rank_y == 0:
            return lambda g: tuple([_of_scaling(g, (x, y)[1 - i], (x, y)[i]) for i in argnums])
        axes_x, axes_y = axes_of(args, kwargs, rank_x, rank_y)
        parts = {0: lambda g: _first(g, y, axes_x, axes_y, rank_x), 1: lambda g: _second(g, x, axes_x, axes_y, rank_y)}
        return lambda g: tuple([_matched(parts[i](g), args[i]) for i in argnums])

    return contraction_vjp


def _of_scaling(g: Array, other: Array, factor: Array) -> Array:
    product = g * other
    return _matched(product if anp.shape(factor) else anp.sum(product), factor)


def _first(g: Array, y: Array, axes_x: Sequence[int], axes_y: Sequence[int], rank: int) -> Array:
    """Return the cotangent of the first factor: its free axes come from `g`, the others from `y`, in the order of `y`'s."""
    free_x = [i for i in range(rank) if i not in axes_x]
    free_y = [j for j in range(len(anp.shape(y))) if j not in axes_y]
    out = anp.tensordot(g, y, (tuple(range(len(free_x), len(free_x) + len(free_y))), tuple(free_y)))
    return _in_order(out, [*free_x, *[axes_x[axes_y.index(j)] for j in sorted(axes_y)]])


def _second(g: Array, x: Array, axes_x: Sequence[int], axes_y: Sequence[int], rank: int) -> Array:
    free_x = [i for i in range(len(anp.shape(x))) if i not in axes_x]
    free_y = [j for j in range(rank) if j not in axes_y]
    out = anp.tensordot(x, g, (tuple(free_x), tuple(range(len(free_x)))))
    return _in_order(out, [*[axes_y[axes_x.index(i)] for i in sorted(axes_x)], *free_y])


def _in_order(out: Array, axes: list[int]) -> Array:
    """Transpose an array whose axes are those of a factor in another order."""
    back = tuple(sorted(range(len(axes)), key=axes.__getitem__))
    return out if back == tuple(range(len(axes))) else anp.transpose(out, back)


def _matched(part: Array, factor: Array) -> Array:
    return anp.real(part) if anp.iscomplexobj(part) and not anp.iscomplexobj(factor) else part


def _of_dot(args: tuple, kwargs: dict, rank_x: int, rank_y: int) -> Axes:
    return (rank_x - 1,), (max(rank_y - 2, 0),)


def _of_inner(args: tuple, kwargs: dict, rank_x: int, rank_y: int) -> Axes:
    return (rank_x - 1,), (rank_y - 1,)


def _of_tensordot(args: tuple, kwargs: dict, rank_x: int, rank_y: int) -> Axes:
    axes: Any = args[2] if len(args) > 2 else kwargs.get("axes", 2)
    if isinstance(axes, int):
        return tuple(range(rank_x - axes, rank_x)), tuple(range(axes))
    first, second = ([axis] if isinstance(axis, int) else axis for axis in axes)
    return tuple([int(i) % rank_x for i in first]), tuple([int(j) % rank_y for j in second])


def trace_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Repeat the cotangent along the diagonal."""
    given = dict(zip(("a", "offset", "axis1", "axis2"), args), **kwargs)
    shape = given["a"].shape
    if len(shape) != 2 or given.keys() - {"a", "offset"}:
        raise NotImplementedError("on devices the derivative of trace is available for matrices; use diagonal and sum")
    ones = identity(given["a"], *shape, k=given.get("offset", 0))
    return lambda g: (ones * g,)


def diagonal_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Put the cotangent on the diagonal."""
    given: Any = dict(zip(("a", "offset", "axis1", "axis2"), args), **kwargs)
    axes, k = (given.get("axis1", 0), given.get("axis2", 1)), given.get("offset", 0)
    rows, columns = (given["a"].shape[axis] for axis in axes)
    mask = identity(given["a"], rows, columns, k)
    # Moved to the rows that it lies on, the diagonal is a column beside the mask.
    before = max(-k, 0)
    after = rows - before - ans.shape[-1]

    def vjp(g: Array) -> tuple[Array]:
        widths = [(0, 0)] * (len(ans.shape) - 1) + [(before, after)]
        return (anp.moveaxis(anp.pad(g, widths, "constant")[..., None] * mask, (-2, -1), axes),)

    return vjp


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
        # Golub and Pereyra: d(A⁺) = -A⁺ dA A⁺ + A⁺A⁺ᵀ dAᵀ (I - AA⁺) + (I - A⁺A) dAᵀ A⁺ᵀA⁺, transposed term by term.
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


VJPS = {
    anp.dot: _contraction_vjp(_of_dot),
    anp.inner: _contraction_vjp(_of_inner),
    anp.tensordot: _contraction_vjp(_of_tensordot),
    anp.trace: trace_vjp,
    anp.diagonal: diagonal_vjp,
    linalg.cholesky: cholesky_vjp,
    linalg.eigh: eigh_vjp,
    linalg.pinv: pinv_vjp,
    linalg.svd: svd_vjp,
}
JVPS: dict = {}
