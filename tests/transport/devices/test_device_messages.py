"""Messages with device arrays: in any order, between ranks whose arrays are copied or not."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from device_double import DeviceArray, double, on_device, on_host
from device_ways import each_way, travelling
from mpi4py import MPI

import mpiad
from mpiad.transport.core import lookup
from mpiad.transport.devices.device_settings import DeviceSettings
from mpiad.transport.devices.staging import close_pools

WORLD = MPI.COMM_WORLD
RIGHT, LEFT = (WORLD.rank + 1) % WORLD.size, (WORLD.rank - 1) % WORLD.size


def values(number, rank=WORLD.rank, length=61):
    return np.arange(float(length)) + 1000 * number + 1e6 * rank


@each_way
def test_messages_overtake_each_other_at_their_receiver(way):
    """Four of one tag and one of another, long and short, from a device and from the host, waited for in any order."""
    lengths = [61, 2, 80, 4, 33]
    with travelling(way):
        posted = [
            mpiad.mpi_irecv(on_device(np.zeros(length)) if k % 2 else np.zeros(length), LEFT, tag=int(k == 2))
            for k, length in enumerate(lengths)
        ]
        sent = []
        for k in (2, 0, 1, 3, 4):
            x = values(k, length=lengths[k])
            sent.append(mpiad.mpi_isend(x if k == 3 else on_device(x), RIGHT, tag=int(k == 2)))
        mpiad.mpi_barrier()
        for k in (4, 1, 0, 3, 2) if WORLD.rank % 2 else (2, 3, 4, 0, 1):
            came = mpiad.mpi_wait(posted[k])
            assert type(came) is (DeviceArray if k % 2 else np.ndarray)
            np.testing.assert_array_equal(on_host(came), values(k, LEFT, lengths[k]))
        mpiad.mpi_waitall(sent[::-1])


def test_the_array_of_one_end_may_be_copied():
    with travelling(DeviceSettings(WORLD.rank % 2 == 1)):
        x = on_device(values(0))
        swapped = mpiad.mpi_exchange(x, RIGHT, LEFT)
        mpiad.mpi_send(x, LEFT, tag=1)
        came = mpiad.mpi_recv(x, MPI.ANY_SOURCE, tag=1)
    np.testing.assert_array_equal(on_host(swapped), values(0, LEFT))
    np.testing.assert_array_equal(on_host(came), values(0, RIGHT))


def test_cotangents_find_their_messages():
    """Of equal arrays under one tag, waited for in another order on each rank."""

    def loss(x):
        coming = [mpiad.mpi_irecv(x, LEFT) for _ in range(3)]
        going = [mpiad.mpi_isend(x * (k + 1.0), RIGHT) for k in range(3)]
        order = (2, 0, 1) if WORLD.rank % 2 else (1, 2, 0)
        came = {k: mpiad.mpi_wait(coming[k]) for k in order}
        mpiad.mpi_waitall(going[k] for k in order)
        return mpiad.device.to_host(np.sum(came[0] + 10 * came[1] ** 2 + 100 * came[2] ** 3)) / 2

    x = np.linspace(-1, 1, 61) + WORLD.rank
    with travelling("staged"):
        gradient = mpiad.grad(loss, objective="sum")(on_device(x))
    expected = (1 + 10 * 2 * (2 * x) * 2 + 100 * 3 * (3 * x) ** 2 * 3) / 2
    np.testing.assert_allclose(on_host(gradient), expected, rtol=1e-13)


@pytest.mark.parametrize("way", ["staged", "direct"])
def test_what_is_under_way_is_not_overwritten(way):
    """Too long for MPI to copy it aside; the sender changes its array, and other calls borrow memory of the same size."""
    x = on_device(values(0, length=200_000))
    with travelling(way):
        mpiad.mpi_send(x, RIGHT)
        going = mpiad.mpi_isend(x, RIGHT)
        x += 7
        for _ in range(3):
            mpiad.mpi_scan(x)
        for came in (mpiad.mpi_recv(x, LEFT), mpiad.mpi_recv(x, LEFT)):
            np.testing.assert_array_equal(on_host(came), values(0, LEFT, 200_000))
        np.testing.assert_array_equal(on_host(mpiad.mpi_wait(going)), values(0, length=200_000))


def test_memory_is_not_lent_while_the_device_reads_it(monkeypatch):
    """The stand-in looks at the memory itself, and keeps no reference to it."""

    def queued(host, out):
        address, taken = host.ctypes.data, host.tobytes()
        DeviceArray._values(out)[...] = host

        def check():
            assert ctypes.string_at(address, len(taken)) == taken, "memory was lent while it was copied from"

        double._queued.append(check)

    monkeypatch.setattr(double, "copy_to_device", queued)
    for call in (mpiad.mpi_scan, mpiad.mpi_allreduce):
        close_pools()  # with little memory the next call takes that of the last one
        with travelling("staged"):
            for k in range(6):
                call(on_device(values(k)))


@each_way
def test_reductions_started_before_other_collectives_are_waited_for_after_them(rank, size, way):
    with travelling(way):
        requests = [mpiad.mpi_iallreduce(on_device(values(k))) for k in range(4)]
        mpiad.mpi_barrier()
        shifted = mpiad.mpi_allreduce(on_device(values(4)))
        mpiad.mpi_barrier()
        for k in (3, 0, 2, 1) if rank % 2 else (1, 2, 3, 0):
            total = on_host(mpiad.mpi_wait(requests[k]))
            np.testing.assert_array_equal(total, sum(values(k, r) for r in range(size)))
        np.testing.assert_array_equal(on_host(shifted), sum(values(4, r) for r in range(size)))


@pytest.mark.mpi(min_size=2)
def test_messages_that_nobody_takes_are_dropped_at_a_reset(rank):
    comm = WORLD.Dup()
    mpiad.mpi_init(comm)
    with travelling("staged"):
        if rank == 0:
            mpiad.mpi_send(on_device(values(0)), 1, comm=comm)
        mpiad.reset(comm)
        if rank == 0:
            mpiad.mpi_send(on_device(values(1)), 1, comm=comm)
        if rank == 1:
            came = mpiad.mpi_recv(on_device(values(1)), 0, comm=comm)
            np.testing.assert_array_equal(on_host(came), values(1, 0))
    mpiad.mpi_barrier(comm=comm)
    comm.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.unguarded
def test_what_is_not_awaited_is_refused_and_dropped(rank):
    with travelling("staged"):
        if rank == 0:
            mpiad.mpi_send(on_device(values(0)), 1)
            mpiad.mpi_send(on_device(values(1)), 1)
        if rank == 1:
            with pytest.raises(ValueError, match="sent (488|more) bytes with tag 0"):
                mpiad.mpi_recv(on_device(np.zeros(60)), 0)
            np.testing.assert_array_equal(on_host(mpiad.mpi_recv(on_device(np.zeros(61)), 0)), values(1, 0))


@pytest.mark.mpi(min_size=2)
def test_under_watch_what_is_refused_is_dropped(rank):
    with travelling("staged"), mpiad.debug.checked():
        if rank == 0:
            mpiad.mpi_send(on_device(values(0)), 1)
        if rank == 1:
            with pytest.raises(mpiad.errors.MessageMismatchError, match=r"shape \(61,\)"):
                mpiad.mpi_recv(on_device(np.zeros(60)), 0)
        mpiad.mpi_barrier()  # after it, sends have ended with Open MPI, too
        assert not lookup.channel(None, "test").has_unfinished()
        assert not lookup.channel(None, "test").reverse.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
