"""End of the program on one rank: its exit code, its line, and the wait for the other ranks.

`MPI_Finalize` waits for all ranks. So a rank that ends waits for the others, even before `os._exit`: launchers differ
in what they do to the others when a rank exits alone. After an error a rank waits only for some seconds, since the others
may wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm
from mpiad.transport.core.agreement import exit_code
from mpiad.transport.core.calls import site_of, site_of_trace
from mpiad.transport.core.channels import base
from mpiad.transport.core.fault_tolerance import exit_process
from mpiad.transport.core.lookup import world_is_given_up
from mpiad.transport.core.polling import Backoff, threads_may_communicate
from mpiad.transport.exits.abort import at, end_job, is_rank, is_reporting

# Seconds from the first error to the end of the job, in which others may report their errors.
_GRACE = 5.0
_POLL_SECONDS = 0.1

_log = logging.getLogger("mpiad")
_comm: Comm = None
_ending: _Ending | None = None
_has_arrived = False


class _Ending(NamedTuple):
    call: str
    code: int
    where: str
    waits: bool = True  # whether this rank waits for the others without limit, as at the end of a program


def watch_for_exit() -> None:
    """Detect from now on by which call and exit code this rank leaves the program."""
    os._exit = _leave_at_once
    if not detect_exit(_note_exit):
        _log.warning(
            "this Python doesn't report its exit code: a rank that leaves by sys.exit(code) doesn't end the job. "
            "Let it raise another exception, or set MPIAD_TIMEOUT."
        )


def prepare_await_others() -> None:
    """Create the communicator of `await_others`; collective over the world."""
    global _comm
    _comm = base().Dup()


def _note_exit(code: object, trace: TracebackType | None) -> None:
    global _ending
    if not is_rank():  # a fork, or after the end of MPI
        return
    site, code_at_exit = site_of_trace(trace), exit_code(code)
    # If the exit leaves a function of this library, the other ranks probably communicate in it.
    waits = code_at_exit == 0 and not site.entry
    _ending = _Ending(f"sys.exit({code!r:.200})", code_at_exit, at(site), waits)
    if not waits:
        threading.Thread(target=_end_if_stuck, args=(_ending,), name="mpiad-departure", daemon=True).start()


def _end_if_stuck(ending: _Ending) -> None:
    """End the job if this rank doesn't reach `await_others`, before which Python joins threads and runs exit functions."""
    left = time.monotonic()
    while not _has_arrived:
        # Threads and exit functions may compute for any time. If they communicate, the ranks may wait for each other.
        frames = sys._current_frames() if time.monotonic() - left > _GRACE and is_rank() else {}
        for thread in threading.enumerate():
            frame = None if thread.daemon else frames.get(thread.ident or 0)
            if frame is not None and frame.f_globals.get("__name__", "").startswith("mpiad.transport"):
                _end(ending, f"{_GRACE:g} s ago, but its thread {thread.name} waits in a communication")
        time.sleep(_POLL_SECONDS)


def _leave_at_once(status: int) -> None:
    if is_rank() and threads_may_communicate():
        leaving = _Ending(f"os._exit({status})", status & 0xFF, at(site_of(sys._getframe(1))))
        if is_reporting():
            _end(leaving, "in the hook for an exception that nobody caught")
        if _comm is not None:
            _await(leaving, at_once=True)
    exit_process(status)


def end_of_program() -> tuple[str, str]:
    """Return the call that ended the program on this rank, and its line."""
    if _ending is not None:
        return _ending.call, _ending.where.removeprefix(" at ") or "-"
    error = getattr(sys, "last_value", None)
    return "the end of the program" if error is None else f"ended by {type(error).__name__}", "-"


def code_at_end() -> int:
    """Return the exit code of this rank."""
    return 0 if _ending is None else _ending.code


def note_finalize() -> None:
    """Record that this rank calls `mpi_finalize`, before the end of the program."""
    global _ending
    _ending = _Ending("mpi_finalize()", 0, at(site_of(sys._getframe(1))))


def await_others(patience: float | None = None) -> bool:
    """Wait until all ranks have left, or end the job if this rank left with an error and others stay; collective."""
    # `patience`: seconds after which the job ends even without an error. A rank gives it if communication was abandoned,
    # since the others may never leave then. Returns whether any rank gave it.
    global _has_arrived, _comm
    _has_arrived = True
    _replace_code(_member)  # since Python's shutdown may read the attribute
    if _comm is None:
        return False
    gave_up = _Ending("its end, after communication was given up", 1, "")
    given_up = _await(_ending if patience is None or _ending is not None else gave_up, False, patience)
    _comm.Free()
    _comm = None
    return given_up


def _await(ending: _Ending | None, at_once: bool, patience: float | None = None) -> bool:
    # Maxima over the ranks of: leaves by os._exit, leaves without it, has abandoned communication.
    mine, every = np.array([at_once, not at_once, patience is not None], dtype=np.int8), np.zeros(3, dtype=np.int8)
    hurried = at_once or patience is not None or (ending is not None and not ending.waits)
    wait, grace = Backoff(), _GRACE if patience is None else patience
    try:
        request = _comm.Iallreduce(mine, every, MPI.MAX)
        while not request.Test():
            if hurried and wait.seconds > grace:
                _end(ending, f"{grace:g} s ago, and other ranks have not left since")
            if world_is_given_up():
                return False
            wait.pause()
    except MPI.Exception:  # a rank has died, and MPI continues: don't wait for the others
        return False
    if at_once and every[:2].all():
        _end(ending, "while other ranks call MPI_Finalize, which waits for all ranks")
    return bool(every[2])


def _end(ending: _Ending | None, why: str) -> None:
    call, code, where, _ = ending  # type: ignore[misc]
    end_job(f"mpiad: rank {MPI.COMM_WORLD.rank} left the program by {call}{where}, {why}. The job ends.\n", code or 1)


# Detection of the exit code, before Python joins threads and runs exit functions.
#
# Python has no hook for this. But if a SystemExit ends the program, the interpreter reads its attribute `code` in the main
# thread after the last Python frame has ended. So the attribute is replaced by a descriptor that detects this access. The
# type is written in C and refuses assignments. But its dictionary, which the garbage collector finds, accepts them.


_member = SystemExit.__dict__["code"]
_python_exit = sys.exit
# Before Python 3.12, an exception raised by C code is created only when it is caught, not if it ends the program.
_MADE_LATE = sys.version_info < (3, 12)


class _Code:
    """SystemExit's `code`, which reports when the interpreter reads it to end the program."""

    __doc__ = _member.__doc__

    def __init__(self, on_exit: Callable[[object, TracebackType | None], object]):
        self._on_exit = on_exit

    def __get__(self, error: SystemExit | None, kind: type | None = None) -> Any:
        if error is None:
            return self
        code = _member.__get__(error, kind)
        ends_program = sys._getframe().f_back is None
        if ends_program and threading.current_thread() is threading.main_thread():
            with contextlib.suppress(Exception):  # the program ends in any case, and with this code
                self._on_exit(code, _whole_trace(error))
        return code

    def __set__(self, error: SystemExit, code: object) -> None:
        _member.__set__(error, code)

    def __delete__(self, error: SystemExit) -> None:
        _member.__delete__(error)


def _whole_trace(error: SystemExit) -> TracebackType | None:
    if not _MADE_LATE:
        return error.__traceback__
    # The exception's own traceback ends at the frame that last accessed it. The whole one is held by the interpreter alone.
    traces = [found for found in gc.get_objects() if isinstance(found, TracebackType)]
    inner = {id(trace.tb_next) for trace in traces}
    outermost = [trace for trace in traces if id(trace) not in inner]
    holds = [any(isinstance(other, BaseException) for other in gc.get_referrers(trace)) for trace in outermost]
    return next((trace for trace, held in zip(outermost, holds) if not held), error.__traceback__)


def detect_exit(on_exit: Callable[[object, TracebackType | None], object]) -> bool:
    """Call a function with code and traceback if a SystemExit ends the program; return whether this Python supports it."""
    if not _replace_code(_Code(on_exit)):
        return False
    if _MADE_LATE:
        sys.exit = _sys_exit
        # `sys.exit` is also replaced in modules that have imported it by `from sys import exit`.
        for names in gc.get_referrers(_python_exit):
            if isinstance(names, dict) and "__name__" in names:
                known = [name for name, value in names.items() if value is _python_exit and name != "_python_exit"]
                names.update(dict.fromkeys(known, _sys_exit))
    return True


def _replace_code(attribute: object) -> bool:
    found = gc.get_referents(SystemExit.__dict__)
    if len(found) != 1 or type(found[0]) is not dict or "code" not in found[0]:  # not CPython
        return False
    found[0]["code"] = attribute
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))  # clears the cache of attributes
    return True


def _sys_exit(status: sys._ExitCode = None, /) -> None:
    try:
        _python_exit(status)
    except SystemExit:  # caught, so that Python creates it: see `_MADE_LATE`
        raise
