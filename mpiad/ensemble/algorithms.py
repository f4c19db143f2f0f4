"""What all methods have in common; each is a file in `methods/`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpiad.ensemble.controller import Controller, IController
from mpiad.ensemble.tableaus import Tableau

__all__ = ["Algorithm"]


@dataclass(frozen=True)
class Algorithm:
    """A Runge-Kutta method and how its steps are chosen.

    Parameters
    ----------
    controller : IController or PIController
        SciPy's by default.
    """

    controller: Controller = IController()
    tableau: ClassVar[Tableau]
