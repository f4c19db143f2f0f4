"""A function of the user's raises on one rank of a collective call: how the others learn of it, and what all raise.

A rank that failed mustn't leave the others waiting in a communication that comes after. Where the MPI can interrupt ranks
that wait, the exception leaves the call at once, and `recovery` brings the ranks together. Elsewhere it is kept until all
have come to an agreement:

- `StageFailures` are agreed on after each stage of the call, with a sum of one flag, by which a number of each rank's can
  be added up too;
- `DeferredFailures` are agreed on where a sum that the ranks make anyhow says so: a rank whose function raised goes on with
  NaN in its place, through the same communication as the others, and that sum is NaN on all of them.

Only then do they say to each other what happened, and raise it together. What becomes of a rank that comes to an agreement
which others never reach, since they wait for it, is the business of `failure_detector`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from mpi4py.MPI import SUM

from mpiad._typing import Comm, Function
from mpiad.errors import ConvergenceError, DeadlockError, WorkerError
from mpiad.transport.agreement import (
    Failures,
    agreed,
    agreed_among,
    error_of,
    failures_among,
    first_of,
    forget_agreement,
    raise_first,
)
from mpiad.transport.channels import communications, live_channels, world_ranks
from mpiad.transport.failure_detector import LATE, SOON, FailureDetector, LoneFailure
from mpiad.transport.lookup import channel
from mpiad.transport.recovery import recovers
from mpiad.transport.signals import requested
from mpiad.transport.tracing import tracing

T = TypeVar("T")

# What a rank says of its part of a stage: whether it failed, whether a solver in it didn't converge, whether the rank was
# told to end, and its term of a sum.
_FAILED, _UNREACHED, _END_REQUESTED, _TERM = range(4)


class Unreached(Exception):  # noqa: N818 - no error, as StopIteration is none
    """Leave a stage on all ranks, since a solver in it hasn't converged on some: the call goes on elsewhere."""


class WrongValueError(TypeError):
    """Report a function that returned what it mustn't: raised on all ranks as a TypeError."""


def verdict(failures: Failures, call: str = "minimize") -> Exception:
    """Return what all ranks raise after failures on some; those of the first rank count."""
    rank, others = first_of(failures)
    if failures[rank].kind == WrongValueError.__name__:
        return TypeError(f"{failures[rank].text} This happened on rank {rank}{others}.")
    return error_of(failures, call, WorkerError)


class StageFailures:
    """What the ranks know of each other's failures in a call of many stages.

    - `comm`: the call's own.
    - `call`: name of the public function.
    - `room`: module of the stages: a rank whose innermost frame is of it has come to an agreement.
    - `complete`: ``complete(error, trace)`` completes the text of an exception before it is told to all ranks.
    - `error` (or None): what all ranks have raised; nothing is agreed on any more afterwards.
    - `broken`: whether this rank's stage has failed where the ranks that wait for it can be interrupted.
    - `end_requested`: whether any rank had been told to end (SIGTERM) when it came to an agreement: the same on all
      ranks.
    - `tolerates`: whether a ConvergenceError is no failure: `Unreached` is then raised on all ranks, and the call may
      go on. The same on all ranks.
    """

    def __init__(self, comm: Comm, call: str, room: str, complete: Callable[[BaseException, Any], None]):
        self._interrupts = recovers() and comm.size > 1
        self._comm, self._room = comm, room
        self._detector = FailureDetector(comm, room, listens=not self._interrupts)
        self.broken, self.end_requested, self._call, self._complete = False, False, call, complete
        self.members = tuple(getattr(comm, "members", None) or world_ranks(comm))
        self._refused = [found for found in live_channels() if found.fault]  # by what came before
        self._mine, self._sums = np.zeros(4), np.zeros(4)
        self.error: Exception | None = None
        self.tolerates = False

    def run(self, stage: Callable[[], T]) -> T:
        """Run this rank's part of a stage; raise on all ranks where any rank's part has failed.

        A WorkerError has the rank and the traceback of the first one; a TypeError stands for a `WrongValueError` there. It
        is Unreached where only solvers have failed, and that is tolerated.
        """
        return self.summed(stage, lambda result: 0.0)[0]

    def summed(self, stage: Callable[[], T], term: Callable[[T], float]) -> tuple[T, float]:
        """Run this rank's part of a stage as `run` does; return what it returned, and the sum of all ranks' terms of it."""
        self.raise_if_failed()
        try:
            result = stage()
            own = term(result)
        except Unreached:  # of a stage inside this one: all ranks have met
            raise
        except (Exception, SystemExit) as failure:
            self._complete(failure, failure.__traceback__)  # it is told to all ranks before it leaves the trace
            # What all raise together leaves nobody waiting.
            alike = self._tolerated(failure) and len(agreed_among(failure)) >= self._comm.size
            if self._interrupts and not alike:
                self.broken = True
                forget_agreement(failure)  # the call raises another, so all must meet
                raise
            if self.error is None:  # else a stage inside this one has agreed already
                self._conclude(failure)
            raise
        return result, self._conclude(None, own)

    def _conclude(self, failure: BaseException | None, term: float = 0.0) -> float:
        """Return the sum of all ranks' terms; raise on all where one has failed."""
        unreached = self._tolerated(failure)
        self._mine[:] = failure is not None and not unreached, unreached, requested() is not None, term
        if self._comm.size == 1:
            self._sums[:] = self._mine
        else:
            request = self._comm.Iallreduce(self._mine, self._sums, SUM)
            if failure is None or self._interrupts:
                request.Wait()
            else:
                self._detector.wait_as_failed(request, failure)
        self.end_requested |= bool(self._sums[_END_REQUESTED])
        if self._sums[_FAILED]:
            # Its notices travel on the same communicator: all ranks take theirs off before anything else is received there.
            self._detector.close(failed=True)
            self.error = verdict(failures_among(self._comm, failure), self._call)
            if not self._interrupts:
                agreed(self, self.error)
                self._lift()
            raise self.error from failure
        if self._sums[_UNREACHED]:
            self._detector.close(failed=True)
            self._detector = FailureDetector(self._comm, self._room, listens=not self._interrupts)
            raise Unreached(f"{self._call}: a solver hasn't converged") from failure
        return float(self._sums[_TERM])

    def _lift(self) -> None:
        """Let channels be used again on which a rank's own exception may have left collectives: all ranks have met."""
        for found in live_channels():
            if found.fault and not found.has_messages and found not in self._refused:
                found.fault = None

    def _tolerated(self, failure: BaseException | None) -> bool:
        return self.tolerates and isinstance(failure, ConvergenceError)

    def raise_if_failed(self) -> None:
        """Raise what all ranks have raised, should a method go on in spite of it."""
        if self.error is not None:
            raise self.error

    def clear(self, members: tuple[int, ...]) -> None:
        """End what an unreached stage has left under way on communicators among these ranks; all of them call this.

        Ranks may have left the stage at different messages, and old ones mustn't be taken for new.
        """
        inside = {(found.members, found.number): found for found in live_channels() if set(found.members) <= set(members)}
        every = self._comm.allgather(list(inside))
        held = dict(zip(members, map(set, every)))
        # In one order on all ranks; only what all of its ranks still have.
        for key in sorted(set().union(*held.values())):
            if key in inside and all(key in held[rank] for rank in key[0]):
                inside[key].renew_beneath()

    def close(self) -> None:
        """End the lookout; every rank calls it once no stage is to come."""
        if self.error is None:
            self._detector.close()


class DeferredFailures:
    """What this rank has run into, and the others don't know yet.

    A function that communicates may have raised before the other ranks got from it what they wait for. Where it has raised
    before its first communication, at its first call or after it communicated when it was called before, it is called once
    more with an argument that it can take, for the sake of its messages. What else may leave the others waiting ends the
    job after a while.

    - `comm`: the ranks that are to know.
    - `call`: name of the public function.
    - `talkers`: names of functions that have communicated, in this call or in others with the same functions; it grows.
    - `apart`: whether they meet on a communicator of its own, where no function's communication is taken for it.
    - `error` (or None): the first one.
    """

    def __init__(self, comm: Comm, call: str, talkers: set[str] | None = None, apart: bool = False):
        self.error: Exception | None = None
        self._used, self._call = channel(comm, call), call
        self._meeting = self._used.aside() if apart else self._used.data
        self._talkers = set() if talkers is None else talkers
        self._usual: dict[str, int] = {}  # how often a function communicated when it was called last
        self._lone: LoneFailure | None = None
        self._fault: str | None = None

    def attempt(self, name: str, fun: Function, *args: Any, again: Callable[[], Any] | None = None) -> Any:
        """Return what the function `name` of the user's returns; None where it raises, and the others are yet to be told.

        `again` returns an argument that the function can take in place of `args`.
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
            if again is not None and not spent and (usual is None or name in self._talkers):
                with contextlib.suppress(Exception):
                    fun(again())
            # A trace that it left has marked the channel, on which the ranks are yet to meet.
            if fault is None and self._used.fault is not None:
                # Of collectives none is left once all have met.
                self._fault = self._used.fault if self._used.has_messages else self._fault
                self._used.fault = None
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

    def __exit__(self, kind: object, reached: object, trace: object) -> None:
        # What this rank has raised says more than that the others didn't come within the limit of a wait.
        if isinstance(reached, DeadlockError) and self.error is not None:
            raise reached from self.error

    def raise_together(self) -> None:
        """Raise on all ranks where one has run into something: its own there, one of the same kind and text elsewhere.

        All ranks call it: it costs one small reduction where no sum has told of it.
        """
        under_way = self._fault is not None or (self._used, True) in (tracing.channels or ())
        mine, every = np.array([self.error is not None, under_way], np.int32), np.empty(2, np.int32)
        with self:
            self._meeting.Allreduce(mine, every)
        if self._lone is not None:
            self._lone.met()
        if not every[0]:
            return
        # On all ranks alike: one that could go on without the others would wait for them.
        if every[1]:
            self._used.mark(self._fault or f"an exception left {self._call} in which messages were under way.")
        error, self.error = self.error, None
        raise_first(self._used, error)
