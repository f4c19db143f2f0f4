"""`eigsh`: the largest eigenvalues of A u = λ B u by a randomized algorithm; A and B are given as matrix-vector products.

First, B⁻¹A is applied to k + p random directions, and the results are orthonormalized in the inner product of B. Second, A
is projected onto the span of the results. The error is small if the eigenvalues decay rapidly, as for Hessians A of data
misfits and precisions B of priors: if the ratio of successive eigenvalues is 0.8, the first 40 have relative errors below
1e-3 for p = 20.

References
----------
.. [1] A. K. Saibaba, J. Lee and P. K. Kitanidis, "Randomized algorithms for generalized Hermitian eigenvalue problems with
   application to computing Karhunen-Loève expansion", Numer. Linear Algebra Appl. 23 (2016), algorithm 6.
.. [2] N. Halko, P. G. Martinsson and J. A. Tropp, SIAM Review 53 (2011), section 5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from mpiad._typing import Comm, LocalArray
from mpiad.primitives import stop_gradient
from mpiad.primitives.operation import suspended
from mpiad.transport import SUM, Channel, channel
from mpiad.transport.core.agreement import agreed, raising_together, require_same
from mpiad.transport.core.collectives import allreduce
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.exits.user_failures import DeferredFailures

_CALL = "linalg.eigsh"
_ASYMMETRY = 1e-3  # largest asymmetry of a projected matrix, relative to its norm: products may contain inexact solves
_DEPENDENT = 1e-15  # vectors are dependent if an eigenvalue of their Gram matrix is below this fraction of the largest
_BATCH = 16  # number of vectors per product; a product needs memory for about ten times as many vectors

Product = Callable[[LocalArray], LocalArray]


class EigenPairs(NamedTuple):
    """The result of `eigsh`.

    Attributes
    ----------
    values : array, shape (k,)
        The eigenvalues, the largest first; the same on all ranks.
    vectors : array, shape (k, *like.shape)
        This rank's parts of the eigenvectors, which are orthonormal in the inner product of B.

    Examples
    --------
    >>> from mpiad.linalg import eigsh
    >>> weights = np.array([4.0, 2.0, 1.0]) if rank == 0 else np.zeros(3)
    >>> pairs = eigsh(lambda v: weights * v, np.zeros(3), k=2, oversample=4)
    >>> print(pairs.vectors.shape, np.allclose(mpiad.mpi_allreduce(pairs.vectors @ pairs.vectors.T), np.eye(2)))
    (2, 3) True
    """

    values: np.ndarray
    vectors: LocalArray


def eigsh(
    product: Product,
    like: LocalArray,
    k: int,
    *,
    mass: Product | None = None,
    mass_solve: Product | None = None,
    oversample: int = 20,
    seed: int | LocalArray = 0,
    batch: bool = False,
    comm: Comm = None,
) -> EigenPairs:
    """Return approximations of the k largest eigenvalues of A u = λ B u, and of their eigenvectors, which are distributed.

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
    oversample : int
        Number of random directions in addition to k. A is applied 2 (k + oversample) times.
    seed : int, or array of shape (k + oversample, *like.shape)
        Seed of the random directions, or this rank's parts of the directions. With directions from `Domain.normal`, for
        example, the results don't depend on the number of ranks.
    batch : bool
        Whether `product`, `mass` and `mass_solve` take up to 16 vectors at once, along a first axis, like the products of
        `linearize` and `make_hvp` with ``batch=True``.
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    EigenPairs
        The eigenvalues and eigenvectors; fewer than k if the rank of A is lower.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid on any rank or differs between ranks, A or B isn't symmetric, or B isn't
        positive definite.
    Exception
        On all ranks, if a product raises it on any rank; the other ranks raise an exception of the same type and text.

    Ranks
    -----
    All ranks of `comm` call it, with the same k, oversample and seed.

    Adjoint
    -------
    None: the result is a constant.

    Examples
    --------
    >>> from mpiad.linalg import eigsh
    >>> weights = np.array([4.0, 2.0, 1.0]) if rank == 0 else np.zeros(3)
    >>> pairs = eigsh(lambda v: weights * v, np.zeros(3), k=2, oversample=4)
    >>> print(pairs.values.round(6))
    [4. 2.]
    """
    return ritz_pairs(product, like, k, mass, mass_solve, oversample, seed, batch, comm)[0]


def ritz_pairs(
    product: Product, like: LocalArray, k: int, mass: Product | None, mass_solve: Product | None, oversample: int,
    seed: int | LocalArray, batch: bool, comm: Comm,
) -> tuple[EigenPairs, float]:  # fmt: skip
    """Return the result of `eigsh`, and the smallest of all k + oversample Ritz values."""
    group = channel(comm, _CALL)
    like = np.asarray(stop_gradient(like))
    with raising_together(group):
        if like.dtype.kind != "f":
            raise TypeError(f"{_CALL}: like must be an array of real numbers, but got dtype {like.dtype}.")
        are_integers = isinstance(k, (int, np.integer)) and isinstance(oversample, (int, np.integer))
        if not (are_integers and k >= 1 and oversample >= 0):
            raise ValueError(f"{_CALL}: k must be 1 or more and oversample 0 or more, but got {k!r} and {oversample!r}.")
        if not isinstance(seed, (int, np.integer)) and np.shape(seed) != (k + oversample, *like.shape):
            raise ValueError(
                f"{_CALL}: seed must be an integer, or directions of shape {(k + oversample, *like.shape)}, but has shape "
                f"{np.shape(seed)}."
            )
        if (mass is None) != (mass_solve is None):
            raise ValueError(f"{_CALL}: mass and mass_solve must be passed together, but got only one of them.")
    seed_name = seed if isinstance(seed, (int, np.integer)) else "directions"
    mass_name = "given" if mass else None
    require_same(group, f"k={k}, oversample={oversample}, seed={seed_name}, mass={mass_name}, batch={batch}", _CALL)
    size = int(_total(group, np.array([float(like.size)]))[0])
    if k > size:
        raise agreed(group, ValueError(f"{_CALL}: k must be at most {size}, the length of a vector, but got {k}."))
    failures = DeferredFailures(comm, _CALL, apart=True)
    with restoring_state(), suspended():
        if isinstance(seed, (int, np.integer)):
            generator = np.random.Generator(np.random.Philox(key=np.array([int(seed), group.rank], np.uint64)))
            seed = generator.standard_normal((k + oversample, *like.shape))
        samples = np.asarray(seed)[:size]
        images = _products(failures, "product", product, samples, batch)
        range_vectors = images if mass_solve is None else _products(failures, "mass_solve", mass_solve, images, batch)
        # B `range_vectors` = `images`, so the first orthonormalization needs no product with B.
        basis = _combined(_orthonormal(group, range_vectors, images), range_vectors)
        for _ in range(2):  # twice, since orthonormalization by a Gram matrix loses half of the digits
            weighted = basis if mass is None else _products(failures, "mass", mass, basis, batch)
            basis = _combined(_orthonormal(group, basis, weighted), basis)
        projected = _gram(group, basis, _products(failures, "product", product, basis, batch))
        asymmetry = np.linalg.norm(projected - projected.T)
        if not asymmetry <= _ASYMMETRY * np.linalg.norm(projected):
            problem = f"a projection of norm {np.linalg.norm(projected):.3e} differs from its transpose by {asymmetry:.3e}"
            raise agreed(group, ValueError(f"{_CALL}: product must be symmetric, but {problem}."))
        values, vectors = np.linalg.eigh(0.5 * (projected + projected.T))
        order = np.argsort(values)[::-1][:k]
        return EigenPairs(values[order], _combined(vectors[:, order], basis)), float(values[0])


def _products(failures: DeferredFailures, name: str, product: Product, vectors: LocalArray, batch: bool) -> LocalArray:
    images = []
    for part in [vectors[k : k + _BATCH] for k in range(0, len(vectors), _BATCH)] if batch else list(vectors):
        image = failures.attempt(
            name, lambda v: np.asarray(product(v), dtype=float), part, again=partial(np.zeros_like, part)
        )
        if image is not None and image.shape != part.shape:
            shapes = f"the shape of its argument, {part.shape}, but returned one of {image.shape}"
            failures.note(ValueError(f"{_CALL}: {name} must return an array of {shapes}. Does it belong to another grid?"))
        images.append(part if image is None else image)
    failures.raise_together()
    return np.concatenate(images) if batch else np.stack(images)


def _combined(coefficients: np.ndarray, vectors: LocalArray) -> LocalArray:
    return np.tensordot(coefficients.T, vectors, 1)


def _gram(group: Channel, vectors_1: LocalArray, vectors_2: LocalArray) -> np.ndarray:
    """Return the inner products of all vectors of two sets, bitwise the same on all ranks."""
    return _total(group, vectors_1.reshape(len(vectors_1), -1) @ vectors_2.reshape(len(vectors_2), -1).T)


def _total(group: Channel, local: np.ndarray) -> np.ndarray:
    total = np.array(allreduce(group, local, SUM, _CALL))
    group.data.Bcast(total, 0)  # results of an all-reduction may differ between ranks by rounding errors
    if not np.all(np.isfinite(total)):
        raise agreed(group, ValueError(f"{_CALL}: a product isn't finite."))
    return total


def _orthonormal(group: Channel, vectors: LocalArray, weighted: LocalArray) -> np.ndarray:
    """Return coefficients of orthonormal combinations of vectors, fewer if they are dependent; `weighted` = B vectors."""
    gram = _gram(group, vectors, weighted)
    asymmetry, size = np.linalg.norm(gram - gram.T), np.linalg.norm(gram)
    values, rotation = np.linalg.eigh(0.5 * (gram + gram.T))
    if not asymmetry <= _ASYMMETRY * size or values[0] < -_ASYMMETRY * size:
        problem = f"a matrix Vᵀ B V has eigenvalues {values[0]:.3e} to {values[-1]:.3e} and asymmetry {asymmetry:.3e}"
        text = f"{_CALL}: mass must be symmetric and positive definite, and mass_solve its inverse, but {problem}."
        raise agreed(group, ValueError(text))
    independent = values > _DEPENDENT * values[-1]
    return rotation[:, independent] / np.sqrt(values[independent])
