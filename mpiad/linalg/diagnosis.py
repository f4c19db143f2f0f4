"""Diagnosis of an operator from a solution, or from a failure: singular, not linear, not symmetric, or only rounding."""

from __future__ import annotations

import math

import numpy as np

from mpiad._typing import LocalArray
from mpiad.linalg.system import System
from mpiad.linalg.vectors import beside, inner, on_host

_SEED = 20250101
_MARGIN = 100.0  # multiple of the rounding error of a product with the operator
_SINGULAR = (
    "it is singular: the operator maps a constant field to zero, so u is determined but for a constant (and exists only "
    "where b has none). Is this a pure Neumann or periodic problem? Fix the value of one cell, or add a small multiple of "
    "u to the operator"
)
_CONTRAST = 1e-8


def require_iterations(system: System, targets: np.ndarray) -> None:
    """Raise on all ranks if the maximum number of iterations is reached."""
    if system.iterations >= system.limit:
        target = math.hypot(*(targets * system.units).tolist())
        what = f"the residual didn't fall to {target:.3e} within maxiter={system.limit} iterations"
        why = diagnosis(system)
        system.fail(f"{what}: {why}" if why else what)


def rounding_floor(system: System, x: LocalArray, targets: np.ndarray) -> np.ndarray:
    """Return the smallest norm that the residual of a rounded solution can have, for each system.

    Rounding x moves each entry up or down by up to half a unit in its last place: A (±x) eps, with random signs, has the
    size of the effect on the residual. An iteration adds up a number of such errors.
    """
    image = system.apply((_signs(x, 0) * x).astype(x.dtype))
    return np.maximum(targets, _MARGIN * np.finfo(x.dtype).eps * system.norms(image))


def require_determined(system: System, x: LocalArray, targets: np.ndarray) -> None:
    """Raise on all ranks if the solution isn't unique because the operator maps constants to zero.

    One product shows whether x plus a constant as large as x also meets the tolerance. A loose tolerance allows that too;
    only then another product decides whether the constant's image is more than rounding.
    """
    image = system.apply(np.ones_like(x))
    # The number of entries too, so that the mean square of the solution follows from the same reduction.
    own = np.array([*inner((x, x), (image, image)).ravel(), *[x.shape[1]] * len(x)])
    squares, of_image, total = np.real(system.sums(own)).reshape(3, -1)
    change = np.sqrt(squares * of_image / np.maximum(total, 1.0))
    doubtful = (squares > 0.0) & (change <= targets)
    if doubtful.any() and _is_rounding(system, x, of_image)[doubtful].any():
        system.fail(diagnosis(system) or _SINGULAR)


def diagnosis(system: System) -> str:
    """Return the problem with the operator of an unsolved system, as the end of a message; empty if unknown."""
    like = system.full(0.0)
    one, other = _signs(like, 0).astype(system.dtype), _signs(like, 1).astype(system.dtype)
    # For zero, a constant, and two fields and their sum: a linear operator maps the sum to the images' sum.
    images = [system.apply(v) for v in (like, np.ones_like(like), one, other, one + other)]
    squares = np.real(system.dots(*[(v, v) for v in images]))
    gap = images[4] - images[2] - images[3]
    nonlinear, forth, back = system.dots((gap, gap), (other, images[2]), (images[3], one))
    scale = squares[2] + squares[3]
    if (squares[0] > 0.0).any() or (nonlinear.real > 1e-6 * scale).any():
        return "matvec isn't linear in u, as it must be. Does it add a boundary value or a source? That belongs into b."
    if not squares[1:3].any():
        return "the operator maps all fields to zero. Check the coefficients; if it is a derivative, start from another u."
    constant = (squares[1] <= _rounding_squared(system.dtype) * squares[2]).any()
    # If some rows are so small, neither a constant's image nor a product's sign says anything about them.
    contrast = _contrast(system, images[2], images[3], scale / system.length)
    if constant and not contrast:
        return _SINGULAR + "."
    if system.settings.method == "cg" and (np.abs(forth - back) > 1e-6 * np.sqrt(scale * system.length)).any():
        return "the operator isn't symmetric. Take method='gmres' or 'bicgstab'."
    if contrast:
        return (
            f"the operator's rows differ by a factor of {contrast:.0e} in size: a coefficient of extreme contrast, where "
            f"{system.dtype} resolves {1.0 / np.finfo(system.dtype).eps:.0e}. Limit it, or precondition by the diagonal."
        )
    return ""


def _contrast(system: System, one: LocalArray, other: LocalArray, mean: np.ndarray) -> float:
    """Return the factor by which some of the operator's rows are smaller than others; 0 for few rows or small factors."""
    squares = np.abs(one) ** 2 + np.abs(other) ** 2
    low = (squares > 0.0) & (squares < _CONTRAST**2 * mean.reshape(-1, 1))
    local = [on_host(np.sum(rows, axis=1)) for rows in (low, np.where(low, squares, 0.0))]
    count, total = np.real(system.sums(np.array(local, float)))
    # Random signs cancel in one row of sixteen at most.
    found = np.sqrt(mean * count / np.where(total > 0.0, total, np.inf))
    return float(np.max(np.where(count > 0.2 * system.length, found, 0.0)))


def _is_rounding(system: System, x: LocalArray, of_image: np.ndarray) -> np.ndarray:
    image = system.apply(_signs(x, 0).astype(x.dtype))
    return of_image <= _rounding_squared(x.dtype) * system.dots((image, image))[0].real


def _rounding_squared(dtype: np.dtype) -> float:
    return float((_MARGIN * np.finfo(dtype).eps) ** 2)


def _signs(like: LocalArray, number: int) -> LocalArray:
    # The same signs on all ranks would also do: only constants and smooth fields would not.
    return beside(like, np.random.default_rng(_SEED + number).integers(0, 2, like.shape) * 2 - 1)
