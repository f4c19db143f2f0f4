"""The limited memory of L-BFGS, with two passes over it and one reduction per iteration.

The first pass replaces the previous gradient by the newest gradient change, and computes the products of this change with
itself and all other rows. The products are summed over all ranks on the root, which computes and broadcasts the
coefficients of the direction. The second pass computes the direction. With m pairs and n variables, the passes read or
write (4m + 4) n numbers of the memory per iteration.

The products of the rows with the gradient are updated by adding the products with the newest change. They are computed from
the rows again only when the last step isn't stored as a pair, or the gradient is so small that rounding errors of the
updates would matter.

The two-loop recursion needs only scalar products of the steps s, the gradient changes y and the gradient g. The direction
-H g is a combination of these 2m + 1 vectors.

References
----------
.. [1] W. Chen, Z. Wang and J. Zhou, "Large-scale L-BFGS using MapReduce", NIPS 2014, algorithm 3.
.. [2] J. Nocedal, Math. Comp. 35 (1980), the recursion itself.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.optimize.sharded.vectors import HostVectors, Ring
from mpiad.optimize.totals import Totals
from mpiad.pytrees import put
from mpiad.transport.devices.device_arrays import arrays_of, copied

# If the gradient's norm decreases by a factor, the relative errors of its products grow by the same factor. Beyond this
# factor the products are computed again.
_DECREASE = 100.0
_TABLES = "lengths", "products", "with_gradient", "coefficients"  # the attributes that are part of the state


@dataclass(eq=False, slots=True)
class Point:
    """A point: this rank's variables, and scalars that are the same on all ranks; `LimitedMemory` has the gradient."""

    x: Array  # shape (n,)
    value: float = math.nan  # the objective
    norm: float = math.nan  # largest absolute entry of the (projected) gradient
    slope: float = math.nan  # of the objective along the direction, without the variables that a bound stopped
    finite: bool = False  # whether the value and all entries of the gradient are finite
    clipped: bool = False  # whether a bound stopped any variable in the step
    step: float = math.nan  # factor of the direction
    length: float = 0.0  # 2-norm of the step from the previous point, over all ranks
    range: float = math.inf  # distance to the nearest trial point of the last search at which the objective wasn't finite
    change_before: float = math.nan  # product of the step with the gradient at the previous point
    change_after: float = math.nan  # product of the step with the gradient at this point
    current: bool = False  # whether this is the current point of the memory
    stored: bool = False  # whether the memory stores a copy of the gradient


class LimitedMemory:
    """The last steps, gradient changes and gradients; with bounds, all products are sums over the free variables."""

    def __init__(self, ring: Ring, vectors: HostVectors, totals: Totals):
        self.ring, self.vectors, self.totals = ring, vectors, totals
        height = ring.height
        # The row of a step stores the direction; these factors convert the direction to the step.
        self._lengths = np.ones(height)
        self._products, self._with_gradient = np.zeros((height, height)), np.zeros(height)  # on the root
        self._coefficients, self._direction_computed = np.zeros(1), False
        self._largest_norm = 0.0  # largest gradient norm since the last computation of products from the rows

    def store_gradient(self, point: Point) -> None:
        """Copy the gradient of the last trial point to the unused row of its slot: the next trial overwrites it."""
        np.copyto(self.vectors.memory[self.ring.trial + 1], self.vectors.memory[self.ring.trial])
        point.stored = True

    def restore_gradient(self, point: Point) -> None:
        """Restore a stored gradient to the row for trial points."""
        if point.stored:
            np.copyto(self.vectors.memory[self.ring.trial], self.vectors.memory[self.ring.trial + 1])
            point.stored = False

    def gradient(self, point: Point) -> Array:
        """Return the gradient at the current point, or at the last trial point."""
        return copied(self.vectors.memory[self.ring.gradient if point.current else self.ring.trial])

    def update(self, new: Point, before: Point | None, stop: bool) -> tuple[float, float, bool]:
        """Make `new` the current point; return the next slope, the gradient's 2-norm, and whether any rank stops."""
        store = before is not None
        if store:
            self.ring.advance()
            self._lengths[self.ring.newest + 1] = new.step if self.vectors.box is None else 1.0
        elif not new.current:
            np.copyto(self.vectors.memory[self.ring.gradient], self.vectors.memory[self.ring.trial])
        new.current = True
        self._largest_norm = max(self._largest_norm, new.norm)
        due = self._largest_norm > _DECREASE * new.norm
        if due:
            self._largest_norm = new.norm
        recompute = due or not store
        if self.vectors.box is None:
            of_change, of_gradient, square = self.vectors.products(self.ring, store, recompute)
            parts = np.concatenate([of_change, of_gradient[:-1], [square]])
        else:
            products, other_slope = self.vectors.products_of_free(self.ring, new.x, new.norm, before.x if before else None)
            parts = np.append(products, other_slope)
        decision = self.totals.decide_on_root(
            np.append(parts, float(stop)), 2 * self.ring.count + 4, lambda sums: self._decide(sums, new, store, recompute)
        )
        *coefficients, slope, grad_norm, stopped = decision.tolist()
        self._coefficients, self._direction_computed = np.array(coefficients), False
        return slope, grad_norm, bool(stopped)

    def state(self) -> dict[str, np.ndarray]:
        """Return all arrays of the state; rows that are on the host aren't copied."""
        numbers = [self.ring.first, self.ring.count, self._largest_norm]
        vectors = {"rows": to_host(self.vectors.memory), "ring": np.array(numbers)}
        return {**vectors, **{name: getattr(self, f"_{name}") for name in _TABLES}}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore the result of `state`."""
        if (given := state["rows"].shape) != (expected := self.vectors.memory.shape):
            raise ValueError(
                f"minimize: the checkpoint's vectors have shape {given} instead of {expected}: it was written by another "
                "version of mpiad. Delete the files, or pass another one."
            )
        (self.vectors.memory[...],) = put([state["rows"]], [arrays_of(self.vectors.memory)])
        first, count, self._largest_norm = state["ring"].tolist()
        self.ring.first, self.ring.count = int(first), int(count)
        for name in _TABLES:
            setattr(self, f"_{name}", state[name])
        self._direction_computed = False

    def _decide(self, sums: np.ndarray, new: Point, store: bool, recompute: bool) -> np.ndarray:
        """Return the root's decision: the coefficients, the slope, the gradient's 2-norm, and whether to stop."""
        rows, stop, other_slope = self.ring.rows(), sums[-1], 0.0
        lengths = self._lengths[rows]
        if self.vectors.box is not None:
            other_slope = sums[-2]
            products = sums[:-2].reshape(len(rows), len(rows))
            with_gradient = products[-1]
        else:
            self._store_products(sums, rows, new, store, recompute)
            products, with_gradient = self._products[np.ix_(rows, rows)], self._with_gradient[rows]
        coefficients, slope = two_loop_recursion(products[:-1, :-1], with_gradient[:-1], float(with_gradient[-1]))
        return np.concatenate([coefficients * lengths, [slope + other_slope, np.sqrt(with_gradient[-1]), stop]])

    def _store_products(self, sums: np.ndarray, rows: np.ndarray, new: Point, store: bool, recompute: bool) -> None:
        """Store new products in the tables; products with a direction are scaled to the step."""
        lengths, old, with_gradient = self._lengths[rows], rows[:-1], self._with_gradient
        of_change, of_gradient = sums[: len(rows)] * lengths, sums[len(rows) : 2 * len(rows) - 1] * lengths[:-1]
        if store:
            change = self.ring.newest
            self._products[change, rows] = self._products[rows, change] = of_change
            with_gradient[old] += of_change[:-1]
            # The product of the step s with the gradient is the step length times the slope at the end of the line search.
            with_gradient[change], with_gradient[change + 1] = of_change[-1], new.step * new.slope
        if recompute:
            with_gradient[old] = of_gradient
        with_gradient[rows[-1]] = sums[2 * len(rows) - 1]

    def advance(self, current: Point, step: float, out: Array) -> None:
        """Write ``x + step * direction`` to `out`; the first call after `update` computes the direction."""
        ring, vectors = self.ring, self.vectors
        if not self._direction_computed:
            vectors.combine(ring.parts(), self._coefficients, ring.direction)
            if vectors.box is not None:
                vectors.set_direction_at_bounds(ring, current.x, current.norm)
            self._direction_computed = True
        vectors.advance(ring.direction, current.x, step, out)

    def measure(self, point: Point, origin: Point | None, gradient: Array) -> list[float]:
        """Copy the gradient of a trial point to its row; return the numbers of `HostVectors.store_trial_within`."""
        ring = self.ring
        if self.vectors.box is not None:
            return self.vectors.store_trial_within(ring, gradient, point.x, origin.x if origin else None)
        largest, slope, square = self.vectors.store_trial(gradient, ring.direction, ring.trial)
        return [largest, slope, 0.0, 0.0, 0.0 if origin is None else point.step**2 * square, 0.0]


def two_loop_recursion(products: np.ndarray, with_gradient: np.ndarray, square: float) -> tuple[np.ndarray, float]:
    """Return the coefficients of -H g, shape (2m + 1,), that of g last, and the slope g · (-H g).

    `products`, (2m, 2m), are the inner products of all y and s: y and s of pair j have rows 2j and 2j + 1, and the oldest
    pair is the first. Pairs without positive curvature are omitted. `with_gradient`, (2m,), are the products with g,
    and `square` is g · g.
    """
    least = sys.float_info.epsilon
    pairs = [j for j in range(len(products) // 2) if products[2 * j, 2 * j + 1] > least * products[2 * j, 2 * j]]
    inner = np.append(with_gradient, square)
    whole = np.vstack([products, with_gradient])  # one row per vector, one column per y and s
    coefficients, alphas = np.zeros(len(inner)), {}
    coefficients[-1] = -1.0
    for j in reversed(pairs):
        alphas[j] = coefficients @ whole[:, 2 * j + 1] / products[2 * j, 2 * j + 1]
        coefficients[2 * j] -= alphas[j]
    if pairs:
        y, s = 2 * pairs[-1], 2 * pairs[-1] + 1
        coefficients *= products[s, y] / products[y, y]  # the usual first inverse Hessian, s·y / y·y times the identity
    for j in pairs:
        beta = coefficients @ whole[:, 2 * j] / products[2 * j, 2 * j + 1]
        coefficients[2 * j + 1] += alphas[j] - beta
    return coefficients, float(coefficients @ inner)
