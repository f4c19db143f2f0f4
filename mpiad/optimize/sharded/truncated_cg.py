"""Conjugate gradients for a Newton step, ended early: by a tolerance, by negative curvature, or by a trust region.

The residual is measured as the gradient is, in the user's inner product: in the norm of the preconditioner P it may be
small while the model still has a gradient, which the next step would have to remove. The step is measured by
‖p‖² = pᵀ P⁻¹ p. P⁻¹ is never asked for: this norm and the product of the step with the direction follow by recurrences.

References
----------
.. [1] T. Steihaug, "The conjugate gradient method and trust regions in large scale optimization", SIAM J. Numer. Anal. 20
   (1983).
.. [2] A. R. Conn, N. I. M. Gould and Ph. L. Toint, *Trust-Region Methods*, SIAM 2000, algorithm 7.5.1.
.. [3] J. Nocedal and S. J. Wright, *Numerical Optimization*, 2nd ed., Springer 2006, algorithms 7.1 and 7.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from mpiad._typing import Array


class System(NamedTuple):
    """A Newton system H p = -g."""

    # `multiply`, `precondition`: from this rank's piece of a vector to that of its product; collective.
    multiply: Callable[[Array], Array]
    precondition: Callable[[Array], Array]
    dot: Callable[[Array, Array], float]  # the product of two vectors over all ranks, the same bits on all
    ended: Callable[[], bool]  # whether a rank was told to end; the same on all
    square: float  # of the gradient in the inner product
    # Up to how many times its target the square of a residual in P's norm may be when `measure` is called.
    slack: float = math.inf
    # From a residual to its square in the inner product; None where that is r · P r. Collective.
    measure: Callable[[Array], float] | None = None


class Step(NamedTuple):
    """What was found."""

    way: Array  # this rank's piece of the step
    decrease: float  # what the quadratic model predicts
    length: float  # in the preconditioner's norm
    bound: bool  # whether the trust region has ended it


def truncated_cg(system: System, gradient: Array, forcing: float, limit: int, radius: float = math.inf) -> Step | None:
    """Return about the minimiser of gᵀp + ½ pᵀHp within a radius; None where a rank was told to end.

    By `forcing` the residual is to fall in the inner product, in no more products than `limit`. If the radius is infinite,
    for a line search, the first negative curvature ends it with the step so far, or the steepest descent. A ValueError on
    all ranks, if the preconditioner isn't positive definite, or what it or the Hessian returns isn't finite.
    """
    way, residual = gradient * 0.0, gradient.copy()
    z = system.precondition(residual)
    square = _positive(system, system.dot(residual, z))
    target, near = forcing**2 * system.square, system.slack * forcing**2 * square
    direction, length, across, along, decrease = -z, 0.0, 0.0, square, 0.0
    for count in range(limit):
        product = system.multiply(direction)
        curvature = system.dot(direction, product)
        if not math.isfinite(curvature):
            raise ValueError("minimize: a product with the Hessian isn't finite, where the objective and its gradient are.")
        step = square / curvature if curvature > 0.0 else math.inf
        if radius < math.inf and length + step * (2.0 * across + step * along) >= radius**2:
            step = (math.sqrt(max(across**2 + along * (radius**2 - length), 0.0)) - across) / along
            way += step * direction
            return Step(way, decrease + step * (square - 0.5 * step * curvature), radius, True)
        if curvature <= 0.0:
            # Without a model that has a minimiser the steepest descent is as long as the line search makes it.
            return Step(direction, square, math.sqrt(along), False) if count == 0 else _ended(way, decrease, length)
        way += step * direction
        residual += step * product
        decrease += 0.5 * step * square
        length += step * (2.0 * across + step * along)
        if system.ended():
            return None
        z = system.precondition(residual)
        before, square = square, _positive(system, system.dot(residual, z))
        if square <= near and (square if system.measure is None else system.measure(residual)) <= target:
            break
        beta = square / before
        across, along = beta * (across + step * along), square + beta**2 * along
        direction = beta * direction - z
    return _ended(way, decrease, length)


def _ended(way: Array, decrease: float, length: float) -> Step:
    return Step(way, decrease, math.sqrt(length), False)


def _positive(system: System, square: float) -> float:
    if square >= 0.0:
        return square
    name = "inner product" if system.measure is None else "preconditioner"  # one operator is both
    raise ValueError(
        f"minimize: the {name} must be symmetric and positive definite, but r · P r = {square:.3e} of a residual r."
    )
