"""The end of the program on one rank: its exit code, its line, and whether the other ranks end, too.

MPI ends on all ranks or on none, so a rank that leaves waits for the others, also before `os._exit`, to which launchers
react differently. After an error it waits only for some seconds, since the others may wait for it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiad.transport.core.lookup import world_is_given_up
from mpiad.transport.core.notices import threads_may_communicate
from mpiad.transport.core.polling import Backoff
from mpiad.transport.exits.abort import at_place, at_trace, end_job, is_rank
from mpiad.transport.exits.exit_codes import exit_code, forget_exit, note_exit
from mpiad.transport.exits.uncaught import is_reporting

# Seconds from the first error to the end of the job, in which others may report their errors.
_GRACE = 5.0
_POLL_SECONDS = 0.1

_log = logging.getLogger("mpiad")
_exit = os._exit
_comm: Any = None
_farewell: _Farewell | None = None
_has_arrived = False


class _Farewell(NamedTuple):
    call: str
    code: int
    where: str


def note_departure() -> None:
    """Start to note the exit code of this rank."""
    os._exit = _leave_at_once
    if not note_exit(_note_exit):
        _log.warning(
            "this Python doesn't report its exit code: a rank that leaves by sys.exit(code) doesn't end the job. "
            "Let it raise another exception, or set MPIAD_TIMEOUT."
        )


def await_departures() -> None:
    """Let this rank wait at its end until all ranks have left; collective over all ranks."""
    global _comm
    _comm = MPI.COMM_WORLD.Dup()


def _note_exit(code: object, trace: TracebackType | None) -> None:
    global _farewell
    if not is_rank():  # a fork, or after the end of MPI
        return
    text = repr(code)
    shown = text if len(text) <= 200 else f"{text[:197]}..."
    _farewell = _Farewell(f"sys.exit({shown})", exit_code(code), at_trace(trace))
    if _farewell.code:
        threading.Thread(target=_end_if_stuck, args=(_farewell,), name="mpiad-departure", daemon=True).start()


def _end_if_stuck(farewell: _Farewell) -> None:
    """End the job if this rank doesn't reach `await_others`, before which Python joins threads and runs exit functions."""
    left = time.monotonic()
    while not _has_arrived:
        # Threads and exit functions may compute for any time. If they communicate, the ranks may wait for each other.
        if time.monotonic() - left > _GRACE and is_rank() and (waiting := _waiting_thread()):
            _end(farewell, f"{_GRACE:g} s ago, but its {waiting} waits in a communication")
        time.sleep(_POLL_SECONDS)


def _waiting_thread() -> str:
    """Return the name of a thread that Python joins and that is inside a communication; "" if there is none."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = None if thread.daemon else frames.get(thread.ident or 0)
        if frame is not None and frame.f_globals.get("__name__", "").startswith("mpiad.transport"):
            return f"thread {thread.name}"
    return ""


def _leave_at_once(status: int) -> None:
    if is_rank() and threads_may_communicate():
        leaving = _Farewell(f"os._exit({status})", status & 0xFF, at_place(sys._getframe(1)))
        if is_reporting():
            _end(leaving, "in the hook for an exception that nobody caught")
        if _comm is not None:
            _await(leaving, at_once=True)
    _exit(status)


def farewell() -> tuple[str, str]:
    """Return the call that ended the program on this rank, and its line."""
    if _farewell is not None:
        return _farewell.call, _farewell.where.removeprefix(" at ") or "-"
    error = getattr(sys, "last_value", None)
    return "the end of the program" if error is None else f"ended by {type(error).__name__}", "-"


def code_at_end() -> int:
    """Return the exit code of this rank."""
    return 0 if _farewell is None else _farewell.code


def note_finalize() -> None:
    """Record that this rank ends MPI before the end of the program."""
    global _farewell
    _farewell = _Farewell("mpi_finalize()", 0, at_place(sys._getframe(1)))


def await_others(patience: float | None = None) -> bool:
    """Wait until all ranks have left the program; end the job if this rank left with an error and others stay.

    After `patience`, in seconds, the job ends in any case. It is given if communication was given up, since the others may
    never leave then. Return whether it is given on any rank. All ranks of the world call this once.
    """
    global _has_arrived, _comm
    _has_arrived = True
    if _comm is None:
        forget_exit()
        return False
    gave_up = _Farewell("its end, after communication was given up", 1, "")
    given_up = _await(_farewell if patience is None or _farewell is not None else gave_up, False, patience)
    _comm.Free()
    _comm = None
    forget_exit()
    return given_up


def _await(farewell: _Farewell | None, at_once: bool, patience: float | None = None) -> bool:
    # Maxima over the ranks: leaves by os._exit, leaves in good order, has given up communication.
    mine, every = np.array([at_once, not at_once, patience is not None], dtype=np.int8), np.zeros(3, dtype=np.int8)
    hurried = at_once or (farewell is not None and farewell.code != 0)
    wait, grace = Backoff(), _GRACE if patience is None else patience
    try:
        request = _comm.Iallreduce(mine, every, MPI.MAX)
        while not request.Test():
            if hurried and wait.seconds > grace:
                _end(farewell, f"{grace:g} s ago, and other ranks have not left since")
            if world_is_given_up():
                return False
            wait.pause()
    except MPI.Exception:  # a rank has died, and MPI still works: don't wait for the others
        return False
    if at_once and every[:2].all():
        _end(farewell, "while other ranks leave in good order, for which MPI needs all ranks")
    return bool(every[2])


def _end(farewell: _Farewell | None, why: str) -> None:
    call, code, where = farewell  # type: ignore[misc]
    end_job(f"mpiad: rank {MPI.COMM_WORLD.rank} left the program by {call}{where}, {why}. The job ends.\n", code or 1)
