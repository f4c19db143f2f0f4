"""Under watch, what MPI uses is held at whatever line an interrupt comes, and nobody waits forever for its rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each_line import interrupted_before_each_line
from mpi4py import MPI

import mpiad
from mpiad.errors import DeadlockError
from mpiad.transport.core import channels
from mpiad.transport.watch import status, timed_waits
from mpiad.transport.watch.call_agreement import Agreement
from mpiad.transport.watch.communicator import Guarded
from mpiad.transport.watch.message_headers import HeadedMessages


class Operation:
    """A request of MPI's: never complete, and Ctrl-C comes in the wait for it."""

    def __init__(self, *buffers: Any, receives: bool = False):
        self.buffers, self.receives, self.active, self.tested = buffers, receives, True, 0

    def Test(self, status: Any = None) -> bool:
        self.tested += self.active
        if self.tested == 3:
            raise KeyboardInterrupt
        return not self.active

    def Cancel(self) -> None:
        self.active = False

    def Wait(self) -> None:
        assert not self.active


class Bare:
    """Stands for a communicator of MPI's, with the operations that were started on it."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.started: list[Operation] = []
        self.owner: Any = None

    def _start(self, *args: Any, **more: Any) -> Operation:
        self.started.append(Operation(*(arg for arg in args if isinstance(arg, (np.ndarray, list))), **more))
        return self.started[-1]

    Isend = Iallreduce = Iallgather = _start

    def Irecv(self, *args: Any) -> Operation:
        return self._start(*args, receives=True)

    def Improbe(self, *args: Any) -> None:
        raise KeyboardInterrupt

    def Allreduce(self, mine: np.ndarray, every: np.ndarray, op: Any) -> None:
        every[:] = mine

    def Dup(self) -> Bare:
        return self


def headed(bare: Bare) -> HeadedMessages:
    return HeadedMessages(bare, bare, "test", (0, 1))


def agreement(bare: Bare) -> Agreement:
    made = Agreement(bare, (0, 1), "test")
    made.open()
    return made


UNUSED: Any = None


def question(bare: Bare) -> None:
    bare.owner = status.Responder(bare)  # which lives as long as the program
    bare.owner.post([1, 1], 1, "text")


PROGRAMS: dict[str, Callable[[Bare], Any]] = {
    "send": lambda bare: Guarded(bare, "test", (0, 1)).Isend(np.ones(3), 1, 5).Wait(),
    "receive": lambda bare: Guarded(bare, "test", (0, 1)).Recv(np.ones(3), 1, 5),
    "headed send": lambda bare: headed(bare).Isend(np.ones(3), 1, 5).Wait(),
    "headed receive": lambda bare: headed(bare).Irecv(np.ones(3), 1, 5).Wait(),
    "sum": lambda bare: Guarded(bare, "test", (0, 1)).Allreduce(np.ones(3), np.ones(3)),
    "sum waited for later": lambda bare: Guarded(bare, "test", (0, 1), agreement(bare)).Iallreduce(np.ones(3), np.ones(3)),
    "agreement": lambda bare: Guarded(bare, "test", (0, 1), agreement(bare)).agree("Barrier"),
    "descriptions": lambda bare: agreement(bare).descriptions("text", 0, UNUSED),
    "question": question,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_mpi_uses_is_held_at_whatever_line_an_interrupt_comes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = str(Path(channels.__file__).parents[1])
    monkeypatch.setattr(status.Responder, "start", lambda responder: None)
    monkeypatch.setattr(timed_waits, "pending", {})
    for lines, run in enumerate(interrupted_before_each_line(folder)):
        bare = Bare()
        run(partial(PROGRAMS[name], bare))
        for operation in bare.started:
            for buffer in operation.buffers:
                # Besides the test, there is whoever holds it.
                assert sys.getrefcount(buffer) > 3 or not operation.active, lines
        for found in list(timed_waits.pending.values()):  # as a reset does
            timed_waits.cancel_receives(found.owner)
        assert not any(operation.active for operation in bare.started if operation.receives), lines
    assert bare.started and lines > 8


@pytest.mark.mpi(min_size=2)
def test_nobody_waits_forever_in_a_collective_for_a_rank_that_agreed_and_left(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int, short_deadline: Any
) -> None:
    agree = Guarded.agree

    def interrupted(*args: Any) -> None:
        agree(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if rank == 0:
            patch.setattr(Guarded, "agree", interrupted)
        with short_deadline(), pytest.raises(KeyboardInterrupt if rank == 0 else DeadlockError):
            mpiad.mpi_allreduce(1.0)
    MPI.COMM_WORLD.Barrier()
    mpiad.reset()
    assert mpiad.mpi_allreduce(1.0) == size


@pytest.mark.mpi(min_size=2)
def test_a_reset_that_some_ranks_have_given_up_can_be_repeated(rank: int, size: int, short_deadline: Any) -> None:
    mpiad.mpi_send(np.zeros(3), (rank + 1) % size)
    if rank:
        with short_deadline(), pytest.raises(DeadlockError):
            mpiad.reset()
    MPI.COMM_WORLD.Barrier()
    mpiad.reset()
    mpiad.mpi_send(np.full(3, float(rank)), (rank + 1) % size)
    np.testing.assert_array_equal(mpiad.mpi_recv(np.zeros(3), (rank - 1) % size), (rank - 1) % size)
