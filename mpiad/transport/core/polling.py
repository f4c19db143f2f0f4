"""Waits that don't occupy a core, and messages for which ranks poll: objects, questions about states, a shared counter.

There are often more ranks than cores, and MPI's own waits would occupy the core of another rank.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm, Rank, Request
from mpiad.transport.core.channels import Channel, drain, make_communicator
from mpiad.transport.core.fault_tolerance import is_process_failure

_AT_ONCE = 0.01
_LONGEST_NAP = 1e-3
_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))  # takes 1 µs; a sleep takes up to 100 µs


class Backoff:
    """Increasing pauses during a wait, zero in the first `at_once` seconds; `nap`: seconds of the next pause."""

    def __init__(self, at_once: float = _AT_ONCE) -> None:
        self._at_once = at_once
        self.renew()

    def renew(self) -> None:
        """Begin again with pauses of zero."""
        self._start, self.nap = time.perf_counter(), 0.0

    def pause(self) -> None:
        """Sleep, or yield the core to another process."""
        if self.nap:
            time.sleep(self.nap)
        else:
            _yield_core()
        if self.nap or time.perf_counter() - self._start > self._at_once:
            self.nap = min(self.nap + 2e-5, _LONGEST_NAP)

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.perf_counter() - self._start


def wait_for_message(probe: Callable[[], bool], comm: Comm, source: int = MPI.ANY_SOURCE) -> None:
    """Wait until ``probe()``, which probes for a message from `source`, returns true."""
    if isinstance(comm, MPI.Comm):
        pause_until(probe)
    else:
        comm.until(probe, source)  # deadlock reports show this wait


def wait_gently(request: Request) -> None:
    """Wait for a request; a guarded request has its own wait."""
    if isinstance(request, MPI.Request):
        pause_until(request.Test)
    else:
        request.Wait()


def pause_until(ended: Callable[[], bool]) -> None:
    """Wait with pauses until ``ended()`` returns true."""
    patience = Backoff()
    while not ended():
        patience.pause()


def threads_may_communicate() -> bool:
    """Return whether MPI was initialized for calls from several threads at once."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


class Message(NamedTuple):
    """A received message: its sender, kind, and object."""

    source: Rank
    kind: int
    content: Any


def packed(content: object) -> np.ndarray:
    """Return the pickle of an object, ready to be sent, possibly several times; raises the exceptions of pickle."""
    return np.frombuffer(pickle.dumps(content, protocol=5), np.uint8)


def _is_over(request: Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception as error:
        if is_process_failure(error):
            return True  # the receiver has died
        raise


class Mailbox:
    """Sends and receives objects on a communicator without other messages; the channel holds the buffers."""

    def __init__(self, comm: Comm, channel: Channel):
        self.comm, self._channel = comm, channel
        self._status = MPI.Status()
        self._posted: list[tuple[list[Request], Rank]] = []

    def post(self, dest: Rank, kind: int, parcel: np.ndarray) -> None:
        """Send an object that `packed` has returned, without waiting."""
        self.settle()
        self._posted.append((self._channel.begin("parcel", parcel, self.comm.Isend, (parcel,), (dest,), (kind,)), dest))

    def take(self, source: Rank = MPI.ANY_SOURCE) -> Message | None:
        """Return a message that has arrived, or None."""
        status = self._status
        found = self.comm.Improbe(source, MPI.ANY_TAG, status)
        if found is None:
            return None
        parcel = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
        found.Recv(parcel)
        return Message(status.source, status.tag, pickle.loads(parcel.data))

    def is_quiet(self) -> bool:
        """Return whether all posted messages have been sent."""
        self.settle()
        return not self._posted

    def settle(self, dead: Rank | None = None) -> None:
        """Release the buffers of messages that have been sent, or that were posted to a rank that has died."""
        held, self._posted = self._posted, []
        for requests, dest in held:
            if dest == dead or _is_over(requests[0]):
                self._channel.release(requests)
            else:
                self._posted.append((requests, dest))


_LAST, _ASK, _ANSWER = 0, 1, 2
_POLL_INTERVAL = 5e-4  # seconds


class StateExchange:
    """Questions of the ranks about each other's states, which a thread of each rank answers every `tick` seconds."""

    def __init__(self, comm: Comm, state: Callable[[], object], tick: float, name: str):
        # `comm` has no other messages and isn't guarded. Without a second thread, a rank answers only in `answer`.
        self._comm, self._state, self._tick, self._name = comm, state, tick, name
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._sends: list[tuple[np.ndarray, list[Request]]] = []  # buffers and, once started, their requests
        self._asked = 0
        self._answers: dict[Rank, Any] = {}
        self._receiving, self._sending = threading.Lock(), threading.Lock()
        self._ended = threading.Event()
        self.thread: threading.Thread | None = None  # answers, if MPI allows a second thread

    def start(self) -> None:
        """Start to answer."""
        self._ended.clear()
        if threads_may_communicate() and self._others:
            self.thread = threading.Thread(target=self._respond, name=self._name, daemon=True)
            self.thread.start()

    def stop(self) -> None:
        """Stop answering."""
        self._ended.set()
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _respond(self) -> None:
        while not self._ended.wait(self._tick):
            self.answer()

    def answer(self) -> None:
        """Receive all messages that have arrived, and answer questions."""
        with self._receiving:
            status = MPI.Status()
            while (message := self._comm.improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
                source, kind = status.source, status.tag
                self._handle(source, kind, message.recv())

    def _handle(self, source: Rank, kind: int, value: Any) -> None:
        if kind == _ASK and not self._ended.is_set():
            self.post([source], _ANSWER, (value, self._state()))
        elif kind == _ANSWER and value[0] == self._asked:  # late answers to earlier questions are ignored
            self._answers[source] = value[1]

    def post(self, ranks: list[Rank], kind: int, value: object) -> None:
        """Send a message without waiting."""
        buffer = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        with self._sending:
            self._sends = [(held, requests) for held, requests in self._sends if not (requests and requests[0].Test())]
            for rank in ranks:
                requests: list[Request] = []
                self._sends.append((buffer, requests))
                # `extend` with `map` can't be interrupted between the send and its registration.
                requests.extend(map(self._comm.Isend, (buffer,), (rank,), (kind,)))

    def ask_all(self, seconds: float, ends: Callable[[], bool] = lambda: False) -> dict[Rank, Any]:
        """Return the states of the other ranks that answer within a time, and before ``ends()`` is true."""
        with self._receiving:
            self._asked += 1
            self._answers = {}
        self.post(self._others, _ASK, self._asked)
        until = time.perf_counter() + seconds
        while len(self._answers) < len(self._others) and time.perf_counter() < until and not ends():
            self.answer()
            time.sleep(_LONGEST_NAP)
        return self._answers

    def drain(self) -> None:
        """Complete or drop all messages after `stop`; collective."""
        self._comm.Barrier()  # until then, the thread of another rank would take the last messages of `drain`
        drain(self._comm, _LAST)
        for request in [request for _, requests in self._sends for request in requests]:
            request.Wait()


class SharedCounter:
    """A counter from 0, from which any rank takes the next number: a context that all ranks enter and leave.

    A thread of rank 0 answers the other ranks, so MPI must allow calls from several threads. Several MPIs execute one-sided
    operations, the alternative, only while the target rank calls MPI.
    """

    def __init__(self, comm: Comm):
        self._comm: Comm = make_communicator(comm.Dup)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="mpiad-counter", daemon=True)
        if comm.rank == 0:
            self._thread.start()

    def take(self, many: int = 1) -> int:
        """Return the next number, and advance the counter by `many`."""
        number = np.array(many, np.int64)
        self._comm.Send(number, 0, _ASK)
        wait_gently(self._comm.Irecv(number, 0, _ANSWER))
        return int(number)

    def _answer(self) -> None:
        number, many, status = np.zeros((), np.int64), np.empty((), np.int64), MPI.Status()
        while not self._ended.wait(_POLL_INTERVAL):
            # Polled, since MPI's own wait would occupy a core.
            while self._comm.Iprobe(MPI.ANY_SOURCE, _ASK, status):
                self._comm.Recv(many, status.source, _ASK)
                self._comm.Send(number, status.source, _ANSWER)
                number += many

    def __enter__(self) -> SharedCounter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End; after an exception the communicator isn't freed, since this would be collective."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if kind is None:
            self._comm.Free()
