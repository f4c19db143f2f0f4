"""Kutta's classical method of order 4, with fixed steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpiad.ensemble.tableaus import Algorithm, Tableau, explicit


@dataclass(frozen=True)
class RK4(Algorithm):
    """The classical method of order 4, with steps of a fixed size, the argument `dt` of `solve`.

    States between steps are computed by cubic Hermite interpolation.

    References
    ----------
    W. Kutta, Beitrag zur näherungsweisen Integration totaler Differentialgleichungen (1901).

    Examples
    --------
    >>> from mpiad.ensemble import RK4, ODEProblem, solve
    >>> decay = ODEProblem(lambda u, p, t: [-u[0]], [1.0], (0.0, 2.0))
    >>> error = [abs(solve(decay, RK4(), dt=dt).u_end[0] - np.exp(-2.0)) for dt in (0.2, 0.1)]
    >>> print(round(np.log2(error[0] / error[1])))
    4
    """

    tableau: ClassVar[Tableau] = explicit(
        c=(0.0, 1 / 2, 1 / 2, 1.0),
        a=((1 / 2,), (0.0, 1 / 2), (0.0, 0.0, 1.0)),
        b=(1 / 6, 1 / 3, 1 / 3, 1 / 6),
        order=4,
    )
