"""The dot-product test: Σ⟨A x, y⟩ = Σ⟨x, Aᵀ y⟩ over all ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpiad._typing import Array, Comm, Function, LocalArray
from mpiad.device import to_host
from mpiad.differentiation import make_vjp
from mpiad.primitives.cotangents import spec_like
from mpiad.transport import Channel, channel


class AdjointError(AssertionError):
    """Report an adjoint that isn't the transpose of its linear map.

    Examples
    --------
    >>> from mpiad.extend import custom_operator, defadjoint
    >>> wrong = custom_operator(lambda x: 2 * x)
    >>> _ = defadjoint(wrong, lambda y: 3 * y)
    >>> try:
    ...     mpiad.testing.check_adjoint(wrong, np.ones(2))
    ... except mpiad.testing.AdjointError as error:
    ...     print("caught")
    caught
    """


def check_adjoint(
    linear_map: Function,
    x: LocalArray,
    *,
    adjoint: Function | None = None,
    comm: Comm = None,
    ulps: float = 16.0,
    seed: int = 0,
) -> float:
    """Test over all ranks that the adjoint of a linear map is its transpose.

    Parameters
    ----------
    linear_map : callable
        A linear function ``A(x)`` of one array.
    x : array
        An array with the shape and dtype of this rank's argument; the test replaces the values by random numbers.
    adjoint : callable, optional
        ``Aᵀ(y)``; by default the vector-Jacobian product of `linear_map`.
    comm : mpi4py intracommunicator, optional
    ulps : float
        Tolerance of the difference, in units of the machine epsilon times the sum of absolute products.
    seed : int
        Seed of the random values.

    Returns
    -------
    float
        The absolute difference of the two inner products, in the units of `ulps`.

    Raises
    ------
    AdjointError
        On all ranks, if the two inner products differ by more than `ulps`, or the map isn't linear.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    Not differentiable.

    Examples
    --------
    >>> _ = mpiad.testing.check_adjoint(mpiad.mpi_scan, np.zeros(3))  # raises if the adjoint isn't the transpose
    """
    group = channel(comm, "check_adjoint")
    # The random numbers differ between ranks, so that an adjoint that interchanges ranks fails the test.
    rng = np.random.default_rng((seed, group.rank, 1))
    x = noise_like(x, rng)
    vjp, y = make_vjp(linear_map)(x)
    # Doubling is exact in binary arithmetic, so A(2x) = 2 A(x) for a linear A.
    twice = linear_map(x + x)
    y_bar = noise_like(y, rng)
    x_bar = vjp(y_bar) if adjoint is None else adjoint(y_bar)
    x, y, y_bar, x_bar, twice = to_host((x, y, y_bar, x_bar, twice))
    sides, absolute_sum, nonlinearity = _products(group, (y, y_bar), (x, x_bar), np.max(np.abs(twice - y - y), initial=0.0))
    eps = max(group.data.allgather(float(np.finfo(spec_like(x).dtype).eps)))
    scale = eps * max(absolute_sum, np.finfo(float).tiny)
    if nonlinearity > 1e3 * eps * max(1.0, absolute_sum):
        raise AdjointError(f"check_adjoint: the map isn't linear: A(2x) − 2 A(x) has an entry of {nonlinearity:.3e}.")
    error = abs(sides[0] - sides[1]) / scale
    if error > ulps:
        raise AdjointError(
            f"check_adjoint: Σ⟨A x, y⟩ = {sides[0]!r}, but Σ⟨x, Aᵀ y⟩ = {sides[1]!r} over {group.size} ranks: "
            f"the two differ by {error:.3g} ulp, more than ulps={ulps:g}. The adjoint isn't the transpose."
        )
    return float(error)


def _products(group: Channel, left: tuple, right: tuple, nonlinearity: float) -> tuple[list[complex], float, float]:
    """Return the exactly summed inner products, the larger sum of absolute products, and the largest nonlinearity."""
    terms = [np.ravel(np.asarray(a) * np.asarray(b)) for a, b in (left, right)]
    if not (np.iscomplexobj(right[0]) and np.iscomplexobj(left[0])):
        # If x or A x is real, the map is linear over the real numbers, and only the real parts are equal.
        terms = [np.real(part) for part in terms]
    # All ranks gather all products, since a sum per rank would be rounded.
    gathered = group.data.allgather((terms, nonlinearity))
    flat = [np.concatenate([pair[0][side] for pair in gathered]) for side in (0, 1)]
    sides = [complex(math.fsum(np.real(part)), math.fsum(np.imag(part))) for part in flat]
    return sides, max(float(np.sum(np.abs(part))) for part in flat), max(pair[1] for pair in gathered)


def noise_like(leaf: Array, rng: np.random.Generator) -> Any:
    """Return normally distributed numbers with the shape, dtype and device of an array or a number."""
    spec = spec_like(leaf)
    noise = rng.standard_normal(spec.shape)
    if spec.dtype.kind == "c":
        noise = noise + 1j * rng.standard_normal(spec.shape)
    noise = np.asarray(noise, dtype=spec.dtype)
    return noise[()] if spec.arrays is None else spec.arrays.to_device(noise)
