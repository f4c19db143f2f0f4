"""Several communicators in one trace, and the user's own traffic between."""

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from one_process import assert_close, directions, gradients, hessian_products, inputs

import mpiad

WORLD = MPI.COMM_WORLD


def check(program, whole, xs, rank):
    vs = directions(xs)
    value, g = mpiad.value_and_grad(program)(xs[rank])
    assert_close(value, whole(xs))
    assert_close(g, gradients(whole, xs)[rank])
    assert_close(mpiad.hvp(program)(xs[rank], vs[rank]), hessian_products(whole, xs, vs)[rank])


@pytest.fixture
def parts(rank):
    """Two ways to divide the ranks: by parity (in reverse order), and into halves."""
    comms = WORLD.Split(rank % 2, -rank), WORLD.Split(rank // 2, rank)
    for comm in comms:
        mpiad.mpi_init(comm)
    yield comms
    for comm in comms:
        comm.Free()


def parity_of(r, size):
    return [s for s in reversed(range(size)) if s % 2 == r % 2]


def half_of(r, size):
    return [s for s in range(size) if s // 2 == r // 2]


def test_two_communicators_interleaved(parts, rank, size, rank_rng):
    xs = inputs(rank_rng, size)
    parity, half = parts

    def program(x):
        a = mpiad.mpi_allreduce(anp.sum(anp.sin(x)), comm=parity)
        b = mpiad.mpi_bcast(x[:2] * a, root=half.size - 1, comm=half)
        c = mpiad.mpi_scan(anp.sum(b) * x[2], comm=parity)
        d = mpiad.mpi_allreduce(c * b[1], comm=half)
        return mpiad.mpi_allreduce(d**2 * (rank + 1.0))

    def whole(zs):
        a = [sum(anp.sum(anp.sin(zs[s])) for s in parity_of(r, size)) for r in range(size)]
        last = [half_of(r, size)[-1] for r in range(size)]
        b = [zs[s][:2] * a[s] for s in last]
        e = [anp.sum(b[r]) * zs[r][2] for r in range(size)]
        c = [sum(e[s] for s in parity_of(r, size) if s >= r) for r in range(size)]
        d = [sum(c[s] * b[s][1] for s in half_of(r, size)) for r in range(size)]
        return sum(d[r] ** 2 * (r + 1.0) for r in range(size))

    check(program, whole, xs, rank)


def test_messages_with_equal_tags_on_two_communicators(parts, rank, size, rank_rng):
    """The same partner, the same tag, received in the other order than sent."""
    xs = inputs(rank_rng, size, lambda r: (2,))
    _, half = parts
    other = half.size - 1 - half.rank
    world_rank = half_of(rank, size)[other]

    def program(x):
        mpiad.mpi_send(anp.sin(x), other, tag=3, comm=half)
        mpiad.mpi_send(x**3, world_rank, tag=3)
        cube = mpiad.mpi_recv(x, world_rank, tag=3)
        sine = mpiad.mpi_recv(x, other, tag=3, comm=half)
        return mpiad.mpi_allreduce(anp.sum(cube * sine**2) * (rank + 1.0))

    def partner(r):
        return list(reversed(half_of(r, size)))[half_of(r, size).index(r)]

    def whole(zs):
        return sum(anp.sum(zs[partner(r)] ** 3 * anp.sin(zs[partner(r)]) ** 2) * (r + 1.0) for r in range(size))

    check(program, whole, xs, rank)


def test_a_communicator_prepared_by_its_first_collective(rank, size, rank_rng):
    xs = inputs(rank_rng, size)
    comm = WORLD.Dup()
    right, left = (rank + 1) % size, (rank - 1) % size

    def program(x):
        total = mpiad.mpi_allreduce(anp.sum(x**2), comm=comm)
        return mpiad.mpi_sum(mpiad.mpi_exchange(total * x[0], right, left, comm=comm), comm=comm)

    check(program, lambda zs: sum(anp.sum(z**2) for z in zs) * sum(z[0] for z in zs), xs, rank)
    comm.Free()


def test_a_cartesian_communicator_and_its_edges(rank, size, rank_rng):
    """`Shift` names PROC_NULL as the partner beyond the edge."""
    xs = inputs(rank_rng, size, lambda r: (2,))
    line = WORLD.Create_cart([size], periods=[False])
    mpiad.mpi_init(line)
    source, dest = line.Shift(0, 1)

    def program(x):
        came = mpiad.mpi_exchange(x**2, dest, source, comm=line)
        return mpiad.mpi_allreduce(anp.sum(anp.cos(came) * x**2), comm=line)

    def whole(zs):
        return sum(anp.sum(anp.cos(zs[r - 1] ** 2 if r else np.zeros(2)) * z**2) for r, z in enumerate(zs))

    check(program, whole, xs, rank)
    line.Free()


@pytest.mark.parametrize("own", ["the default", "one of the user's"])
def test_the_users_own_traffic_with_the_same_tags(own, rank, size, rank_rng):
    """Messages and collectives of mpi4py on the same communicator, under way while the library's are."""
    xs, right, left = inputs(rank_rng, size), (rank + 1) % size, (rank - 1) % size
    comm = WORLD.Dup()
    mpiad.mpi_init(comm)
    given, user = (None, WORLD) if own == "the default" else (comm, comm)

    def program(x):
        mine, theirs = np.array([100.0 + rank]), np.zeros(1)
        receiving = user.Irecv(theirs, left, tag=0)
        mpiad.mpi_send(x[:1] * 2, right, tag=0, comm=given)
        sending = user.Isend(mine, right, tag=0)
        summing = user.Iallreduce(mine, total := np.zeros(1))
        came = mpiad.mpi_recv(np.zeros(1), left, tag=0, comm=given)
        request = mpiad.mpi_iallreduce(came[0] ** 2, comm=given)
        MPI.Request.Waitall([receiving, sending, summing])
        assert theirs[0] == 100.0 + left and total[0] == 100.0 * size + sum(range(size))
        assert user.allreduce(1) == size
        return mpiad.mpi_wait(request) * mpiad.mpi_allreduce(anp.sum(x), comm=given)

    check(program, lambda zs: sum((2 * z[0]) ** 2 for z in zs) * sum(anp.sum(z) for z in zs), xs, rank)
    comm.Free()
