"""Comparison of the ranks' next calls, on a separate communicator.

A hash identifies the call of each rank. In log2(P) rounds of one small message per rank, all ranks compute the minimum and
maximum of the hashes. If these differ, the ranks exchange descriptions of the calls. Channels with the same ranks share one
communicator for this, so calls on different channels are compared, too.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Comm
from mpiad.transport.core.channels import ABANDONED, make_communicator
from mpiad.transport.watch.timed_waits import Awaited, GuardedRequest, cancel_receives, poll_for

_LANES = 256  # number of independent sequences of agreements: one for the main thread, the others for other threads


class Agreement:
    """The agreements of one group: `members` in the world, restarts (`epoch`), and nonblocking `starts` by lane."""

    def __init__(self, comm: Comm, members: tuple[int, ...], label: str):
        self.comm, self.members, self.label = comm, members, label
        # Tags differ between epochs, so messages of an earlier epoch aren't received. MPI limits the number of tags.
        self._epochs = min(int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767), 2**31 - 1) // (2 * _LANES)
        self.epoch = 0
        # Numbers of agreements begun, by lane; deadlock reports find missing ranks by them.
        self._numbers: Counter[int] = Counter()
        self.starts: Counter[int] = Counter()
        self.later: Comm = None  # for comparisons of the main thread's nonblocking calls
        self._is_open = False
        self.begun_later = self.ended_later = 0  # numbers of comparisons of nonblocking calls

    def open(self) -> None:
        """Begin a new epoch after `renew`, the latest of any rank; collective."""
        if self._is_open:
            return
        mine = np.array([-self.epoch, self.begun_later, -self.begun_later, self.ended_later])
        least = np.empty_like(mine)
        self.comm.Allreduce(mine, least, MPI.MIN)
        self.epoch = -int(least[0])
        if self.later is None or not least[1] == -least[2] == least[3]:
            # Not freed: a rank may have begun an operation there that others haven't, and the context may be reused.
            ABANDONED.append((self.later,))
            self.later, self.begun_later, self.ended_later = make_communicator(self.comm.Dup), 0, 0
        self._is_open = True

    def begun(self, lane: int) -> tuple[str, int]:
        """Return the key under which the agreements of a lane are counted, and their number."""
        return self._key(lane), self._numbers[lane]

    def counts(self) -> dict[str, int]:
        """Return the numbers of agreements that this rank has begun."""
        return {self._key(lane): number for lane, number in self._numbers.copy().items()}

    def _key(self, lane: int) -> str:
        return f"{self.label}, lane {lane}" if lane else self.label

    def agree(self, mine: int, lane: int, make: Callable[[], Awaited]) -> bool:
        """Return whether `mine`, a hash of the call, is the same on all ranks; waits with a deadline."""
        self._numbers[lane] += 1
        # `mine` is small enough for the sum to be below 2⁶³.
        least = greatest = mine + self.starts[lane]
        # Dissemination algorithm: the distance doubles in each round. It works for any number of ranks, since minimum and
        # maximum don't change if a number arrives twice.
        comm, tag, distance = self.comm, self._tag(lane), 1
        while distance < comm.size:
            out, into = np.array([least, greatest], np.int64), np.empty(2, np.int64)
            source, dest = (comm.rank - distance) % comm.size, (comm.rank + distance) % comm.size
            receive = GuardedRequest(self, make, comm.Irecv, into, source, tag, receives=True)
            send = GuardedRequest(self, make, comm.Isend, out, dest, tag)
            receive.Wait()
            send.Wait()
            low, high = into.tolist()
            least, greatest = min(least, low), max(greatest, high)
            distance *= 2
        return least == greatest

    def descriptions(self, mine: Array, lane: int, make: Callable[[], Awaited]) -> list[Any]:
        """Return each rank's description; all ranks call this after a disagreement."""
        tag = self._tag(lane) + _LANES * self._epochs
        buffer = np.frombuffer(pickle.dumps(mine), dtype=np.uint8)
        sends = [GuardedRequest(self, make, self.comm.Isend, buffer, rank, tag) for rank in range(self.comm.size)]
        found = [poll_for(partial(self.comm.improbe, rank, tag), make).recv() for rank in range(self.comm.size)]
        for send in sends:
            send.Wait()
        return found

    def renew(self) -> None:
        """Abandon pending agreements, and restart the counts with other tags; all ranks call this, and then `open`."""
        self.epoch += 1
        self._is_open = False
        self._numbers.clear()
        self.starts.clear()
        cancel_receives(self)  # so that they don't receive later messages

    def _tag(self, lane: int) -> int:
        return self.epoch % self._epochs * _LANES + lane


_MAIN = threading.main_thread().ident


def lane_of(channel_number: int) -> int:
    """Return the lane of this thread: 0 for the main thread, otherwise one that depends on the channel."""
    return 0 if threading.get_ident() == _MAIN else channel_number % (_LANES - 1) + 1
