"""How often f was called for a trajectory, and how many matrices were factored, by the number of its steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.tableaus import Algorithm

__all__ = ["FactorizationCounts", "evaluations"]


def evaluations(naccept: Array, nreject: Array, alg: Algorithm, dt: float | None) -> Array:
    """Return how often f was called for each trajectory, by a method whose first step was given or not."""
    tries = naccept + nreject
    at_start = 1 if dt is not None else 2  # the second is a probe for the size of the first step
    return np.where(tries > 0, at_start + alg.tableau.calls * tries, 0)


class FactorizationCounts:
    """A solution, of one trajectory or of many, that knows how many matrices its steps took."""

    naccept: Any
    nreject: Any
    alg: Algorithm | None

    @property
    def nlu(self) -> Any:
        """How many factorizations the steps of a trajectory took: one for each try, of Rosenbrock methods."""
        tries = self.naccept + self.nreject
        return tries if self.alg is not None and self.alg.tableau.implicit else 0 * tries

    @property
    def njac(self) -> Any:
        """How many Jacobians of f they took: each matrix has one of its own."""
        return self.nlu
