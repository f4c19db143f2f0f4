"""The end of the ranks that are left, where a process has died and the MPI survived it.

The end of MPI waits for all ranks of the world, and with Open MPI 5.0 now and then for the dead ones too, for ever. So
the ranks that are left wait for each other by themselves, and leave without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from mpi4py import MPI

from mpiad.transport.fault_tolerance import FAULT_TOLERANT

__all__ = ["all_have_come", "leave"]

_exit = os._exit  # before `departure` replaces it


def all_have_come() -> bool:
    """Wait for the other ranks that are alive, and tell whether these are all; collective, and the same on all of them."""
    if not FAULT_TOLERANT or MPI.COMM_WORLD.size == 1:
        return True
    # A rank may know of a death before another does, so that they must agree on it.
    alive = MPI.COMM_WORLD.Shrink()
    size = alive.size
    alive.Free()
    return size == MPI.COMM_WORLD.size


def leave(code: int) -> None:
    """Leave the process; doesn't return."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be none, or a closed one
            stream.flush()
    _exit(code)
