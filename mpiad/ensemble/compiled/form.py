"""What a kernel is generated for: the sizes and options that its source has built in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpiad.ensemble.controller import Controller
from mpiad.ensemble.tableaus import Tableau

__all__ = ["Fields", "Form", "numbered"]


class Form(NamedTuple):
    """The sizes and options of one kernel.

    Parameters
    ----------
    d : int
        Components of a state.
    varying, shared : int
        Numbers among the parameters: those of each trajectory, and those of all.
    tableau : Tableau
    controller : Controller
    single : bool
        Whether states are float32.
    lanes : int
        How many trajectories advance together.
    inside : bool
        Whether times are saved that lie inside of steps.
    record : bool
        Whether all accepted steps are kept.
    tolerances : bool
        Whether each component has its own absolute tolerance.
    directions : tuple of (str, int)
        Along which initial values ("u") and parameters ("p" of each, "s" of all) tangents are carried.
    wanted_varying, wanted_shared : int
        How many parameters of each trajectory, and of all, an adjoint is asked for.
    timed : bool
        Whether it is asked for the ends of tspan.
    """

    d: int
    varying: int
    shared: int
    tableau: Tableau
    controller: Controller
    single: bool = False
    lanes: int = 16
    inside: bool = False
    record: bool = False
    tolerances: bool = False
    directions: tuple[tuple[str, int], ...] = ()
    wanted_varying: int = 0
    wanted_shared: int = 0
    timed: bool = False

    @property
    def stages(self) -> int:
        """How many stages a step has, without the one that belongs to the next."""
        return len(self.tableau.a)


class Fields:
    """Places in a flat buffer: each field is one number for each lane.

    With constant distances between fields in one buffer, the compiler can prove that they don't overlap.

    Parameters
    ----------
    lanes : int
    """

    def __init__(self, lanes: int):
        self._lanes, self._first, self.count = lanes, {}, 0
        self._sizes: dict[str, int] = {}

    def add(self, name: str, count: int = 1) -> None:
        """Make room for `count` fields of a name."""
        self._first[name], self._sizes[name] = self.count, count
        self.count += count

    def at(self, name: str, i: int = 0) -> str:
        """Return the place of a lane's field, as source."""
        offset = (self._first[name] + i) * self._lanes
        return f"b[{offset} + l]" if offset else "b[l]"

    def __iter__(self) -> Iterator[str]:
        """Return one line on each name."""
        for name, size in self._sizes.items():
            first = self._first[name]
            yield f"{first}: {name}" if size == 1 else f"{first}-{first + size - 1}: {name}"


def numbered(name: str, count: int) -> list[str]:
    """Return names with their numbers."""
    return [f"{name}{i}" for i in range(count)]
