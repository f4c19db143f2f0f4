"""All ranks agree how a stage of an evaluation went before any goes on to the next.

A rank that fails in the function must not leave the others waiting in the backward pass or in the reduction of the
gradient. After each stage the ranks exchange one flag, and where one has failed, all raise the same.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from mpiad._typing import Comm
from mpiad.errors import WorkerError
from mpiad.optimize.watch import Watch

__all__ = ["Agreement", "WrongValueError", "worker_error"]

T = TypeVar("T")


class WrongValueError(TypeError):
    """Report a function that returned what it mustn't: raised on all ranks as a TypeError."""


class Agreement:
    """What the ranks know of each other's failures in one solve.

    Attributes
    ----------
    error : Exception or None
        What all ranks have raised; nothing is agreed on any more afterwards.
    """

    def __init__(self, comm: Comm):
        self._comm, self._watch = comm, Watch(comm)
        self._mine, self._all = np.zeros(1, np.int8), np.zeros(comm.size, np.int8)
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
        if self.error is not None:
            raise self.error
        try:
            result = stage()
        except (Exception, SystemExit) as failure:
            if self.error is None:  # else a stage inside this one has agreed already
                self._conclude(failure)
            raise
        self._conclude(None)
        return result

    def _conclude(self, failure: BaseException | None) -> None:
        if self._comm.size == 1:
            self._all[0] = failure is not None
        else:
            self._mine[0] = failure is not None
            request = self._comm.Iallgather(self._mine, self._all)
            if failure is None:
                request.Wait()
            else:
                self._watch.wait_as_failed(request, failure)
        if self._all.any():
            self._raise_everywhere(failure)

    def _raise_everywhere(self, failure: BaseException | None) -> None:
        failed: list[int] = np.flatnonzero(self._all).tolist()
        self._watch.close(failed=True)
        described = self._comm.bcast(None if failure is None else _described(failure), failed[0])
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        self.error = _error_from(described, failed[0], others)
        raise self.error from failure

    def close(self) -> None:
        """End the solve's lookout; every rank calls it once no evaluation is to come."""
        if self.error is None:
            self._watch.close()


def _described(failure: BaseException) -> tuple[bool, str, str]:
    trace = "".join(traceback.format_exception(type(failure), failure, failure.__traceback__))
    summary = "".join(traceback.format_exception_only(type(failure), failure)).strip()
    return isinstance(failure, WrongValueError), str(failure) if isinstance(failure, WrongValueError) else summary, trace


def _error_from(described: tuple[bool, str, str], rank: int, others: str) -> Exception:
    wrong_value, summary, trace = described
    if wrong_value:
        return TypeError(f"{summary} This happened on rank {rank}{others}.")
    return worker_error(f"minimize: rank {rank}{others} raised {summary}", rank, trace)


def worker_error(message: str, rank: int, trace: str) -> WorkerError:
    """Make the error that shows another rank's traceback."""
    return WorkerError(f"{message}\n\nThe traceback of rank {rank}:\n{trace.rstrip()}", rank, trace)
