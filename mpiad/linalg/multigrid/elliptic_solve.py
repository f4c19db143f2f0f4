"""`solve_elliptic`: a solve by multigrid, differentiated by the implicit function theorem.

As in `linalg.solve`, the adjoint takes a second solve, and one reverse pass through the operator at the solution. The
operator is its own transpose, so the second solve uses the same multigrid levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpiad._typing import LocalArray
from mpiad.differentiation import make_vjp
from mpiad.domain import Domain
from mpiad.domain.root_copies import require_own_block
from mpiad.extend import custom_operator, defjvp_together, defvjp_together
from mpiad.linalg.multigrid.elliptic import Coefficient
from mpiad.linalg.multigrid.preconditioner import Multigrid
from mpiad.linalg.solve import change_along
from mpiad.linalg.vectors import require_together
from mpiad.primitives import stop_gradient
from mpiad.primitives.cotangents import tangent_of
from mpiad.transport import channel
from mpiad.transport.core.agreement import raising_together
from mpiad.transport.core.tracing import opaque, tracing

_CALL = "linalg.solve_elliptic"


@opaque
def solve_elliptic(
    domain: Domain,
    kappa: Coefficient,
    b: LocalArray,
    c: LocalArray | float = 0.0,
    *,
    spacing: float | Sequence[float] = 1.0,
    boundary: str | Sequence = "dirichlet",
    centred: bool = False,
    mean_zero: bool = False,
    rtol: float = 1e-8,
    atol: float = 0.0,
    maxiter: int = 100,
    x0: LocalArray | None = None,
    callback: Callable[[float], object] | None = None,
) -> LocalArray:
    """Solve -∇·(κ∇u) + c u = b on a domain; differentiable with respect to κ, b and c.

    Parameters
    ----------
    domain : Domain
    kappa : number, array of shape local_shape or (dimensions, *local_shape), or list of arrays
        The coefficient κ at the points, the diagonal of a tensor, or κ on faces, as for `Elliptic`. It must be positive,
        and may jump.
    b : array of shape (..., *local_shape)
        This rank's block of the right-hand side. Several right-hand sides, along leading axes, are solved together, each to
        its own tolerance.
    c : array of shape local_shape, or number
        The coefficient c, zero or positive. All arrays must be on the host, or all on one device.
    spacing, boundary, centred
        As in `Elliptic`. Derivatives also flow to values in `boundary`, which may have the leading axes of `b`.
    mean_zero : bool
        As in `Multigrid`.
    rtol, atol, maxiter
        As in `Multigrid.solve`, also for the solves of derivatives, with their own right-hand sides.
    x0, callback
        As in `Multigrid.solve`; no derivative flows through `x0`.

    Returns
    -------
    array of the shape and dtype of `b`, on the device of `b`
        This rank's block of u.

    Raises
    ------
    TypeError, ValueError, ConvergenceError
        On all ranks: see `Multigrid` and `Multigrid.solve`.

    Ranks
    -----
    All ranks of the domain call it.

    Adjoint
    -------
    One solve A λ = ū, on all ranks, with the levels of the forward solve; b gets λ, and κ, c
    and the coefficients α of sides get -(∂(A u)/∂(κ, c, α))ᵀ λ. Values on sides are part of the right-hand side.
    Forward mode and higher orders take one solve per derivative.

    Examples
    --------
    >>> domain = mpiad.Domain((16, 16))
    >>> u = mpiad.linalg.solve_elliptic(domain, 1.0, np.ones(domain.local_shape), spacing=1 / 16, centred=True)
    >>> print(f"{domain.max(u):.4f}")
    0.0734
    """
    grid: Any = {"spacing": spacing, "boundary": boundary, "centred": centred, "mean_zero": mean_zero}
    levels = Multigrid(domain, stop_gradient(kappa), stop_gradient(c), **grid)
    group, given, operator = channel(domain.comm, _CALL), isinstance(kappa, (list, tuple)), levels.operator
    fields: Any = list(kappa) if given else [kappa]
    with raising_together(group):
        require_together(_CALL, b=stop_gradient(b), kappa=stop_gradient(fields[0]), c=stop_gradient(c))
        for field in (b, c, *fields):
            require_own_block(field, domain.local_shape, group.size, group.rank, _CALL)
    source: Any = operator.source(kappa)
    rhs = b if type(source) is float else b + source.astype(stop_gradient(b).dtype)
    faces = operator.faces(fields if given else operator.field(kappa, stop_gradient(b)))
    # The solves of derivatives start from zero, and call no callback.
    initial = {"x0": stop_gradient(x0), "callback": callback}
    return _solution(rhs, c, *faces, problem=_Problem(levels, {"rtol": rtol, "atol": atol, "maxiter": maxiter}, initial))


class _Problem(NamedTuple):
    """The parameters of a solve, without its arrays."""

    levels: Multigrid
    settings: dict[str, Any]  # arguments of `Multigrid.solve`, also for the solves of derivatives
    initial: dict[str, Any] = {}  # further arguments of `Multigrid.solve`, for the first solve only
    linear: bool = False  # whether derivatives with respect to κ and c are omitted

    def product(self, arguments: Sequence[LocalArray]) -> LocalArray:
        """Return the operator's product with u, for the list [u, c, *faces]."""
        u, c, *faces = arguments
        return self.levels.operator.product(u, c, faces)


@custom_operator
def _solution(b: LocalArray, c: LocalArray, *faces: LocalArray, problem: _Problem) -> LocalArray:
    """Return the solution. The levels were computed from c and κ, which are arguments only for their derivatives."""
    return problem.levels.solve(b, **problem.settings, **problem.initial)


def _adjoint(ans: LocalArray, b: LocalArray, c: LocalArray, *faces: LocalArray, problem: _Problem) -> Callable:
    """Return the transpose of the solution's derivative, for which A u̇ = ḃ - (∂A/∂κ κ̇ + ∂A/∂c ċ) u."""

    def vjp(g: LocalArray) -> list:
        # If the current tape's only variable is the cotangent (`of_cotangents`), κ and c are constants in this solve:
        # derivatives with respect to them are omitted. The kind of tape is the same on all ranks.
        tape = tracing.tape
        linear = tape is not None and tape.of_cotangents
        # The operator is its own transpose, so the same levels solve for all cotangents at once.
        multiplier = _solution(g, c, *faces, problem=problem._replace(initial={}, linear=linear))
        if problem.linear:
            return [multiplier]
        pull, _ = make_vjp(problem.product)([ans, c, *faces])
        # The first cotangent, Aᵀ λ, is equal to ū.
        _, *others = pull(multiplier, batch=len(g.shape) > len(ans.shape))
        return [multiplier, *[-cotangent for cotangent in others]]

    return vjp


def _tangent(gs: list, ans: LocalArray, b: LocalArray, c: LocalArray, *faces: LocalArray, problem: _Problem) -> LocalArray:
    """Return the derivative of the solution along tangents of b, c and κ."""
    change = change_along(problem.product, ans, (c, *faces), gs[1:])
    return _solution(tangent_of(b, gs[0]) - change, c, *faces, problem=problem._replace(initial={}, linear=False))


defvjp_together(_solution, _adjoint)
defjvp_together(_solution, _tangent)
_solution.batched_adjoint = True
