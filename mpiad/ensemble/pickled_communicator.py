"""Communicators of solutions that are pickled: MPI's own are known everywhere by name, others to their program alone."""

from __future__ import annotations

import pickle
from typing import Any

from mpiad._typing import Comm
from mpiad.errors import CommunicatorError

__all__ = ["PickledCommunicator", "LeftBehind", "present"]


class LeftBehind:
    """What stands for a communicator that a pickle couldn't take along."""

    def __repr__(self) -> str:
        return "<communicator of the program that pickled this>"


class PickledCommunicator:
    """A communicator on its way with a solution: copies of the solution share it, and pickles take what can be had."""

    def __init__(self, comm: Comm):
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, Any]) -> PickledCommunicator:
        return self

    def __reduce__(self) -> tuple[type[PickledCommunicator], tuple[Any]]:
        try:
            pickle.dumps(self.comm)
        except Exception:  # noqa: BLE001 - mpi4py has raised different kinds in its versions
            return PickledCommunicator, (LeftBehind(),)
        return PickledCommunicator, (self.comm,)


def present(comm: Comm, call: str, remedy: str) -> Comm:
    """Return a solution's communicator.

    Raises
    ------
    CommunicatorError
        Where its pickle has left it behind.
    """
    if isinstance(comm, LeftBehind):
        raise CommunicatorError(
            f"{call}: this solution was pickled, and its communicator, which belongs to the program of then, couldn't be "
            f"pickled with it. {remedy}"
        )
    return comm
