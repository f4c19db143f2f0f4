"""What the user's functions raise in a collective call, kept until all ranks learn of it by a sum that they make anyhow.

A rank whose function raises goes on with NaN in its place, through the same communication as the others, up to their next
sum. That is NaN on all ranks then, and only now they say to each other what happened, and raise it together. Where no sum
follows, `raise_together` costs one small reduction.

A function that communicates may have raised before the other ranks got from it what they wait for. Where it has raised
before its first communication, and communicated when it was called before, it is called once more with an argument that it
can take, for the sake of its messages. What else may leave the others waiting ends the job after a while (`lone_failure`).
Where the MPI can interrupt waits, nothing of this is done: the exception leaves the call, which brings the ranks together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from mpiad._typing import Comm, Function
from mpiad.errors import DeadlockError
from mpiad.primitives.operation import communications, current
from mpiad.transport import channel
from mpiad.transport.agreement import agreed_among, raise_first
from mpiad.transport.lone_failure import LATE, SOON, LoneFailure
from mpiad.transport.recovery import recovers

__all__ = ["Mishaps"]


class Mishaps:
    """What this rank has run into, and the others don't know yet.

    Parameters
    ----------
    comm : mpi4py intracommunicator or None
        The ranks that are to know.
    call : str
        Name of the public function.
    talkers : set of str, optional
        Names of functions that have communicated, in this call or in others with the same functions; it grows.

    Attributes
    ----------
    error : Exception or None
        The first one.
    """

    def __init__(self, comm: Comm, call: str, talkers: set[str] | None = None):
        self.error: Exception | None = None
        self._used, self._call = channel(comm, call), call
        self._talkers = set() if talkers is None else talkers
        self._usual: dict[str, int] = {}  # how often a function communicated when it was called last
        self._lone: LoneFailure | None = None
        self._fault: str | None = None

    def attempt(self, name: str, fun: Function, *args: Any, again: Callable[[], Any] | None = None) -> Any:
        """Return what a function of the user's returns, None where it raises.

        Parameters
        ----------
        name : str
            Of the function.
        fun : callable
        *args
        again : callable, optional
            Returns an argument that the function can take in place of `args`.

        Raises
        ------
        Exception
            Where the other ranks raise it too, or needn't be told.
        """
        fault, start = self._used.fault, next(communications)
        try:
            out = fun(*args)
        except Exception as error:
            # A wait that has reached its limit has ended the others' too.
            alone = self._used.size == 1 or recovers() or isinstance(error, DeadlockError)
            if alone or set(self._used.members) <= agreed_among(error):
                raise
            spent, usual = next(communications) - start - 1, self._usual.get(name)
            self.note(error, LATE if usual is not None and spent >= usual else SOON)
            if again is not None and not spent and name in self._talkers:
                with contextlib.suppress(Exception):
                    fun(again())
            # A trace that it left has marked the channel, on which the ranks are yet to meet.
            if fault is None and self._used.fault is not None:
                self._fault, self._used.fault = self._used.fault, None
            return None
        self._usual[name] = spent = next(communications) - start - 1
        if spent:
            self._talkers.add(name)
        return out

    def note(self, error: Exception, seconds: float = LATE) -> None:
        """Keep what is wrong on this rank; `seconds` are those after which it is wrong that the others don't know."""
        if self.error is None:
            self.error, self._lone = error, LoneFailure(error, self._call, seconds)

    def __enter__(self) -> None:
        """Begin a communication in which the others are to learn of it."""

    def __exit__(self, kind: Any, reached: Any, trace: Any) -> None:
        # What this rank has raised says more than that the others didn't come within the limit of a wait.
        if isinstance(reached, DeadlockError) and self.error is not None:
            raise reached from self.error

    def raise_together(self) -> None:
        """Raise on all ranks where one has run into something: its own there, one of the same kind and text elsewhere.

        Ranks
        -----
        All ranks call it.
        """
        under_way = self._fault is not None or self._used in (current.body or ())
        mine, every = np.array([self.error is not None, under_way], np.int32), np.empty(2, np.int32)
        with self:
            self._used.data.Allreduce(mine, every)
        if self._lone is not None:
            self._lone.met()
        if not every[0]:
            return
        # On all ranks alike: one that could go on without the others would wait for them.
        if every[1]:
            self._used.mark(self._fault or f"an exception left {self._call} in which messages were under way.")
        error, self.error = self.error, None
        raise_first(self._used, error)
