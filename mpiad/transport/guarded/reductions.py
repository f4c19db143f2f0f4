"""Nonblocking reductions of debug mode: ranks may start them at different times, so they are compared at their end."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from mpiad.transport.guarded import settings
from mpiad.transport.guarded.agreement import Agreement
from mpiad.transport.guarded.awaited import Gathering
from mpiad.transport.guarded.descriptions import describe
from mpiad.transport.guarded.mismatch import raise_mismatch
from mpiad.transport.guarded.requests import GuardedRequest, keep_for_ever
from mpiad.transport.guarded.waits import poll

__all__ = ["StartedReduction"]

_BYTES = 1024


class StartedReduction(GuardedRequest):
    """A reduction under way, and the descriptions of what each rank has started."""

    def __init__(self, comm: Any, array: np.ndarray, out: np.ndarray, op: Any):
        agreement: Agreement = comm.agreement
        agreement.starts += 1
        comm.started += 1
        number = comm.started
        said = describe(comm.label, "Iallreduce", array, op, None, settings.present().call_sites)
        super().__init__(comm.bare.Iallreduce(array, out, op), lambda: Gathering(comm, comm.label, number, said))
        self.caller = said.operation, said.place
        self._comm, self._held = comm, (array, out)
        self._mine, self._every = np.zeros(_BYTES, np.uint8), np.zeros((comm.size, _BYTES), np.uint8)
        packed = np.frombuffer(pickle.dumps((said, agreement.starts)), np.uint8)
        self._mine[: min(packed.size, _BYTES)] = packed[:_BYTES]
        self._saying = agreement.later().Iallgather(self._mine, self._every)

    def Wait(self, status: Any = None) -> None:
        """Wait for the descriptions, compare them, and wait for the sum."""
        poll(self._saying.Test, self._make)
        said = [pickle.loads(every.tobytes()) for every in self._every]
        if any(_compared(one) != _compared(said[0]) for one in said):
            keep_for_ever(self.request, self._held)
            raise_mismatch(said, self._comm)
        super().Wait(status)


def _compared(said: Any) -> Any:
    description, starts = said
    return description.compared, starts
