"""Waits that don't end: who waits for whom, in which call, and the cycle."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from agreement import poll
from mpi4py import MPI

import mpiad
from mpiad.errors import DeadlockError
from mpiad.transport import channel
from mpiad.transport.core import channels
from mpiad.transport.watch import communicator, message_headers, status, timed_waits
from mpiad.transport.watch.communicator import Guarded
from mpiad.transport.watch.status import State, finding_of
from mpiad.transport.watch.timed_waits import Departure, GuardedRequest

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(params=["compared", "deadline alone"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whether the ranks compare what they do, or only their waits end."""
    from mpiad.transport.watch import switch, watch_settings

    before, alone = watch_settings.present(), request.param == "deadline alone"
    switch.restore(before._replace(debug=not alone))
    yield request.param
    (switch.apply if alone else switch.restore)(before)


# Where the ranks compare nothing, another test shows what a wait's end does.
mostly_compared = pytest.mark.parametrize(
    "mode", ["compared", pytest.param("deadline alone", marks=pytest.mark.thorough)], indirect=True
)


@pytest.fixture
def expect_deadlock(short_deadline: Any) -> Callable[..., DeadlockError]:
    """`expect_deadlock(run, *words)`: check the error and that `reset` helps; ranks that don't wait call `recover`."""

    def expect(run: Any, *words: str) -> DeadlockError:
        with short_deadline(), pytest.raises(DeadlockError) as caught:
            run()
        for word in words:
            assert word in str(caught.value)
        recover()
        return caught.value

    return expect


def recover() -> None:
    """Meet the other ranks again, from the same line; a rank that comes early computes until then."""
    poll(MPI.COMM_WORLD.Ibarrier(), None)
    mpiad.reset()
    assert mpiad.mpi_allreduce(1) == MPI.COMM_WORLD.size


@pytest.mark.few(2)
@pytest.mark.also_on(2)
def test_all_receive_first(mode: str, rank: int, size: int, expect_deadlock: Any) -> None:
    error = expect_deadlock(
        lambda: mpiad.mpi_recv(np.ones(3), (rank + 1) % size, tag=5), "-> rank 0", "with tag 5", "test_deadlock.py:"
    )
    assert error.ranks == tuple(range(size)) and error.cycle == (*range(size), 0)


@pytest.mark.few(2)
def test_one_doesn_t_come(mode: str, rank: int, size: int, expect_deadlock: Any) -> None:
    if rank == 1:
        recover()
        return
    error = expect_deadlock(lambda: mpiad.mpi_allreduce(np.ones(3)), "mpi_allreduce", "computes", "shape (3,), float64")
    assert error.ranks == tuple(r for r in range(size) if r != 1) and error.cycle == ()
    assert all(error.table.splitlines()[1 + other].endswith("rank 1") for other in error.ranks)


@mostly_compared
def test_a_message_with_another_tag_is_named(mode: str, rank: int, expect_deadlock: Any) -> None:
    if rank > 1:
        recover()
        return
    mpiad.mpi_send(np.ones(3), 1 - rank, tag=6)
    error = expect_deadlock(lambda: mpiad.mpi_recv(np.ones(3), 1 - rank, tag=5), "with tag 6 (24 bytes) is there instead")
    assert error.cycle == (0, 1, 0)
    if mode == "compared":
        assert f"Rank {rank} sent a message to rank {1 - rank} with tag 6 at test_deadlock.py:" in str(error)


@mostly_compared
def test_a_message_of_mpi4py_is_named(mode: str, rank: int, expect_deadlock: Any) -> None:
    if rank > 1:
        recover()
        return
    sent = MPI.COMM_WORLD.Isend(np.ones(3), 1 - rank, tag=5)
    text = (
        f"Rank {rank}: the message from rank {1 - rank} with tag 5 was sent by mpi4py, on another communicator: both ends"
    )
    expect_deadlock(lambda: mpiad.mpi_recv(np.ones(3), 1 - rank, tag=5), text, "The lines below the table say why")
    MPI.COMM_WORLD.Recv(np.empty(3), 1 - rank, tag=5)
    sent.Wait()


@mostly_compared
def test_a_collective_against_a_message(mode: str, rank: int, expect_deadlock: Any) -> None:
    def wrong() -> Any:
        return mpiad.mpi_recv(0.0, 0) if rank == 1 else mpiad.mpi_barrier()

    error = expect_deadlock(wrong, "mpi_recv(from rank 0", "mpi_barrier")
    assert {0, 1} <= set(error.ranks)


@pytest.mark.few(1)
def test_backwards_the_forward_line_is_named(mode: str, rank: int, size: int, expect_deadlock: Any) -> None:
    def loss(x: Any) -> Any:
        y = mpiad.mpi_send(x, (rank + 1) % size)
        return anp.sum(y * mpiad.mpi_recv(x, (rank - 1) % size))

    vjp, _ = mpiad.make_vjp(loss)(np.ones(2))
    if 0 < rank < size - 1:
        vjp(1.0)
        recover()
        return
    # The last one waits for the cotangent of what it has sent to the first.
    error = expect_deadlock(lambda: vjp(1.0) if rank else mpiad.mpi_recv(0.0, size - 1, tag=3))
    assert "adjoint of mpi_send" in error.table and "in loss (run by test_deadlock.py:" in error.table


@mostly_compared
def test_a_caught_deadlock_in_a_trace_can_be_left(mode: str, rank: int, size: int, expect_deadlock: Any) -> None:
    def loss(x: Any) -> Any:
        return anp.sum(mpiad.mpi_recv(x, (rank - 1) % size))

    expect_deadlock(lambda: mpiad.grad(loss)(np.ones(2)))
    assert mpiad.grad(lambda x: mpiad.mpi_allreduce(x))(1.0) == 1.0


@mostly_compared
@pytest.mark.also_on(2)
@pytest.mark.not_on(3)
def test_what_was_never_received_is_not_taken_for_something_later(mode: str, rank: int, expect_deadlock: Any) -> None:
    if rank == 1:
        recover()
    else:
        expect_deadlock(lambda: mpiad.mpi_allreduce(np.ones(3)))
    # Each begins anew, with other tags.
    for _ in range(130):
        mpiad.reset()
        assert mpiad.mpi_allreduce(1) == MPI.COMM_WORLD.size


def waits(peers: list[int]) -> dict[str, Any]:
    return {
        "state": "waits", "seconds": 2.0, "call": "mpi_recv", "arguments": "", "place": "a.py:1", "peers": peers,
        "hint": "", "ledger": message_headers.Summary([], [], []), "wait": 1, "counts": {},
    }  # fmt: skip


def waits_together() -> dict[str, Any]:
    return {key: value for key, value in waits([]).items() if key != "peers"}


def test_tables_of_states() -> None:
    left = {
        "state": "left",
        "how": "sys.exit(3)",
        "place": "a.py:9",
        "seconds": 1.0,
        "ledger": message_headers.Summary([], [], []),
        "counts": {},
    }
    found = finding_of([waits([1]), left, None, waits([4]), waits([3])], 0)
    assert found.ranks == (0,) and found.cycle == ()
    assert "rank 1, which left the program" in found.text
    rows = found.table.splitlines()
    assert "sys.exit(3)" in rows[2] and "no answer" in rows[3]
    found = finding_of([waits([1]), left, None, waits([4]), waits([3])], 4)
    assert found.ranks == (3, 4) and found.cycle in ((3, 4, 3), (4, 3, 4))


def test_more_ranks_than_calls_may_nest() -> None:
    ranks = 1200
    ring: list[State | None] = [waits([(rank - 1) % ranks]) for rank in range(ranks)]
    found = finding_of(ring, 7)
    assert found.cycle == (0, *range(ranks - 1, -1, -1)) and found.ranks == tuple(range(ranks))
    assert "rank 0 -> rank 1199 -> " in found.text and "(1200 ranks) -> rank 1 -> rank 0" in found.text
    # Even ranks have come to one collective, odd ones to another.
    every = tuple(range(ranks))
    apart: list[State | None] = [
        waits_together() | {"key": key, "number": 1, "members": every, "counts": {key: 1}} for key in "ab" * (ranks // 2)
    ]
    found = finding_of(apart, 2)
    assert found.cycle == (0, 1, 0) and found.ranks == every
    rows = found.table.splitlines()
    assert len(rows) == 3 and rows[1].split()[:8] == ["0,", "2,", "4,", "6,", "8,", "10,", "12,", "14,"]
    assert "(600 ranks)" in rows[1]


def test_a_rank_that_left_is_named_where_it_answers_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "departed", {})
    assert status._departure(0) is None
    status.departed[0] = Departure({"world": 3}, False, "sys.exit(3)", "a.py:9", time.perf_counter())
    found = finding_of([status._departure(0), waits([0])], 1)
    assert "for rank 0, which left the program" in found.text and "sys.exit(3)" in found.table


def test_a_long_message_may_still_come_from_a_rank_that_has_left(rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    comm = channel(None, "test")
    receive = communicator.MessageWait(comm.data, False, left, 0)
    gone = {rank: Departure({}, True, "", "", 0.0) for rank in range(size)}
    assert not receive.needs_departed(gone, 1.0)
    assert receive.needs_departed({rank: departed._replace(sends=False) for rank, departed in gone.items()}, 1.0)
    assert not comm.has_pending_sends()
    mpiad.mpi_barrier()
    mpiad.mpi_send(np.ones(4_000_000), right)  # longer than MPI sends at once
    assert comm.has_pending_sends()
    mpiad.mpi_barrier()
    mpiad.mpi_recv(np.ones(4_000_000), left)
    mpiad.mpi_barrier()
    deadline = time.monotonic() + 5
    while comm.has_pending_sends() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not comm.has_pending_sends()


def interrupted(request: GuardedRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_status: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(request, "Test", interrupt)
        with pytest.raises(KeyboardInterrupt):
            request.Wait()


def test_a_receive_that_is_interrupted_is_taken_back(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    comm = Guarded(MPI.COMM_WORLD.Dup(), "test", tuple(range(size)))
    dropped, wanted = np.zeros(3), np.zeros(3)
    interrupted(comm.Irecv(dropped, rank, 5), monkeypatch)
    # The next message mustn't go where nobody looks, into memory that may be another array's by then.
    request = comm.Irecv(wanted, rank, 5)
    comm.Isend(np.ones(3), rank, 5).Wait()
    request.Wait()
    assert wanted.all() and not dropped.any()
    comm.Free()


def test_a_send_that_is_interrupted_keeps_its_memory(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    # Long enough to wait for its receive; a longer one to oneself travels in pieces, one at each look, with naps between.
    comm, x = Guarded(MPI.COMM_WORLD.Dup(), "test", tuple(range(size))), np.ones(100_000)
    request = comm.Isend(x, rank, 5)
    interrupted(request, monkeypatch)
    assert any(x is found.arguments[0] for found in timed_waits.pending.values())
    comm.Recv(np.empty_like(x), rank, 5)
    request.Wait()
    comm.Free()


def test_a_rank_answers_while_it_makes_communicators_and_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that answers reads what the program writes: an exception there would end the job."""
    errors, done, interval, thresholds = [], threading.Event(), sys.getswitchinterval(), gc.get_threshold()

    def pause(*_: Any) -> None:  # as finalizers may
        time.sleep(0)

    class Owner:
        """Stands for a channel."""

        def __init__(self, label: str):
            self.kept = message_headers.HeadedMessages(MPI.COMM_SELF, MPI.COMM_SELF, label, (0,))

        def duplicates(self) -> list[Guarded]:
            return [self.kept]

    owner = Owner("kept")
    live = weakref.WeakValueDictionary({0: owner})
    monkeypatch.setattr(channels, "_live", live)

    def answer() -> None:
        try:
            while not done.is_set():
                message_headers.summary()
                communicator.counts()
        except RuntimeError as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)
    gc.set_threshold(20)
    gc.callbacks.append(pause)
    thread = threading.Thread(target=answer)
    thread.start()
    try:
        for tag in range(3000):
            owner.kept.count_send(0, tag, "here")
            another = live[1 + tag] = Owner("another")
            del another
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(pause)
        done.set()
        thread.join()
    assert not errors
