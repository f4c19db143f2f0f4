"""`eigsh`: the largest eigenvalues of A u = λ B u by a block Krylov method; A and B are given as matrix-vector products.

B⁻¹A is symmetric in the inner product of B. The method begins with a block of random directions and builds an orthonormal
basis Q of a Krylov space. Every new vector is orthogonalized against all former vectors (full reorthogonalization).
B⁻¹A Q₁ = Q H holds up to rounding, in which Q₁ are the vectors of Q to which A was applied, and H contains the coefficients
of the orthogonalization. Thus H yields both the Ritz pairs (θ, Q₁ y) and the norms of their residuals, |H y - θ y|.

A Krylov space of a block of n vectors contains at most n eigenvectors of a multiple eigenvalue. So when the leading pairs
have converged, new random directions are added, until they don't change the leading values any more.

References
----------
.. [1] G. H. Golub and R. Underwood, "The block Lanczos method for computing eigenvalues", in: Mathematical Software III
   (1977).
.. [2] R. Li and Y. Zhang, "Convergence of the block Lanczos method for eigenvalue clusters", Numer. Math. 131 (2015).
.. [3] A. K. Saibaba, J. Lee and P. K. Kitanidis, "Randomized algorithms for generalized Hermitian eigenvalue problems with
   application to computing Karhunen-Loève expansion", Numer. Linear Algebra Appl. 23 (2016), for the inner product.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from mpiad._typing import Comm, LocalArray, Rng
from mpiad.errors import ConvergenceError
from mpiad.primitives import stop_gradient
from mpiad.primitives.operation import suspended
from mpiad.transport import SUM, Channel, channel
from mpiad.transport.core.agreement import agreed, raising_together, require_same
from mpiad.transport.core.collectives import allreduce
from mpiad.transport.core.random_keys import generator_of, shared_key
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.exits.user_failures import DeferredFailures

_CALL = "linalg.eigsh"
_ASYMMETRY = 1e-3  # largest asymmetry of a projected matrix, relative to its norm: products may contain inexact solves
_ROUNDING = 1e-14  # residuals and directions below this fraction of the largest eigenvalue are rounding errors
_ZERO = 1e-12  # eigenvalues below this fraction of the largest count as zero
_GRADED = 1e-12  # smallest eigenvalue of a Gram matrix, relative to the largest, by which directions are scaled in one pass
_BLOCK, _BATCH = 4, 8  # directions of the block; larger blocks find more copies of an eigenvalue and need more products

Product = Callable[[LocalArray], LocalArray]


class EigenPairs(NamedTuple):
    """The result of `eigsh`.

    Attributes
    ----------
    values : array, shape (n,)
        The eigenvalues, the largest first; the same on all ranks. n is at most k.
    vectors : array, shape (n, *like.shape)
        This rank's parts of the eigenvectors, which are orthonormal in the inner product of B.
    residuals : array, shape (n,)
        The norms of B⁻¹A u - λ u in the inner product of B, divided by abs(λ).
    products : int
        The number of vectors to which A was applied.

    Examples
    --------
    >>> from mpiad.linalg import eigsh
    >>> rank = mpiad.mpi_rank()
    >>> weights = np.array([4.0, 2.0, 1.0]) if rank == 0 else np.zeros(3)
    >>> pairs = eigsh(lambda v: weights * v, np.zeros(3), k=2)
    >>> print(pairs.vectors.shape, np.allclose(mpiad.mpi_allreduce(pairs.vectors @ pairs.vectors.T), np.eye(2)))
    (2, 3) True
    """

    values: np.ndarray
    vectors: LocalArray
    residuals: np.ndarray
    products: int


def eigsh(
    product: Product,
    like: LocalArray,
    k: int,
    *,
    mass: Product | None = None,
    mass_solve: Product | None = None,
    tol: float = 1e-6,
    ncv: int | None = None,
    rng: Rng | Callable[[int], LocalArray] = 0,
    batch: bool = False,
    comm: Comm = None,
) -> EigenPairs:
    """Return the k largest eigenvalues of A u = λ B u to a tolerance, and their eigenvectors, which are distributed.

    Parameters
    ----------
    product : callable
        ``product(v)`` returns this rank's part of A v from its part of v; A must be symmetric.
    like : array
        This rank's part of any real vector; only the shape is used.
    k : int
        Number of eigenvalues.
    mass, mass_solve : callable, optional
        The products with B and with B⁻¹; B must be symmetric and positive definite. Pass both functions, or neither if B
        is the identity.
    tol : float
        Largest norm of the residual of a pair, relative to the eigenvalue. The relative error of an eigenvalue is at most
        `tol`, and near `tol` squared if the eigenvalue is well separated.
    ncv : int, optional
        Largest number of vectors to which A is applied. The basis of about `ncv` vectors is kept; default 10 k + 100.
    rng : Generator, SeedSequence, int or callable, optional
        The source of the random directions, the same on all ranks; None: other ones in each call. Or a function:
        ``rng(n)`` returns this rank's part of direction n = 0, 1, .... With ``rng=domain.normal``, for example, the results
        don't depend on the number of ranks.
    batch : bool
        Whether `product`, `mass` and `mass_solve` take several vectors at once, along a first axis, like the products of
        `linearize` and `make_hvp` with ``batch=True``. They then get blocks of up to 8 vectors.
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    EigenPairs
        The eigenvalues and eigenvectors, the residuals, and the number of products. Zero eigenvalues (below 1e-12 times the
        largest) are omitted; so there are fewer than k pairs if fewer eigenvalues are different from zero.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid on any rank or differs between ranks, A or B isn't symmetric, or B isn't
        positive definite.
    mpiad.errors.ConvergenceError
        On all ranks, if a pair has a residual above `tol` after `ncv` products, or because products contain errors larger
        than `tol`. `history` contains the largest residual of the k leading pairs after each block.
    Exception
        On all ranks, if a product raises it on any rank; the other ranks raise an exception of the same type and text.

    Ranks
    -----
    All ranks of `comm` call it, with the same k, tol, ncv and rng.

    Adjoint
    -------
    None: the result is a constant.

    Examples
    --------
    >>> from mpiad.linalg import eigsh
    >>> rank = mpiad.mpi_rank()
    >>> weights = np.array([4.0, 2.0, 1.0]) if rank == 0 else np.zeros(3)
    >>> pairs = eigsh(lambda v: weights * v, np.zeros(3), k=2)
    >>> print(pairs.values.round(6), np.all(pairs.residuals < 1e-6))
    [4. 2.] True
    """
    pairs, _, history = ritz_pairs(product, like, k, mass, mass_solve, tol, ncv, rng, batch, comm)
    if not np.all(pairs.residuals <= tol):
        raise agreed(channel(comm, _CALL), ConvergenceError(f"{_CALL}: {shortcoming(pairs, tol)}", history))
    return pairs


def shortcoming(pairs: EigenPairs, tol: float) -> str:
    """Describe pairs whose residuals are above the tolerance."""
    failed = np.flatnonzero(~(pairs.residuals <= tol))
    worst = failed[np.argmax(pairs.residuals[failed])]
    return (
        f"{len(failed)} of {len(pairs.values)} pairs have relative residuals above tol={tol:.3g} after {pairs.products} "
        f"products, the first is number {failed[0] + 1}, and the largest residual is {pairs.residuals[worst]:.3g} for the "
        f"eigenvalue {pairs.values[worst]:.3g}; the largest eigenvalue is {pairs.values[0]:.3g}. Pass a smaller k, a "
        "larger tol, or a larger ncv; if product or mass_solve contains iterative solves, decrease their tolerance."
    )


def ritz_pairs(
    product: Product, like: LocalArray, k: int, mass: Product | None, mass_solve: Product | None, tol: float,
    ncv: int | None, rng: Rng | Callable[[int], LocalArray], batch: bool, comm: Comm, floor: float = 0.0,
) -> tuple[EigenPairs, float, list[float]]:  # fmt: skip
    """Return pairs, converged or not, the smallest Ritz value, the history; residuals are relative to max(|λ|, floor)."""
    group, like = channel(comm, _CALL), np.asarray(stop_gradient(like))
    size, limit = _checked_sizes(group, like, k, ncv, tol, rng, mass, mass_solve, batch)
    block_size, history, is_random, settled = _BATCH if batch else _BLOCK, [], True, np.full(k, np.nan)
    if callable(rng):
        numbers = itertools.count()
        draw = lambda _: rng(next(numbers))  # noqa: E731
    else:
        generator = generator_of(shared_key(rng, group, _CALL), group.rank)
        draw = lambda v: generator.standard_normal(v.shape)  # noqa: E731
    functions = {"rng": draw, "product": product, "mass": mass, "mass_solve": mass_solve}
    space = _KrylovSpace(group, like.shape, functions, batch)
    with restoring_state(), suspended():
        block = space.add_random(min(block_size, size))
        while block:
            space.expand(block[: limit - len(space.expanded)])
            images = space.images(len(block)) if is_random else []
            spectrum, vectors, inside, others, rows = space.ritz(k)
            outside, values, largest = np.linalg.norm(rows, axis=0), spectrum[:k], np.max(np.abs(spectrum))
            zero = max(_ZERO * largest, tol * floor, np.finfo(float).tiny)
            kept, scale = np.abs(values) > zero, np.maximum(np.abs(values), max(floor, zero))
            residuals = (np.hypot(inside, outside) + 10.0 * np.finfo(float).eps * largest) / scale
            history, is_random = [*history, float(np.max(residuals))], False
            # `inside` comes from errors of products, and further vectors don't decrease it.
            converged = outside <= np.maximum(np.maximum(tol * scale, inside), _ROUNDING * largest)
            finished = np.all(converged) and (len(values) == k or not np.all(kept))
            leading = np.pad(values * kept, (0, k - len(values)))
            tested = finished and not images  # random directions must be multiplied twice to be a test
            if (tested and np.allclose(leading, settled, tol, zero)) or len(space.expanded) >= limit:
                break
            if tested or not others:
                settled, is_random = leading if finished else np.full(k, np.nan), True
                block = space.add_random(min(_BLOCK, size - len(space.expanded)))
            elif images:
                block = images
            else:  # the directions that contribute most to the residuals of pairs above the tolerance, or the newest
                share = np.max(np.abs(rows) / np.where(converged, np.inf, scale), axis=1)
                order, count = np.argsort(share, kind="stable")[::-1], _BLOCK if finished else block_size
                block = [others[j] for j in order[:count]]
    found = (vectors[:, kept].T @ space.basis[space.expanded]).reshape(np.sum(kept), *like.shape)
    return EigenPairs(values[kept], found, residuals[kept], len(space.expanded)), float(spectrum[-1]), history


def _checked_sizes(
    group: Channel, like: np.ndarray, k: int, ncv: int | None, tol: float, rng: object, mass: Product | None,
    mass_solve: Product | None, batch: bool,
) -> tuple[int, int]:  # fmt: skip
    """Return the length of a vector, and the largest number of products; raise an error on all ranks."""
    with raising_together(group):
        if like.dtype.kind != "f":
            raise TypeError(f"{_CALL}: like must be an array of real numbers, but got dtype {like.dtype}.")
        if not (isinstance(k, (int, np.integer)) and isinstance(ncv, (int, np.integer, type(None)))):
            raise TypeError(f"{_CALL}: k and ncv must be integers, but got {k!r} and {ncv!r}.")
        limit = 10 * k + 100 if ncv is None else ncv
        if not 1 <= k <= limit:
            raise ValueError(f"{_CALL}: k must be at least 1 and at most ncv={limit}, but got {k}.")
        if not (isinstance(tol, (int, float, np.number)) and 0.0 < tol < 1.0):
            raise ValueError(f"{_CALL}: tol must be a number between 0 and 1, but got {tol!r}.")
        if (mass is None) != (mass_solve is None):
            raise ValueError(f"{_CALL}: mass and mass_solve must be passed together, but got only one of them.")
    given = f"rng={'a function' if callable(rng) else 'a source'}, mass={'given' if mass else None}, batch={batch}"
    require_same(group, f"k={k}, tol={tol}, ncv={ncv}, {given}", _CALL)
    size = int(_total(group, np.array([float(like.size)]))[0])
    if k > size:
        raise agreed(group, ValueError(f"{_CALL}: k must be at most {size}, the length of a vector, but got {k}."))
    return size, min(limit, size)


class _KrylovSpace:
    """Orthonormal vectors, the rows of `basis`; B⁻¹A times row `expanded[j]` is column j of `projected` times `basis`."""

    def __init__(self, group: Channel, shape: tuple[int, ...], functions: dict[str, Product | None], batch: bool):
        self.group, self.failures = group, DeferredFailures(group.user, _CALL, apart=True)
        self.shape, self.functions, self.batch = shape, functions, batch
        self.basis, self.projected, self.expanded = np.zeros((0, math.prod(shape))), np.zeros((0, 0)), []

    def add_random(self, count: int) -> list[int]:
        """Add random directions, orthogonal to those that A was applied to; return their positions in the basis."""
        vectors = self._images("rng", np.zeros((count, self.basis.shape[1])))
        return self._rotated(self._add(vectors, self._images("mass", vectors), 0.0))

    def images(self, count: int) -> list[int]:
        """Return positions of vectors that span the last images under B⁻¹A, without vectors to which A was applied."""
        images = self.projected[:, -count:]
        is_new = np.linalg.norm(images[self.others()]) > _ROUNDING * np.linalg.norm(self.projected)
        return self._rotated(images) if is_new else []

    def _rotated(self, coefficients: np.ndarray) -> list[int]:
        """Rotate the vectors to which A wasn't applied so that the first ones span directions; return their positions."""
        # Otherwise an eigenvector among these vectors would be missed, since new directions are orthogonal to it.
        others = self.others()
        rotation = np.linalg.qr(coefficients[others], mode="complete")[0].T
        self.basis[others], self.projected[others] = rotation @ self.basis[others], rotation @ self.projected[others]
        return others[: coefficients.shape[1]]

    def expand(self, block: list[int]) -> None:
        """Apply B⁻¹A to vectors of the basis, and add the new directions."""
        weighted = self._images("product", self.basis[block])
        scale = np.max(np.abs(self.projected), initial=np.finfo(float).tiny)
        coefficients = self._add(self._images("mass_solve", weighted), weighted, scale)
        self.projected, self.expanded = np.hstack([self.projected, coefficients]), self.expanded + block

    def others(self) -> list[int]:
        """Return the positions of vectors to which A wasn't applied."""
        return sorted(set(range(len(self.basis))) - set(self.expanded))

    def ritz(self, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int], np.ndarray]:
        """Return the Ritz values, k vectors, norms of residuals in `expanded`, the other positions, components there."""
        square = self.projected[self.expanded]
        asymmetry, norm = np.linalg.norm(square - square.T), np.linalg.norm(self.projected)
        if not asymmetry <= _ASYMMETRY * norm:
            problem = f"a projection of norm {norm:.3e} differs from its transpose by {asymmetry:.3e}"
            raise agreed(self.group, ValueError(f"{_CALL}: product must be symmetric, but {problem}."))
        values, vectors = np.linalg.eigh(0.5 * (square + square.T))
        values, vectors = values[::-1], vectors[:, ::-1][:, :k]
        inside = np.linalg.norm(square @ vectors - vectors * values[:k], axis=0)
        others = self.others()
        return values, vectors, inside, others, self.projected[others] @ vectors

    def _add(self, vectors: LocalArray, weighted: LocalArray, scale: float) -> np.ndarray:
        """Add orthonormalized vectors, except rounding errors of `scale`; return coefficients in the basis."""
        coefficients = _total(self.group, self.basis @ weighted.T)
        scale = max(scale, np.max(np.abs(coefficients), initial=0.0))
        vectors, factor = vectors - coefficients.T @ self.basis, np.eye(len(vectors))
        # Usually two passes, since each loses digits if directions are nearly dependent.
        for _ in range(8 if len(vectors) else 0):
            weighted = self._images("mass", vectors)
            correction = _total(self.group, self.basis @ weighted.T)
            vectors = vectors - correction.T @ self.basis
            correction = correction @ factor.T
            coefficients = coefficients + correction
            gram = _total(self.group, vectors @ weighted.T)
            values, rotation = np.linalg.eigh(0.5 * (gram + gram.T))
            asymmetry, size = np.linalg.norm(gram - gram.T), max(np.linalg.norm(gram), _ROUNDING * scale**2)
            wrong = max(size, scale) == 0.0 or np.max(np.abs(correction), initial=0.0) > _ASYMMETRY * scale
            if wrong or not asymmetry <= _ASYMMETRY * size or values[0] < -_ASYMMETRY * size:
                problem = f"a matrix Vᵀ B V has eigenvalues {values[0]:.3e} to {values[-1]:.3e}, asymmetry {asymmetry:.3e}"
                text = f"{_CALL}: mass must be symmetric and positive definite, and mass_solve its inverse, but {problem}."
                raise agreed(self.group, ValueError(text))
            norms = np.sqrt(np.maximum(values, max(_GRADED * values[-1], np.finfo(float).tiny)))
            factor = factor @ rotation * norms
            sizes = np.linalg.norm(factor, axis=0)
            kept = sizes > _ROUNDING * max(scale, np.max(sizes))
            factor, vectors = factor[:, kept], (rotation[:, kept] / norms[kept]).T @ vectors
            if len(vectors) == 0 or np.max(np.abs(values - 1.0)) < 0.1:
                break
        self.basis = np.concatenate([self.basis, vectors])
        self.projected = np.pad(self.projected, ((0, len(vectors)), (0, 0)))
        return np.concatenate([coefficients, factor.T])

    def _images(self, name: str, vectors: LocalArray) -> LocalArray:
        function = self.functions[name]
        if function is None:
            return vectors
        blocks, batch = vectors.reshape(len(vectors), *self.shape), self.batch and name != "rng"
        images, width = np.zeros(blocks.shape), _BATCH if batch else 1
        for j in range(0, len(blocks), width):
            part = blocks[j : j + width] if batch else blocks[j]
            image = self.failures.attempt(
                name, lambda v: np.asarray(function(v), dtype=float), part, again=partial(np.zeros_like, part)
            )
            if image is not None and image.shape != part.shape:
                shapes = f"the shape of its argument, {part.shape}, but returned one of {image.shape}"
                text = f"{_CALL}: {name} must return an array of {shapes}. Does it belong to another grid?"
                self.failures.note(ValueError(text))
            elif image is not None:
                images[j : j + width] = image
        self.failures.raise_together()
        return images.reshape(vectors.shape)


def _total(group: Channel, local: np.ndarray) -> np.ndarray:
    """Return the sum over all ranks, bitwise the same on all of them."""
    total = np.array(allreduce(group, local, SUM, _CALL))
    group.data.Bcast(total, 0)  # results of an all-reduction may differ between ranks by rounding errors
    if not np.all(np.isfinite(total)):
        raise agreed(group, ValueError(f"{_CALL}: a product isn't finite."))
    return total
