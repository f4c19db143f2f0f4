"""Host memory that the ranks of a node share: the boards on which they publish device memory, and the flags of messages.

Each rank has a board in one file of POSIX shared memory. The file is removed as soon as all ranks have mapped it, so killed
ranks leave nothing behind. A message in device memory has two flags on the board of the rank whose memory it is in, 64-bit
numbers that devices write and wait for:

- `packed`: the sender's device writes the message's number after it has written the message;
- `pulled`: the receiver's device writes this number after it has read the message, whose memory may then be used again.

A device that waits for a flag can't be interrupted, so a thread looks after the waits of this rank: if the other rank has
died or ended the job, or the deadline of waits is over, it writes `POISON`, which ends the wait, and marks the communicator
as unusable. Ranks hold a lock on the file, which the system releases when a process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from mpiad._typing import Comm, Rank

POISON = 1 << 62  # larger than the number of any message
# Of one rank: blocks of device memory; messages that haven't been pulled; slots that it offers to each other rank.
BLOCKS, FLAGS, OFFERS = 256, 1 << 14, 8
OFFER = np.dtype([(name, "<i8") for name in ("number", "nbytes", "block", "start", "flag")])
_FOLDER = Path("/dev/shm")
_LOOKS_EVERY = 0.1  # seconds
_COOKIE = 16  # bytes

_log = logging.getLogger("mpiad")


def _no_deadline() -> float | None:
    return None


_deadline: Callable[[], float | None] = _no_deadline


def set_deadline(deadline: Callable[[], float | None]) -> None:
    """Set the function that returns the deadline of waits in seconds, None without one."""
    global _deadline
    _deadline = deadline


class Markable(Protocol):
    """A channel, which can be marked as unusable; `members`: the ranks of the world."""

    rank: int
    members: tuple[int, ...]

    def mark(self, reason: str, messages: bool = True) -> None:
        """Mark it."""


class Wait(NamedTuple):
    """A wait of this rank's device until the message `number` of a rank is packed."""

    sender: Rank  # local rank
    owner: Rank  # on whose board the flag is
    flag: int
    number: int
    began: float
    channel: Markable


def board_of(size: int) -> np.dtype:
    """Return the dtype of a rank's board, which fills whole pages, on a node with so many ranks."""
    fields = [("blocks", "<i8"), ("answers", "<i8", (size,)), ("handles", "u1", (BLOCKS, 64))]
    fields += [("offers", OFFER, (size, OFFERS)), ("packed", "<i8", (FLAGS,)), ("pulled", "<i8", (FLAGS,))]
    nbytes = np.dtype(fields).itemsize
    return np.dtype([*fields, ("rest", "u1", (-nbytes % mmap.PAGESIZE,))])


class NodeMemory:
    """The boards of a node's ranks. `world`: their ranks in the world; `cookie`: bytes that no other data contains."""

    def __init__(self, comm: Comm, world: list[Rank], file: int, cookie: bytes):
        self.comm, self.cookie = comm, np.frombuffer(cookie, np.uint8)
        self.rank: Rank = comm.rank
        self.local = {rank: k for k, rank in enumerate(world)}
        self.world = world
        self._file, kind = file, board_of(comm.size)
        self.memory = np.frombuffer(mmap.mmap(file, kind.itemsize * comm.size), np.uint8)
        self.boards = self.memory.view(kind)
        self.packed, self.pulled = self.boards["packed"], self.boards["pulled"]
        self._lock(self.rank)
        self._waits = deque[Wait]()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def offset(self, flags: str, owner: Rank, flag: int) -> int:
        """Return the position in the shared memory, in bytes, of one of a rank's flags."""
        kind = self.boards.dtype
        return owner * kind.itemsize + kind.fields[flags][1] + 8 * flag  # type: ignore[index]

    def note(self, wait: Wait) -> None:
        """Look after a wait of this rank's device."""
        self._waits.append(wait)
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_after, name="mpiad-device-waits", daemon=True)
            self._thread.start()

    def _look_after(self) -> None:
        while not self._ended.wait(_LOOKS_EVERY):
            for _ in range(len(self._waits)):
                if not self._is_over(wait := self._waits.popleft()):
                    self._waits.append(wait)

    def _is_over(self, wait: Wait) -> bool:
        value = self.packed[wait.owner, wait.flag]
        if value >= wait.number and value != POISON:
            return True
        limit, seconds, rank = _deadline(), time.monotonic() - wait.began, self.world[wait.sender]
        if value == POISON:
            reason = f"rank {rank} ended the job before it had sent an array on its device."
        elif not self.is_alive(wait.sender):
            reason = f"the process of rank {rank} died before it had sent an array on its device."
        elif limit is not None and seconds > limit:
            reason = f"an array on the device of rank {rank} hasn't arrived after {seconds:.0f} seconds."
        else:
            return False
        self.packed[wait.owner, wait.flag] = POISON
        wait.channel.mark(reason)
        _log.warning("rank %d: %s The array that was received contains no values.", self.world[self.rank], reason)
        return True

    def release(self) -> None:
        """End all waits of this rank's device, and those of other devices for this rank, which ends the job."""
        for wait in list(self._waits):
            self.packed[wait.owner, wait.flag] = POISON
        self.packed[self.rank] = POISON

    def is_alive(self, rank: Rank) -> bool:
        """Return whether the process of a rank of this node runs."""
        if rank == self.rank:
            return True
        try:
            self._lock(rank)
        except OSError:  # the rank holds it
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return False

    def _lock(self, rank: Rank) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def close(self) -> None:
        """End the thread; the memory is unmapped with the last array of it."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        os.close(self._file)


def shared_by(comm: Comm, world: list[Rank]) -> NodeMemory | str:
    """Return the memory that the ranks of a node share, or why they can't share device memory; collective over `comm`."""
    pids = comm.allgather(os.getpid())
    if len(set(pids)) < comm.size:
        return f"ranks have equal process numbers ({max(pids, key=pids.count)}), in separate PID namespaces"
    path, cookie = b"", secrets.token_bytes(_COOKIE)
    if comm.rank == 0:
        with contextlib.suppress(OSError):
            path = _made(board_of(comm.size).itemsize * comm.size, cookie)
    path, cookie = comm.bcast((path, cookie), 0)
    file, reason = -1, f"{_FOLDER} has no memory for {comm.size} ranks"
    if path:
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            reason = "" if os.pread(file, _COOKIE, 0) == cookie else "another file"
        except OSError as error:
            reason = error.strerror
        reason = reason and f"the ranks don't share {_FOLDER} ({reason})"
    reasons = [found for found in comm.allgather(reason) if found]
    if comm.rank == 0 and path:
        os.unlink(path)
    if reasons:
        if file >= 0:
            os.close(file)
        return reasons[0]
    shared = NodeMemory(comm, world, file, cookie)
    if comm.rank == 0:
        shared.memory[:_COOKIE] = 0  # all ranks have compared it
    comm.Barrier()  # all ranks hold their locks
    return shared


def _made(nbytes: int, cookie: bytes) -> bytes:
    """Return the path of a new file of shared memory that begins with the cookie; raise an OSError without memory."""
    file, path = tempfile.mkstemp(prefix="mpiad-", dir=_FOLDER)
    try:
        os.posix_fallocate(file, 0, nbytes)  # so that later writes can't fail
        os.pwrite(file, cookie, 0)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    return os.fsencode(path)
