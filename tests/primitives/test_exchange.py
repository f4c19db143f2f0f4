import autograd.numpy as anp
import numpy as np
import pytest
import reference
from against_reference import arrays, assert_close, check, check_exact, check_new_memory
from arrays import each_array
from mpi4py import MPI

import mpiad

HIGHEST_TAG = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)


@each_array
def test_ring(rngs, rank, size, dtype, shape, layout):
    program = reference.move([shape] * size, [(r - 1) % size for r in range(size)])
    xs = arrays(rngs, shape, dtype, layout)
    check(lambda x: mpiad.mpi_exchange(x, (rank + 1) % size, (rank - 1) % size), program, xs, rngs)


@pytest.mark.parametrize("nobody", [None, MPI.PROC_NULL], ids=["none", "proc-null"])
@pytest.mark.parametrize("step", [1, -1])
def test_line(rngs, rank, size, nobody, step):
    """The first or last rank receives from nobody, and its opposite sends to nobody."""

    def neighbour(r):
        return r if 0 <= r < size else nobody

    program = reference.move([(2, 3)] * size, [r - step if 0 <= r - step < size else None for r in range(size)])
    dest, source = neighbour(rank + step), neighbour(rank - step)
    check(lambda x: mpiad.mpi_exchange(x, dest, source), program, arrays(rngs, (2, 3)), rngs)


def test_halo_of_both_neighbours(rngs, rank, size):
    """With one tag, also where both neighbours are the same rank, or this one itself."""
    left, right = (rank - 1) % size, (rank + 1) % size

    def fun(x):
        return anp.stack((mpiad.mpi_exchange(x, right, left, tag=3), mpiad.mpi_exchange(x, left, right, tag=3)))

    shapes = [(3,)] * size
    shifts = [reference.move(shapes, [(r + step) % size for r in range(size)]) for step in (-1, 1)]
    check(fun, reference.stack(*shifts), arrays(rngs, (3,)), rngs)


def test_shapes_of_each_ranks_own(rngs, rank, size):
    shapes = [(r, 2) for r in range(size)]
    source = (rank - 1) % size

    def fun(x):
        return mpiad.mpi_exchange(x, (rank + 1) % size, source, like=np.empty(shapes[source]))

    check(fun, reference.move(shapes, [(r - 1) % size for r in range(size)]), arrays(rngs, shapes), rngs)


def test_zeros_of_the_template_where_nobody_sends(rank):
    y = mpiad.mpi_exchange(np.ones(3), None, None, like=np.ones((2, 2), "f4"))
    assert_close(y, np.zeros((2, 2)), "f4")


def test_ranks_that_only_send_or_only_receive(rngs, rank, size):
    """The first rank receives from the last, and nobody else takes part."""
    dest, source = (0 if rank == size - 1 else None), (size - 1 if rank == 0 else None)
    program = reference.move([(3,)] * size, [size - 1 if r == 0 else None for r in range(size)])
    check(lambda x: mpiad.mpi_exchange(x, dest, source), program, arrays(rngs, (3,)), rngs)


def test_meets_sends_and_receives(rngs, rank, size):
    """An exchange on even ranks, its two halves on odd ones."""
    after, before = (rank + 1) % size, (rank - 1) % size

    def fun(x):
        if rank % 2 == 0:
            return mpiad.mpi_exchange(x, after, before, tag=2)
        mpiad.mpi_send(x, after, tag=2)
        return mpiad.mpi_recv(x, before, tag=2)

    program = reference.move([(2, 3)] * size, [(r - 1) % size for r in range(size)])
    check(fun, program, arrays(rngs, (2, 3)), rngs)


@pytest.mark.parametrize("tag", [32768, HIGHEST_TAG])
def test_tags(rngs, rank, size, tag):
    program = reference.move([(3,)] * size, [(r - 1) % size for r in range(size)])
    xs = arrays(rngs, (3,))
    check(lambda x: mpiad.mpi_exchange(x, (rank + 1) % size, (rank - 1) % size, tag=tag), program, xs, rngs)


def test_integers_and_booleans(rngs, rank, size):
    program = reference.move([(2, 3)] * size, [(r - 1) % size for r in range(size)])
    check_exact(lambda x: mpiad.mpi_exchange(x, (rank + 1) % size, (rank - 1) % size), program, rngs)


def test_dtypes_of_each_direction(rank, size):
    """Rank 0 sends single precision and receives double, or complex numbers, or integers."""
    after, before = (rank + 1) % size, (rank - 1) % size
    dtypes = ["f4", "c16", "i8", "f8", "c8"][:size]
    x = np.arange(3).astype(dtypes[rank])
    y = mpiad.mpi_exchange(x, after, before, like=np.empty(3, dtypes[before]))
    assert y.dtype == dtypes[before] and np.all(y == np.arange(3))


def test_new_memory(rank, size):
    check_new_memory(lambda x: mpiad.mpi_exchange(x, (rank + 1) % size, (rank - 1) % size), np.ones(3))
    check_new_memory(lambda x: mpiad.mpi_exchange(x, None, None), np.ones(3))


def test_changing_x_afterwards_changes_nothing_sent(rank, size):
    """The last rank sends a long message and receives nothing, so that it doesn't wait."""
    x = np.full(200_000, float(rank))
    if rank == size - 1:
        mpiad.mpi_exchange(x, 0, None)
        x[:] = -1
    if rank == 0:
        assert np.all(mpiad.mpi_exchange(x, None, size - 1) == size - 1)


def test_numbers(rank, size):
    for number in (2.5, 2, True, 1j, np.float32(2.5)):
        y = mpiad.mpi_exchange(number, (rank + 1) % size, (rank - 1) % size)
        assert y == number and y.dtype == np.result_type(number)


@pytest.mark.parametrize("sent, length", [(3, 4), (3, 2), (5000, 4999), (200_000, 1)])
def test_template_of_another_size(rank, size, sent, length):
    after, before = (rank + 1) % size, (rank - 1) % size
    with pytest.raises(ValueError, match=rf"mpi_exchange: rank {before} sent .* shape \({length},\) and dtype float64"):
        mpiad.mpi_exchange(np.ones(sent), after, before, like=np.ones(length))


def test_wrong_arguments(size):
    for name, partners in (("dest", (size, 0)), ("source", (0, size))):
        with pytest.raises(ValueError, match=f"mpi_exchange: {name} must be a rank from 0 to {size - 1}.* got {size}"):
            mpiad.mpi_exchange(1.0, *partners)
    with pytest.raises(ValueError, match=f"mpi_exchange: source must be .* got {MPI.ANY_SOURCE}"):
        mpiad.mpi_exchange(1.0, 0, MPI.ANY_SOURCE)
    with pytest.raises(TypeError, match=r"mpi_exchange: like .* must be an array.*got list"):
        mpiad.mpi_exchange(1.0, 0, 0, like=[1.0])
    with pytest.raises(TypeError, match=r"mpi_exchange: x must be an array.*got list \(\[1.0\]\)"):
        mpiad.mpi_exchange([1.0], 0, 0, like=1.0)
    with pytest.raises(TypeError, match=r"mpi_exchange: x gives .*must be an array.*got list \(\[1.0\]\)"):
        mpiad.mpi_exchange([1.0], 0, 0)


def test_refused_calls_are_not_counted(rngs, rank, size):
    """Messages and the adjoints' replies are matched by their number, which a call that was refused must not take."""
    after, before = (rank + 1) % size, (rank - 1) % size
    refused = [
        lambda: mpiad.mpi_exchange([1.0], after, before, like=1.0, tag=6),
        lambda: mpiad.mpi_exchange(1.0, after, size, tag=6),
        lambda: mpiad.mpi_exchange(1.0, size, before, tag=6),
        lambda: mpiad.mpi_send("text", after, tag=6),
        lambda: mpiad.mpi_isend([1.0], after, tag=6),
        lambda: mpiad.mpi_recv(None, before, tag=6),
        lambda: mpiad.mpi_irecv([1.0], before, tag=6),
    ]
    for call in refused[: rank + 3]:
        with pytest.raises((TypeError, ValueError)):
            call()
    program = reference.move([(2, 3)] * size, [(r - 1) % size for r in range(size)])
    check(lambda x: mpiad.mpi_exchange(x, after, before, tag=6), program, arrays(rngs, (2, 3)), rngs)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("jit", [False, True], ids=["interpreted", "jitted"])
def test_an_exchange_whose_partner_sends_and_receives(rank, jit):
    """The partner's messages don't wait for their receiver, nor do the cotangents of the exchange."""
    n = 500_000

    def loss(x):
        if rank > 1:
            return 0.0 * anp.sum(x)
        if rank == 0:
            second = mpiad.mpi_recv(x, 1, tag=2)
            return anp.sum(mpiad.mpi_exchange(x, 1, 1, tag=1) * second)
        mpiad.mpi_send(x, 0, tag=1)
        mpiad.mpi_send(2 * x, 0, tag=2)
        return anp.sum(mpiad.mpi_recv(x, 0, tag=1) * x)

    # J = 2 |y|^2 + x y with the arrays x and y of the first two ranks.
    gradient = mpiad.value_and_grad(loss, objective="sum")
    x = np.full(n, 1.0 + rank)
    for _ in range(2):
        J, g = (mpiad.jit(gradient) if jit else gradient)(x)
        assert J == pytest.approx(10.0 * n, rel=1e-12)
        np.testing.assert_array_equal(g, np.full(n, {0: 2.0, 1: 8.0 + 1.0}.get(rank, 0.0)))
