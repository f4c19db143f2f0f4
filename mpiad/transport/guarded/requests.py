"""Requests whose wait has a deadline; reductions among them are compared at their end, since ranks may start them apart."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Comm, Op, Request, Status
from mpiad.transport import calls
from mpiad.transport.guarded import watch_settings
from mpiad.transport.guarded.awaited import Gathering
from mpiad.transport.guarded.call_agreement import Agreement, lane_of
from mpiad.transport.guarded.descriptions import Description, describe, raise_mismatch
from mpiad.transport.guarded.timed_waits import Awaited, poll

# What MPI may still use of requests that were given up; never emptied: nobody knows when MPI is done with it.
_abandoned: list[tuple[Any, Any]] = []


class GuardedRequest:
    """A request of mpi4py's, waited for by polling.

    `make`: describes the wait. `held`: its buffers. `receives`: whether it can be taken back.
    """

    def __init__(self, request: Request, make: Callable[[], Awaited], held: object = None, receives: bool = False):
        self.request, self._make = request, make
        self._held, self._receives = held, receives

    def Test(self, status: Status = None) -> bool:
        """Tell whether it is complete."""
        return self.request.Test(status)

    def Wait(self, status: Status = None) -> None:
        """Wait until it is complete."""
        try:
            poll(lambda: self.Test(status), self._make)
        except MPI.Exception:  # it is complete
            raise
        except BaseException:  # the deadline, or a Ctrl-C between two looks
            self._give_up()
            raise

    def _give_up(self) -> None:
        # The caller drops the buffers. A receive must not take a later message into them either.
        if self._receives:
            self.Cancel()
            self.request.Wait()
        else:
            _abandoned.append((self.request, self._held))

    def Cancel(self) -> None:
        """Cancel it."""
        self.request.Cancel()


_BYTES = 1024  # for each rank: of one length, so that one nonblocking call is enough


class StartedReduction(GuardedRequest):
    """A reduction under way, and the descriptions of what each rank has started."""

    def __init__(self, comm: Comm, array: Array, out: np.ndarray, op: Op | None):
        agreement: Agreement = comm.agreement
        lane = lane_of(comm.number)
        agreement.starts[lane] += 1
        comm.started += 1
        number = comm.started
        said = _described(comm, out, op)
        super().__init__(comm.bare.Iallreduce(array, out, op), lambda: Gathering(comm, comm.label, number, said))
        self.caller = said.operation, said.place
        self._held = array, out
        self._mine, self._every = np.zeros(_BYTES, np.uint8), np.zeros((comm.size, _BYTES), np.uint8)
        packed = _packed(said, agreement.starts[lane])
        self._mine[: packed.size] = packed
        self._saying = agreement.later(lane, comm.post).Iallgather(self._mine, self._every)
        self._group = comm if lane else agreement  # in whose order they say it

    def Wait(self, status: Status = None) -> None:
        """Wait for the descriptions, compare them, and wait for the sum."""
        poll(self._saying.Test, self._make)
        said = [pickle.loads(every.tobytes()) for every in self._every]
        if len({(description.compared, starts) for description, starts in said}) > 1:
            # The sum of what doesn't belong together may never end, and mustn't be written into memory that others use.
            _abandoned.append((self.request, self._held))
            raise_mismatch(said, self._group)
        super().Wait(status)


def _described(comm: Comm, out: np.ndarray, op: Op | None) -> Description:
    said, call = describe(comm.label, "Iallreduce", out, op, None, watch_settings.present().compares_lines), calls.current()
    # Of an array that goes in pieces, the first ones are alike where the ranks' lengths differ.
    return said if call is None or call.arguments.shape is None else said._replace(shape=call.arguments.shape)


def _packed(said: Description, starts: int) -> np.ndarray:
    """Return a description in at most so many bytes: cut short on all ranks alike, where names are long."""
    packed, width = pickle.dumps((said, starts)), 256
    while len(packed) > _BYTES:
        cut = [value[:width] if isinstance(value, str) else value for value in said]
        packed, width = pickle.dumps((Description._make(cut), starts)), width // 2
    return np.frombuffer(packed, np.uint8)
