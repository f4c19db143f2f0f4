"""The solution of a linear system as one operator, differentiated by the implicit function theorem.

From A(p) u = b follows A u̇ = ḃ - (∂A/∂p ṗ) u: a tangent takes one solve. Transposed: with Aᵀ λ = ū, the cotangent of b is
λ, and that of p is -(∂(A(p) u)/∂p)ᵀ λ, one reverse pass through the user's operator at the solution. The iteration itself
is never traced. Both rules are made of this operator and of the user's, so they can be differentiated again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Function, LocalArray
from mpiad.differentiation import make_jvp, make_vjp
from mpiad.extend import communicating, defvjp_together
from mpiad.linalg.conjugate_gradients import conjugate_gradients
from mpiad.linalg.system import Settings, System
from mpiad.primitives import stop
from mpiad.primitives.cotangents import tangent_of

__all__ = ["METHODS", "Problem", "solution"]

METHODS: dict[str, Callable[..., LocalArray]] = {"cg": conjugate_gradients}


class Problem(NamedTuple):
    """A linear system but for its right-hand side and the values of its parameters.

    Parameters
    ----------
    matvec : callable
    preconditioner : callable or None
    build : callable
        From the leaves of the parameters to the parameters.
    settings : Settings
    start : array or None
        Where the iteration starts.
    primal : pair of array or None
        For an adjoint solve, which takes the operator for its own transpose: solution and right-hand side of the system
        that it belongs to, which show whether it is.
    """

    matvec: Function
    preconditioner: Function | None
    build: Callable[[Any], Any]
    settings: Settings
    start: LocalArray | None = None
    primal: tuple[LocalArray, LocalArray] | None = None

    def derived(self, primal: tuple[LocalArray, LocalArray] | None = None) -> Problem:
        """Return the problem of an adjoint or a tangent: the same operator, started from zero."""
        return self._replace(start=None, primal=primal, settings=self.settings._replace(callback=None))

    def product(self, u: LocalArray, leaves: Any) -> LocalArray:
        """Return the product with the operator, as part of the program around it."""
        return self.matvec(u, *self.build(leaves))


@communicating
def solution(b: LocalArray, *leaves: Any, problem: Problem) -> LocalArray:
    """Return the solution of a linear system.

    Parameters
    ----------
    b : array
        This rank's block of the right-hand side.
    *leaves : array or anything
        The leaves of the parameters.
    problem : Problem

    Returns
    -------
    array of the shape of `b`

    Raises
    ------
    ValueError, TypeError, ConvergenceError
        On all ranks: see `solve`.

    Ranks
    -----
    All ranks call it.

    Adjoint
    -------
    One solve with the transposed operator, which is the operator itself for conjugate gradients.
    """
    system = System(problem.matvec, problem.preconditioner, problem.build(leaves), b, problem.settings)
    x = METHODS[problem.settings.method](system, b, problem.start)
    if problem.primal is not None:
        _require_symmetric(system, *problem.primal, x, b)
    return x


def _adjoint(ans: LocalArray, b: LocalArray, *leaves: Any, problem: Problem) -> Callable:
    """Return the transpose of the solution's derivative."""

    def vjp(g: LocalArray) -> tuple:
        multiplier = solution(g, *leaves, problem=problem.derived((stop(ans), stop(b))))
        if not leaves:
            return (multiplier,)
        # A rank none of whose leaves is a variable takes part all the same: hence one that always is.
        pull, _ = make_vjp(lambda all_leaves: problem.product(ans, all_leaves[1:]))([0.0, *leaves])
        return (multiplier, *pull(-multiplier)[1:])

    return vjp


def _tangent(tangents: dict[int, Any], ans: LocalArray, args: tuple, kwargs: dict) -> LocalArray:
    """Return the derivative of the solution along tangents of b and of the leaves."""
    problem, b, leaves = kwargs["problem"], args[0], args[1:]
    residual = tangent_of(b, tangents.get(0))
    if leaves:
        along = [0.0, *[_direction(leaf, tangents.get(k)) for k, leaf in enumerate(leaves, 1)]]
        push = make_jvp(lambda all_leaves: problem.product(ans, all_leaves[1:]))([0.0, *leaves])
        residual = residual - push(along)[1]
    return solution(residual, *leaves, problem=problem.derived())


def _direction(leaf: Any, tangent: Any) -> Any:
    return tangent_of(leaf, tangent) if np.ndim(stop(leaf)) or tangent is not None else 0.0


defvjp_together(solution, _adjoint)
solution.forward = _tangent


def _require_symmetric(system: System, u: LocalArray, b: LocalArray, x: LocalArray, g: LocalArray) -> None:
    """Raise on all ranks where A isn't its own transpose, as seen from A u = b and A x = g: x·b and u·g must be equal."""
    xb, ug, xx, uu, bb, gg = system.dots((x, b), (u, g), (x, x), (u, u), (b, b), (g, g))
    settings, rounding = system.settings, np.finfo(b.dtype).eps ** 0.25
    tolerances = [max(settings.rtol * math.sqrt(square), settings.atol) for square in (bb, gg)]
    solved = math.sqrt(xx) * tolerances[0] + math.sqrt(uu) * tolerances[1]
    scale = math.sqrt(xx) * math.sqrt(bb) + math.sqrt(uu) * math.sqrt(gg)
    if abs(xb - ug) > 10 * solved + rounding * scale:
        raise ValueError(
            f"linalg.solve: {settings.method} needs a symmetric operator, but in the derivative λ·Au = {xb:.6e} differs "
            f"from u·Aλ = {ug:.6e}, so it isn't its own transpose and the derivative would be wrong."
        )
