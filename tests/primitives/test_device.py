"""Every primitive on device arrays: value, adjoint, tangent and second order, in each way in which arrays travel."""

from __future__ import annotations

import functools

import autograd.numpy as anp
import numpy as np
import pytest
import reference
from against_reference import arrays, assert_close, check
from device_double import DeviceArray, on_device, on_host, transfers
from device_ways import SETTINGS, beside, each_way, through_device, travelling
from linear_primitives import LINEAR_PRIMITIVES
from mpi4py import MPI

import mpiad
from mpiad.transport.core.collectives import sum_of_rows
from mpiad.transport.devices.device_settings import DeviceSettings

WORLD = MPI.COMM_WORLD
RIGHT, LEFT = (WORLD.rank + 1) % WORLD.size, (WORLD.rank - 1) % WORLD.size
ROOT = WORLD.size - 1


def moved(shapes):
    return reference.move(shapes, [(rank - 1) % len(shapes) for rank in range(len(shapes))])


def sent_late(x):
    """Return what the rank before starts to send, with a barrier between start and wait."""
    coming, going = mpiad.mpi_irecv(x, LEFT, tag=4), mpiad.mpi_isend(x, RIGHT, tag=4)
    mpiad.mpi_barrier()
    return mpiad.mpi_wait(coming) + 0 * mpiad.mpi_wait(going)


def from_anyone(x):
    mpiad.mpi_send(x, RIGHT, tag=6)
    return mpiad.mpi_recv(x, MPI.ANY_SOURCE, tag=6)


def paired(x):
    return mpiad.mpi_sendrecv(x, dest=0, source=ROOT)


def summed_late(x):
    request = mpiad.mpi_iallreduce(x)
    mpiad.mpi_barrier()
    return mpiad.mpi_wait(request)


OTHERS = {
    "bcast from None": (
        lambda x: mpiad.mpi_bcast(x if WORLD.rank == ROOT else None, ROOT), lambda s: reference.bcast(s, ROOT),
    ),
    "reduce": (lambda x: mpiad.mpi_reduce(x, MPI.SUM, ROOT), lambda s: reference.sum_to_root(s, ROOT)),
    "gather stacked": (lambda x: mpiad.mpi_gather(x, ROOT), lambda s: reference.gather(s, ROOT)),
    "gather by columns": (lambda x: mpiad.mpi_gather(x, ROOT, 1), lambda s: reference.gather(s, ROOT, 1)),
    "allgather stacked": (mpiad.mpi_allgather, reference.allgather),
    "scatter by columns": (lambda x: mpiad.mpi_scatter(x, ROOT, 1), lambda s: reference.scatter(s, ROOT, 1)),
    "scatter from None": (
        lambda x: mpiad.mpi_scatter(x if WORLD.rank == ROOT else None, ROOT, 0), lambda s: reference.scatter(s, ROOT, 0),
    ),
    "isend": (sent_late, moved),
    "recv from anyone": (from_anyone, moved),
    "iallreduce": (summed_late, reference.allreduce),
    "sendrecv": (paired, lambda s: reference.move(s, [ROOT if rank == 0 else rank for rank in range(len(s))])),
    "product": (lambda x: mpiad.mpi_allreduce(x, MPI.PROD), lambda s: reference.reduction("PROD", s)),
    "largest": (lambda x: mpiad.mpi_allreduce(x, MPI.MAX), lambda s: reference.reduction("MAX", s)),
    "smallest on the root": (lambda x: mpiad.mpi_reduce(x, MPI.MIN, ROOT), lambda s: reference.reduction("MIN", s, ROOT)),
}  # fmt: skip
SHAPE = (5, 3)


TAKEN = DeviceSettings(cuda_aware=True, exchanged=4 << 20)


@pytest.mark.parametrize(
    "length, settings",
    [(9_000, TAKEN), (600_000, TAKEN), (9_001, DeviceSettings(cuda_aware=False))],
    ids=["direct", "exchanged", "staged"],
)
@pytest.mark.parametrize("mixed", [False, True], ids=["", "mixed"])
def test_long_sums(length, settings, mixed):
    """As the start sets it up."""
    numbers = [np.random.default_rng(rank).normal(size=length) for rank in range(WORLD.size)]
    put, look = (on_device, on_host) if not mixed or WORLD.rank == ROOT else (np.array, np.asarray)
    with travelling(settings):
        x, total = put(numbers[WORLD.rank]), sum(numbers)
        np.testing.assert_allclose(look(mpiad.mpi_allreduce(x)), total, rtol=1e-14, atol=1e-14)
        np.testing.assert_array_equal(look(mpiad.mpi_allreduce(x, MPI.MAX)), np.max(numbers, axis=0))
        np.testing.assert_array_equal(look(mpiad.mpi_allgather(x, 0)), np.concatenate(numbers))
        found = look(mpiad.mpi_sum(x, ROOT))
        np.testing.assert_allclose(found, total if WORLD.rank == ROOT else 0 * total, rtol=1e-14, atol=1e-14)
        counts = [length - WORLD.size + 1, *[1] * (WORLD.size - 1)]
        own = slice(sum(counts[: WORLD.rank]), sum(counts[: WORLD.rank + 1]))
        block = look(mpiad.mpi_reduce_scatter(x, 0, counts=counts))
        np.testing.assert_allclose(block, total[own], rtol=1e-14, atol=1e-14)
        # Σ y³ of the sum over all ranks, on all ranks: each x gets 3 y² from each of them.
        slope = mpiad.grad(lambda x: anp.sum(mpiad.mpi_allreduce(x) ** 3), objective="sum")(x)
        # The root of it has the sum's rounding errors, which depend on the order of the terms; its square near 0 doesn't.
        np.testing.assert_allclose(np.sqrt(look(slope) / (3 * WORLD.size)), np.abs(total), rtol=1e-14, atol=1e-14)


def test_rows_are_added_in_their_order():
    rows = np.random.default_rng(0).normal(size=(64, 1, 9))
    for part in (rows[:, :, 0], rows[:, 0]):  # NumPy adds the rows of one number in pairs
        np.testing.assert_array_equal(on_host(sum_of_rows(on_device(part))), functools.reduce(np.add, list(part)))


@pytest.mark.also_on(3)
@pytest.mark.parametrize("dtype", ["f8", "f4", "c16"])
@pytest.mark.parametrize("way", ["exchanged", "shared"])
def test_sums_of_blocks_add_in_the_order_of_the_ranks(way, dtype, rank, size):
    numbers = [np.random.default_rng(r).normal(size=1001).astype(dtype) for r in range(size)]
    total = functools.reduce(np.add, numbers)
    counts = [1] * size
    counts[-1] += 1001 - size
    with travelling(way):
        x = on_device(numbers[rank])
        np.testing.assert_array_equal(on_host(mpiad.mpi_allreduce(x)), total)
        np.testing.assert_array_equal(on_host(mpiad.mpi_sum(x, ROOT)), total if rank == ROOT else 0 * total)
        own = total[rank:] if rank == ROOT else total[rank : rank + 1]
        np.testing.assert_array_equal(on_host(mpiad.mpi_reduce_scatter(x, 0, counts=counts)), own)


@pytest.mark.parametrize(
    "dtype, way", [*[("f8", way) for way in SETTINGS], ("f4", "staged"), ("c16", "staged"), ("c16", "direct")]
)
@pytest.mark.parametrize("name", LINEAR_PRIMITIVES)
def test_linear_primitives(rngs, size, name, dtype, way):
    call, make = LINEAR_PRIMITIVES[name]
    with travelling(way):
        fun = through_device(lambda x: call(x, WORLD))
        check(fun, make([SHAPE] * size), arrays(rngs, SHAPE, dtype), rngs)


@each_way
@pytest.mark.parametrize("name", OTHERS)
def test_other_primitives(rngs, size, name, way):
    call, make = OTHERS[name]
    with travelling(way):
        check(through_device(call), make([SHAPE] * size), arrays(rngs, SHAPE), rngs)


@each_way
def test_alltoall(rngs, size, way):
    with travelling(way):
        shape = (size, 3)
        check(through_device(mpiad.mpi_alltoall), reference.alltoall([shape] * size), arrays(rngs, shape), rngs)


@each_way
@pytest.mark.parametrize("shape", [(), (0,), (2, 0)], ids=["0d", "empty", "2x0"])
def test_shapes_without_entries_or_dimensions(rngs, size, shape, way):
    with travelling(way):
        calls = {mpiad.mpi_allreduce: reference.allreduce, from_anyone: moved, mpiad.mpi_scan: reference.scan}
        for call, make in calls.items():
            check(through_device(call), make([shape] * size), arrays(rngs, shape), rngs)


@pytest.mark.parametrize("place", [through_device, beside], ids=["devices", "mixed"])
@pytest.mark.parametrize("way, dtype", [("staged", "f8"), ("direct", "f8"), ("staged", "f4"), ("staged", "c16")])
def test_lengths_that_differ(rngs, size, way, place, dtype):
    """One block is empty, and each rank's may be the longest."""
    counts = [(7, 0, 4, 3)[rank % 4] for rank in range(size)][:: 1 if size % 2 else -1]
    shapes, total = [(count, 3) for count in counts], sum(counts)
    blocks = np.array([np.roll(counts, shift) for shift in range(size)])  # from each rank (row) to each rank
    rows = [(2, total)] * size
    calls = {
        "allgather": (lambda x: mpiad.mpi_allgather(x, 0), reference.allgather(shapes, 0)),
        "gather": (lambda x: mpiad.mpi_gather(x, ROOT, 0), reference.gather(shapes, ROOT, 0)),
        "scatter": (
            lambda x: mpiad.mpi_scatter(x, ROOT, 1, counts), reference.scatter([(2, total)] * size, ROOT, 1, counts),
        ),
        "reduce_scatter": (
            lambda x: mpiad.mpi_reduce_scatter(x, 0, counts), reference.reduce_scatter([(total, 2)] * size, 0, counts),
        ),
        "alltoall": (lambda x: mpiad.mpi_alltoall(x, blocks[WORLD.rank], 1), reference.alltoallv(rows, blocks, 1)),
    }  # fmt: skip
    with travelling(way):
        for call, program in calls.values():
            check(place(call), program, arrays(rngs, program.in_shapes, dtype), rngs)


@each_way
def test_arrays_here_and_there(rngs, size, way):
    """Of every call that all ranks make: some ranks' arrays lie on a device, others' on the host."""
    blocks = (size, 7)
    calls = {name: (lambda x, call=call: call(x, WORLD), make) for name, (call, make) in LINEAR_PRIMITIVES.items()}
    with travelling(way):
        for call, make in [*calls.values(), *(OTHERS[name] for name in ("product", "largest", "smallest on the root"))]:
            check(beside(call), make([SHAPE] * size), arrays(rngs, SHAPE), rngs)
        for call, make in ((mpiad.mpi_alltoall, reference.alltoall), (mpiad.mpi_reduce_scatter, reference.reduce_scatter)):
            check(beside(call), make([blocks] * size), arrays(rngs, blocks), rngs)


@each_way
def test_what_lies_apart_in_memory(rngs, rank, size, way):
    xs = arrays(rngs, (6, 4))
    with travelling(way):
        x = on_device(xs[rank]).T[::2]
        total = mpiad.mpi_allreduce(x)
        assert type(total) is DeviceArray
        assert_close(on_host(total), sum(x.T[::2] for x in xs), np.dtype("f8"))
        assert_close(on_host(from_anyone(x)), xs[LEFT].T[::2], np.dtype("f8"))


@each_way
@pytest.mark.parametrize("dtype", ["?", "i4", "u8"])
def test_integers_travel_untraced(rngs, rank, size, dtype, way):
    xs = [rng.integers(0, 2, 40).astype(dtype) for rng in rngs]
    with travelling(way):
        x = on_device(xs[rank])
        np.testing.assert_array_equal(on_host(from_anyone(x)), xs[LEFT])
        np.testing.assert_array_equal(on_host(mpiad.mpi_bcast(x, ROOT)), xs[ROOT])
        largest = mpiad.mpi_allreduce(x, MPI.LOR if dtype == "?" else MPI.MAX)
        np.testing.assert_array_equal(on_host(largest), np.max(xs, axis=0))
        np.testing.assert_array_equal(on_host(mpiad.mpi_allgather(x)), xs)
        if dtype != "?":
            np.testing.assert_array_equal(on_host(mpiad.mpi_wait(mpiad.mpi_iallreduce(x))), sum(xs))
            np.testing.assert_array_equal(on_host(mpiad.mpi_scan(x)), sum(xs[: rank + 1]))


@pytest.mark.parametrize("place", [through_device, beside], ids=["devices", "mixed"])
@each_way
def test_a_nan_on_any_rank_is_the_maximum_on_all(rank, size, way, place):
    count = size + 30
    xs = [np.where(np.arange(count) == r, np.nan, np.arange(count) % (r + 2)).astype("f4") for r in range(size)]
    with travelling(way):
        for op, extreme in ((MPI.MAX, np.maximum), (MPI.MIN, np.minimum)):
            found = place(lambda x, op=op: mpiad.mpi_allreduce(x, op))(xs[rank])
            np.testing.assert_array_equal(found, extreme.reduce(xs), strict=True)


@each_way
def test_results_are_memory_of_their_own(rank, way):
    with travelling(way):
        x = on_device(np.arange(30.0) + rank)
        results = [mpiad.mpi_bcast(x, ROOT), mpiad.mpi_allreduce(x), mpiad.mpi_wait(mpiad.mpi_isend(x, RIGHT))]
        expected = [on_host(result) for result in results] + [np.arange(30.0) + LEFT]
        x += 100
        results.append(mpiad.mpi_recv(x, LEFT))
        for result, right in zip(results, expected):
            np.testing.assert_array_equal(on_host(result), right)


@each_way
def test_where_a_message_comes_to_is_said_by_its_template(rank, size, way):
    """Either end may be on the host; both ways of travelling are understood there."""
    values = np.arange(30.0) + rank
    with travelling(way):
        mpiad.mpi_send(on_device(values), RIGHT)
        on_the_host = mpiad.mpi_recv(values, LEFT)
        mpiad.mpi_send(values, RIGHT)
        there = mpiad.mpi_recv(on_device(values), LEFT)
        swapped = mpiad.mpi_exchange(on_device(values), RIGHT, LEFT, like=np.zeros(30))
        assert type(on_the_host) is type(swapped) is np.ndarray and type(there) is DeviceArray
        for found in (on_the_host, there, swapped):
            np.testing.assert_array_equal(on_host(found), np.arange(30.0) + LEFT)


@each_way
def test_where_a_broadcast_comes_to_is_said_by_each_ranks_template(rank, size, way):
    """Also backwards: the root's cotangent lies where its array does."""
    values = np.arange(30.0) + rank
    like = on_device if rank % 2 else np.array

    def loss(x):
        y = mpiad.mpi_bcast(x, ROOT)
        assert isinstance(getattr(y, "_value", y), type(like(0.0)))
        return mpiad.device.to_host(anp.sum(y**2)) * (1.0 + rank)

    with travelling(way):
        gradient = mpiad.grad(loss, objective="sum")(like(values))
    assert type(gradient) is type(like(0.0))
    expected = 2 * values * sum(1.0 + r for r in range(size)) if rank == ROOT else np.zeros(30)
    np.testing.assert_allclose(on_host(gradient), expected)


def test_an_allreduce_and_its_adjoint_take_two_copies_each_way(rank, size):
    x = on_device(np.arange(1000.0) + rank)
    with travelling("staged"):
        vjp, total = mpiad.make_vjp(mpiad.mpi_allreduce)(x)
        transfers.reset()
        vjp, total = mpiad.make_vjp(mpiad.mpi_allreduce)(x)
        vjp(total)
        assert (transfers.d2h, transfers.h2d) == (2, 2)
        assert (transfers.d2h_bytes, transfers.h2d_bytes) == (16000, 16000)


def test_each_call_copies_what_it_sends_and_what_it_keeps(rank, size):
    """So many bytes to the host and to the device, forwards and then backwards."""
    n = 40
    x, blocks = on_device(np.arange(float(n)) + rank), on_device(np.arange(float(size * n)).reshape(size, n) + rank)
    first, root, whole = rank == 0, rank == ROOT, size * n
    calls = [
        (mpiad.mpi_allreduce, x, (n, n), (n, n)),
        (lambda x: mpiad.mpi_wait(mpiad.mpi_iallreduce(x)), x, (n, n), (n, n)),
        (mpiad.mpi_allgather, x, (n, whole), (whole, n)),
        (lambda x: mpiad.mpi_gather(x, ROOT), x, (n, root * whole), (root * whole, n)),
        (lambda x: mpiad.mpi_scatter(x, ROOT), blocks, (root * whole, n), (n, root * whole)),
        (mpiad.mpi_reduce_scatter, blocks, (whole, n), (n, whole)),
        (mpiad.mpi_alltoall, blocks, (whole, whole), (whole, whole)),
        (mpiad.mpi_scan, x, (n, n), (n, n)),
        (mpiad.mpi_exscan, x, (n, n * (not first)), (n, n * (rank < size - 1))),
        (lambda x: mpiad.mpi_sum(x, ROOT), x, (n, n * root), (n * root, n * (not root))),
    ]
    with travelling("staged"):
        for call, given, forwards, backwards in calls:
            transfers.reset()
            vjp, value = mpiad.make_vjp(call)(given)
            assert (transfers.d2h_bytes, transfers.h2d_bytes) == (8 * forwards[0], 8 * forwards[1])
            transfers.reset()
            vjp(value)
            assert (transfers.d2h_bytes, transfers.h2d_bytes) == (8 * backwards[0], 8 * backwards[1])


def test_an_mpi_that_takes_device_memory_is_given_it(rank, size):
    x = on_device(np.arange(1000.0) + rank)
    with travelling("direct"):
        transfers.reset()
        vjp, total = mpiad.make_vjp(mpiad.mpi_allreduce)(x)
        vjp(total)
        from_anyone(x)
        assert transfers.copies == 0 and transfers.synchronizations > 0


@each_way
def test_what_is_refused(way):
    with travelling(way):
        with pytest.raises(TypeError, match="dtype"):
            mpiad.mpi_allreduce(on_device(np.ones(3, "f2")))
        with pytest.raises(TypeError, match="op must be"):
            mpiad.mpi_allreduce(on_device(np.ones(3) + 1j), MPI.MAX)


@pytest.mark.mpi(min_size=2)
@each_way
@pytest.mark.unguarded
def test_a_message_of_another_size_is_refused_and_leaves_nothing(rank, size, way):
    with travelling(way):
        x = on_device(np.arange(30.0))
        if rank == 0:
            mpiad.mpi_send(x, 1)
            mpiad.mpi_send(x, 1)
        if rank == 1:
            with pytest.raises(ValueError, match=r"sent (240|more) bytes"):
                mpiad.mpi_recv(on_device(np.zeros(29)), 0)
            assert type(mpiad.mpi_recv(x, 0)) is DeviceArray


@pytest.mark.mpi(min_size=2)
def test_other_lengths_are_found_under_watch(rank, size):
    """Also where some arrays lie on the host."""
    x = np.arange(30.0) if rank == 0 else on_device(np.arange(29.0))
    with travelling("staged"), mpiad.debug.checked():
        for call in (mpiad.mpi_allreduce, mpiad.mpi_sum, mpiad.mpi_scan):
            with pytest.raises(mpiad.errors.CommunicationMismatchError, match=r"the shape differs[\s\S]*on a device"):
                call(x)
        total = mpiad.mpi_allreduce(x[:29])
        np.testing.assert_array_equal(on_host(total), size * np.arange(29.0))


@each_way
def test_under_watch(rngs, size, way):
    """Headers carry the form of the array; ranks compare calls, not where arrays lie."""
    watched = ("isend", "recv from anyone", "iallreduce", "product", "gather by columns", "allgather stacked")
    with travelling(way), mpiad.debug.checked():
        for call, make in [OTHERS[name] for name in watched]:
            check(beside(call), make([SHAPE] * size), arrays(rngs, SHAPE), rngs)
        for call, make in ((mpiad.mpi_alltoall, reference.alltoall), (mpiad.mpi_exscan, reference.exscan)):
            check(through_device(call), make([(size, 3)] * size), arrays(rngs, (size, 3)), rngs)
        with pytest.raises(mpiad.errors.MessageMismatchError, match=r"shape \(5, 3\), dtype float64, 120 bytes"):
            mpiad.mpi_send(on_device(np.zeros(SHAPE)), RIGHT)
            mpiad.mpi_recv(on_device(np.zeros((3, 5))), LEFT)


def test_copies_of_a_variable_are_compared_under_watch(rank, size):
    x = on_device(np.arange(3.0))
    with mpiad.debug.checked():
        gradient = mpiad.grad(lambda x: mpiad.device.to_host(anp.sum(mpiad.mpi_bcast(x) ** 2)), shared=True)(x)
        np.testing.assert_array_equal(on_host(gradient), 2.0 * np.arange(3))
        if size > 1:
            with pytest.raises(mpiad.errors.ReplicationError, match="0.5"):
                mpiad.grad(lambda x: mpiad.device.to_host(anp.sum(mpiad.mpi_bcast(x) ** 2)), shared=True)(x + 0.5 * rank)
