"""Fault tolerance of MPI (ULFM): whether communicators can be revoked, and errors that report failed ranks.

Open MPI 5 supports it, with ``mpiexec --with-ft ulfm``. `MPI_Finalize` of Open MPI 5.0 sometimes waits forever for dead
ranks. So if a rank has died, the surviving ranks wait for each other, and leave without `MPI_Finalize`.
"""

from __future__ import annotations

import contextlib
import os
import sys

from mpi4py import MPI

from mpiad._typing import Comm
from mpiad.environment_variables import switch
from mpiad.errors import RemoteError


def _can_revoke() -> bool:
    # In debug mode ranks wait on communicators that nobody revokes; these waits have a limit instead.
    if not switch("MPIAD_RECOVERY", True) or switch("MPIAD_DEBUG", False) or not hasattr(MPI.Comm, "Revoke"):
        return False
    # The launcher sets this variable. Without it, Open MPI has these functions, but they don't work.
    asked = os.environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "on", "enabled")
    return asked and MPI.get_vendor()[0] == "Open MPI"


FAULT_TOLERANT = _can_revoke()
_DEATHS = {getattr(MPI, name, None) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING")} - {None}
_INTERRUPTIONS = _DEATHS | ({getattr(MPI, "ERR_REVOKED", None)} - {None})


def is_revoked(comm: Comm) -> bool:
    """Return whether a rank has revoked a communicator."""
    return comm != MPI.COMM_NULL and comm.Is_revoked()


def is_interruption(error: BaseException | None) -> bool:
    """Return whether an exception is, or was raised while handling, MPI's error that other ranks have failed."""
    seen = 0
    # A RemoteError reports an interruption from which all ranks have recovered.
    while error is not None and not isinstance(error, RemoteError) and seen < 100:
        if isinstance(error, MPI.Exception):
            kind = error.Get_error_class()
            # Calls for several requests report only that one of them has failed.
            if kind in _INTERRUPTIONS or (FAULT_TOLERANT and kind == MPI.ERR_IN_STATUS):
                return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def is_process_failure(error: BaseException) -> bool:
    """Return whether an exception is MPI's error that a process has died."""
    return isinstance(error, MPI.Exception) and error.Get_error_class() in _DEATHS


def lost_ranks(comm: Comm) -> list[int]:
    """Return the ranks of a communicator whose processes are known to have died."""
    failed, group = comm.Get_failed(), comm.Get_group()
    lost = sorted(failed.Translate_ranks(None, group)) if failed.size else []
    failed.Free()
    group.Free()
    return lost


exit_process = os._exit  # before `departure` replaces it


def all_ranks_alive(comm: Comm) -> bool:
    """Wait for the surviving ranks, and return, the same on all of them, whether all ranks are alive; collective."""
    if not FAULT_TOLERANT or comm.size == 1:
        return True
    # A rank may know of a death before others do, so they must agree on it.
    alive = comm.Shrink()
    size = alive.size
    alive.Free()
    return size == comm.size


def flush_streams(text: str = "") -> None:
    """Flush standard output and standard error, after writing `text` to the latter."""
    for stream, last in ((sys.stdout, ""), (sys.stderr, text)):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be no stream, or a closed one
            stream.write(last)
            stream.flush()
