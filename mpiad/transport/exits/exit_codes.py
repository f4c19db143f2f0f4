"""Detection of the code with which Python ends the program, before it joins threads and runs exit functions.

Python has no hook for it. But if a SystemExit ends the program, the interpreter reads its `code` in the main thread, when
no Python frame is left. So the attribute `code` of the type is replaced by one that notices this access, however the
exception was raised. The type is written in C and refuses assignments; its dictionary, found by the garbage collector,
accepts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

_member = SystemExit.__dict__["code"]
_python_exit = sys.exit
# Until Python 3.12, an exception raised by C code is created only when it is caught, not if it ends the program.
_MADE_LATE = sys.version_info < (3, 12)


def exit_code(code: object) -> int:
    """Return the exit code that the launcher gets for SystemExit's `code`."""
    if code is None:
        return 0
    # The system keeps eight bits. Python prints anything but an integer, and ends with 1.
    return code & 0xFF if isinstance(code, int) else 1


def code_of(error: BaseException) -> int:
    """Return the exit code of a job that an exception ends: never 0."""
    if isinstance(error, KeyboardInterrupt):
        return 130  # 128 + SIGINT, as shells report it
    return exit_code(error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", 1)) or 1


class _Code:
    """SystemExit's `code`, which reports when the interpreter reads it to end the program."""

    __doc__ = _member.__doc__

    def __init__(self, leaves: Callable[[Any, TracebackType | None], object]):
        self._leaves = leaves

    def __get__(self, error: SystemExit | None, kind: type | None = None) -> Any:
        if error is None:
            return self
        code = _member.__get__(error, kind)
        if threading.current_thread() is threading.main_thread() and not _has_caller():
            with contextlib.suppress(Exception):  # the program ends in any case, and with this code
                self._leaves(code, _whole_trace(error))
        return code

    def __set__(self, error: SystemExit, code: object) -> None:
        _member.__set__(error, code)

    def __delete__(self, error: SystemExit) -> None:
        _member.__delete__(error)


def _has_caller() -> bool:
    try:
        sys._getframe(2)
    except ValueError:
        return False
    return True


def _whole_trace(error: SystemExit) -> TracebackType | None:
    if not _MADE_LATE:
        return error.__traceback__
    # The exception's own traceback ends at the frame that last accessed it. The whole one is held by the interpreter alone.
    traces = [found for found in gc.get_objects() if isinstance(found, TracebackType)]
    inner = {id(trace.tb_next) for trace in traces}
    outermost = [trace for trace in traces if id(trace) not in inner]
    holds = [any(isinstance(other, BaseException) for other in gc.get_referrers(trace)) for trace in outermost]
    return next((trace for trace, held in zip(outermost, holds) if not held), error.__traceback__)


def note_exit(leaves: Callable[[Any, TracebackType | None], object]) -> bool:
    """Call a function with code and traceback if a SystemExit ends the program; return whether this Python supports it."""
    if not _replace_code(_Code(leaves)):
        return False
    if _MADE_LATE:
        sys.exit = _exit
        # `sys.exit` is also replaced in modules that have imported it by `from sys import exit`.
        for names in gc.get_referrers(_python_exit):
            if isinstance(names, dict) and "__name__" in names:
                known = [name for name, value in names.items() if value is _python_exit and name != "_python_exit"]
                names.update(dict.fromkeys(known, _exit))
    return True


def forget_exit() -> None:
    """Undo `note_exit`, since Python's shutdown may read the attribute."""
    _replace_code(_member)


def _replace_code(attribute: object) -> bool:
    found = gc.get_referents(SystemExit.__dict__)
    if len(found) != 1 or type(found[0]) is not dict or "code" not in found[0]:  # not CPython
        return False
    found[0]["code"] = attribute
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))  # clears the cache of attributes
    return True


def _exit(status: Any = None, /) -> None:
    try:
        _python_exit(status)
    except SystemExit:  # caught, so that Python creates it: see `_MADE_LATE`
        raise
