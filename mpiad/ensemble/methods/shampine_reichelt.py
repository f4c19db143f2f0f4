"""Shampine and Reichelt's Rosenbrock pair of order 2(3)."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np

from mpiad.ensemble.tableaus import Algorithm, RosenbrockTableau, rosenbrock

# d and e32 in the paper by Shampine and Reichelt.
_D, _E32 = 1 / (2 + sqrt(2)), 6 + sqrt(2)


@dataclass(frozen=True)
class Rosenbrock23(Algorithm):
    """Shampine and Reichelt's L-stable pair of order 2(3) for stiff systems at crude tolerances: MATLAB's ode23s.

    Parameters
    ----------
    controller : PIController, optional
        Step size controller; SciPy's by default.

    Notes
    -----
    Each step takes one exact Jacobian of f (by automatic differentiation), one factorization, and three linear solves.

    References
    ----------
    L. F. Shampine, M. W. Reichelt, The MATLAB ODE suite (1997), section 3, with its interpolant of order 2.

    Examples
    --------
    >>> from mpiad.ensemble import ODEProblem, Rosenbrock23, solve
    >>> fast = ODEProblem(lambda u, p, t: [-1e6 * (u[0] - p), u[0] - u[1]], [0.0, 0.0], (0.0, 5.0), 1.0)
    >>> sol = solve(fast, Rosenbrock23())
    >>> print(sol.u_end.round(2), sol.naccept < 50)
    [1.   0.99] True
    """

    # The paper's k are Γ⁻¹ times the stages here, with Γ⁻¹ = ((1, 0, 0), (1, 1, 0), (2, e32, 1)) / d.
    tableau: ClassVar[RosenbrockTableau] = rosenbrock(
        gamma=_D,
        c=(0.0, 1 / 2, 1.0),
        a=((0.5 / _D,), (1 / _D, 1 / _D)),
        coupling=((-1 / _D,), (-2 / _D, -_E32 / _D)),
        slopes=(_D, 0.0, -_D),
        b=(1 / _D, 1 / _D, 0.0),
        error=(-1 / (6 * _D), (2 - _E32) / (6 * _D), -1 / (6 * _D)),
        order=2,
        embedded_order=3,
        dense=np.array([[1 / _D, 0.0], [-2 / (1 - 2 * _D), 1 / (_D * (1 - 2 * _D))], [0.0, 0.0]]),
    )
