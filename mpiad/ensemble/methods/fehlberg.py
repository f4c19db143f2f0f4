"""Fehlberg's pair of order 4(5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpiad.ensemble.tableaus import Algorithm, Tableau, explicit


@dataclass(frozen=True)
class Fehlberg45(Algorithm):
    """Fehlberg's pair of order 4(5): the solution of order 4 goes on.

    States between steps are Hermite's cubic, of order 3.

    Parameters
    ----------
    controller : IController or PIController

    References
    ----------
    E. Fehlberg, Klassische Runge-Kutta-Formeln vierter und niedrigerer Ordnung mit Schrittweiten-Kontrolle (1970), the
    second formula of order 4(5).

    Examples
    --------
    >>> from mpiad.ensemble import Fehlberg45, ODEProblem, solve
    >>> decay = ODEProblem(lambda u, p, t: [-u[0]], [1.0], (0.0, 2.0))
    >>> print(solve(decay, Fehlberg45(), rtol=1e-7).u_end.round(5), np.exp(-2.0).round(5))
    [0.13533] 0.13534
    """

    tableau: ClassVar[Tableau] = explicit(
        c=(0.0, 1 / 4, 3 / 8, 12 / 13, 1.0, 1 / 2),
        a=(
            (1 / 4,),
            (3 / 32, 9 / 32),
            (1932 / 2197, -7200 / 2197, 7296 / 2197),
            (439 / 216, -8.0, 3680 / 513, -845 / 4104),
            (-8 / 27, 2.0, -3544 / 2565, 1859 / 4104, -11 / 40),
        ),
        b=(25 / 216, 0.0, 1408 / 2565, 2197 / 4104, -1 / 5, 0.0),
        error=(-1 / 360, 0.0, 128 / 4275, 2197 / 75240, -1 / 50, -2 / 55),
        order=4,
        embedded_order=5,
    )
