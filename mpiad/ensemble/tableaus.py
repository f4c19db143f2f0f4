"""Explicit Runge-Kutta methods as tables of numbers, and the facts that a step needs of them.

A table says all of a method: columns of arrays, kernels and adjoints of both read it, and know no method by its name. Each
method has a file of its own in `methods/`, with its published coefficients.

Each table ends with the derivative at the new state, which is the first stage of the next step. In the error estimate it
has a weight where a method is first-same-as-last, and none elsewhere: it then costs a call of f where a step is rejected.
So interpolants have the derivatives at both ends of a step, whatever the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.controller import Controller, IController

# Of sums of published decimals.
ROUNDING = 1e-13


@dataclass(frozen=True, eq=False)
class Tableau:
    """The coefficients of an explicit method; `explicit` makes it. There are few: each is equal to itself alone."""

    # Row i, from the second stage on: the weights of the stages before it. The last row gives the new state.
    a: tuple[tuple[float, ...], ...]
    c: tuple[float, ...]  # times of the stages, as parts of the step, in any order
    error: tuple[float, ...] | None  # weights of the error estimate, one for each stage; None where steps are fixed
    # Shape (stages, degree). Row i: coefficients of x, x², … in the weight of stage i at the part x of the step.
    dense: Array
    order: int  # of the solution that goes on
    embedded_order: int | None  # of the solution that it is compared with

    # Whether its stages are solutions of linear systems, with the Jacobian of f.
    implicit: ClassVar[bool] = False

    @property
    def takes_mass(self) -> bool:
        """Whether systems may have a mass matrix, a singular one too."""
        return False

    @cached_property
    def stages(self) -> int:
        """The number of stages, the last of which belongs to the next step."""
        return len(self.a) + 1

    @cached_property
    def error_order(self) -> int:
        """The order of the error estimate in the step: q of a step h is in proportion to h to this power."""
        return 1 + min(self.order, self.embedded_order or self.order)

    @property
    def calls(self) -> int:
        """How often f is called in a step."""
        return self.stages - 1

    @property
    def sums(self) -> tuple[tuple[float, ...], ...]:
        """The sums over stages that a step takes: in their arguments, and in the error."""
        return (*self.a, self.error or ())


def explicit(
    c: Sequence[float], a: Sequence[Sequence[float]], b: Sequence[float], error: Sequence[float] | None = None, *,
    order: int, embedded_order: int | None = None, dense: Array | None = None,
) -> Tableau:  # fmt: skip
    """Return the table of an explicit method as it is published.

    `c` are times of the stages, without the derivative at the new state, of which the first is 0; `a` has a row for each
    stage but the first: the weights of the stages before it. `b` are the weights of the stages in the new state, `error`
    the same less the weights of the embedded solution, with one more where that takes the derivative at the new state
    (first-same-as-last); none for fixed steps. `dense`, shape (stages, degree), has the coefficients of x, x², … in the
    weights of the stages, that of the derivative at the new state included; Hermite's cubic by default, of order 3. A
    ValueError where numbers are missing, or sums of weights aren't what they must be.
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
    dense = _hermite((*b, 0.0)) if dense is None else dense
    return Tableau(tuple(tuple(row) for row, _ in rows), (*c, 1.0), error, dense, order, embedded_order)


def _hermite(b: Sequence[float]) -> Array:
    """Return Hermite's cubic through both ends of a step, with the derivatives there."""
    weights = np.outer(b, [0.0, 3.0, -2.0])
    weights[0] += [1.0, -2.0, 1.0]
    weights[-1] += [0.0, -1.0, 1.0]
    return weights


@dataclass(frozen=True)
class Algorithm:
    """A Runge-Kutta method and how its steps are chosen."""

    controller: Controller = IController()
    tableau: ClassVar[Tableau]
