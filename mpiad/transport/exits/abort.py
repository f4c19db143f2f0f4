"""End of the whole job if one rank can't continue, since the others would wait for it forever.

An exception that the program doesn't catch ends the job (`end_job`): in the main thread, in another thread, or in a
function at exit. Python then calls a hook. Other software (debuggers, loggers, test frameworks) sets the same hooks. Its
hooks must be called, and mustn't prevent the end of the job. So the dictionaries of the modules `sys` and `threading`
contain the hooks of this file, which Python calls and which call the other ones. Other code reads and sets its own hooks
through a property: the modules get a class with properties of the hooks' names.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from mpi4py import MPI

from mpiad.environment_variables import switch
from mpiad.transport.core.agreement import code_of
from mpiad.transport.core.calls import Site
from mpiad.transport.core.channels import is_fork
from mpiad.transport.core.fault_tolerance import FAULT_TOLERANT, exit_process, flush_streams, lost_ranks

_UNTIL_READ, _UNTIL_KILLED = 0.3, 2.0  # seconds

before_abort: list[Callable[[], object]] = []  # called before a rank ends the job; they mustn't wait for other ranks

_ending = threading.Lock()


def is_rank() -> bool:
    """Return whether this process can communicate: MPI is initialized, and this is no fork of a rank."""
    return not is_fork() and MPI.Is_initialized() and not MPI.Is_finalized()


def at(site: Site) -> str:
    """Return " at program.py:12 in work, in mpi_recv" for a line of the program; "" outside of it."""
    return f" at {site}{f', in {site.entry}' if site.entry else ''}" if site.file else ""


def end_job(text: str, code: int) -> None:
    """End all ranks with an exit code, and print the reason to standard error; doesn't return."""
    if not _ending.acquire(blocking=False):  # another thread already ends the job
        time.sleep(_UNTIL_READ + _UNTIL_KILLED)
        exit_process(code)
    # One write per stream, so that the lines of ranks that fail together don't mix.
    flush_streams(text)
    for function in before_abort:
        with contextlib.suppress(Exception):
            function()
    # Launchers end a job without reading the rest of its pipes: without a pause the text would sometimes be lost.
    time.sleep(_UNTIL_READ)
    # After the death of a rank, Open MPI's abort would end the job with code 0; the exit of this rank ends it with `code`.
    if not (FAULT_TOLERANT and lost_ranks(MPI.COMM_WORLD)):
        MPI.COMM_WORLD.Abort(code)
        # Some MPIs return from Abort. The exit functions of this process mustn't run, since they wait for the other ranks.
        time.sleep(_UNTIL_KILLED)
    exit_process(code)


def may_end_job() -> bool:
    """Return whether an exception on one rank may end the others: with more than one rank and without ``MPIAD_ABORT=0``."""
    return switch("MPIAD_ABORT", True) and MPI.COMM_WORLD.size > 1


_installed = False
_reporting = False
_in_session = False


class _ForeignHook:
    """The property of a module by which other code reads and sets its hook."""

    def __init__(self, module: ModuleType, name: str):
        self._module, self._name = module, name
        self.hook = self.default = getattr(module, f"__{name}__")

    def replace(self, ours: Callable[..., object]) -> None:
        self.hook = getattr(self._module, self._name)
        vars(self._module)[self._name] = ours
        # cloudpickle stores a module that a function uses as the module's name if its class is exactly ModuleType. An
        # instance of another class needs `__reduce__`.
        by_name = {"__reduce__": lambda module: (importlib.import_module, (module.__name__,))}
        # `importlib` creates modules by `type(sys)`. They are plain ones, without this property.
        plain = {"__new__": lambda _, *args, **keywords: ModuleType(*args, **keywords)}
        self._module.__class__ = type("module", (type(self._module),), {self._name: self, **by_name, **plain})

    def __get__(self, module: ModuleType | None, kind: type | None = None) -> Any:
        return self if module is None else self.hook

    def __set__(self, module: ModuleType, hook: Callable[..., object]) -> None:
        self.hook = hook

    def __delete__(self, module: ModuleType) -> None:
        self.hook = self.default


_main_hook = _ForeignHook(sys, "excepthook")
_thread_hook = _ForeignHook(threading, "excepthook")
_unraisable_hook = _ForeignHook(sys, "unraisablehook")


def install_hooks() -> bool:
    """Make an uncaught exception end all ranks with its traceback; return whether this call did so (once, if enabled)."""
    global _installed, _in_session
    if not may_end_job() or _installed:
        return False
    _installed = True
    _in_session = hasattr(sys, "ps1")
    _main_hook.replace(_end_job)
    _thread_hook.replace(_end_job_of_thread)
    _unraisable_hook.replace(_end_job_at_exit)
    # Launchers report the signal of a rank that crashes, but not the line of the program.
    if not faulthandler.is_enabled():
        with contextlib.suppress(AttributeError, OSError, ValueError):  # standard error may be no file
            faulthandler.enable(all_threads=False)
    return True


def is_reporting() -> bool:
    """Return whether a hook of other code runs before the end of the job."""
    return _reporting


def end_by(error: BaseException, reason: str = "") -> None:
    """End the job because of an exception, after printing a reason; if the hooks aren't installed, only show both."""
    flush_streams(f"mpiad: {reason}.\n" if reason else "")
    (_end_job if _installed else sys.excepthook)(type(error), error, error.__traceback__)


def _end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # If this isn't a rank, no other rank waits for it. An interactive session continues after an error.
    if not is_rank() or _in_session or sys.flags.inspect:
        _main_hook.hook(kind, error, trace)
    else:
        _report_and_end(_main_hook, (kind, error, trace), error, trace)


def _end_job_of_thread(args: threading.ExceptHookArgs) -> None:
    # SystemExit ends only the thread; pytest reports exceptions of threads itself.
    in_a_test = "_pytest.runner" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ
    if args.exc_type is SystemExit or in_a_test or not is_rank():
        _thread_hook.hook(args)
    else:
        _report_and_end(_thread_hook, (args,), args.exc_value or args.exc_type(), args.exc_traceback)


def _end_job_at_exit(args: sys.UnraisableHookArgs) -> None:
    # Python itself would continue, and end with code 0.
    error = args.exc_value
    in_good_order = isinstance(error, SystemExit) and not error.code
    if "atexit callback" in (args.err_msg or "") and is_rank() and error is not None and not in_good_order:
        _report_and_end(_unraisable_hook, (args,), error, args.exc_traceback)
    else:
        _unraisable_hook.hook(args)


def _report_and_end(foreign: _ForeignHook, args: tuple, error: BaseException, trace: TracebackType | None) -> None:
    """Report an exception, by the hook of other code if there is one, and end the job."""
    global _reporting
    code, text = code_of(error), traceback.format_exception(type(error), error, trace)
    if foreign.hook is not foreign.default:
        _reporting = True
        try:
            foreign.hook(*args)
            text = traceback.format_exception_only(type(error), error)
        except SystemExit as left:
            code, text = code_of(left), traceback.format_exception_only(type(error), error)
        except BaseException as second:  # noqa: BLE001 - the job ends in any case
            text += ["and its hook failed:\n", *traceback.format_exception(type(second), second, second.__traceback__)]
    end_job(f"mpiad: rank {MPI.COMM_WORLD.rank} ended the job by an exception that nobody caught:\n{''.join(text)}", code)
