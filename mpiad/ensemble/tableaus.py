"""Runge-Kutta pairs as tables of numbers.

All have the first-same-as-last property: the last stage is evaluated at the new state and is the first of the next step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["CLASSIC", "DORMAND_PRINCE", "TSITOURAS", "Tableau"]


class Tableau(NamedTuple):
    """The coefficients of an explicit pair.

    Parameters
    ----------
    a : tuple of tuple of float
        Row i, from the second stage on: the weights of the stages before it. The last row gives the new state.
    c : tuple of float
        Times of the stages, as parts of the step.
    error : tuple of float or None
        Weights of the error estimate, one for each stage; None where steps are fixed.
    dense : array, shape (stages, degree)
        Row i: coefficients of x, x², … in the weight of stage i at the part x of the step.
    order : int
    """

    a: tuple[tuple[float, ...], ...]
    c: tuple[float, ...]
    error: tuple[float, ...] | None
    dense: np.ndarray
    order: int

    # There are few, and arrays in them: they are told apart by what they are, not by their numbers.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def stages(self) -> int:
        """The number of stages, the last of which belongs to the next step."""
        return len(self.a) + 1


# J. R. Dormand and P. J. Prince (1980), table 2; the interpolant with the optimal c6 of L. F. Shampine (1986).
DORMAND_PRINCE = Tableau(
    a=(
        (1 / 5,),
        (3 / 40, 9 / 40),
        (44 / 45, -56 / 15, 32 / 9),
        (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
        (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
    ),
    c=(0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0),
    error=(-71 / 57600, 0.0, 71 / 16695, -71 / 1920, 17253 / 339200, -22 / 525, 1 / 40),
    dense=np.array([
        [1, -8048581381 / 2820520608, 8663915743 / 2820520608, -12715105075 / 11282082432],
        [0, 0, 0, 0],
        [0, 131558114200 / 32700410799, -68118460800 / 10900136933, 87487479700 / 32700410799],
        [0, -1754552775 / 470086768, 14199869525 / 1410260304, -10690763975 / 1880347072],
        [0, 127303824393 / 49829197408, -318862633887 / 49829197408, 701980252875 / 199316789632],
        [0, -282668133 / 205662961, 2019193451 / 616988883, -1453857185 / 822651844],
        [0, 40617522 / 29380423, -110615467 / 29380423, 69997945 / 29380423],
    ]),
    order=5,
)

# Ch. Tsitouras (2011), table 1; its interpolant of order 4.
TSITOURAS = Tableau(
    a=(
        (0.161,),
        (-0.008480655492356989, 0.335480655492357),
        (2.8971530571054935, -6.359448489975075, 4.3622954328695815),
        (5.325864828439257, -11.748883564062828, 7.4955393428898365, -0.09249506636175525),
        (5.86145544294642, -12.92096931784711, 8.159367898576159, -0.071584973281401, -0.028269050394068383),
        (0.09646076681806523, 0.01, 0.4798896504144996, 1.379008574103742, -3.290069515436081, 2.324710524099774),
    ),
    c=(0.0, 0.161, 0.327, 0.9, 0.9800255409045097, 1.0, 1.0),
    error=(
        -0.00178001105222577714, -0.0008164344596567469, 0.007880878010261995, -0.1447110071732629,
        0.5823571654525552, -0.45808210592918697, 0.015151515151515152,
    ),
    dense=np.array([
        [1, -2.763706197274826, 2.9132554618219126, -1.0530884977290216],
        [0, 0.13169999999999998, -0.2234, 0.1017],
        [0, 3.9302962368947516, -5.941033872131505, 2.490627285651253],
        [0, -12.411077166933676, 30.33818863028232, -16.548102889244902],
        [0, 37.50931341651104, -88.1789048947664, 47.37952196281928],
        [0, -27.896526289197286, 65.09189467479366, -34.87065786149661],
        [0, 1.5, -4, 2.5],
    ]),
    order=5,
)

# W. Kutta (1901), with the derivative at the new state as a fifth stage; the interpolant is Hermite's cubic.
CLASSIC = Tableau(
    a=((1 / 2,), (0.0, 1 / 2), (0.0, 0.0, 1.0), (1 / 6, 1 / 3, 1 / 3, 1 / 6)),
    c=(0.0, 1 / 2, 1 / 2, 1.0, 1.0),
    error=None,
    dense=np.array([
        [1, -2 + 3 / 6, 1 - 2 / 6],
        [0, 3 / 3, -2 / 3],
        [0, 3 / 3, -2 / 3],
        [0, 3 / 6, -2 / 6],
        [0, -1, 1],
    ]),
    order=4,
)
