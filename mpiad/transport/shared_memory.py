"""Memory that all ranks of a node have in common: a vector is written there once, where a message copies it twice.

The memory is a file that lies in memory itself. All ranks open it by its name, which it loses before anything is written:
the last process that has it mapped gives it back, however that ends. The shared windows of an MPI would be freed by all
ranks together, but ranks that an exception has taken out of a solve don't come together; and where there is no room, that
is an error here, while the first use of a window would end the process.

No lock is needed: what a rank has written before it sends a message, the others may read once they have that message, or
a later one that depends on it.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm
from mpiad.transport.channels import on_any_rank

T = TypeVar("T")

_FOLDER = "/dev/shm"
_LINE = 8  # doubles in a cache line: two ranks never write in the same one


def shared_vectors(comm: Comm, count: int, size: int) -> np.ndarray | None:
    """Return vectors of doubles, shape (count, size), the same memory on all ranks, as long as any rank holds one of them.

    They are zeros, of length 1 at least. None on all ranks where any can't have it: on another node, without room for it,
    or on a system of another kind; and where calls are under watch, since what goes through memory isn't seen. All ranks of
    `comm` call it, with the same `count` and `size`.
    """
    if not isinstance(comm, MPI.Comm):
        return None
    stride = -(-size // _LINE) * _LINE
    length = 8 * count * stride
    file = _common_file(comm, length)
    if file is None:
        return None
    try:
        start, end = (length * rank // comm.size for rank in (comm.rank, comm.rank + 1))
        memory = _tried(lambda: _mapped(file, length, start, end))
        if on_any_rank(comm, memory is None):
            return None
    finally:
        os.close(file)
    return np.frombuffer(memory, dtype=float).reshape(count, stride)[:, :size]  # type: ignore[arg-type]


def _common_file(comm: Comm, length: int) -> int | None:
    """Return a new file's descriptor; None on all ranks where one can't see it. It has no name any more."""
    path, file = "", None
    try:
        if comm.rank == 0:
            path = f"{_FOLDER}/mpiad-{secrets.token_hex(16)}"
            file = _tried(lambda: _created(path, length))
        path = comm.bcast(path)
        if comm.rank > 0:
            file = _tried(lambda: os.open(path, os.O_RDWR))
        # A rank on another node sees no such file, and all must know before any maps it.
        seen = not on_any_rank(comm, file is None)
    finally:
        if comm.rank == 0:
            # Without a name it is gone when the last rank has closed it, however the program ends.
            _tried(lambda: os.unlink(path))
    if not seen and file is not None:
        os.close(file)
    return file if seen else None


def _created(path: str, length: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        found = os.fstatvfs(file)
        # Other programs, and MPI itself, go on making files there, and may not survive where there is no room.
        if 2 * length > found.f_bavail * found.f_frsize:
            raise OSError(errno.ENOSPC, "more than half of the room that is left", path)
        os.ftruncate(file, length)
    except OSError:
        os.close(file)
        raise
    return file


def _mapped(file: int, length: int, start: int, end: int) -> mmap.mmap:
    """Map a file, and take the memory from `start` to `end`; each rank takes a share, near its own core."""
    os.posix_fallocate(file, start, end - start)
    return mmap.mmap(file, length)


def _tried(action: Callable[[], T]) -> T | None:
    """Return what an action returns, None where the system refuses it or has nothing of the kind."""
    try:
        return action()
    except (OSError, ValueError, AttributeError):
        return None
