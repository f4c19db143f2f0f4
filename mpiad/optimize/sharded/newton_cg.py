"""An inexact Newton method for distributed variables; all ranks run the iteration with the same scalars.

A step solves the Newton system by `truncated_cg`, with a tolerance that decreases with the gradient (Eisenstat and Walker).
If the gradient at the end of the step is the one that CG predicts, the problem is linear, and CG goes on to the tolerance
of the solve. A line search or a trust region shortens the step until the objective decreases enough. The norm of the
gradient g is √(gᵀ R⁻¹ g), with the matrix R of the user's inner product. If R is the inverse covariance of a prior, this
norm doesn't depend on the mesh.

With bounds, the system is restricted to the free variables. The other variables take projected gradient steps, and points
are projected onto the bounds (Bertsekas's two-metric projection).

References
----------
.. [1] S. C. Eisenstat and H. F. Walker, "Choosing the forcing terms in an inexact Newton method", SIAM J. Sci. Comput. 17
   (1996), choice 2 with its safeguard.
.. [2] J. Nocedal and S. J. Wright, *Numerical Optimization*, 2nd ed., Springer 2006, algorithms 4.1 and 7.1.
.. [3] D. P. Bertsekas, SIAM J. Control Optim. 20 (1982).
.. [4] U. Villa, N. Petra and O. Ghattas, "hIPPYlib", ACM Trans. Math. Software 47 (2021), section 3: prior-preconditioned
   inexact Newton-CG.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.linalg.iteration import forcing_term
from mpiad.optimize.constraints import Box
from mpiad.optimize.evaluated_points import INTERRUPTED, RETREAT, Ending
from mpiad.optimize.iterates import ShardedIterates
from mpiad.optimize.sharded.convergence import ABNORMAL, EVALUATIONS, NewtonSettings
from mpiad.optimize.sharded.second_order import Derivatives, SecondOrderEvaluation
from mpiad.optimize.sharded.sharded_method import ShardedMethod, StateFiles
from mpiad.optimize.sharded.vectors import local_dot

# Conjugate gradients for a Newton step, ended early by a tolerance, by negative curvature, or by a trust region.
#
# The residual is measured in the user's inner product, like the gradient, since its norm in the preconditioner P may be
# small although the gradient of the model isn't. The norm of the step is ‖p‖² = pᵀ P⁻¹ p. This norm and the product of the
# step with the direction are updated by recurrences, without P⁻¹.
#
# Rounding errors bring back the components of residuals along eigenvectors that have converged, so that problems with a
# few large eigenvalues take up to twice as many products. With a preconditioner, such as a prior's, each residual is
# therefore orthogonalized to the first ones. This must begin with the first residual: the components are then at rounding
# level, and the residual remains that of the step.
#
# References
# ----------
# .. [1] T. Steihaug, "The conjugate gradient method and trust regions in large scale optimization", SIAM J. Numer. Anal. 20
#    (1983).
# .. [2] A. R. Conn, N. I. M. Gould and Ph. L. Toint, *Trust-Region Methods*, SIAM 2000, algorithm 7.5.1.
# .. [3] J. Nocedal and S. J. Wright, *Numerical Optimization*, 2nd ed., Springer 2006, algorithms 7.1 and 7.2.

_MOST_KEPT = 32  # residuals to which others are orthogonalized


class System(NamedTuple):
    """A Newton system H p = -g."""

    multiply: Callable[[Array], Array]  # this rank's part of the product with H; collective
    precondition: Callable[[Array], Array]  # this rank's part of the product with P; collective
    # The inner products of pairs of vectors over all ranks, bitwise the same on all ranks.
    dots: Callable[..., list[float]]
    ended: Callable[[], bool]  # whether a rank received SIGTERM; the same on all ranks
    square: float  # squared norm of the gradient in the inner product
    # The expensive `measure` isn't called if the squared norm in P exceeds this multiple of its target.
    slack: float = math.inf
    measure: Callable[[Array], float] | None = None  # squared norm in the inner product; None: r · P r; collective
    most_kept: int = 0  # number of first residuals to which others are orthogonalized


class Step(NamedTuple):
    """The result of `truncated_cg`."""

    vector: Array  # this rank's part
    decrease: float  # of the quadratic model
    length: float  # in the preconditioner's norm
    on_boundary: bool  # whether the step ends at the boundary of the trust region


def truncated_cg(
    system: System,
    gradient: Array,
    forcing: float,
    limit: int,
    radius: float = math.inf,
    forcing_at: Callable[[Array, Array], float] | None = None,
) -> Step | None:
    """Return an approximate minimizer of gᵀp + ½ pᵀHp within a radius; None if a rank received SIGTERM."""
    p, residual = gradient * 0.0, gradient.copy()
    z = system.precondition(residual)
    square = _positive(system, *system.dots((residual, z)))
    kept: list[tuple[Array, Array, float]] = []  # residuals r, with P r and r · P r
    # The norm of the residual must fall by the factor `forcing`, then by ``forcing_at(step, residual)`` if that is smaller.
    target = forcing**2 * system.square
    near = system.slack * (square / system.square if target else 1.0)  # close to the target in P's norm, relative to it
    # `pp`, `pd` and `dd` are pᵀ P⁻¹ p, pᵀ P⁻¹ d and dᵀ P⁻¹ d for the direction d.
    direction, pp, pd, dd, decrease = -z, 0.0, 0.0, square, 0.0
    for count in range(limit):
        product = system.multiply(direction)
        (curvature,) = system.dots((direction, product))
        if not math.isfinite(curvature):
            raise ValueError(
                "minimize: a product with the Hessian isn't finite, but the objective and its gradient are. Check the "
                "second derivatives of fun, or hessp."
            )
        step = square / curvature if curvature > 0.0 else math.inf
        if radius < math.inf and pp + step * (2.0 * pd + step * dd) >= radius**2:
            step = (math.sqrt(max(pd**2 + dd * (radius**2 - pp), 0.0)) - pd) / dd
            p += step * direction
            return Step(p, decrease + step * (square - 0.5 * step * curvature), radius, True)
        if curvature <= 0.0:
            # The model has no minimizer; the line search chooses the length of a steepest descent step.
            return Step(direction, square, math.sqrt(dd), False) if count == 0 else Step(p, decrease, math.sqrt(pp), False)
        p += step * direction
        if len(kept) < system.most_kept:
            copy = residual.copy()
            kept.append((copy, copy if z is residual else z.copy(), square))
        residual += step * product
        if kept:
            for (r, _, r_square), overlap in zip(kept, system.dots(*[(residual, other) for _, other, _ in kept])):
                residual -= overlap / r_square * r
        decrease += 0.5 * step * square
        pp += step * (2.0 * pd + step * dd)
        if system.ended():
            return None
        z = system.precondition(residual)
        before, square = square, _positive(system, *system.dots((residual, z)))
        if square <= near * target:
            found = square if system.measure is None else system.measure(residual)
            if found <= target and forcing_at is not None:
                target, forcing_at = min(target, forcing_at(p, residual) ** 2 * system.square), None
            if found <= target:
                break
        beta = square / before
        pd, dd = beta * (pd + step * dd), square + beta**2 * dd
        direction = beta * direction - z
    return Step(p, decrease, math.sqrt(pp), False)


def _positive(system: System, square: float) -> float:
    if square >= 0.0:
        return square
    name = "inner product" if system.measure is None else "preconditioner"  # without `measure` it is both
    raise ValueError(
        f"minimize: the {name} must be symmetric and positive definite, but r · P r = {square:.3e} for a residual r."
    )


GRADIENT = Ending(0, "CONVERGENCE: the gradient's norm is at most gtol, or grtol times the norm at x0.")
# Required fraction of the decrease that the first- or second-order model predicts.
_DECREASE = 1e-4
_ROUNDING = 10.0 * sys.float_info.epsilon
# The initial and largest forcing term.
_LARGEST = 0.5
# A problem is linear if the gradient at the end of a step differs from the prediction by at most this fraction of the
# gradient at its start, or by half the tolerance of the solve.
_LINEAR = 1e-8
# Tolerance of the relative difference between g·P(Pg) and Pg·Pg; iterative solvers aren't exactly symmetric.
_ASYMMETRY = 1e-3
_NEAR = 1.5  # see `System.slack`


class NewtonPoint:
    """A point x: this rank's variables, shape (n,), and quantities at x; scalars are the same on all ranks.

    - `finite`: whether the value and all entries of the gradient are finite.
    - `free`: mask of the free variables; None for all.
    - `projected_step`: with bounds, the projection of x - g onto the bounds, minus x.
    - `norm`: norm of the gradient in the inner product, NaN until it is computed. `square`: squared norm of its free part.
    - `length`, `slope`: length of the step from the previous point, and derivative at the previous point along the step.
    """

    def __init__(self, x: Array, derivatives: Derivatives):
        self.x, self.value, self.gradient, self.multiply = x, derivatives.value, derivatives.gradient, derivatives.multiply
        self.free: Array = None
        self.projected_step: Array = None
        self.finite = False
        self.norm, self.square, self.length, self.slope = math.nan, math.nan, 0.0, 0.0

    def masked(self, vector: Array) -> Array:
        """Return a vector with zeros for the variables that aren't free."""
        return vector if self.free is None else vector * self.free


class NewtonCG(ShardedMethod[NewtonPoint]):
    """The Newton iteration."""

    _settings: NewtonSettings

    def __init__(self, evaluation: SecondOrderEvaluation, iterates: ShardedIterates, files: StateFiles, box: Box | None):
        super().__init__(iterates, files, box, settings := evaluation.settings)
        self._evaluation, self._totals = evaluation, evaluation.totals
        self._represent = evaluation.on_vectors(settings.inner_product, "inner_product")
        self._precondition = evaluation.on_vectors(settings.preconditioner, "preconditioner") or self._represent
        # If both are methods of one object, such as a prior, they are similar operators, and `inner_product` is expensive.
        owners = [getattr(operator, "__self__", None) for operator in (settings.preconditioner, settings.inner_product)]
        self._slack = _NEAR if owners[0] is owners[1] is not None else math.inf
        self._forcing, self._radius, self._norm_at_start = settings.forcing or _LARGEST, settings.radius, math.nan
        self._full_step: NewtonPoint | None = None  # the point at the end of a step, if `_step` has evaluated it
        self._value_before = math.inf
        self._shortened = self._line_search if settings.globalization == "line search" else self._trust_region

    def _begin(self, point: NewtonPoint) -> None:
        self._measure(point)
        self._require_symmetric(point)
        self._norm_at_start = point.norm

    def _next_point(self, iterate: NewtonPoint) -> NewtonPoint | Ending:
        found = self._shortened(iterate)
        if found is None:
            self._write(iterate, True)
            return INTERRUPTED if self._files.interrupted else self._evaluation_limit() or ABNORMAL
        self._measure(found)
        chosen = forcing_term(self._forcing, found.norm / iterate.norm, _LARGEST)
        self._forcing, self._value_before = self._settings.forcing or chosen, iterate.value
        return found

    def _ending(self, iterate: NewtonPoint) -> Ending | None:
        if iterate.norm <= self._tolerance:
            return GRADIENT
        return self._limit_reached(self._value_before, iterate.value, self._iterates.any_stopped)

    @property
    def _tolerance(self) -> float:
        return max(self._settings.gtol, self._settings.grtol * self._norm_at_start)

    def _evaluation_limit(self) -> Ending | None:
        return EVALUATIONS if self.count >= self._settings.maxfun else None

    def _evaluated(self, x: Array, iterate: NewtonPoint | None) -> NewtonPoint:
        self.count += 1
        point = NewtonPoint(x, self._evaluation.at(x))
        with np.errstate(over="ignore", invalid="ignore"):  # a trial point may not be finite
            moved = None if iterate is None else x - iterate.x
            terms = [0.0, 0.0] if moved is None else [local_dot(moved, moved), local_dot(iterate.gradient, moved)]  # type: ignore[union-attr]
            largest = float(to_host(np.max(np.abs(point.gradient)))) if x.size else 0.0
        not_finite = not math.isfinite(largest)
        square, point.slope, any_broken, point.value = self._totals.reduce(terms, [float(not_finite)], [point.value])
        point.length, point.finite = math.sqrt(square), not any_broken and math.isfinite(point.value)
        return point

    def _measure(self, point: NewtonPoint) -> None:
        """Compute the free variables and the gradient's norm."""
        if not math.isnan(point.norm):
            return
        at_bounds = 0.0
        if self._box is not None:
            point.projected_step = self._box.projected_step(point.x, point.gradient)
            largest = float(to_host(np.max(np.abs(point.projected_step)))) if point.x.size else 0.0
            (largest,) = self._totals.reduce([], [largest], [])
            point.free = self._box.free(point.x, point.gradient, largest)
            # The norm combines the projected steps of variables at bounds with the gradient of free variables.
            at_bounds = local_dot(point.projected_step, point.projected_step * ~point.free)
        gradient = point.masked(point.gradient)
        represented = gradient if self._represent is None else point.masked(self._represent(gradient))
        at_bounds, square = self._totals.sums(np.array([at_bounds, local_dot(gradient, represented)])).tolist()
        if not 0.0 <= square < math.inf:
            raise ValueError(
                "minimize: the inner product must be symmetric and positive definite, but with its inverse R⁻¹ and the "
                f"gradient g, g · R⁻¹ g = {square:.3e}."
            )
        point.norm, point.square = math.sqrt(at_bounds + square), square

    def _require_symmetric(self, point: NewtonPoint) -> None:
        for name, operator in (("inner product", self._represent), ("preconditioner", self._precondition)):
            if operator is not None and not (name == "preconditioner" and operator is self._represent):
                once = operator(point.gradient)
                twice = operator(once)
                pairs = (point.gradient, twice), (once, once), (point.gradient, point.gradient), (twice, twice)
                one, other, *squares = self._dots(*pairs)
                if not abs(one - other) <= _ASYMMETRY * math.sqrt(squares[0] * squares[1]):
                    raise ValueError(
                        f"minimize: the {name} must be symmetric, but g · P (P g) = {one:.6e} and P g · P g = {other:.6e} "
                        "for the gradient g at x0."
                    )

    def _dots(self, *pairs: tuple[Array, Array]) -> list[float]:
        """Return inner products over all ranks."""
        return self._totals.sums(np.array([local_dot(a, b) for a, b in pairs])).tolist()

    def _step(self, iterate: NewtonPoint, radius: float = math.inf) -> Step | None:
        def on_free(operator: Callable | None) -> Callable[[Array], Array]:
            return lambda r: r if operator is None else iterate.masked(operator(r))

        represent, precondition = on_free(self._represent), on_free(self._precondition)

        def multiply(v: Array) -> Array:
            return iterate.masked(iterate.multiply(v))

        def square_of(r: Array) -> float:
            return self._dots((r, represent(r)))[0]

        def forcing_at(p: Array, residual: Array) -> float:
            """Return the forcing term for the whole solve if the problem is linear, otherwise that of the current step."""
            # CG predicts the gradient at the end of its step, the residual. Eisenstat and Walker's choice 1 measures its
            # error, too. For a linear problem CG needn't start again: it goes on to the tolerance of the solve.
            if self.count + 2 > self._settings.maxfun:
                return self._forcing
            point = self._full_step = self._evaluated(self._shifted(iterate, p, 1.0), iterate)
            wanted, norm = 0.5 * self._tolerance, math.sqrt(iterate.square)
            error = iterate.masked(point.gradient) - residual if point.finite else residual
            error_norm = math.sqrt(max(square_of(error), 0.0))
            if not point.finite or error_norm > max(wanted, _LINEAR * norm):
                return self._forcing
            self._full_step = None
            return max(wanted, error_norm, _ROUNDING * norm) / norm

        self._full_step = None
        measure = None if self._represent is self._precondition else square_of
        ended = lambda: self._files.interrupted  # noqa: E731
        most_kept = 0 if self._precondition is None else _MOST_KEPT
        system = System(multiply, precondition, self._dots, ended, iterate.square, self._slack, measure, most_kept)
        gradient, limit = iterate.masked(iterate.gradient), self._settings.maxcg
        return truncated_cg(
            system, gradient, self._forcing, limit, radius, forcing_at if self._settings.forcing is None else None
        )

    def _at_step(self, iterate: NewtonPoint, p: Array, step: float) -> NewtonPoint:
        """Return the point at a step along p; the full step may have been evaluated in `_step`."""
        found, self._full_step = self._full_step, None
        return found or self._evaluated(self._shifted(iterate, p, step), iterate)

    def _shifted(self, iterate: NewtonPoint, p: Array, step: float) -> Array:
        if self._box is None:
            return iterate.x + step * p
        x = iterate.x + step * (p + iterate.projected_step * ~iterate.free)
        self._box.project(x)
        return x

    def _line_search(self, iterate: NewtonPoint) -> NewtonPoint | None:
        """Return a point along the Newton step with sufficient decrease; None if none is found."""
        found = self._step(iterate)
        step = 1.0
        for _ in range(self._settings.maxls if found is not None else 0):
            if self._evaluation_limit():
                break
            new = self._at_step(iterate, found.vector, step)  # type: ignore[union-attr]
            if new.finite and new.slope < 0.0 and self._is_sufficient(iterate, new, -_DECREASE * new.slope):
                return new
            if not new.finite:
                step *= RETREAT
            else:
                # The minimizer of the parabola through both values and the slope at the current point.
                rise = new.value - iterate.value - new.slope
                lowest = -0.5 * new.slope / rise if rise > 0.0 else 0.5
                step *= min(max(lowest, 0.1), 0.5)
        return None

    def _trust_region(self, iterate: NewtonPoint) -> NewtonPoint | None:
        """Return a point in a trust region with sufficient decrease; None if none is found."""
        if self._radius is None:
            gradient = iterate.masked(iterate.gradient)
            # The length of the preconditioned steepest descent step, in the preconditioner's norm.
            once = gradient if self._precondition is None else iterate.masked(self._precondition(gradient))
            self._radius = math.sqrt(max(self._dots((gradient, once))[0], 0.0))
        for _ in range(self._settings.maxls):
            found = None if self._evaluation_limit() else self._step(iterate, self._radius)
            if found is None:
                break
            trial = self._at_step(iterate, found.vector, 1.0)
            # With bounds, the decrease that the model predicts is computed for the projected step.
            expected = found.decrease
            if self._box is not None:
                moved = trial.x - iterate.x
                expected = -trial.slope - 0.5 * self._dots((moved, iterate.multiply(moved)))[0]
            ratio = (iterate.value - trial.value) / expected if trial.finite and expected > 0.0 else -math.inf
            falls = trial.finite and expected > 0.0 and self._is_sufficient(iterate, trial, _DECREASE * expected)
            # Differences at rounding level don't reduce the radius.
            if ratio < 0.25 and not (falls and ratio > 0.0 and expected <= _ROUNDING * abs(iterate.value)):
                self._radius = 0.25 * found.length
            elif ratio > 0.75 and found.on_boundary:
                self._radius = 2.0 * self._radius
            if falls:
                return trial
        return None

    def _is_sufficient(self, iterate: NewtonPoint, trial: NewtonPoint, required: float) -> bool:
        if trial.value <= iterate.value - required:
            return True
        # If the values are equal up to rounding, the gradients are compared.
        if trial.value > iterate.value + _ROUNDING * abs(iterate.value) or required > _ROUNDING * abs(iterate.value):
            return False
        self._measure(trial)
        return trial.norm < iterate.norm

    def _arrays(self, iterate: NewtonPoint) -> Iterator[tuple[str, np.ndarray]]:
        radius = math.nan if self._radius is None else self._radius
        yield "numbers", np.array([self._forcing, radius, self._norm_at_start, self._value_before, iterate.length])
        yield "counts", np.array([self.count, self._evaluation.products])

    def _restored(self, arrays: dict[str, np.ndarray], x: Array) -> NewtonPoint:
        iterate = self._evaluated(x, None)
        self._measure(iterate)
        self._forcing, radius, self._norm_at_start, self._value_before, iterate.length = arrays["numbers"].tolist()
        self._radius = None if math.isnan(radius) else radius
        self.count, self._evaluation.products = map(int, arrays["counts"].tolist())
        return iterate
