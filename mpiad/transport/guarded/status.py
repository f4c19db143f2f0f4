"""What each rank is doing, told to a rank that asks: by a thread of each rank, over a communicator of its own.

A rank whose wait has expired asks all others, makes the table of the answers and sends it to those that wait with it,
which raise the same. Where MPI allows no second thread, ranks answer from inside their own waits only.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm
from mpiad.errors import DeadlockError
from mpiad.transport import calls
from mpiad.transport.departure import farewell
from mpiad.transport.guarded import communicator, message_counts, timed_waits
from mpiad.transport.guarded.deadlock import finding_of
from mpiad.transport.guarded.timed_waits import Departure, Waiting, departed
from mpiad.transport.notices import threads_may_communicate

_ASK, _TOLD, _VERDICT, _LEFT = 1, 2, 3, 4
_TICK = 0.02  # seconds between two looks of the thread
_PATIENCE = 1.0  # seconds for an answer, besides those for the number of ranks
_APART = 1e-3  # seconds between the ranks' questions


class Responder:
    """Answers questions about this rank, and asks about the others; made by all ranks together."""

    def __init__(self, comm: Comm):
        self._comm = comm
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._patience = _PATIENCE + _APART * comm.size
        self._sends: list[Any] = []
        self._asked = 0
        self._asking = False
        self._leaving_since: float | None = None
        self._ear, self._mouth = threading.Lock(), threading.Lock()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.start()

    def start(self) -> None:
        """Begin to answer."""
        self._done.clear()
        if threads_may_communicate() and self._comm.size > 1:
            self._thread = threading.Thread(target=self._respond, name="mpiad-status", daemon=True)
            self._thread.start()
        timed_waits.set_reporter(self.expire, None if self._thread is not None else self.answer)

    def stop(self) -> None:
        """Answer no more."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _respond(self) -> None:
        while not self._done.wait(_TICK):
            self.answer()

    def answer(self) -> None:
        """Answer what has come in."""
        with self._ear:
            while (come := self._taken(_ASK)) is not None:
                source, (number,) = come
                self._post([source], _TOLD, (number, self._state()))
            while (come := self._taken(_LEFT)) is not None:
                source, (counts, sends, how, place) = come
                departed[source] = Departure(counts, sends, how, place, perf_counter())
            while (come := self._taken(_VERDICT)) is not None:
                _, (told, found) = come
                timed_waits.tell(told[self._comm.rank], DeadlockError(*found))

    def announce(self, sends: bool) -> None:
        """Tell all other ranks that this one has left the program."""
        self._leaving_since = self._leaving_since or perf_counter()
        with self._ear:
            self._post(self._others, _LEFT, (communicator.counts(), sends, *farewell()))

    def hear_departures(self) -> None:
        """Take the notices of all others, which have been sent: some MPIs complain of what is left over."""
        until = perf_counter() + self._patience
        # Not for ever: a rank may have been ended from outside, without a notice.
        while len(departed) < len(self._others) and perf_counter() < until:
            self.answer()
            time.sleep(_TICK / 20)

    def expire(self, waiting: Waiting) -> Exception:
        """Return what a wait raises that has taken too long, and tell the ranks that wait with it."""
        # One after the other: the first one's verdict spares the others the question to all ranks.
        self._await_verdict(waiting, _APART * self._comm.rank)
        if waiting.verdict is not None:
            return waiting.verdict
        self._asking = True
        try:
            states = self._ask_all()
            self.answer()
            if waiting.verdict is not None:  # another rank was faster
                return waiting.verdict
            found = finding_of(states, self._comm.rank)
            # Of several ranks that ask at the same time one makes the table.
            first = min([self._comm.rank, *[r for r in found.ranks if (states[r] or {}).get("asking")]])
            if first != self._comm.rank:
                self._await_verdict(waiting, self._patience)
                if waiting.verdict is not None:
                    return waiting.verdict
            told = {rank: states[rank]["wait"] for rank in found.ranks if rank != self._comm.rank}  # type: ignore[index]
            self._post(list(told), _VERDICT, (told, found))
            return DeadlockError(*found)
        finally:
            self._asking = False

    def _await_verdict(self, waiting: Waiting, seconds: float) -> None:
        until = perf_counter() + seconds
        while waiting.verdict is None and perf_counter() < until:
            self.answer()
            time.sleep(_TICK / 4)

    def _ask_all(self) -> list[dict[str, Any] | None]:
        states: list[dict[str, Any] | None] = [None] * self._comm.size
        states[self._comm.rank] = self._state()
        self._asked += 1
        self._post(self._others, _ASK, (self._asked,))
        until, missing = perf_counter() + self._patience, set(self._others)
        while perf_counter() < until and missing:
            self.answer()
            come = self._taken(_TOLD)
            if come is None:
                time.sleep(_TICK / 10)
            # An answer to an earlier question may come late: what it says is no longer so.
            elif come[1][0] == self._asked:
                states[come[0]] = come[1][1]
                missing.discard(come[0])
        for rank in missing:
            states[rank] = _departure(rank)
        return states

    def _state(self) -> dict[str, Any]:
        """Return what this rank is doing."""
        main: int = threading.main_thread().ident  # type: ignore[assignment]
        every = timed_waits.who_waits()
        waiting = every.get(main) or next(iter(every.values()), None)
        common = {"asking": self._asking, "counts": communicator.counts(), "ledger": message_counts.summary()}
        if self._leaving_since is not None:
            how, place = farewell()
            seconds = perf_counter() - self._leaving_since
            return common | {"state": "left", "how": how, "place": place, "seconds": seconds}
        if waiting is not None:
            seconds = perf_counter() - waiting.began
            return common | {"state": "waits", "wait": waiting.number, "seconds": seconds} | waiting.what.report()
        frame = sys._current_frames().get(main)
        return common | {"state": "computes", "place": calls.site_of(frame).text}

    def _post(self, ranks: list[int], tag: int, value: object) -> None:
        buffer = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        with self._mouth:
            self._sends = [held for held in self._sends if not held[0].Test()]
            self._sends += [(self._comm.Isend(buffer, rank, tag), buffer) for rank in ranks]

    def _taken(self, tag: int) -> tuple[int, Any] | None:
        status = MPI.Status()
        message = self._comm.Improbe(MPI.ANY_SOURCE, tag, status)
        if message is None:
            return None
        buffer = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
        message.Recv([buffer, MPI.BYTE])
        return status.source, pickle.loads(buffer.tobytes())


def _departure(rank: int) -> dict[str, Any] | None:
    """Return what a rank has told of its leaving, that answers no more; None where it hasn't left."""
    gone = departed.get(rank)
    if gone is None:
        return None
    seconds = perf_counter() - gone.heard
    return {
        "state": "left", "how": gone.how, "place": gone.place, "seconds": seconds, "counts": gone.counts, "ledger": None,
    }  # fmt: skip
