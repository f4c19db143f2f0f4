"""A rank that failed goes where the others will learn of it. Where they don't come in time, the job ends.

They may wait for a message that this rank never sends, and nothing tells that from a long computation: a wait inside MPI
can't be looked into. An exception that one rank raises alone ends the job where nobody catches it; so does one that all
were to raise, and never will. The time is measured by a thread, which there is on no rank that hasn't failed.
"""

from __future__ import annotations

import threading
import traceback

from mpi4py import MPI

from mpiad.transport.abort import end_job, may_end_job
from mpiad.transport.channels import is_watched

__all__ = ["LATE", "SOON", "LoneFailure"]

SOON, LATE = 10.0, 300.0  # seconds: where others may well wait for this rank, and where that would be a surprise


class LoneFailure:
    """Ends the job after some time, unless `met` is called before; not under watch, where waits have their own limit.

    Parameters
    ----------
    error : Exception
        What this rank would raise.
    call : str
        Name of the public function.
    seconds : float
    """

    def __init__(self, error: Exception, call: str, seconds: float):
        self._timer: threading.Timer | None = None
        if may_end_job() and not is_watched():
            self._timer = threading.Timer(seconds, _end, (error, call, seconds))
            self._timer.daemon = True
            self._timer.start()

    def met(self) -> None:
        """Note that the other ranks have come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _end(error: Exception, call: str, seconds: float) -> None:
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    end_job(
        f"mpiad: rank {MPI.COMM_WORLD.rank} ended the job. {call} can't raise this exception on all ranks: others have not "
        f"come within {seconds:g} s. They wait for this rank in a communication of the user's function, or compute for so "
        f"long (MPIAD_TIMEOUT sets another limit).\n{trace}", 1,
    )
