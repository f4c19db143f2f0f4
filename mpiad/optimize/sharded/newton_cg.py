"""An inexact Newton method for distributed variables; all ranks run the iteration and decide by the same numbers.

A step solves the Newton system by `truncated_cg`, with a tolerance that decreases with the gradient (Eisenstat and Walker).
A line search or a trust region shortens the step until the objective decreases enough. The norm of the gradient g is
√(gᵀ R⁻¹ g), with the matrix R of the user's inner product. If R is the inverse covariance of a prior, this norm doesn't
depend on the mesh.

With bounds, the system is restricted to the free variables. The others are set to their bounds, and points are projected
(Bertsekas's two-metric projection).

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
from typing import Any, NamedTuple, cast

import numpy as np

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.optimize.constraints import Box
from mpiad.optimize.evaluated_points import INTERRUPTED, RETREAT, Ending
from mpiad.optimize.iterates import ShardedIterates
from mpiad.optimize.sharded.convergence import ABNORMAL, EVALUATIONS, NOT_FINITE, ending_at
from mpiad.optimize.sharded.second_order import Derivatives, SecondOrderEvaluation
from mpiad.optimize.sharded.solver_state import StateFiles
from mpiad.transport.devices.device_arrays import arrays_of
from mpiad.transport.resources import vdot

# Conjugate gradients for a Newton step, ended early by a tolerance, by negative curvature, or by a trust region.
#
# The residual is measured like the gradient, in the user's inner product: in the norm of the preconditioner P it may be
# small although the gradient of the model isn't. The norm of the step is ‖p‖² = pᵀ P⁻¹ p. This norm and the product of the
# step with the direction are updated by recurrences, without P⁻¹.
#
# References
# ----------
# .. [1] T. Steihaug, "The conjugate gradient method and trust regions in large scale optimization", SIAM J. Numer. Anal. 20
#    (1983).
# .. [2] A. R. Conn, N. I. M. Gould and Ph. L. Toint, *Trust-Region Methods*, SIAM 2000, algorithm 7.5.1.
# .. [3] J. Nocedal and S. J. Wright, *Numerical Optimization*, 2nd ed., Springer 2006, algorithms 7.1 and 7.2.


class System(NamedTuple):
    """A Newton system H p = -g."""

    multiply: Callable[[Array], Array]  # this rank's part of the product with H; collective
    precondition: Callable[[Array], Array]  # this rank's part of the product with P; collective
    dot: Callable[[Array, Array], float]  # the product of two vectors over all ranks, bitwise the same on all
    ended: Callable[[], bool]  # whether a rank received SIGTERM; the same on all ranks
    square: float  # squared norm of the gradient in the inner product
    # The expensive `measure` isn't called while the squared norm in P exceeds this multiple of its target.
    slack: float = math.inf
    measure: Callable[[Array], float] | None = None  # squared norm in the inner product; None: r · P r; collective


class Step(NamedTuple):
    """The result of `truncated_cg`."""

    vector: Array  # this rank's part
    decrease: float  # of the quadratic model
    length: float  # in the preconditioner's norm
    bound: bool  # whether the step ends at the boundary of the trust region


def truncated_cg(system: System, gradient: Array, forcing: float, limit: int, radius: float = math.inf) -> Step | None:
    """Return an approximate minimizer of gᵀp + ½ pᵀHp within a radius; None if a rank received SIGTERM.

    The norm of the residual must fall by the factor `forcing`, in at most `limit` products. If the radius is infinite,
    negative curvature ends the iteration with the step so far, or with the steepest descent direction if there is none.
    Raise a ValueError on all ranks if the preconditioner isn't positive definite, or a product isn't finite.
    """
    p, residual = gradient * 0.0, gradient.copy()
    z = system.precondition(residual)
    square = _positive(system, system.dot(residual, z))
    target, near = forcing**2 * system.square, system.slack * forcing**2 * square
    direction, length, across, along, decrease = -z, 0.0, 0.0, square, 0.0
    for count in range(limit):
        product = system.multiply(direction)
        curvature = system.dot(direction, product)
        if not math.isfinite(curvature):
            raise ValueError(
                "minimize: a product with the Hessian isn't finite, but the objective and its gradient are. Check the "
                "second derivatives of fun, or hessp."
            )
        step = square / curvature if curvature > 0.0 else math.inf
        if radius < math.inf and length + step * (2.0 * across + step * along) >= radius**2:
            step = (math.sqrt(max(across**2 + along * (radius**2 - length), 0.0)) - across) / along
            p += step * direction
            return Step(p, decrease + step * (square - 0.5 * step * curvature), radius, True)
        if curvature <= 0.0:
            # The model has no minimizer; the line search chooses the length of a steepest descent step.
            return Step(direction, square, math.sqrt(along), False) if count == 0 else _ended(p, decrease, length)
        p += step * direction
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
    return _ended(p, decrease, length)


def _ended(p: Array, decrease: float, length: float) -> Step:
    return Step(p, decrease, math.sqrt(length), False)


def _positive(system: System, square: float) -> float:
    if square >= 0.0:
        return square
    name = "inner product" if system.measure is None else "preconditioner"  # one operator is both
    raise ValueError(
        f"minimize: the {name} must be symmetric and positive definite, but r · P r = {square:.3e} for a residual r."
    )


GRADIENT = Ending(0, "CONVERGENCE: the gradient's norm is at most gtol, or grtol times the first one.")
# Required fraction of the decrease that the first- or second-order model predicts.
_DECREASE = 1e-4
_ROUNDING = 10.0 * sys.float_info.epsilon
# Parameters of Eisenstat and Walker: the first and largest forcing term, gamma, alpha, and the threshold of the safeguard.
_LARGEST, _GAMMA, _ALPHA, _KEPT = 0.5, 0.9, 2.0, 0.1
# Tolerance of the relative difference between g·P(Pg) and Pg·Pg; iterative solvers aren't exactly symmetric.
_ASYMMETRY = 1e-3
_NEAR = 1.5  # see `System.slack`
_EVERYWHERE = slice(None)


class NewtonPoint:
    """A point x: this rank's variables, shape (n,), and known quantities; scalars are the same on all ranks.

    - `finite`: whether the value and all entries of the gradient are finite.
    - `free`: mask of the free variables; None for all.
    - `projected_step`: with bounds, P(x - g) - x.
    - `norm`: norm of the gradient in the inner product, NaN until it is computed. `square`: squared norm of its free part.
    - `length`, `slope`: length of the step from the previous point, and derivative at the previous point along the step.
    """

    def __init__(self, x: Array, found: Derivatives):
        self.x, self.value, self.gradient, self.multiply = x, found.value, found.gradient, found.multiply
        self.finite, self.free, self.projected_step = False, cast(Any, None), cast(Any, None)
        self.norm, self.square, self.length, self.slope = math.nan, math.nan, 0.0, 0.0

    def masked(self, vector: Array) -> Array:
        """Return a vector with zeros for the variables that are held at a bound."""
        return vector if self.free is None else vector * self.free


class NewtonCG:
    """The iteration; `box` are the bounds, on the device of the variables, on all ranks or none."""

    def __init__(self, evaluation: SecondOrderEvaluation, iterates: ShardedIterates, files: StateFiles, box: Box | None):
        self._evaluation, self._totals, self._iterates, self._files = evaluation, evaluation.totals, iterates, files
        self._settings, self._box = evaluation.settings, box
        settings = evaluation.settings
        self._represent = evaluation.on_vectors(settings.inner_product, "inner_product")
        self._precondition = evaluation.on_vectors(settings.preconditioner, "preconditioner") or self._represent
        # If both are methods of one object, such as a prior, they are similar operators, and `inner_product` is expensive.
        owners = [getattr(operator, "__self__", None) for operator in (settings.preconditioner, settings.inner_product)]
        self._slack = _NEAR if owners[0] is owners[1] is not None else math.inf
        self.count, self._iteration = 0, 0
        self._forcing, self._radius, self._first = _LARGEST, settings.radius, math.nan
        self._value_before, self._stopped = math.inf, False
        self._lower = self._along_a_line if settings.globalization == "line search" else self._within_a_region

    def run(self, start: Array) -> tuple[NewtonPoint, Ending]:
        """Minimize from this rank's start, shape (n,), which is overwritten; return the last point and the ending."""
        found = self._files.take()
        if found is not None:
            return self._descend(self._restored(found, start))
        if self._box is not None:
            self._box.project(start)
        here = self._evaluated(start, None)
        if here.finite:
            self._measure(here)
            self._require_symmetric(here)
            self._first = here.norm
        self._iterates.note(here, self.count)
        return self._descend(here) if here.finite else (here, NOT_FINITE)

    def _descend(self, here: NewtonPoint) -> tuple[NewtonPoint, Ending]:
        while True:
            ending = self._ending(here) or (INTERRUPTED if self._files.interrupted else None)
            self._keep(here, ending)
            if ending is not None:
                return here, ending
            found = self._lower(here)
            if found is None:
                ending = INTERRUPTED if self._files.interrupted else self._exhausted() or ABNORMAL
                self._keep(here, ending)
                return here, ending
            self._iteration, self._value_before = self._iteration + 1, here.value
            self._measure(found)
            # Eisenstat and Walker's choice 2: the forcing term depends on the last step's reduction of the gradient.
            chosen, kept = _GAMMA * (found.norm / here.norm) ** _ALPHA, _GAMMA * self._forcing**_ALPHA
            self._forcing = min(_LARGEST, max(chosen, kept) if kept > _KEPT else chosen)
            self._stopped = self._iterates.report(found, self.count)
            here = found

    def _ending(self, here: NewtonPoint) -> Ending | None:
        settings = self._settings
        if here.norm <= max(settings.gtol, settings.grtol * self._first):
            return GRADIENT

        def stopped() -> bool:
            return self._iterates.anyone and self._sums(float(self._stopped))[0] > 0.0

        return ending_at(self._value_before, here.value, stopped, (self._iteration, self.count), settings)

    def _exhausted(self) -> Ending | None:
        return EVALUATIONS if self.count >= self._settings.maxfun else None

    def _evaluated(self, x: Array, here: NewtonPoint | None) -> NewtonPoint:
        """Evaluate the point x; `here` is the previous point."""
        self.count += 1
        point = NewtonPoint(x, self._evaluation.at(x))
        with np.errstate(over="ignore", invalid="ignore"):  # a trial point may not be finite
            moved = None if here is None else x - here.x
            terms = [0.0, 0.0] if moved is None else [_dot(moved, moved), _dot(here.gradient, moved)]  # type: ignore[union-attr]
            largest = float(to_host(np.max(np.abs(point.gradient)))) if x.size else 0.0
        broken = not math.isfinite(largest)
        square, point.slope, any_broken, point.value = self._totals.of(terms, [float(broken)], [point.value])
        point.length, point.finite = math.sqrt(square), not any_broken and math.isfinite(point.value)
        return point

    def _measure(self, point: NewtonPoint) -> None:
        """Compute the free variables and the gradient's norm."""
        if not math.isnan(point.norm):
            return
        held = 0.0
        if self._box is not None:
            point.projected_step = self._box.projected_step(point.x, point.gradient, _EVERYWHERE)
            size = float(to_host(np.max(np.abs(point.projected_step)))) if point.x.size else 0.0
            (size,) = self._totals.of([], [size], [])
            point.free = self._box.free(point.x, point.gradient, size, _EVERYWHERE)
            # The norm combines the projected steps of held variables and the gradient of free ones.
            held = _dot(point.projected_step, point.projected_step * ~point.free)
        gradient = point.masked(point.gradient)
        represented = gradient if self._represent is None else point.masked(self._represent(gradient))
        held, square = self._sums(held, _dot(gradient, represented))
        if not 0.0 <= square < math.inf:
            raise ValueError(
                "minimize: the inner product must be symmetric and positive definite, but with its inverse R⁻¹ and the "
                f"gradient g, g · R⁻¹ g = {square:.3e}."
            )
        point.norm, point.square = math.sqrt(held + square), square

    def _require_symmetric(self, point: NewtonPoint) -> None:
        for name, operator in (("inner product", self._represent), ("preconditioner", self._precondition)):
            if operator is not None and not (name == "preconditioner" and operator is self._represent):
                once = operator(point.gradient)
                twice = operator(once)
                pairs = (point.gradient, twice), (once, once), (point.gradient, point.gradient), (twice, twice)
                one, other, *squares = self._sums(*(_dot(a, b) for a, b in pairs))
                if not abs(one - other) <= _ASYMMETRY * math.sqrt(squares[0] * squares[1]):
                    raise ValueError(
                        f"minimize: the {name} must be symmetric, but g · P (P g) = {one:.6e} and P g · P g = {other:.6e} "
                        "for the gradient g at x0."
                    )

    def _sums(self, *local: float) -> list[float]:
        return self._totals.decided(np.array(local), len(local), lambda sums: sums).tolist()

    def _step(self, here: NewtonPoint, radius: float = math.inf) -> Step | None:
        def by(operator: Callable | None) -> Callable[[Array], Array]:
            return lambda r: r if operator is None else here.masked(operator(r))

        represent = by(self._represent)

        def multiply(v: Array) -> Array:
            return here.masked(here.multiply(v))

        def dot(a: Array, b: Array) -> float:
            return self._sums(_dot(a, b))[0]

        measure = None if self._represent is self._precondition else lambda r: dot(r, represent(r))
        ended = lambda: self._files.interrupted  # noqa: E731
        system = System(multiply, by(self._precondition), dot, ended, here.square, self._slack, measure)
        return truncated_cg(system, here.masked(here.gradient), self._forcing, self._settings.maxcg, radius)

    def _moved(self, here: NewtonPoint, p: Array, step: float) -> Array:
        if self._box is None:
            return here.x + step * p
        x = here.x + step * (p + here.projected_step * ~here.free)
        self._box.project(x)
        return x

    def _along_a_line(self, here: NewtonPoint) -> NewtonPoint | None:
        """Return a point along the Newton step with sufficient decrease; None if there is none."""
        found = self._step(here)
        step = 1.0
        for _ in range(self._settings.maxls if found is not None else 0):
            if self._exhausted():
                break
            new = self._evaluated(self._moved(here, found.vector, step), here)  # type: ignore[union-attr]
            if new.finite and new.slope < 0.0 and self._falls(here, new, -_DECREASE * new.slope):
                return new
            if not new.finite:
                step *= RETREAT
            else:
                # The minimizer of the parabola through both values and the first slope.
                rise = new.value - here.value - new.slope
                lowest = -0.5 * new.slope / rise if rise > 0.0 else 0.5
                step *= min(max(lowest, 0.1), 0.5)
        return None

    def _within_a_region(self, here: NewtonPoint) -> NewtonPoint | None:
        """Return a point in a trust region with sufficient decrease; None if there is none."""
        if self._radius is None:
            gradient = here.masked(here.gradient)
            # The length of the preconditioned steepest descent step, in the preconditioner's norm.
            once = gradient if self._precondition is None else here.masked(self._precondition(gradient))
            self._radius = math.sqrt(max(self._sums(_dot(gradient, once))[0], 0.0))
        for _ in range(self._settings.maxls):
            found = None if self._exhausted() else self._step(here, self._radius)
            if found is None:
                break
            there = self._evaluated(self._moved(here, found.vector, 1.0), here)
            # With bounds, the decrease that the model predicts is computed for the projected step.
            expected = found.decrease if self._box is None else self._expected(here, there)
            ratio = (here.value - there.value) / expected if there.finite and expected > 0.0 else -math.inf
            falls = there.finite and expected > 0.0 and self._falls(here, there, _DECREASE * expected)
            # Differences at rounding level don't reduce the radius.
            if ratio < 0.25 and not (falls and ratio > 0.0 and expected <= _ROUNDING * abs(here.value)):
                self._radius = 0.25 * found.length
            elif ratio > 0.75 and found.bound:
                self._radius = 2.0 * self._radius
            if falls:
                return there
        return None

    def _expected(self, here: NewtonPoint, there: NewtonPoint) -> float:
        """Return the decrease that the model predicts for the step from `here` to `there`."""
        moved = there.x - here.x
        return -there.slope - 0.5 * self._sums(_dot(moved, here.multiply(moved)))[0]

    def _falls(self, here: NewtonPoint, there: NewtonPoint, enough: float) -> bool:
        if there.value <= here.value - enough:
            return True
        # Values that are equal up to rounding: the gradients are compared.
        if there.value > here.value + _ROUNDING * abs(here.value) or enough > _ROUNDING * abs(here.value):
            return False
        self._measure(there)
        return there.norm < here.norm

    def _keep(self, here: NewtonPoint, ending: Ending | None) -> None:
        """Write the state if it is due; all ranks call this."""
        if self._files.due(self._iteration, ending is not None):
            self._files.write(self._iteration, self._arrays(here))

    def _arrays(self, here: NewtonPoint) -> Iterator[tuple[str, Any]]:
        radius = math.nan if self._radius is None else self._radius
        yield "x", to_host(here.x)
        yield "numbers", np.array([self._forcing, radius, self._first, self._value_before, here.length])
        yield "counts", np.array([self.count, self._evaluation.products])
        yield "history", self._iterates.record.table()

    def _restored(self, found: dict[str, np.ndarray], start: Array) -> NewtonPoint:
        """Restore the state of the solve from the arrays of `_arrays`; return the point, evaluated again."""
        xp = arrays_of(start)
        start[...] = found["x"] if xp is None else xp.to_device(found["x"])
        here = self._evaluated(start, None)
        self._measure(here)
        self._forcing, radius, self._first, self._value_before, here.length = found["numbers"].tolist()
        self._radius = None if math.isnan(radius) else radius
        self._iteration = self._files.iteration
        self.count, self._evaluation.products = map(int, found["counts"].tolist())
        self._iterates.record.restore(found["history"])
        return here


def _dot(a: Array, b: Array) -> float:
    return float(to_host(np.sum(a * b))) if not isinstance(a, np.ndarray) else float(vdot(a, b))
