"""Bogacki and Shampine's pair of order 3(2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpiad.ensemble.tableaus import Algorithm, Tableau, explicit


@dataclass(frozen=True)
class BS3(Algorithm):
    """Bogacki and Shampine's pair of order 3(2), for crude tolerances; its steps are those of SciPy's RK23.

    States between steps are computed by cubic Hermite interpolation, which also has order 3.

    Parameters
    ----------
    controller : PIController, optional
        Step size controller; SciPy's by default.

    References
    ----------
    P. Bogacki, L. F. Shampine, A 3(2) pair of Runge-Kutta formulas (1989).

    Examples
    --------
    >>> from mpiad.ensemble import BS3, ODEProblem, solve
    >>> decay = ODEProblem(lambda u, p, t: [-u[0]], [1.0], (0.0, 2.0))
    >>> sol = solve(decay, BS3())
    >>> print(sol.naccept, abs(sol.u_end[0] - np.exp(-2.0)) < 1e-3)
    7 True
    """

    tableau: ClassVar[Tableau] = explicit(
        c=(0.0, 1 / 2, 3 / 4),
        a=((1 / 2,), (0.0, 3 / 4)),
        b=(2 / 9, 1 / 3, 4 / 9),
        error=(5 / 72, -1 / 12, -1 / 9, 1 / 8),
        order=3,
        embedded_order=2,
    )
