"""Tsitouras' pair of order 5(4), with its interpolant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpiad.ensemble.tableaus import Algorithm, Tableau, explicit


@dataclass(frozen=True)
class Tsit5(Algorithm):
    """Tsitouras' pair of order 5(4).

    Parameters
    ----------
    controller : PIController, optional
        Step size controller; SciPy's by default.

    References
    ----------
    Ch. Tsitouras, Runge-Kutta pairs of order 5(4) satisfying only the first column simplifying assumption (2011), table 1;
    its interpolant of order 4.

    Examples
    --------
    >>> from mpiad.ensemble import ODEProblem, Tsit5, solve
    >>> decay = ODEProblem(lambda u, p, t: [-u[0]], [1.0], (0.0, 2.0))
    >>> print(solve(decay, Tsit5(), rtol=1e-6).u_end.round(5), np.exp(-2.0).round(5))
    [0.13534] 0.13534
    """

    tableau: ClassVar[Tableau] = explicit(
        c=(0.0, 0.161, 0.327, 0.9, 0.9800255409045097, 1.0),
        a=(
            (0.161,),
            (-0.008480655492356989, 0.335480655492357),
            (2.8971530571054935, -6.359448489975075, 4.3622954328695815),
            (5.325864828439257, -11.748883564062828, 7.4955393428898365, -0.09249506636175525),
            (5.86145544294642, -12.92096931784711, 8.159367898576159, -0.071584973281401, -0.028269050394068383),
        ),
        b=(0.09646076681806523, 0.01, 0.4798896504144996, 1.379008574103742, -3.290069515436081, 2.324710524099774),
        error=(
            -0.00178001105222577714, -0.0008164344596567469, 0.007880878010261995, -0.1447110071732629,
            0.5823571654525552, -0.45808210592918697, 0.015151515151515152,
        ),
        order=5,
        embedded_order=4,
        dense=np.array([
            [1, -2.763706197274826, 2.9132554618219126, -1.0530884977290216],
            [0, 0.13169999999999998, -0.2234, 0.1017],
            [0, 3.9302962368947516, -5.941033872131505, 2.490627285651253],
            [0, -12.411077166933676, 30.33818863028232, -16.548102889244902],
            [0, 37.50931341651104, -88.1789048947664, 47.37952196281928],
            [0, -27.896526289197286, 65.09189467479366, -34.87065786149661],
            [0, 1.5, -4, 2.5],
        ]),
    )  # fmt: skip
