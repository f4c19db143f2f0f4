"""Page-locked memory: it is used again, it is bounded, and it comes back whatever happens."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from device_double import double, on_device
from device_ways import travelling
from mpi4py import MPI

import mpiad
from mpiad.transport.core import lookup
from mpiad.transport.devices import device_settings, staging
from mpiad.transport.devices.device_settings import DeviceSettings
from mpiad.transport.devices.staging import PinnedBlock, Pool, pool_of

serial = pytest.mark.serial


def in_use(pool):
    """Return the bytes of a pool that are in use."""
    blocks = [found for found in gc.get_objects() if isinstance(found, PinnedBlock)]
    return sum(found._memory.size for found in blocks if found._pool is pool)


def counting(monkeypatch):
    """Return a list of the sizes that are locked from now on."""
    made = []
    lock = double.pinned
    monkeypatch.setattr(double, "pinned", lambda nbytes: made.append(nbytes) or lock(nbytes))
    return made


@serial
def test_memory_is_used_again(monkeypatch):
    made, pool = counting(monkeypatch), Pool(double)
    for nbytes in (5000, 4990, 5100, 5120):
        array = pool.allocate(nbytes).array((nbytes,), np.uint8)
        assert array.nbytes == nbytes and in_use(pool) == 5120
        del array
    assert made == [5120] and (in_use(pool), pool.kept) == (0, 5120)


@serial
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 65536, 65537, 100_000, 64 << 20, (64 << 20) + 1])
def test_at_most_a_quarter_too_much_is_lent(nbytes):
    size = staging._size_class(nbytes)
    assert max(nbytes, 4096) <= size <= max(4096, 1.25 * nbytes + 8)
    assert staging._size_class(size) == size


@serial
def test_a_view_keeps_the_memory():
    pool = Pool(double)
    view = pool.allocate(8000).array((10, 100), "f8")[3:, ::2].T
    assert in_use(pool) > 0
    assert pool.allocate(8000).array((1000,), "f8").ctypes.data != view.ctypes.data
    del view
    assert in_use(pool) == 0


@serial
def test_what_is_kept_is_bounded():
    before = device_settings.put(DeviceSettings(pinned=20_000))
    try:
        pool = Pool(double)
        blocks_in_use = [pool.allocate(8192) for _ in range(5)]
        assert in_use(pool) == 5 * 8192
        blocks_in_use.clear()
        assert (in_use(pool), pool.kept) == (0, 2 * 8192)
    finally:
        device_settings.put(before)


@serial
def test_the_next_borrower_waits_for_the_last_copy():
    pool, x = Pool(double), double.empty((512,), "f8")
    host = np.arange(512.0)
    pinned_block = pool.allocate(host.nbytes)
    pinned_block.array((512,), "f8")[:] = host
    double.copy_to_device(pinned_block.array((512,), "f8").copy(), x)
    pinned_block.read = double.record()
    waited = []
    pool._arrays = type("Counting", (), {"wait": lambda self, event: waited.append(event) or double.wait(event)})()
    event = pinned_block.read
    del pinned_block
    pool.allocate(4096)
    assert waited == [event]
    double.synchronize()


@serial
def test_nothing_is_kept_after_the_end():
    pool = Pool(double)
    kept, out = pool.allocate(5000), pool.allocate(5000)
    del kept
    pool.close()
    assert pool.kept == 0
    del out
    assert (in_use(pool), pool.kept) == (0, 0)


@serial
def test_memory_that_cannot_be_locked_is_not_counted(monkeypatch):
    def fail(nbytes):
        raise MemoryError(f"no {nbytes} bytes")

    pool = Pool(double)
    monkeypatch.setattr(double, "pinned", fail)
    with pytest.raises(MemoryError):
        pool.allocate(100)
    assert (in_use(pool), pool.kept) == (0, 0)


def settle(comm=None):
    """Take back what sends have finished with, and what the stand-in still looks at."""
    mpiad.mpi_barrier()
    double.synchronize()
    channel = lookup.channel(comm, "test")
    for kind, (request,), _ in channel.started.values():
        assert kind == "background send"
        request.Wait()
    channel.started.clear()
    gc.collect()


def program(x, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    mpiad.mpi_send(x, right)
    request = mpiad.mpi_iallreduce(x)
    y = mpiad.mpi_recv(x, left) * mpiad.mpi_exchange(x, left, right)
    going, coming = mpiad.mpi_isend(y, left, tag=2), mpiad.mpi_irecv(y, right, tag=2)
    mpiad.mpi_barrier()
    z = mpiad.mpi_wait(coming) + mpiad.mpi_wait(going) + mpiad.mpi_wait(request)
    return mpiad.device.to_host(np.sum(mpiad.mpi_bcast(mpiad.mpi_allreduce(z), size - 1)))


def test_programs_give_all_memory_back_and_lock_no_more(rank, size, monkeypatch):
    pool_of(double)
    x = on_device(np.linspace(-1.0, 1.0, 700) + rank)
    with travelling("staged"):
        for _ in range(3):
            mpiad.grad(lambda x: program(x, rank, size), objective="sum")(x)
        settle()
        made = counting(monkeypatch)
        # Tests before this one may still hold what they received.
        pool, kept, used = pool_of(double), pool_of(double).kept, in_use(pool_of(double))
        for _ in range(3):
            mpiad.grad(lambda x: program(x, rank, size), objective="sum")(x)
            settle()
        # Sends end when the receiver is there, so how many are under way at once differs from run to run.
        assert in_use(pool) == used and pool.kept == kept + sum(made) and len(made) <= 6


def test_an_exception_leaves_nothing_lent(rank, size):
    """Messages and a reduction are under way when it leaves the trace."""
    x = on_device(np.arange(500.0))
    comm = MPI.COMM_WORLD.Dup()

    def interrupted(x):
        mpiad.mpi_send(x, (rank + 1) % size, comm=comm)
        mpiad.mpi_irecv(x, (rank - 1) % size, tag=7, comm=comm)
        raise KeyError("interrupted")

    with travelling("staged"):
        mpiad.mpi_init(comm)
        settle()
        before = in_use(pool_of(double))
        with pytest.raises(KeyError):
            mpiad.grad(interrupted)(x)
        with pytest.raises(mpiad.errors.UnfinishedMessagesError):
            mpiad.mpi_allreduce(x, comm=comm)
        mpiad.reset(comm)
        settle(comm)
        assert in_use(pool_of(double)) == before
        total = mpiad.mpi_allreduce(x, comm=comm)
        np.testing.assert_array_equal(double.to_host(total), size * np.arange(500.0))
    comm.Free()
