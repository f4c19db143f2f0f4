"""End the whole job if one rank can't continue, since the others would wait for it forever."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from mpi4py import MPI

from mpiad.environment_variables import switch
from mpiad.transport.core.calls import site_of, site_of_trace
from mpiad.transport.core.fault_tolerance import FAULT_TOLERANT, flush_streams, lost_ranks

_UNTIL_READ, _UNTIL_KILLED = 0.3, 2.0  # seconds

last_words: list[Callable[[], object]] = []  # called before a rank ends the job; they mustn't wait for other ranks

_exit = os._exit  # before `departure` replaces it
_process = os.getpid()
_ending = threading.Lock()


def is_rank() -> bool:
    """Return whether this process can communicate: MPI is initialized, and this is no fork of a rank."""
    return os.getpid() == _process and MPI.Is_initialized() and not MPI.Is_finalized()


def at_place(frame: FrameType | None) -> str:
    """Return " at program.py:12 in work, in mpi_recv" for a frame of the program; "" if there is none."""
    site = site_of(frame)
    return f" at {site}{f', in {site.entry}' if site.entry else ''}" if site.file else ""


def at_trace(trace: TracebackType | None) -> str:
    """Return " at program.py:12 in work" for the program's innermost line in a traceback; "" if there is none."""
    site = site_of_trace(trace)
    return f" at {site}" if site.file else ""


def end_job(text: str, code: int) -> None:
    """End all ranks with an exit code, and print the reason to standard error; doesn't return."""
    if not _ending.acquire(blocking=False):  # another thread already ends the job
        time.sleep(_UNTIL_READ + _UNTIL_KILLED)
        _exit(code)
    # One write per stream, so that the lines of ranks that fail together don't mix.
    flush_streams(text)
    for last in last_words:
        with contextlib.suppress(Exception):
            last()
    # Launchers end a job without reading the rest of its pipes: without a pause the text would sometimes be lost.
    time.sleep(_UNTIL_READ)
    # After the death of a rank, Open MPI's abort would end the job with code 0; the exit of this rank ends it with `code`.
    if not (FAULT_TOLERANT and lost_ranks(MPI.COMM_WORLD)):
        MPI.COMM_WORLD.Abort(code)
        # Some MPIs return from Abort. The exit functions of this process mustn't run, since they wait for the other ranks.
        time.sleep(_UNTIL_KILLED)
    _exit(code)


def may_end_job() -> bool:
    """Return whether an exception on one rank may end the others: with more than one rank and without ``MPIAD_ABORT=0``."""
    return switch("MPIAD_ABORT", True) and MPI.COMM_WORLD.size > 1
