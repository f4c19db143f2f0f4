"""The methods of one solve: a Runge-Kutta pair and how its steps are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpiad.ensemble.controller import Controller, IController
from mpiad.ensemble.tableaus import CLASSIC, DORMAND_PRINCE, TSITOURAS, Tableau

__all__ = ["RK4", "RK45", "Algorithm", "Tsit5"]


@dataclass(frozen=True)
class Algorithm:
    """A method with steps of its own choice.

    Parameters
    ----------
    controller : IController or PIController
        SciPy's by default.
    """

    controller: Controller = IController()
    tableau: ClassVar[Tableau]


@dataclass(frozen=True)
class RK45(Algorithm):
    """Dormand and Prince's pair of order 5(4), the default; its steps are those of SciPy's RK45.

    Parameters
    ----------
    controller : IController or PIController
    """

    tableau: ClassVar[Tableau] = DORMAND_PRINCE


@dataclass(frozen=True)
class Tsit5(Algorithm):
    """Tsitouras' pair of order 5(4).

    Parameters
    ----------
    controller : IController or PIController
    """

    tableau: ClassVar[Tableau] = TSITOURAS


@dataclass(frozen=True)
class RK4(Algorithm):
    """The classical method of order 4, with fixed steps: `solve` takes their size as `dt`."""

    tableau: ClassVar[Tableau] = CLASSIC
