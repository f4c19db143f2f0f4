"""End the whole job when one rank can't go on: the others would wait for it for ever.

Here are the hooks for exceptions that nobody catches, in the program, in a thread, and in a callback at exit.
`signals` ends the job of a rank that is told to end, `departure` of one that has left the others behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from mpi4py import MPI

from mpiad.transport.calls import site_of, site_of_trace
from mpiad.transport.fault_tolerance import FAULT_TOLERANT, lost_ranks

__all__ = ["at_place", "at_trace", "end_job", "install_abort_hook", "is_rank", "last_words", "may_end_job"]

_UNTIL_READ, _UNTIL_KILLED = 0.3, 2.0  # seconds

last_words: list[Callable[[], object]] = []  # what a rank does before it ends the job: nothing that waits for others

_exit = os._exit  # before `departure` replaces it
_process = os.getpid()
_ending = threading.Lock()


def is_rank() -> bool:
    """Tell whether this process can communicate: MPI is there, and this is no fork of a rank."""
    return os.getpid() == _process and MPI.Is_initialized() and not MPI.Is_finalized()


def at_place(frame: FrameType | None) -> str:
    """Return " at program.py:12 in work, in mpi_recv" for a frame of the program; "" where there is none."""
    site = site_of(frame)
    return f" at {site}{f', in {site.entry}' if site.entry else ''}" if site.file else ""


def at_trace(trace: TracebackType | None) -> str:
    """Return " at program.py:12 in work" for the program's innermost line in a traceback; "" where there is none."""
    site = site_of_trace(trace)
    return f" at {site}" if site.file else ""


def end_job(text: str, code: int) -> None:
    """End all ranks with an exit code, and say why; doesn't return.

    Parameters
    ----------
    text : str
        What goes to standard error.
    code : int
    """
    if not _ending.acquire(blocking=False):  # another thread does it already
        time.sleep(_UNTIL_READ + _UNTIL_KILLED)
        _exit(code)
    # One write, so that the lines of ranks that fail together don't mix.
    # Standard output too: what the program has printed into its buffer, an abort would lose.
    for stream, last in ((sys.stdout, ""), (sys.stderr, text)):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be none, or a closed one
            stream.write(last)
            stream.flush()
    for last in last_words:
        with contextlib.suppress(Exception):
            last()
    # Launchers end a job without reading what is still in its pipes: the text would be lost now and then.
    time.sleep(_UNTIL_READ)
    # Where Open MPI has outlived the death of a rank, its abort ends the job with 0, and a rank's exit with its code.
    if not (FAULT_TOLERANT and lost_ranks(MPI.COMM_WORLD)):
        MPI.COMM_WORLD.Abort(code)
        # Some MPIs return from it. What would run at the exit of this process waits for the other ranks.
        time.sleep(_UNTIL_KILLED)
    _exit(code)


def may_end_job() -> bool:
    """Tell whether an exception on one rank may end the others: where there are any, and not under ``MPIAD_ABORT=0``."""
    return os.environ.get("MPIAD_ABORT") != "0" and MPI.COMM_WORLD.size > 1


def install_abort_hook() -> bool:
    """Make an uncaught exception end all ranks, with its traceback and a non-zero exit.

    Returns
    -------
    bool
        Whether it was installed: only in worlds of more than one rank, and not under ``MPIAD_ABORT=0``.
    """
    if not may_end_job() or sys.excepthook is _end_job:
        return False
    _end_job.before = sys.excepthook  # type: ignore[attr-defined]
    sys.excepthook = _end_job
    _end_job_of_thread.before = threading.excepthook  # type: ignore[attr-defined]
    threading.excepthook = _end_job_of_thread
    _end_job_at_exit.before = sys.unraisablehook  # type: ignore[attr-defined]
    sys.unraisablehook = _end_job_at_exit
    _show_crashes()
    return True


def _show_crashes() -> None:
    # Launchers name the signal of a rank that crashes, but not the line of the program.
    if not faulthandler.is_enabled():
        with contextlib.suppress(AttributeError, OSError, ValueError):  # standard error may be no file
            faulthandler.enable(all_threads=False)


def _end_job_of_thread(args: threading.ExceptHookArgs) -> None:
    # SystemExit ends the thread alone, as ever; pytest puts a thread's exception into its own report.
    if args.exc_type is SystemExit or _in_a_test():
        _end_job_of_thread.before(args)  # type: ignore[attr-defined]
        return
    _end_job(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)


def _in_a_test() -> bool:
    return "_pytest.runner" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ


def _end_job_at_exit(args: Any) -> None:
    # Python itself would go on, and end with 0.
    error = args.exc_value
    in_good_order = isinstance(error, SystemExit) and not error.code
    if "atexit callback" in (args.err_msg or "") and is_rank() and error is not None and not in_good_order:
        _end_job(type(error), error, args.exc_traceback)
    _end_job_at_exit.before(args)  # type: ignore[attr-defined]


def _end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # Nobody waits for this rank any more, or yet.
    if not is_rank():
        _end_job.before(kind, error, trace)  # type: ignore[attr-defined]
        return
    text = "".join(traceback.format_exception(kind, error, trace))
    rank = MPI.COMM_WORLD.rank
    code = 130 if issubclass(kind, KeyboardInterrupt) else 1  # 128 + SIGINT, as shells report it
    end_job(f"mpiad: rank {rank} ended the job by an exception that nobody caught:\n{text}", code)
