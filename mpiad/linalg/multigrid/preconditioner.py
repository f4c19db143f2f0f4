"""`Multigrid`: geometric multigrid for an elliptic operator, as a preconditioner and as a solver; `solve_elliptic`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, LocalArray, Shape
from mpiad.device.transfer import Constants
from mpiad.differentiation import make_vjp
from mpiad.domain import Domain
from mpiad.domain.partition import Partition
from mpiad.domain.root_copies import require_own_block
from mpiad.errors import NotFiniteError
from mpiad.extend import custom_operator, defjvp_together, defvjp_together
from mpiad.linalg.iteration import diagnosis, iterate, require_iterations
from mpiad.linalg.multigrid.color_layout import Distribution, distribution_of, layout_of
from mpiad.linalg.multigrid.elliptic import Coefficient, Elliptic, layers_of
from mpiad.linalg.multigrid.hierarchy import Level, Plan, hierarchy
from mpiad.linalg.multigrid.stencil import stencil_of
from mpiad.linalg.multigrid.weighted_sums import are_compiled
from mpiad.linalg.solve import change_along
from mpiad.linalg.system import Settings, System, agree_on, check_settings
from mpiad.linalg.vectors import column, on_host, require_together
from mpiad.primitives import stop_gradient
from mpiad.primitives.cotangents import tangent_of
from mpiad.primitives.operation import suspended
from mpiad.transport import MAX, SUM, Channel, channel
from mpiad.transport.core.agreement import agreed, raise_together, raising_together
from mpiad.transport.core.collectives import allreduce
from mpiad.transport.core.tracing import opaque, restoring_state, tracing
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_of, empty_like, is_array

_CALL = "linalg.Multigrid"


def coefficients(domain: Domain, kappa: Coefficient, c: object, group: Channel) -> tuple[Coefficient, LocalArray]:
    """Return κ and c of this rank, on the host; collective. Raise on all ranks if they are invalid on any rank."""
    local, ndim, faces = domain.local_shape, len(domain.shape), isinstance(kappa, (list, tuple))
    with raising_together(group):
        if faces and len(kappa) != ndim:
            raise ValueError(f"{_CALL}: kappa must have one array of faces per dimension, {ndim}, but has {len(kappa)}.")
        require_together(_CALL, kappa=getval(kappa[0] if faces else kappa), c=getval(c))
        if faces:
            shapes = [tuple(n + (axis == other) for other, n in enumerate(local)) for axis in range(ndim)]
            kappa = [_field(domain, x, f"kappa[{k}]", False, [shape]) for k, (x, shape) in enumerate(zip(kappa, shapes))]
        else:
            kappa = _field(domain, kappa, "kappa", False, [local, (ndim, *local)])
        c = _field(domain, c, "c", True, [local])
        for axis, (n, wraps) in enumerate(zip(domain.shape, domain.periodic)):
            if wraps and n % 2:
                raise ValueError(
                    f"{_CALL}: a periodic dimension must have an even number of points, but dimension {axis} has {n}. "
                    "Choose a multiple of a high power of two, which allows the most levels."
                )
    if faces:
        _require_equal_copies(domain, kappa, group)
    return kappa, c


def _require_equal_copies(domain: Domain, faces: list[LocalArray], group: Channel) -> None:
    """Raise a ValueError on all ranks if the values of a face between two ranks differ; collective."""
    ndim, block = len(faces), tuple(slice(0, n) for n in domain.local_shape)
    padded = domain.exchange(np.stack([field[block] for field in faces]), corners=False)  # faces before points
    error = None
    for axis, field in enumerate(faces):
        last, other = (layers_of(x, axis, ndim, cut)(-1, None) for x, cut in ((field, False), (padded[axis], True)))
        if domain.neighbours[axis][1] is not None and not np.allclose(last, other, rtol=1e-6, atol=0.0):
            error = ValueError(
                f"{_CALL}: kappa[{axis}] on the faces after the last points of rank {group.rank} differs from the values "
                "of the next rank on the same faces. Compute it from fields with a halo: see Domain.exchange."
            )
    raise_together(group, error)


def has_constants(of_one: LocalArray, mean_zero: bool, group: Channel) -> bool:
    """Return whether `of_one`, the product with 1, is zero; raise on all ranks if `mean_zero` differs; collective."""
    local = np.array([of_one.max(), mean_zero, not mean_zero], float)
    largest, some_true, some_false = allreduce(group, local, MAX, _CALL)
    if some_true and some_false:
        raise agreed(group, ValueError(f"{_CALL}: mean_zero must be the same on all ranks, but is True on some only."))
    singular = float(largest) == 0.0
    if singular and not mean_zero:
        text = (
            "the operator is singular: no side has boundary='dirichlet' or 'robin', and c is zero everywhere, so a "
            "constant can be added to any solution. Use mean_zero=True for the solution with mean zero, "
            "boundary='dirichlet' on a side, or a small c."
        )
        raise agreed(group, ValueError(f"{_CALL}: {text}"))
    if mean_zero and not singular:
        text = "u or α > 0 is given on a side, or c > 0 somewhere: the solution is unique. Omit mean_zero."
        raise agreed(group, ValueError(f"{_CALL}: mean_zero=True is for singular operators, but {text}"))
    return singular


def contrast(kappa: Coefficient, group: Channel) -> float:
    """Return the ratio of the largest κ to the smallest κ on all ranks; collective."""
    fields = kappa if isinstance(kappa, list) else [kappa]
    # The minimum is -max(-κ), so that one reduction computes both.
    local = np.array([max(x.max() for x in fields), -min(x.min() for x in fields)])
    highest, lowest = allreduce(group, local, MAX, _CALL)
    with np.errstate(over="ignore"):
        return float(highest / -lowest)


def _field(domain: Domain, value: object, name: str, zero_allowed: bool, shapes: list[Shape]) -> LocalArray:
    if isbox(value):
        raise TypeError(
            f"{_CALL}: {name} is traced, but a preconditioner isn't differentiated. Pass mpiad.stop_gradient({name}), or "
            f"use linalg.solve_elliptic, which is differentiable with respect to {name}."
        )
    array = np.asarray(on_host(value))
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{_CALL}: {name} must be real numbers, but got {type(value).__name__} of dtype {array.dtype}.")
    if array.shape not in [(), *shapes] or (not array.shape and domain.local_shape not in shapes):
        raise ValueError(
            f"{_CALL}: {name} must be a number or an array of shape {' or '.join(map(str, shapes))}, of this rank, "
            f"but has shape {array.shape}."
        )
    field = np.broadcast_to(array, array.shape or domain.local_shape).astype(np.float64)
    usable = np.isfinite(field) & (field >= 0.0 if zero_allowed else field > 0.0)
    if not usable.all():
        kind = ValueError if np.isfinite(field).all() else NotFiniteError
        first = np.unravel_index(int(np.argmin(usable)), field.shape)
        index = tuple(int(i) + cells.start for i, cells in zip(first[-len(domain.shape) :], domain.owned))
        raise kind(
            f"{_CALL}: {name} must be {'zero or more' if zero_allowed else 'positive'} and finite, but is "
            f"{float(field[first])!r} at point {index} of the grid, and invalid at {int(np.count_nonzero(~usable))} of "
            f"{field.size} points of this rank.{'' if zero_allowed else ' Take the exponential of a learned field.'}"
        )
    return field


# If κ varies by more than the factor `_SMOOTH`, `_DOUBLED` levels are visited twice in each cycle.
_DOUBLED, _SMOOTH = 2, 100.0
_EXTREME = 1e8  # error messages mention the contrast of κ if it is at least this large


def _conjugate_gradients(
    level: Level, system: System, x: LocalArray, r: LocalArray, norms: np.ndarray, targets: np.ndarray
) -> bool:
    """Solve by conjugate gradients; a `Method`, faster for small grids than `krylov`'s, which checks user functions."""
    p, s, before, curvature = np.zeros_like(r), np.zeros_like(r), np.full(len(r), np.inf), np.zeros(len(r))
    while (active := norms > targets).any():
        require_iterations(system, targets)
        # After the V-cycle that computes z, half of the equations A z = r are satisfied: A z takes half a product. A p, for
        # the search direction p, follows from A z by the recurrence of p. Both are memory of the level.
        z, w = (part(system.block(r)).reshape(r.shape) for part in (level.cycle, level.product_after))
        rz, wz = system.dots((r, z), (w, z))
        # Converged systems don't change. As in `linalg.krylov`, p·Ap follows from a recurrence.
        beta = np.where(active, rz / before, 0.0)
        curvature = wz - beta * beta * curvature
        invalid = active & ~((rz > 0.0) & (curvature > 0.0))
        if invalid.any():
            text = f"r·z = {rz[invalid][0]:.3e} and p·Ap = {curvature[invalid][0]:.3e} should be positive"
            system.fail(f"{text}: rounding errors dominate. Increase rtol; {diagnosis(system)}")
        for direction, change in ((p, z), (s, w)):
            direction *= column(direction, beta)
            direction += change
        alpha = column(x, np.where(active, rz, 0.0) / np.where(active, curvature, 1.0))
        x += alpha * p
        r = r - alpha * s  # `r` may be the right-hand side
        before, curvature = np.where(active, rz, np.inf), np.where(active, curvature, 0.0)
        norms = system.norms(r)
        system.require_finite(norms, r, "the residual")
        system.note(norms)
    return True


class Multigrid:
    """Geometric multigrid for -∇·(κ∇u) + c u on a domain, with interpolation that depends on κ, so that κ may jump.

    The levels are computed on the host. A cycle runs on the host or device of its argument; all levels are copied
    to a device before its first cycle.

    Parameters
    ----------
    domain : Domain
        Periodic dimensions must have an even number of points; coarsening ends when this number becomes odd.
    kappa
        The coefficient κ, as for `Elliptic`. It must be positive, and may jump by orders of magnitude between neighboring
        points.
    c : array of shape local_shape, or number
        Zero or more.
    spacing, boundary, centred
        As in `Elliptic`.
    mean_zero : bool
        Whether to return the solution with mean zero. Required if the operator's kernel contains constants (no side with
        "dirichlet" or "robin", and c = 0). The mean of right-hand sides is subtracted, since otherwise no solution exists.

    Attributes
    ----------
    operator : Elliptic
    kappa, c : array or list of arrays
        The coefficients, in double precision on the host.
    history : list of float
        The norm of the residual of all systems together, at the start and after each iteration of the last `solve`.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid, or if the operator is singular without `mean_zero`. If κ or c is invalid,
        the message names a point.

    Ranks
    -----
    All ranks of the domain call the constructor, and all methods.

    References
    ----------
    J. E. Dendy, Black box multigrid, Journal of Computational Physics 48 (1982).

    Examples
    --------
    >>> from mpiad.linalg import Multigrid
    >>> domain = mpiad.Domain((16, 16))
    >>> grid = Multigrid(domain, kappa=np.ones(domain.local_shape), spacing=1 / 17)
    >>> u = grid.solve(np.ones(domain.local_shape), rtol=1e-8)
    >>> print(domain.norm(grid.matvec(u) - 1.0) < 1e-6, len(grid.history) < 12)
    True True
    """

    takes_blocks = True  # arrays with leading axes, as a preconditioner of `solve`

    def __init__(
        self,
        domain: Domain,
        kappa: Coefficient,
        c: LocalArray | float = 0.0,
        *,
        spacing: float | Sequence[float] = 1.0,
        boundary: str | Sequence = "dirichlet",
        centred: bool = False,
        mean_zero: bool = False,
    ):
        with restoring_state(), suspended():
            self.operator = Elliptic(domain, spacing=spacing, boundary=boundary, centred=centred)
            self.domain = self.operator.domain
            self._channel = channel(domain.comm, "linalg.Multigrid")
            self.kappa, self.c = coefficients(self.domain, kappa, c, self._channel)
            self._faces = [np.asarray(on_host(stop_gradient(part))) for part in self.operator.faces(self.kappa)]
            of_constant = self.operator.product(np.ones(self.domain.local_shape), self.c, self._faces)
            self.mean_zero = has_constants(of_constant, mean_zero, self._channel)
            distribution = distribution_of(Partition(self.domain.shape, self.domain.dims, self.domain.periodic))
            self._layout = layout_of(distribution.box(self.domain.position))
            self._level = self._levels(distribution)
        self._coefficients, self._copies = Constants(self.c, *self._faces), dict[ArrayModule, Level]()
        self.history: list[float] = []

    def matvec(self, u: LocalArray) -> LocalArray:
        """Return this rank's block of the product of the operator with `u`; differentiable with respect to `u`."""
        c, *faces = self._coefficients.on(arrays_of(stop_gradient(u)))
        return self.operator.product(u, c, faces)

    def __call__(self, r: LocalArray) -> LocalArray:
        """Return an approximate solution for a right-hand side, by one symmetric V-cycle.

        Parameters
        ----------
        r : array of shape (..., *local_shape)
            The residual: not traced, on the host or on a device. A complex array takes two cycles.

        Returns
        -------
        array of the shape and dtype of `r`, on the device of `r`

        Ranks
        -----
        All ranks of the domain call it.

        Adjoint
        -------
        None; the cycle is its own transpose, but a preconditioner isn't differentiated.
        """
        if is_array(r) and r.dtype.kind == "c":
            # The operator is real, so the real and imaginary parts are independent systems.
            return (self(r.real) + 1j * self(r.imag)).astype(r.dtype)
        r = self._checked(r, "linalg.Multigrid")
        if not r.size:
            return empty_like(r, r.shape)
        level = self._level_for(r)
        with restoring_state(), suspended():
            # If the operator is singular, the right-hand side must have mean zero, as the result does.
            cycled = self._layout.join(level.cycle(self._split(r)))
            return self._without_mean(cycled).reshape(r.shape).astype(r.dtype)

    @property
    def T(self) -> Multigrid:
        """The transpose: the same object, since a cycle is symmetric."""
        return self

    def solve(
        self,
        b: LocalArray,
        *,
        rtol: float = 1e-8,
        atol: float = 0.0,
        maxiter: int = 100,
        x0: LocalArray | None = None,
        callback: Callable[[float], object] | None = None,
    ) -> LocalArray:
        """Return the solution by conjugate gradients, preconditioned by V-cycles; not differentiable.

        Parameters
        ----------
        b : array of shape (..., *local_shape)
            Right-hand side, not traced, on the host or on a device (`solve_elliptic` is differentiable). Several
            right-hand sides, along leading axes, are solved together, each to its own tolerance.
        rtol, atol : float
            The norm of the residual over all ranks must fall to ``max(rtol * norm(b), atol)``.
        maxiter : int
            Maximum number of iterations.
        x0 : array of the shape of `b`, optional
            Initial guess, on the device of `b`; zero by default.
        callback : callable, optional
            ``callback(norm)`` is called on every rank after each iteration; the norm is that of all systems together.

        Returns
        -------
        array of the shape and dtype of `b`, on the device of `b`

        Raises
        ------
        TypeError, ValueError
            On all ranks, if `b` or `x0` has the wrong shape or isn't finite, if they are on different devices, or if a
            tolerance can't be met or differs between ranks.
        Exception
            On all ranks, if the callback raises it on any rank.
        ConvergenceError
            On all ranks, if the maximum number of iterations is reached. Its `history` contains the norms of the residual.

        Ranks
        -----
        All ranks of the domain call it.
        """
        call = "linalg.Multigrid.solve"
        settings = Settings("cg", rtol, atol, maxiter, self.domain.comm, callback, batch=1, verify=False, call=call)

        def check() -> dict[str, object]:
            check_settings(settings, ("cg",), 1)
            self._checked(b, call)
            if x0 is not None and self._checked(x0, call).shape != b.shape:
                raise ValueError(f"{call}: x0 must have the shape of b, {b.shape}, but has {x0.shape}.")
            require_together(call, b=b, x0=0.0 if x0 is None else x0)
            return {"with_x0": x0 is not None, "leading axes of b": b.shape[: -len(self.domain.shape)]}

        with restoring_state(), suspended():
            return self._solved(b, x0, agree_on(settings, check))

    def _solved(self, b: LocalArray, x0: LocalArray | None, settings: Settings) -> LocalArray:
        """Return the solution for checked arguments."""
        if not b.size:
            self.history = [0.0]
            return empty_like(b, b.shape)
        # The solve is in double precision, since in single precision the residual can't fall by a factor of 1e-8.
        split, start = (None if x is None else self._split(x.astype(np.float64)) for x in (b, x0))
        product = lambda u: self._split(self.matvec(self._layout.join(u)))  # noqa: E731
        system = System(product, None, split, settings, diagnose=self._slowness_reason)
        u = iterate(partial(_conjugate_gradients, self._level_for(b)), system, split, start)
        system.settle()
        self.history = system.history
        return self._without_mean(self._layout.join(u)).reshape(b.shape).astype(b.dtype)

    def _slowness_reason(self) -> str:
        """Return a possible reason for slow convergence; collective."""
        ratio = contrast(self.kappa, self._channel)
        if ratio < _EXTREME:
            return "very different spacings need more iterations"
        return f"kappa varies by a factor of {ratio:.0e}, an extreme contrast (double precision resolves up to 5e+15)"

    def require_fit(self, r: LocalArray) -> None:
        """Raise an error if `r` doesn't match this rank's block."""
        self._checked(r.real, _CALL)

    def _checked(self, r: Array, call: str) -> LocalArray:
        ndim = len(self.domain.shape)
        if isbox(r) or not is_array(r) or r.dtype.kind != "f":
            kind = f"dtype {r.dtype}" if is_array(r) else type(r).__name__
            raise TypeError(f"{call}: expected a plain array of floats, but got {kind}.")
        if r.shape[max(0, r.ndim - ndim) :] != self.domain.local_shape:
            raise ValueError(
                f"{call}: expected an array of shape (..., *local_shape) with local_shape {self.domain.local_shape}, but "
                f"got {r.shape} on rank {self._channel.rank}."
            )
        return r

    def _split(self, block: LocalArray) -> LocalArray:
        """Return blocks (..., *local_shape), without their means, in the layout of the levels (systems, colors, size)."""
        return self._layout.split(self._without_mean(block.reshape(-1, *self.domain.local_shape)))

    def _without_mean(self, blocks: LocalArray) -> LocalArray:
        """Return blocks of several systems; if the kernel contains constants, subtract each system's mean over the grid."""
        if not self.mean_zero:
            return blocks
        local = np.array(on_host(blocks.reshape(len(blocks), -1).sum(axis=1, dtype=np.float64)))
        means = allreduce(self._channel, local, SUM, "linalg.Multigrid") / np.prod(self.domain.shape)
        return blocks - column(blocks, means)

    def _level_for(self, r: LocalArray) -> Level:
        xp = arrays_of(r)
        if xp is None:
            return self._level
        if xp not in self._copies:
            self._copies[xp] = self._level.on(xp)
        return self._copies[xp]

    def _levels(self, distribution: Distribution) -> Level:
        ndim = len(self.domain.shape)
        # The diagonal is the sum of c and the coefficients of all faces; there is no coupling across physical sides.
        diagonal, couplings = self.c, dict[tuple[int, ...], LocalArray]()
        for axis, (step, faces) in enumerate(zip(self.operator.sides.spacing, self._faces)):
            of_faces = layers_of(faces / step**2, axis, ndim, cut=False)
            diagonal = diagonal + of_faces(0, -1) + of_faces(1, None)
            for end, offset in enumerate((-1, 1)):
                coupling = of_faces(end, end - 1 or None).copy()
                if self.domain.neighbours[axis][end] is None:
                    layers_of(coupling, axis, ndim, cut=False)(-end, None if end else 1)[...] = 0.0
                couplings[tuple(offset if other == axis else 0 for other in range(ndim))] = coupling
        stencil = stencil_of(self._layout, {(0,) * ndim: -diagonal, **couplings})
        doubled = _DOUBLED if contrast(self.kappa, self._channel) > _SMOOTH else 0
        plan = Plan(self._channel.rank, self.domain.comm, self.mean_zero, doubled, are_compiled(diagonal.size))
        return hierarchy(stencil, distribution, plan)


# `solve_elliptic`: a solve by multigrid, differentiated by the implicit function theorem.
#
# As in `linalg.solve`, the adjoint takes a second solve, and one reverse pass through the operator at the solution. The
# operator is its own transpose, so the second solve uses the same multigrid levels.

_SOLVE = "linalg.solve_elliptic"


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
    group, given, operator = channel(domain.comm, _SOLVE), isinstance(kappa, (list, tuple)), levels.operator
    fields: Any = list(kappa) if given else [kappa]
    with raising_together(group):
        require_together(_SOLVE, b=stop_gradient(b), kappa=stop_gradient(fields[0]), c=stop_gradient(c))
        for field in (b, c, *fields):
            require_own_block(field, domain.local_shape, group.size, group.rank, _SOLVE)
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
