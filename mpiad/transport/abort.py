"""End the whole job when one rank dies of an exception: the others would wait for it for ever."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from types import TracebackType

from mpi4py import MPI

__all__ = ["install_abort_hook"]

_UNTIL_READ, _UNTIL_KILLED = 0.3, 2.0  # seconds


def install_abort_hook() -> bool:
    """Make an uncaught exception end all ranks, with its traceback and a non-zero exit.

    Returns
    -------
    bool
        Whether it was installed: only in worlds of more than one rank, and not under ``MPIAD_ABORT=0``.
    """
    if os.environ.get("MPIAD_ABORT") == "0" or MPI.COMM_WORLD.size == 1 or sys.excepthook is _end_job:
        return False
    _end_job.before = sys.excepthook  # type: ignore[attr-defined]
    sys.excepthook = _end_job
    _end_job_of_thread.before = threading.excepthook  # type: ignore[attr-defined]
    threading.excepthook = _end_job_of_thread
    return True


def _end_job_of_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit:  # ends the thread alone, as ever
        _end_job_of_thread.before(args)  # type: ignore[attr-defined]
        return
    _end_job(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)


def _end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # Nobody waits for this rank any more, or yet.
    if not MPI.Is_initialized() or MPI.Is_finalized():
        _end_job.before(kind, error, trace)  # type: ignore[attr-defined]
        return
    rank = MPI.COMM_WORLD.rank
    text = "".join(traceback.format_exception(kind, error, trace))
    # One write, so that the lines of ranks that fail together don't mix.
    sys.stdout.flush()
    sys.stderr.write(f"mpiad: rank {rank} ended the job by an exception that nobody caught:\n{text}")
    sys.stderr.flush()
    # Launchers end a job without reading what is still in its pipes: the traceback would be lost now and then.
    time.sleep(_UNTIL_READ)
    code = 130 if issubclass(kind, KeyboardInterrupt) else 1
    MPI.COMM_WORLD.Abort(code)
    # Some MPIs return from it. What would run at the exit of this process waits for the other ranks.
    time.sleep(_UNTIL_KILLED)
    os._exit(code)
