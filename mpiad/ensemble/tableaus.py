"""Explicit Runge-Kutta methods as tables of numbers, and the properties of them that a step needs.

A table defines a method completely: columns of arrays, kernels and adjoints of both use it, and depend on no method by its
name. Each method has a file of its own in `methods/`, with its published coefficients.

Each table ends with the derivative at the new state, which is the first stage of the next step, so that interpolants have
the derivatives at both ends of a step, whatever the method. In the error estimate this stage has a weight if the method is
first-same-as-last, and none otherwise: it then costs an additional call of f if a step is rejected.
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
    """The coefficients of an explicit method, created by `explicit`. Tables compare by identity."""

    # Row i, from the second stage on: the weights of the stages before it. The last row gives the new state.
    a: tuple[tuple[float, ...], ...]
    c: tuple[float, ...]  # times of the stages, as fractions of the step, in any order
    error: tuple[float, ...] | None  # weights of the error estimate, one per stage; None for fixed steps
    # Shape (stages, degree). Row i: coefficients of x, x², … in the weight of stage i at the fraction x of the step.
    dense: Array
    order: int  # of the solution from which the next step starts
    embedded_order: int | None  # of the solution that it is compared with

    # Whether its stages are solutions of linear systems with the Jacobian of f.
    implicit: ClassVar[bool] = False

    @property
    def takes_mass(self) -> bool:
        """Whether systems may have a mass matrix, including a singular one."""
        return False

    @cached_property
    def stages(self) -> int:
        """The number of stages, the last of which belongs to the next step."""
        return len(self.a) + 1

    @cached_property
    def error_order(self) -> int:
        """The order of the error estimate: the error q of a step of size h is proportional to h to this power."""
        return 1 + min(self.order, self.embedded_order or self.order)

    @property
    def calls(self) -> int:
        """The number of calls of f per step."""
        return self.stages - 1

    @property
    def sums(self) -> tuple[tuple[float, ...], ...]:
        """The sums over stages in a step: for their arguments, and for the error."""
        return (*self.a, self.error or ())


def explicit(
    c: Row, a: Rows, b: Row, error: Row | None = None, *, order: int, embedded_order: int | None = None, dense: Array = None
) -> Tableau:
    """Return the table of an explicit method in its published form.

    `c` are the times of the stages, of which the first is 0, without the derivative at the new state; `a` has a row for
    each stage but the first: the weights of the stages before it. `b` are the weights of the stages in the new state,
    `error` the same minus the weights of the embedded solution, with one more if that uses the derivative at the new state
    (first-same-as-last); None for fixed steps. `dense`, shape (stages, degree), has the coefficients of x, x², … in the
    weights of the stages, including the derivative at the new state; by default Hermite's cubic, of order 3. Raises a
    ValueError if numbers are missing, or sums of weights violate the consistency conditions.
    """
    if len(a) != len(c) - 1 or len(b) != len(c):
        raise ValueError(f"the table has {len(a)} rows for {len(c)} stages, and {len(b)} weights b")
    rows = list(zip((*a, b), (*c[1:], 1.0)))
    for i, (row, time) in enumerate(rows, 1):
        if len(row) > i or abs(sum(row) - time) > ROUNDING * (1 + sum(map(abs, row))):
            raise ValueError(
                f"row {i} of the table, {row}, sums up to {sum(row)!r}, and must have {i} weights whose sum is its time "
                f"{time!r}: is a number missing, or a digit wrong?"
            )
    if error is not None:
        if len(error) - len(b) not in (0, 1) or abs(sum(error)) > ROUNDING or embedded_order is None:
            raise ValueError(
                f"the error has {len(error)} weights with the sum {sum(error)!r}, of a solution of order {embedded_order}; "
                f"expected are {len(b)}, or one more for the derivative at the new state, with the sum 0, and the order"
            )
        error = (*error, 0.0)[: len(b) + 1]
    if dense is None:
        dense = np.outer((*b, 0.0), [0.0, 3.0, -2.0])
        dense[0] += [1.0, -2.0, 1.0]
        dense[-1] += [0.0, -1.0, 1.0]
    return Tableau(tuple(tuple(row) for row, _ in rows), (*c, 1.0), error, dense, order, embedded_order)


@dataclass(frozen=True)
class Algorithm:
    """A Runge-Kutta method and its step size controller."""

    controller: PIController = PIController(beta=0.0)
    tableau: ClassVar[Tableau]


# Rosenbrock methods as tables of numbers.
#
# A step of size h from u at time t factors W = I/γ - h J once, with J = ∂f/∂u and T = ∂f/∂t there, and solves with it for
# the stages, one after the other:
#
#     W k_i = f(u + h Σ a_ij k_j, t + c_i h) + Σ C_ij k_j + d_i h T,    u_new = u + h Σ b_i k_i.
#
# This is the form that codes use (Hairer and Wanner, Solving Ordinary Differential Equations II, IV.7: their u_i is h k_i).
# It needs no product with J, and a step of size zero needs no special case. For M u' = f, W is M/γ - h J, and the sum of
# C_ij k_j is multiplied by M.
#
# All other code treats such a table as that of a Runge-Kutta method: its stages are preceded by f at the present state and
# followed by f at the new one, and error estimate and interpolant are sums over the stages.


@dataclass(frozen=True, eq=False)
class RosenbrockTableau(Tableau):
    """The coefficients of a Rosenbrock method, created by `rosenbrock`."""

    gamma: float
    coupling: tuple[tuple[float, ...], ...]  # row i: the weights C of the stages before stage i + 1 in its right-hand side
    slopes: tuple[float, ...]  # the weights d of h ∂f/∂t there

    implicit: ClassVar[bool] = True

    @cached_property
    def ends_at_new_state(self) -> bool:
        """Whether f at the last stage's argument equals that at the new state, and needn't be called again."""
        row = self.a[-2]
        return self.c[-2] == 1 and self.a[-1] == (*row, 0.0)

    @property
    def takes_mass(self) -> bool:
        """Whether it is stiffly accurate: the new state is the last argument plus h times its stage."""
        return self.a[-1] == (*self.a[-2], 1.0)

    @property
    def calls(self) -> int:
        """The number of calls of f per step."""
        return len(self.coupling) - self.ends_at_new_state

    @property
    def sums(self) -> tuple[tuple[float, ...], ...]:
        """The sums over stages: for their arguments, for their right-hand sides, for the error."""
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

    `c` are the times of the stages, of which the first is 0; `a` and `coupling` have a row for each stage but the first:
    the weights of the stages before it in its argument, and in its right-hand side. `slopes` are the weights of h ∂f/∂t,
    `b` those of the stages in the new state, `error` the same minus those of the embedded solution. `dense`, shape (stages,
    degree), has the coefficients of x, x², … in the weights of the stages at the fraction x of the step. Raises a
    ValueError if numbers are missing, or sums of weights violate the consistency conditions.
    """
    count = len(c)
    # For u' = 1 each stage is the sum of its row of Γ, which is its weight of h ∂f/∂t.
    expected = [(row, time) for row, time in zip(((), *a), c)]
    expected += [(row, slope / gamma - 1) for row, slope in zip(((), *coupling), slopes)]
    expected += [(b, 1.0), (error, 0.0)]
    for row, value in expected:
        found = sum(weight * slope for weight, slope in zip(row, slopes))
        if abs(found - value) > ROUNDING * (1 + sum(map(abs, row))):
            raise ValueError(
                f"the row {row} of the table, times the weights {tuple(slopes)} of ∂f/∂t, sums up to {found!r}, and must "
                f"to {value!r}: is a number missing, or a digit wrong?"
            )
    lengths = [len(slopes), len(b), len(error), len(dense), len(a) + 1, len(coupling) + 1]
    if lengths != 6 * [count] or any(len(rows[i]) != i + 1 for rows in (a, coupling) for i in range(count - 1)):
        raise ValueError(
            f"the table has {count} times c, and {lengths} slopes, b, error, dense, and rows of a and coupling: all must "
            f"be {count}, and row i have i weights"
        )
    # f at the present state is prepended, with zero weights in all sums.
    shifted = [(0.0, *row) for row in ((), *a, b)]
    padded, coupled = np.pad(dense, ((1, 1), (0, 0))), tuple((0.0, *row) for row in ((), *coupling))
    weights = tuple(shifted), (0.0, *c, 1.0), (0.0, *error, 0.0), padded
    return RosenbrockTableau(*weights, order, embedded_order, gamma, coupled, tuple(slopes))
