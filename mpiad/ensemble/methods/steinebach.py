"""Steinebach's Rosenbrock pair of order 5(4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpiad.ensemble.tableaus import Algorithm, RosenbrockTableau, rosenbrock

_A6 = (-7.502846399306121, 2.561846144803919, -11.627539656261098, -0.18268767659942256, 0.030198172008377946)
_B = np.array([*_A6, 1.0, 1.0, 1.0])
# The interpolant at the fraction x is u (1 - x) + x (u_new + (1 - x) (H2 + x (H3 + x H4))), each H a sum of stages.
_H2 = np.array([
    25.948786856663858, -2.5579724845846235, 10.433815404888879, -2.3679251022685204, 0.524948541321073,
    1.1241088310450404, 0.4272876194431874, -0.17202221070155493,
])  # fmt: skip
_H3 = np.array([
    -9.91568850695171, -0.9689944594115154, 3.0438037242978453, -24.495224566215796, 20.176138334709044,
    15.98066361424651, -6.789040303419874, -6.710236069923372,
])  # fmt: skip
_H4 = np.array([
    11.419903575922262, 2.8879645146136994, 72.92137995996029, 80.12511834622643, -52.072871366152654,
    -59.78993625266729, -0.15582684282751913, 4.883087185713722,
])  # fmt: skip


@dataclass(frozen=True)
class Rodas5P(Algorithm):
    """Steinebach's stiffly accurate, L-stable pair of order 5(4) for stiff systems, recommended for rtol < 1e-3.

    Parameters
    ----------
    controller : PIController, optional
        Step size controller; SciPy's by default.

    Notes
    -----
    Each step takes one exact Jacobian of f (by automatic differentiation), one factorization, and eight linear solves.

    References
    ----------
    G. Steinebach, Construction of Rosenbrock-Wanner method Rodas5P and numerical benchmarks within the Julia Differential
    Equations package (2023), with its interpolant of order 4.

    Examples
    --------
    >>> from mpiad.ensemble import ODEProblem, Rodas5P, solve
    >>> fast = ODEProblem(lambda u, p, t: [-1e6 * (u[0] - p), u[0] - u[1]], [0.0, 0.0], (0.0, 5.0), 1.0)
    >>> sol = solve(fast, Rodas5P(), rtol=1e-8, atol=1e-8)
    >>> print(sol.u_end.round(6), sol.naccept < 100)
    [1.       0.993262] True
    """

    tableau: ClassVar[RosenbrockTableau] = rosenbrock(
        gamma=0.21193756319429014,
        c=(0.0, 0.6358126895828704, 0.4095798393397535, 0.9769306725060716, 0.4288403609558664, 1.0, 1.0, 1.0),
        a=(
            (3.0,),
            (2.849394379747939, 0.45842242204463923),
            (-6.954028509809101, 2.489845061869568, -10.358996098473584),
            (2.8029986275628964, 0.5072464736228206, -0.3988312541770524, -0.04721187230404641),
            _A6,
            (*_A6, 1.0),
            (*_A6, 1.0, 1.0),
        ),
        coupling=(
            (-14.155112264123755,),
            (-17.97296035885952, -2.859693295451294),
            (147.12150275711716, -1.41221402718213, 71.68940251302358),
            (165.43517024871676, -0.4592823456491126, 42.90938336958603, -5.961986721573306),
            (24.854864614690072, -3.0009227002832186, 47.4931110020768, 5.5814197821558125, -0.6610691825249471),
            (
                30.91273214028599, -3.1208243349937974, 77.79954646070892, 34.28646028294783, -19.097331116725623,
                -28.087943162872662,
            ),
            (
                37.80277123390563, -3.2571969029072276, 112.26918849496327, 66.9347231244047, -40.06618937091002,
                -54.66780262877968, -9.48861652309627,
            ),
        ),
        slopes=(
            0.21193756319429014, -0.42387512638858027, -0.3384627126235924, 1.8046452872882734, 2.325825639765069,
            0.0, 0.0, 0.0,
        ),
        b=tuple(_B.tolist()),
        error=(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
        order=5,
        embedded_order=4,
        dense=np.stack([_B + _H2, _H3 - _H2, _H4 - _H3, -_H4], axis=1),
    )  # fmt: skip
