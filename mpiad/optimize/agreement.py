"""All ranks agree how a stage of an evaluation went before any goes on to the next.

A rank that fails in the function must not leave the others waiting in the backward pass or in the reduction of the
gradient. After each stage the ranks add up one flag, and where one has failed, all raise the same. Where the MPI can
interrupt ranks that wait, a failure isn't agreed on here: it leaves `minimize`, which brings the ranks together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mpiad._typing import Comm
from mpiad.differentiation.refusals import explain
from mpiad.errors import WorkerError
from mpiad.optimize.watch import Watch
from mpiad.transport import SUM
from mpiad.transport.agreement import forget_agreement
from mpiad.transport.fault_tolerance import FAULT_TOLERANT
from mpiad.transport.recovery import Failure, first_of
from mpiad.transport.signals import requested

__all__ = ["Agreement", "WrongValueError", "verdict"]

T = TypeVar("T")

# What a rank says of its part: whether it failed, whether it was told to end, and its term of a sum.
_FAILED, _ASKED, _TERM = range(3)


class WrongValueError(TypeError):
    """Report a function that returned what it mustn't: raised on all ranks as a TypeError."""


class Agreement:
    """What the ranks know of each other's failures in one solve.

    Attributes
    ----------
    error : Exception or None
        What all ranks have raised; nothing is agreed on any more afterwards.
    broken : bool
        Whether this rank's stage has failed where the ranks that wait for it can be interrupted.
    asked : bool
        Whether any rank had been told to end (SIGTERM) when it came to an agreement: the same on all ranks.
    """

    def __init__(self, comm: Comm, call: str = "minimize"):
        self._interrupts = FAULT_TOLERANT and comm.size > 1
        self._comm, self._watch = comm, Watch(comm, listens=not self._interrupts)
        self.broken, self.asked, self._call = False, False, call
        self._mine, self._sums = np.zeros(3), np.zeros(3)
        self.error: Exception | None = None

    def run(self, stage: Callable[[], T]) -> T:
        """Run this rank's part of a stage; raise on all ranks where any rank's part has failed.

        Raises
        ------
        WorkerError
            With the rank and the traceback of the first one.
        TypeError
            Where that was a `WrongValueError`.
        """
        return self.summed(stage, lambda result: 0.0)[0]

    def summed(self, stage: Callable[[], T], term: Callable[[T], float]) -> tuple[T, float]:
        """Run this rank's part of a stage as `run` does; return what it returned, and the sum of all ranks' terms of it."""
        if self.error is not None:
            raise self.error
        try:
            result = stage()
            own = term(result)
        except (Exception, SystemExit) as failure:
            explain(failure, failure.__traceback__)  # it is told to all ranks before it leaves the trace
            if self._interrupts:
                self.broken = True
                forget_agreement(failure)  # `minimize` raises another, so all must meet
                raise
            if self.error is None:  # else a stage inside this one has agreed already
                self._conclude(failure)
            raise
        return result, self._conclude(None, own)

    def _conclude(self, failure: BaseException | None, term: float = 0.0) -> float:
        """Return the sum of all ranks' terms; raise on all where one has failed."""
        self._mine[:] = failure is not None, requested() is not None, term
        if self._comm.size == 1:
            self._sums[:] = self._mine
        else:
            request = self._comm.Iallreduce(self._mine, self._sums, SUM)
            if failure is None:
                request.Wait()
            else:
                self._watch.wait_as_failed(request, failure)
        self.asked |= bool(self._sums[_ASKED])
        if self._sums[_FAILED]:
            self._raise_everywhere(failure)
        return float(self._sums[_TERM])

    def _raise_everywhere(self, failure: BaseException | None) -> None:
        # Flags first: only one traceback travels, and only once something has failed.
        told = self._comm.allgather(failure is not None)
        failed = [rank for rank, has in enumerate(told) if has]
        # Its notices travel on the same communicator: all ranks take theirs off before anything else is received there.
        self._watch.close(failed=True)
        first = self._comm.bcast(None if failure is None else Failure.of(failure), failed[0])
        described: dict[int, Any] = dict.fromkeys(failed, first)
        self.error = verdict(described, self._call)
        raise self.error from failure

    def close(self) -> None:
        """End the solve's lookout; every rank calls it once no evaluation is to come."""
        if self.error is None:
            self._watch.close()


def verdict(failures: dict[int, Failure], call: str = "minimize") -> Exception:
    """Return what all ranks raise after failures on some; those of the first rank count."""
    rank, others = first_of(failures)
    failure = failures[rank]
    if failure.kind == WrongValueError.__name__:
        return TypeError(f"{failure.text} This happened on rank {rank}{others}.")
    text = f"{call}: rank {rank}{others} raised {failure.summary}"
    return WorkerError(text, rank, failure.trace, exit_code=failure.exit_code)
