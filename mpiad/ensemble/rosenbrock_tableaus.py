"""Rosenbrock methods as tables of numbers.

A step of size h from u at time t factors W = I/γ - h J once, with J = ∂f/∂u and T = ∂f/∂t there, and solves with it for the
stages, one after the other:

    W k_i = f(u + h Σ a_ij k_j, t + c_i h) + Σ C_ij k_j + d_i h T,    u_new = u + h Σ b_i k_i.

That is the form in which codes have them (Hairer and Wanner, Solving Ordinary Differential Equations II, IV.7: their u_i is
h k_i). No product with J is taken in it, and a step of size zero is one like all others. Of M u' = f, W is M/γ - h J, and M
stands before the sum of C_ij k_j.

To all others such a table is that of a Runge-Kutta method: in front of its stages stands f at the present state, behind
them that at the new one, and error estimate and interpolant are sums over the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.tableaus import ROUNDING, Tableau


@dataclass(frozen=True, eq=False)
class RosenbrockTableau(Tableau):
    """The coefficients of a Rosenbrock method; `rosenbrock` makes it."""

    gamma: float
    coupling: tuple[tuple[float, ...], ...]  # row i: the weights C of the stages before stage i + 1 in its right-hand side
    slopes: tuple[float, ...]  # the weights d of h ∂f/∂t there

    implicit: ClassVar[bool] = True

    @cached_property
    def ends_at_new_state(self) -> bool:
        """Whether f at the last stage's argument is that at the new state, and needn't be called again."""
        row = self.a[-2]
        return self.c[-2] == 1 and self.a[-1] == (*row, 0.0)

    @property
    def takes_mass(self) -> bool:
        """Whether it is stiffly accurate: the new state is the last argument and h times its stage."""
        return self.a[-1] == (*self.a[-2], 1.0)

    @property
    def calls(self) -> int:
        """How often f is called in a step."""
        return len(self.coupling) - self.ends_at_new_state

    @property
    def sums(self) -> tuple[tuple[float, ...], ...]:
        """The sums over stages: in their arguments, in their right-hand sides, in the error."""
        return (*self.a, *self.coupling, self.error or ())


def rosenbrock(
    gamma: float, c: Sequence[float], a: Sequence[Sequence[float]], coupling: Sequence[Sequence[float]],
    slopes: Sequence[float], b: Sequence[float], error: Sequence[float], dense: Array, *, order: int, embedded_order: int,
) -> RosenbrockTableau:  # fmt: skip
    """Return the table of a Rosenbrock method as it is published.

    `c` are times of the stages, of which the first is 0; `a` and `coupling` have a row for each stage but the first: the
    weights of the stages before it in its argument, and in its right-hand side. `slopes` are the weights of h ∂f/∂t, `b`
    those of the stages in the new state, `error` the same less those of the embedded solution. `dense`, shape (stages,
    degree), has the coefficients of x, x², … in the weights of the stages at the part x of the step. A ValueError where
    numbers are missing, or sums of weights aren't what they must be.
    """
    count = len(c)
    # Of u' = 1 each stage is the sum of its row of Γ, which is its weight of h ∂f/∂t.
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
    # f at the present state stands in front, and takes part in no sum.
    shifted = [(0.0, *row) for row in ((), *a, b)]
    return RosenbrockTableau(
        tuple(shifted), (0.0, *c, 1.0), (0.0, *error, 0.0), np.pad(dense, ((1, 1), (0, 0))), order, embedded_order, gamma,
        tuple((0.0, *row) for row in ((), *coupling)), tuple(slopes),
    )  # fmt: skip
