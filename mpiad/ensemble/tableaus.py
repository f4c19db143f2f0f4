"""Runge-Kutta and Rosenbrock methods as tables of coefficients.

A table defines a method completely: the NumPy solver, kernels and adjoints use it, and refer to no method by name. Each
method has a file in `methods/` with its published coefficients.

The last stage of each table is f at the new state, which is the first stage of the next step, so interpolants of all
methods can use the derivatives at both ends of a step. If a method isn't first-same-as-last, this stage has no weight in
the error estimate, and costs an additional call of f if a step is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeAlias

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.controller import PIController

Row: TypeAlias = Sequence[float]
Rows: TypeAlias = Sequence[Row]
# Tolerance for sums of published decimals.
ROUNDING = 1e-13


@dataclass(frozen=True, eq=False)
class Tableau:
    """The coefficients of an explicit method, created by `explicit`; compared by identity."""

    # Row i: the weights of stages in the argument of stage i + 1. The last row gives the new state.
    a: tuple[tuple[float, ...], ...]
    c: tuple[float, ...]  # times of the stages, as fractions of the step, in any order
    error: tuple[float, ...] | None  # weights of the error estimate, one per stage; None for fixed steps
    # Shape (stages, degree). Row i: coefficients of x, x², … in the weight of stage i at the fraction x of the step.
    dense: Array
    order: int  # of the solution from which the next step starts
    embedded_order: int | None  # of the embedded solution, with which the error is estimated

    implicit: ClassVar[bool] = False  # whether stages are solutions of linear systems with the Jacobian of f

    @property
    def takes_mass(self) -> bool:
        """Whether the method supports mass matrices, including singular ones."""
        # It is stiffly accurate: the new state is the last argument plus h times its stage.
        return self.implicit and self.a[-1] == (*self.a[-2], 1.0)

    @cached_property
    def stages(self) -> int:
        """The number of stages; the last stage is the first stage of the next step."""
        return len(self.a) + 1

    @cached_property
    def error_order(self) -> int:
        """The order of the error estimate, which is proportional to the step size to this power."""
        return 1 + min(self.order, self.embedded_order or self.order)

    @cached_property
    def interpolating(self) -> slice:
        """The range of the stages that have weights in the interpolant."""
        stages = np.flatnonzero(self.dense.any(axis=1))
        return slice(int(stages[0]), int(stages[-1]) + 1)

    @property
    def calls(self) -> int:
        """The number of calls of f per step."""
        return self.stages - 1

    @property
    def sums(self) -> tuple[tuple[float, ...], ...]:
        """The weights of all sums over stages in a step: for arguments, and for the error."""
        return (*self.a, self.error or ())


def explicit(
    c: Row, a: Rows, b: Row, error: Row | None = None, *, order: int, embedded_order: int | None = None, dense: Array = None
) -> Tableau:
    """Return the table of an explicit method in its published form.

    - `c`: the times of the stages as fractions of the step, without that of f at the new state; the first is 0.
    - `a`: for each stage but the first, the weights of earlier stages.
    - `b`: the weights of the stages in the new state.
    - `error`: `b` minus the weights of the embedded solution, with one more weight if the embedded solution uses f at the
      new state (first-same-as-last); None for fixed steps.
    - `dense`: shape (stages, degree), including f at the new state; the coefficients of x, x², … in the weights of the
      stages at the fraction x of the step; by default those of cubic Hermite interpolation, of order 3.

    Raises ValueError if numbers are missing, or sums of weights violate the consistency conditions.
    """
    if len(a) != len(c) - 1 or len(b) != len(c):
        raise ValueError(f"the table has {len(a)} rows for {len(c)} stages, and {len(b)} weights b")
    rows = list(zip((*a, b), (*c[1:], 1.0)))
    for i, (row, time) in enumerate(rows, 1):
        _require_sum(f"row {i}", row, i * [1.0], time)
    if error is not None:
        if len(error) - len(b) not in (0, 1) or abs(sum(error)) > ROUNDING or embedded_order is None:
            raise ValueError(
                f"the error has {len(error)} weights with the sum {sum(error)!r}, and embedded_order={embedded_order}: it "
                f"must have {len(b)} weights, or one more for f at the new state, with the sum 0, and an embedded_order"
            )
        error = (*error, 0.0)[: len(b) + 1]
    if dense is None:
        dense = np.outer((*b, 0.0), [0.0, 3.0, -2.0])
        dense[0] += [1.0, -2.0, 1.0]
        dense[-1] += [0.0, -1.0, 1.0]
    return Tableau(tuple(tuple(row) for row, _ in rows), (*c, 1.0), error, dense, order, embedded_order)


def _require_sum(name: str, row: Row, factors: Row, value: float) -> None:
    """Raise a ValueError if a row is longer than `factors`, or its weights times the factors don't sum up to a value."""
    total = sum(weight * factor for weight, factor in zip(row, factors))
    if len(row) > len(factors) or abs(total - value) > ROUNDING * (1 + sum(map(abs, row))):
        raise ValueError(
            f"{name} of the table, {row}, must have at most {len(factors)} weights, whose sum (times {factors}) is "
            f"{value!r}, but sums up to {total!r}: is a number missing, or a digit wrong?"
        )


@dataclass(frozen=True)
class Algorithm:
    """A Runge-Kutta or Rosenbrock method with its step size controller."""

    controller: PIController = PIController(beta=0.0)
    tableau: ClassVar[Tableau]


# A Rosenbrock step of size h from u at time t factors W = I/γ - h J once, with J = ∂f/∂u and T = ∂f/∂t at (u, t), and
# solves linear systems with W for the stages, one after the other:
#
#     W k_i = f(u + h Σ a_ij k_j, t + c_i h) + Σ C_ij k_j + d_i h T,    u_new = u + h Σ b_i k_i.
#
# In this form (Hairer and Wanner, Solving Ordinary Differential Equations II, IV.7, with u_i = h k_i) no product with J is
# needed, and a step of size zero is no special case. For M u' = f, W is M/γ - h J, and the sum of C_ij k_j is multiplied
# by M. In the table the stages k_i are preceded by f at the current state, and followed by f at the new state, as in
# Runge-Kutta methods. The error estimate and the interpolant are sums over all these stages.


@dataclass(frozen=True, eq=False)
class RosenbrockTableau(Tableau):
    """The coefficients of a Rosenbrock method, created by `rosenbrock`."""

    gamma: float
    coupling: tuple[tuple[float, ...], ...]  # row i: the weights C of stages in the right-hand side of stage i + 1
    slopes: tuple[float, ...]  # the weights d of h ∂f/∂t in the right-hand sides

    implicit: ClassVar[bool] = True

    @cached_property
    def ends_at_new_state(self) -> bool:
        """Whether the new state is the argument of the last stage k_i."""
        row = self.a[-2]
        return self.c[-2] == 1 and self.a[-1] == (*row, 0.0)

    @property
    def calls(self) -> int:
        """The number of calls of f per step."""
        return len(self.coupling) - self.ends_at_new_state

    @property
    def sums(self) -> tuple[tuple[float, ...], ...]:
        """The weights of all sums over stages in a step: for arguments, right-hand sides, and the error."""
        return (*self.a, *self.coupling, self.error or ())


def rosenbrock(
    gamma: float,
    c: Row,
    a: Rows,
    coupling: Rows,
    slopes: Row,
    b: Row,
    error: Row,
    dense: Array,
    *,
    order: int,
    embedded_order: int,
) -> RosenbrockTableau:
    """Return the table of a Rosenbrock method in its published form.

    - `c`: the times of the stages as fractions of the step; the first is 0.
    - `a`, `coupling`: for each stage but the first, the weights of earlier stages in its argument and right-hand side.
    - `slopes`: the weights of h ∂f/∂t in the right-hand sides.
    - `b`: the weights of the stages in the new state. `error`: `b` minus the weights of the embedded solution.
    - `dense`: shape (stages, degree); the coefficients of x, x², … in the weights of the stages at the fraction x.

    Raises ValueError if numbers are missing, or sums of weights violate the consistency conditions.
    """
    count = len(c)
    # The sum of a row of the matrix Γ is both the stage for u' = 1 and the weight of h ∂f/∂t in this stage.
    expected = [(row, time) for row, time in zip(((), *a), c)]
    expected += [(row, slope / gamma - 1) for row, slope in zip(((), *coupling), slopes)]
    for row, value in [*expected, (b, 1.0), (error, 0.0)]:
        _require_sum("a row", row, slopes, value)
    lengths = [len(slopes), len(b), len(error), len(dense), len(a) + 1, len(coupling) + 1]
    if lengths != 6 * [count] or any(len(rows[i]) != i + 1 for rows in (a, coupling) for i in range(count - 1)):
        raise ValueError(
            f"the table has {count} entries of c, and {lengths} of slopes, b, error, dense and, counting one more, a and "
            f"coupling: all numbers must be {count}, and row i must have i weights"
        )
    # Prepend f at the current state, with zero weights in all sums.
    shifted = [(0.0, *row) for row in ((), *a, b)]
    padded, coupled = np.pad(dense, ((1, 1), (0, 0))), tuple((0.0, *row) for row in ((), *coupling))
    weights = tuple(shifted), (0.0, *c, 1.0), (0.0, *error, 0.0), padded
    return RosenbrockTableau(*weights, order, embedded_order, gamma, coupled, tuple(slopes))
