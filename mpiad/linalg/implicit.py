"""The solution of a linear system as one operator, differentiated by the implicit function theorem.

From A(p) u = b follows A u̇ = ḃ - (∂A/∂p ṗ) u: a tangent takes one solve. Transposed: with Aᵀ λ = ū, the cotangent of b is
λ, and that of p is -(∂(A(p) u)/∂p)ᵀ λ, one reverse pass through the user's operator at the solution. The iteration itself
is never traced. Both rules are made of this operator and of the user's, so they can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Function, LocalArray
from mpiad.differentiation import make_jvp, make_vjp
from mpiad.extend import communicating, defjvp_together, defvjp_together
from mpiad.linalg.conjugate_gradients import conjugate_gradients
from mpiad.linalg.system import Settings, System
from mpiad.primitives import mpi_allreduce, stop
from mpiad.primitives.cotangents import tangent_of
from mpiad.primitives.operation import suspended

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
    """

    matvec: Function
    preconditioner: Function | None
    build: Callable[[Any], Any]
    settings: Settings
    start: LocalArray | None = None

    def derived(self) -> Problem:
        """Return the problem of an adjoint or a tangent: the same operator, started from zero."""
        return self._replace(start=None, settings=self.settings._replace(callback=None))

    def product(self, all_leaves: Any) -> LocalArray:
        """Return the product with the operator, of u and the leaves, as part of the program around it."""
        return self.matvec(all_leaves[0], *self.build(all_leaves[1:]))


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
    return METHODS[problem.settings.method](system, b, problem.start)


def _adjoint(ans: LocalArray, b: LocalArray, *leaves: Any, problem: Problem) -> Callable:
    """Return the transpose of the solution's derivative."""

    def vjp(g: LocalArray) -> list:
        multiplier = solution(g, *leaves, problem=problem.derived())
        pull, _ = make_vjp(problem.product)([ans, *leaves])
        transposed, *of_leaves = pull(multiplier)
        _require_transpose(stop(transposed), stop(g), problem.settings)
        return [multiplier, *[None if part is None else -part for part in of_leaves]]

    return vjp


def _tangent(gs: list, ans: LocalArray, b: LocalArray, *leaves: Any, problem: Problem) -> LocalArray:
    """Return the derivative of the solution along tangents of b and of the leaves."""
    residual = tangent_of(b, gs[0])
    if leaves:
        push = make_jvp(problem.product)([ans, *leaves])
        along = [_direction(leaf, g) for leaf, g in zip(leaves, gs[1:])]
        residual = residual - push([np.zeros(ans.shape, ans.dtype), *along])[1]
    return solution(residual, *leaves, problem=problem.derived())


def _direction(leaf: Any, tangent: Any) -> Any:
    return tangent_of(leaf, tangent) if np.ndim(stop(leaf)) or tangent is not None else 0.0


defvjp_together(solution, _adjoint)
defjvp_together(solution, _tangent)


def _require_transpose(transposed: LocalArray, g: LocalArray, settings: Settings) -> None:
    """Raise on all ranks where Aᵀ λ isn't g, though A λ is: the operator isn't its own transpose."""
    gap = np.asarray(transposed - g, np.float64)
    with suspended():
        squares = mpi_allreduce(np.array([np.vdot(gap, gap), np.vdot(g, g)], np.float64), comm=settings.comm)
    found, norm = np.sqrt(squares).tolist()
    # Beyond the tolerance, rounding keeps the true residual of an ill-conditioned system above the one of the iteration.
    if found > 10 * max(settings.rtol * norm, settings.atol) + np.finfo(g.dtype).eps ** 0.25 * norm:
        raise ValueError(
            f"linalg.solve: {settings.method} needs a symmetric operator, but in the derivative A λ = g was solved and "
            f"Aᵀ λ - g has norm {found:.3e}, where g has {norm:.3e}: A isn't its own transpose, and the derivative would "
            "be wrong."
        )
