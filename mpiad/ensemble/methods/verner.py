"""Verner's pair of order 7(6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpiad.ensemble.tableaus import Algorithm, Tableau, explicit


@dataclass(frozen=True)
class Vern7(Algorithm):
    """Verner's most efficient pair of order 7(6), for tolerances of 1e-8 and less.

    Parameters
    ----------
    controller : PIController, optional
        Step size controller; SciPy's by default.

    Notes
    -----
    Verner's interpolants need three or six additional stages. The interpolant used here has order 5 and needs none. It is
    a polynomial of degree 5 that satisfies the conditions of order 5, and matches the states and their derivatives at both
    ends of the step. Among these polynomials, it has the smallest error terms of order 6 (in mean square over the step);
    among several polynomials with equal error terms, it has the smallest norm.

    References
    ----------
    J. H. Verner, Numerically optimal Runge-Kutta pairs with interpolants (2010); the pair's coefficients are those of the
    author's page, "most efficient 7(6)".

    Examples
    --------
    >>> from mpiad.ensemble import RK45, ODEProblem, Vern7, solve
    >>> decay = ODEProblem(lambda u, p, t: [-u[0]], [1.0], (0.0, 2.0))
    >>> print([solve(decay, method, rtol=1e-10, atol=1e-12).naccept for method in (RK45(), Vern7())])
    [55, 14]
    """

    tableau: ClassVar[Tableau] = explicit(
        c=(0.0, 0.005, 0.10888888888888888, 0.16333333333333333, 0.4555, 0.6095094489978381, 0.884, 0.925, 1.0, 1.0),
        a=(
            (0.005,),
            (-1.07679012345679, 1.185679012345679),
            (0.04083333333333333, 0.0, 0.1225),
            (0.6389139236255726, 0.0, -2.455672638223657, 2.272258714598084),
            (-2.6615773750187572, 0.0, 10.804513886456137, -8.3539146573962, 0.820487594956657),
            (6.067741434696771, 0.0, -24.711273635911084, 20.427517930788895, -1.9061579788166472, 1.006172249242068),
            (
                12.054670076253203, 0.0, -49.75478495046899, 41.142888638604674, -4.461760149974004, 2.042334822239175,
                -0.09834843665406108,
            ),
            (
                10.138146522881808, 0.0, -42.6411360317175, 35.76384003992257, -4.3480228403929075, 2.0098622683770357,
                0.3487490460338272, -0.27143900510483127,
            ),
            (
                -45.030072034298676, 0.0, 187.3272437654589, -154.02882369350186, 18.56465306347536, -7.141809679295079,
                1.3088085781613785, 0.0, 0.0,
            ),
        ),
        b=(
            0.04715561848627222, 0.0, 0.0, 0.25750564298434153, 0.2621665397741262, 0.15216092656738558,
            0.49399691700324844, -0.29430311714032503, 0.0813174723249511, 0.0,
        ),
        error=(
            0.0025470118799310456, 0.0, 0.0, -0.00965839487279575, 0.0420647097563969, -0.0666822437469301,
            0.26500974646212816, -0.29430311714032503, 0.0813174723249511, -0.020295184663356284,
        ),
        order=7,
        embedded_order=6,
        dense=np.array([
            [1.0, -5.219859524994628, 10.830816004203358, -9.766275340991474, 3.202474480269014],
            [0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0],
            [0, 6.98180750147704, -20.398701854117725, 21.139509418726036, -7.465109423101009],
            [0, -2.277241393513223, 13.519737014775032, -18.896917150139764, 7.916588068652082],
            [0, -0.06003422335664177, -0.9715647191965103, 2.884036741299874, -1.7002768721793362],
            [0, 1.301910816987899, -4.710228661797189, 7.984709457646924, -4.0823946958343855],
            [0, -0.12276004826160451, -2.6616740911300685, 4.220112741343326, -1.7299817190919775],
            [0, 1.0491737209414604, -3.6873437220633476, 4.633753642927069, -1.9142661694802312],
            [0, 0.34700315071969734, -1.9210399706735513, 2.8010704891880107, -1.2270336692341568],
            [0, -2.0, 10.0, -15.0, 7.0],
        ]),
    )  # fmt: skip
