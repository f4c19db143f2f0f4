"""The ranks of a group agree on their next call, over a communicator of their own.

Each rank has a number that identifies its call. In log2(P) rounds of one small message all learn the minimum and the
maximum: if these are equal, all calls are. Descriptions are sent only if they differ. Channels of the same ranks share
one communicator for this, so that a call on the wrong one of two is found, too.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Comm
from mpiad.transport.guarded.timed_waits import Awaited, poll, poll_for

_LANES = 256  # of threads: one for the main thread, the others share the rest
_abandoned: list[Any] = []  # MPI may still use these buffers and communicators


class Agreement:
    """The communicators and counters by which the ranks of one group agree.

    `members`: their ranks in the world, by their rank in its communicator. `epoch`: the number of restarts.
    `starts`: by lane, the number of nonblocking reductions begun: they must come at the same place among the other
    calls.
    """

    def __init__(self, comm: Comm, members: tuple[int, ...], label: str):
        self.comm, self.members, self.label = comm, members, label
        # Messages never received must not match a later epoch's receives: as many epochs as MPI's tags allow.
        self._epochs = min(int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767), 2**31 - 1) // (2 * _LANES)
        self.epoch = 0
        # Numbers of agreements begun, by lane: they show which ranks are missing.
        self._numbers: Counter[int] = Counter()
        self.starts: Counter[int] = Counter()
        self._lanes: dict[int, _Lane] = {}
        self._later: Comm | None = None
        self._is_open = False
        # Numbers of comparisons begun and ended on that communicator.
        self.begun_later = self.ended_later = 0

    def open(self) -> None:
        """Begin a new epoch after `renew`; all ranks call it, when all are present."""
        if self._is_open:
            return
        # Ranks may have made different numbers of attempts to renew it.
        mine = np.array([-self.epoch, self.begun_later, -self.begun_later, self.ended_later])
        least = np.empty_like(mine)
        self.comm.Allreduce(mine, least, MPI.MIN)
        self.epoch = -int(least[0])
        if self._later is None or not least[1] == -least[2] == least[3]:
            # A rank may have begun an operation there that others haven't. Not freed: a reused context would receive that.
            _abandoned.append(self._later)
            self._later, self.begun_later, self.ended_later = self.comm.Dup(), 0, 0
        self._is_open = True

    def later(self, lane: int, own: Comm) -> Comm:
        """Return the communicator for comparisons at the end of nonblocking calls: the channel's own in threads."""
        return own if lane else self._later  # type: ignore[return-value]

    def begun(self, lane: int) -> tuple[str, int]:
        """Return the key under which the agreements of a lane are counted, and their number."""
        return self._key(lane), self._numbers[lane]

    def counts(self) -> dict[str, int]:
        """Return the numbers of agreements that this rank has begun."""
        return {self._key(lane): number for lane, number in self._numbers.copy().items()}

    def _key(self, lane: int) -> str:
        return f"{self.label}, lane {lane}" if lane else self.label

    def agree(self, mine: int, lane: int, make: Callable[[], Awaited]) -> bool:
        """Return whether all ranks have given the same number; a wait with a deadline."""
        self._numbers[lane] += 1
        # The count is part of the compared number; a fingerprint leaves bits free for it, so the sum is below 2⁶³.
        return self._lane(lane).agree(mine + self.starts[lane], make)

    def descriptions(self, mine: Array, lane: int, make: Callable[[], Awaited]) -> list[Any]:
        """Return each rank's description; all ranks call it after they have disagreed."""
        tag = self._tag(lane) + _LANES * self._epochs
        buffer = np.frombuffer(pickle.dumps(mine), dtype=np.uint8)
        # Held also after an exception, which may come while some are under way.
        _abandoned.append(held := [buffer])
        # To this rank too, so that it needs no case of its own.
        sends = [self.comm.Isend(buffer, rank, tag) for rank in range(self.comm.size)]
        found = [_received(self.comm, rank, tag, make) for rank in range(self.comm.size)]
        for send in sends:
            poll(send.Test, make)
        held.clear()
        return found

    def renew(self, epoch: int | None = None) -> None:
        """Forget agreements under way, and restart the counts: later messages have other tags. All ranks call it.

        The `epoch` is the same on all ranks, if they may have restarted independently.
        """
        self.epoch = self.epoch + 1 if epoch is None else epoch
        self._is_open = False
        self._numbers.clear()
        self.starts.clear()
        for lane in self._lanes.values():
            lane.abandon()
        self._lanes.clear()

    def _lane(self, number: int) -> _Lane:
        lane = self._lanes.get(number)
        if lane is None or lane.broken:
            lane = self._lanes[number] = _Lane(self.comm, self._tag(number))
        return lane

    def _tag(self, lane: int) -> int:
        return self.epoch % self._epochs * _LANES + lane


_MAIN = threading.main_thread().ident


def lane_of(channel_number: int) -> int:
    """Return the lane of this thread: other threads than the main one may have communicators, and agree separately."""
    return 0 if threading.get_ident() == _MAIN else channel_number % (_LANES - 1) + 1


def _received(comm: Comm, source: int, tag: int, make: Callable[[], Awaited]) -> Any:
    status = MPI.Status()
    message = poll_for(lambda: comm.Improbe(source, tag, status), make)
    buffer = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
    message.Recv([buffer, MPI.BYTE])
    return pickle.loads(buffer.tobytes())


class _Lane:
    """Persistent requests for the rounds of one tag."""

    def __init__(self, comm: Comm, tag: int):
        self.broken, self.busy = False, False
        self._rounds: list[tuple[np.ndarray, np.ndarray, Any, Any]] = []
        # Dissemination, with the distance doubled in each round. A rank's number may come twice, which doesn't change the
        # minimum and maximum: so it works for any number of ranks.
        distance = 1
        while distance < comm.size:
            out, into = np.zeros(2, np.int64), np.zeros(2, np.int64)
            send = comm.Send_init(out, (comm.rank + distance) % comm.size, tag)
            receive = comm.Recv_init(into, (comm.rank - distance) % comm.size, tag)
            self._rounds.append((out, into, send, receive))
            distance *= 2

    def agree(self, mine: int, make: Callable[[], Awaited]) -> bool:
        least = greatest = mine
        self.busy = True
        try:
            for out, into, send, receive in self._rounds:
                out[0], out[1] = least, greatest
                # The receive first, so that MPI needn't buffer the message.
                receive.Start()
                send.Start()
                poll(receive.Test, make)
                low, high = into.tolist()
                least, greatest = min(least, low), max(greatest, high)
                poll(send.Test, make)
        except BaseException:
            self.abandon()
            raise
        self.busy = False
        return least == greatest

    def abandon(self) -> None:
        """Cancel pending rounds: a later message must not be received in their place."""
        self.broken = True
        for _, _, send, receive in self._rounds:
            if not receive.Test():  # true if it isn't active
                receive.Cancel()
                receive.Wait()
            if not self.busy:  # inside of a round MPI may still send: those requests stay
                send.Free()
                receive.Free()
        if self.busy:
            _abandoned.append(self._rounds)
        self._rounds = []
