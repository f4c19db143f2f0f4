"""Dormand and Prince's pair of order 5(4), with Shampine's interpolant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpiad.ensemble.tableaus import Algorithm, Tableau, explicit


@dataclass(frozen=True)
class RK45(Algorithm):
    """Dormand and Prince's pair of order 5(4), the default of `solve`; its steps are those of SciPy's RK45.

    Parameters
    ----------
    controller : PIController, optional
        Step size controller; SciPy's by default.

    References
    ----------
    J. R. Dormand, P. J. Prince, A family of embedded Runge-Kutta formulae (1980), table 2. L. F. Shampine, Some practical
    Runge-Kutta formulas (1986): the interpolant of order 4 with the optimal c6.

    Examples
    --------
    >>> from mpiad.ensemble import RK45, ODEProblem, PIController, solve
    >>> decay = ODEProblem(lambda u, p, t: [-u[0]], [1.0], (0.0, 2.0))
    >>> sol = solve(decay, RK45(controller=PIController()), rtol=1e-8, atol=1e-10)
    >>> print(sol.u_end.round(8), np.exp(-2.0).round(8))
    [0.13533528] 0.13533528
    """

    tableau: ClassVar[Tableau] = explicit(
        c=(0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0),
        a=(
            (1 / 5,),
            (3 / 40, 9 / 40),
            (44 / 45, -56 / 15, 32 / 9),
            (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
            (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        ),
        b=(35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
        error=(-71 / 57600, 0.0, 71 / 16695, -71 / 1920, 17253 / 339200, -22 / 525, 1 / 40),
        order=5,
        embedded_order=4,
        dense=np.array([
            [1, -8048581381 / 2820520608, 8663915743 / 2820520608, -12715105075 / 11282082432],
            [0, 0, 0, 0],
            [0, 131558114200 / 32700410799, -68118460800 / 10900136933, 87487479700 / 32700410799],
            [0, -1754552775 / 470086768, 14199869525 / 1410260304, -10690763975 / 1880347072],
            [0, 127303824393 / 49829197408, -318862633887 / 49829197408, 701980252875 / 199316789632],
            [0, -282668133 / 205662961, 2019193451 / 616988883, -1453857185 / 822651844],
            [0, 40617522 / 29380423, -110615467 / 29380423, 69997945 / 29380423],
        ]),
    )  # fmt: skip
