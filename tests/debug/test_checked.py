"""`checked`: a part of the program under watch, and nothing left of it afterwards."""

from __future__ import annotations

import time

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.errors import CommunicationMismatchError, DeadlockError, UnfinishedMessagesError
from mpiad.primitives.catalogue import ALLREDUCE
from mpiad.transport import channel
from mpiad.transport.watch import switch, watch_settings
from mpiad.transport.watch.call_agreement import Agreement
from mpiad.transport.watch.watch_settings import Settings


@pytest.mark.mpi(min_size=2)
@pytest.mark.unguarded
def test_only_the_part_is_watched(rank, size):
    before = watch_settings.present()
    used = channel(None, "test")
    bare = used.data, used.reverse, ALLREDUCE.forward
    with mpiad.debug.checked():
        assert watch_settings.debug()
        with pytest.raises(CommunicationMismatchError, match="the shape differs"):
            mpiad.mpi_allreduce(np.ones(2 + rank))
        assert mpiad.mpi_allreduce(1) == size
    assert watch_settings.present() == before
    if not before.debug:
        assert (used.data, used.reverse, ALLREDUCE.forward) == bare
    assert mpiad.mpi_allreduce(1) == size


@pytest.mark.unguarded
def test_leaving_it_after_a_failed_reset_waits_for_nobody(size, monkeypatch):
    """The watch around it takes the channels as they are: other ranks may not come there."""
    before = watch_settings.present()
    switch.apply(Settings(False, 60.0))
    try:
        used = channel(None, "test")
        with mpiad.debug.checked():
            used.data.agreement.renew()  # as by a reset that fails
            monkeypatch.setattr(Agreement, "open", lambda _: pytest.fail("it is collective"))
        monkeypatch.undo()
        mpiad.reset()
        assert mpiad.mpi_allreduce(1) == size
    finally:
        switch.restore(before)


@pytest.mark.mpi(min_size=2)
def test_lines_may_be_left_out(rank, size):
    def meet():
        return mpiad.mpi_allreduce(1) if rank == 0 else mpiad.mpi_allreduce(1)

    def meet_on_two_lines():
        if rank == 0:
            return mpiad.mpi_allreduce(1)
        return mpiad.mpi_allreduce(1)

    with mpiad.debug.checked():
        assert meet() == size
        with pytest.raises(CommunicationMismatchError, match="the call site differs"):
            meet_on_two_lines()
    with mpiad.debug.checked(call_sites=False):
        assert meet_on_two_lines() == size


def test_sums_over_ranks_go_back_in_reverse_order(rank, size):
    """On a communicator that is made under watch: dJ/dx on rank r is Σ cos(s) over the prefix sums s from rank r on."""
    comm = MPI.COMM_WORLD.Dup()
    with mpiad.debug.checked():
        gradient = mpiad.grad(lambda x: anp.sin(mpiad.mpi_scan(x, comm=comm)), objective="sum")(0.3 * (rank + 1))
    sums = 0.3 * np.cumsum(np.arange(1.0, size + 1))
    np.testing.assert_allclose(gradient, np.sum(np.cos(sums[rank:])), rtol=1e-14)
    comm.Free()


@pytest.mark.mpi(min_size=2)
def test_messages_under_way_at_its_beginning_and_end(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for _ in range(3):
        mpiad.mpi_send(np.full(3, 1.0 + rank), right)  # sent before, received inside
        early = mpiad.mpi_irecv(0.0, left, tag=1)  # posted before, sent inside
        mpiad.mpi_barrier()
        with mpiad.debug.checked():
            mpiad.mpi_send(10.0 + rank, right, tag=1)
            assert mpiad.mpi_wait(early) == 10.0 + left
            assert mpiad.mpi_recv(np.zeros(3), left)[0] == 1.0 + left
            mpiad.mpi_send(np.full(2, 5.0), right)  # has its header
            mpiad.mpi_send(20.0 + rank, right, tag=2)  # sent inside, received after
            late = mpiad.mpi_irecv(0, left, tag=3)  # posted inside, sent after
            assert mpiad.mpi_recv(np.zeros(2), left)[0] == 5.0
        assert mpiad.mpi_recv(0.0, left, tag=2) == 20.0 + left
        mpiad.mpi_send(rank, right, tag=3)
        assert mpiad.mpi_wait(late) == left


@pytest.mark.mpi(min_size=2)
def test_a_wait_ends_at_its_deadline(rank, size):
    start = time.perf_counter()
    with mpiad.debug.checked(timeout=0.4), pytest.raises(DeadlockError) as caught:
        mpiad.mpi_recv(0.0, (rank + 1) % size, tag=9)
    assert 0.3 < time.perf_counter() - start < 8
    error = caught.value
    assert error.ranks == tuple(range(size)) and len(error.cycle) == size + 1
    assert "test_checked.py" in error.table and "with tag 9" in error.table
    with pytest.raises(UnfinishedMessagesError, match="mpiad.reset"):
        mpiad.mpi_allreduce(1)
    mpiad.reset()
    assert mpiad.mpi_allreduce(1) == size


@pytest.mark.parametrize("timeout", [-1, "soon", float("nan")])
def test_a_limit_must_be_a_number_of_seconds(timeout):
    with pytest.raises(ValueError, match="checked: timeout must be a number of seconds"):
        with mpiad.debug.checked(timeout=timeout):
            pass


def test_an_exception_ends_it(rank):
    before = watch_settings.present()
    with pytest.raises(ZeroDivisionError):
        with mpiad.debug.checked():
            raise ZeroDivisionError
    assert watch_settings.present() == before


@pytest.mark.parametrize("step", ["note", "_in_common_order", "_put_on"])
@pytest.mark.unguarded
def test_an_interrupt_at_its_beginning_ends_it(step, rank, size, monkeypatch):
    before, used = watch_settings.present(), channel(None, "test")
    bare = used.data

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(switch.calls if step == "note" else switch, step, interrupted)
        with pytest.raises(KeyboardInterrupt), mpiad.debug.checked():
            pass
    assert watch_settings.present() == before and used.data is bare
    assert mpiad.mpi_allreduce(rank + 1.0) == size * (size + 1) / 2
    with mpiad.debug.checked():
        assert mpiad.mpi_allreduce(rank + 1.0) == size * (size + 1) / 2


@pytest.mark.mpi(min_size=2)
def test_communicators_that_outlive_it_are_freed_whole(rank, size):
    """MPI has some thousands of communicators: each part that leaves one behind would end a long program."""
    comm = MPI.COMM_WORLD.Dup()
    with mpiad.debug.checked():
        mpiad.mpi_allreduce(1.0, comm=comm)
        mpiad.mpi_send(1.0, (rank + 1) % size, comm=comm)  # received outside: its header stays behind
    assert mpiad.mpi_recv(0.0, (rank - 1) % size, comm=comm) == 1.0
    used = channel(comm, "test")
    assert used.headers != MPI.COMM_NULL
    comm.Free()
    assert used.headers == MPI.COMM_NULL


@pytest.mark.mpi(min_size=2)
def test_headers_that_are_left_behind_do_not_meet_later_communicators(rank, size):
    with mpiad.debug.checked():
        mpiad.mpi_send(1.0, (rank + 1) % size)  # received outside: its header stays behind
    assert mpiad.mpi_recv(0.0, (rank - 1) % size) == 1.0
    mpiad.reset()
    later = [MPI.COMM_WORLD.Split(0, rank) for _ in range(20)]
    MPI.COMM_WORLD.Barrier()
    assert not any(comm.Iprobe() for comm in later)
    for comm in later:
        comm.Free()


@pytest.mark.mpi(min_size=2)
def test_one_rank_leaves_it_alone(rank, size):
    """The others have begun to agree with it: what is left of that must not be met by a later part."""
    with pytest.raises(KeyError if rank == 0 else DeadlockError), mpiad.debug.checked(timeout=0.4):
        if rank == 0:
            raise KeyError("of this rank alone")
        mpiad.mpi_allreduce(1)
    MPI.COMM_WORLD.Barrier()
    mpiad.reset()
    for _ in range(2):
        with mpiad.debug.checked(timeout=5):
            assert mpiad.mpi_allreduce(1) == size
            assert mpiad.mpi_wait(mpiad.mpi_iallreduce(1)) == size
