"""Shared libraries of Fortran and C: loading, the MPI library that they call, and communicators as their arguments.

A process must contain one MPI library. If a shared library was linked to another one than mpi4py, the order in which the
two were loaded decides which of them its calls reach, so such a library is refused.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from ctypes import c_char_p, c_void_p
from functools import cache
from typing import Any

from mpi4py import MPI

from mpiad._typing import Comm
from mpiad.transport.exits.abort import end_job, is_rank

_CALL = "mpiad.extend.library"


class _SymbolInfo(ctypes.Structure):
    """`Dl_info`, the result of `dladdr`."""

    _fields_ = (("file", c_char_p), ("base", c_void_p), ("symbol", c_char_p), ("address", c_void_p))


class CallInProgress:
    """The call of a function of a library that hasn't returned: its text, or None."""

    text: str | None = None


in_progress = CallInProgress()


class SharedLibrary:
    """A loaded shared library."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        try:
            self._handle = ctypes.CDLL(self.path)
        except OSError as error:
            raise OSError(f"{_CALL}: {self.path} can't be loaded: {error}") from None
        linked, expected = _mpi_of(self._handle), _mpi_of_mpi4py()
        if linked is not None and expected is not None and linked != expected:
            raise RuntimeError(
                f"{_CALL}: {self.path} calls the MPI library {_file_at(linked)}, but mpi4py calls {_file_at(expected)}. A "
                f"process must contain one MPI library: link {self.path} to that of mpi4py."
            )
        _report_exits()

    def symbol(self, name: str) -> Any:
        """Return a function of the library, with its own types of arguments; raise a ValueError if there is none."""
        try:
            return self._handle[name]
        except AttributeError:
            given = f"{name.lower()}_"  # by Fortran compilers, without bind(C)
            hint = f" It has {given!r}." if hasattr(self._handle, given) else ""
            raise ValueError(f"{_CALL}: {self.path} has no function {name!r}.{hint}") from None


def mpi_library() -> str:
    """Return the file of the MPI library that mpi4py calls, to which a library that communicates must be linked.

    Raises
    ------
    OSError
        If the file can't be determined.

    Examples
    --------
    >>> from mpiad.extend import mpi_library
    >>> print("mpi" in mpi_library())
    True
    """
    address = _mpi_of_mpi4py()
    if address is None:
        raise OSError("mpi_library: the file of the MPI library that mpi4py calls can't be determined.")
    return _file_at(address)


def communicator_argument(comm: Comm, language: str, by_value: bool) -> Any:
    """Return a communicator as an argument: Fortran's integer, or C's handle, an integer or a pointer."""
    if language == "Fortran":
        handle: Any = ctypes.c_int(comm.py2f())
    else:
        kind = ctypes.c_int if MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_int) else c_void_p
        handle = kind.from_buffer_copy(kind.from_address(MPI._addressof(comm)))
    return handle if by_value else ctypes.pointer(handle)


@cache
def _report_exits() -> None:
    """End the job with a message if a function of a library ends the process, as by Fortran's ``stop``."""
    # C's exit calls such handlers, and doesn't return to Python. The handler is removed before the interpreter ends.
    libc, key = ctypes.CDLL(None), ctypes.c_char()

    def end() -> None:
        if in_progress.text is not None and is_rank():
            text = f"{in_progress.text} ended the process, as by Fortran's stop or C's exit"
            in_progress.text = None
            end_job(f"mpiad: rank {MPI.COMM_WORLD.rank}: {text}. The other ranks would wait for it, so the job ends.\n", 1)

    handler = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: end())
    if hasattr(libc, "gnu_get_libc_version") and not libc["__cxa_atexit"](handler, None, ctypes.byref(key)):
        atexit.register(lambda: (handler, libc["__cxa_finalize"](ctypes.byref(key))))


@cache
def _mpi_of_mpi4py() -> int | None:
    return _mpi_of(ctypes.CDLL(MPI.__file__))


def _mpi_of(library: ctypes.CDLL) -> int | None:
    """Return the address of `MPI_Comm_rank` in a library or the libraries that it was linked to; None if there is none."""
    try:
        return ctypes.cast(library.MPI_Comm_rank, c_void_p).value
    except AttributeError:
        return None


def _file_at(address: int) -> str:
    info = _SymbolInfo()
    ctypes.CDLL(None).dladdr(c_void_p(address), ctypes.byref(info))
    return (info.file or b"?").decode()
