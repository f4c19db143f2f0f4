"""What a CUDA kernel is made for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpiad.compiling.program import Program
from mpiad.ensemble.controller import Controller
from mpiad.ensemble.tableaus import Tableau

__all__ = ["Plan"]


class Plan(NamedTuple):
    """What a CUDA kernel is made for.

    Parameters
    ----------
    program : Program
        The right-hand side.
    tableau : Tableau
    controller : Controller
    varying, shared : tuple of int
        Which parameters of the program each trajectory has of its own, and which all share: row by row of the kernel's
        arrays.
    directions : tuple of tuple of (str, int)
        Along which the forward kernel carries tangents: ("state", i) or ("parameter", j).
    record : bool
        Whether the forward kernel can keep the accepted steps for the reverse kernel.
    inside : bool
        Whether states are saved at times between the steps too.
    dtype : dtype
        float64 or float32. Times and sizes of steps are double in both.
    wanted : tuple of int, optional
        The parameters that the reverse kernel differentiates by; all by default.
    events : tuple of (Program, bool, int)
        Of each event its condition, whether it ends its trajectory, and the direction.
    """

    program: Program
    tableau: Tableau
    controller: Controller
    varying: tuple[int, ...]
    shared: tuple[int, ...]
    directions: tuple[tuple[str, int], ...] = ()
    record: bool = False
    inside: bool = True
    dtype: Any = np.float64
    wanted: tuple[int, ...] | None = None
    events: tuple[tuple[Program, bool, int], ...] = ()

    @property
    def d(self) -> int:
        """Components of a state."""
        return self.program.groups["state"]

    @property
    def last(self) -> int:
        """The number of the stage at the new state."""
        return self.tableau.stages - 1

    @property
    def wanted_varying(self) -> list[int]:
        """Which of them each trajectory has of its own."""
        return [j for j in self.varying if self.wanted is None or j in self.wanted]

    @property
    def wanted_shared(self) -> list[int]:
        """Which of them all share."""
        return [j for j in self.shared if self.wanted is None or j in self.wanted]
