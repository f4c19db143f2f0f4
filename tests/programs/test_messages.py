"""A compiled rank makes the communications of an interpreted one, so that they fit together."""

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import assert_same, further, objective
from mpi4py import MPI

import mpiad
from mpiad.domain import Domain

X = np.linspace(0.5, 1.75, 6)
EVERYWHERE, NOWHERE = (lambda rank: True), (lambda rank: False)
# On which ranks the function is compiled.
WHERE = [EVERYWHERE, lambda rank: rank == 0, lambda rank: rank > 0]
each_place = pytest.mark.parametrize("compiled", WHERE, ids=["everywhere", "on the root", "elsewhere"])


def check(fun, x, compiled=EVERYWHERE, rank=0, strict=True, rounding=1e-12):
    """Check values and derivatives of a function that is compiled on some ranks, at its trace and in replays."""

    def made(fun):
        return mpiad.jit(fun, strict=strict) if compiled(rank) else fun

    total = objective(fun)
    forms = [mpiad.value_and_grad(made(total)), made(mpiad.value_and_grad(total))]
    jitted = made(fun)
    for given in (x, further(x), x):
        assert_same(jitted(given), fun(given), rounding)
        expected = mpiad.value_and_grad(total)(given)
        for form in forms:
            assert_same(form(given), expected, 10 * rounding)


def collectives(x):
    y = x * (1 + mpiad.mpi_rank())
    parts = [
        mpiad.mpi_allreduce(y * y),
        mpiad.mpi_allreduce(y, MPI.MAX),
        mpiad.mpi_allreduce(y - 2, MPI.MIN),
        mpiad.mpi_reduce(x * 2, root=0),
        mpiad.mpi_reduce_scatter(anp.stack([y] * mpiad.mpi_size())),
        mpiad.mpi_alltoall(anp.stack([x * y] * mpiad.mpi_size())),
        mpiad.mpi_bcast(y * 3, root=mpiad.mpi_size() - 1),
        mpiad.mpi_scan(y),
        mpiad.mpi_exscan(y**2),
        mpiad.mpi_sum(y[::2]),
    ]
    mpiad.mpi_barrier()
    return parts


def agreeing(x):
    """Calls that agree on lengths before; a product with a zero takes another way than one without."""
    size, rank = mpiad.mpi_size(), mpiad.mpi_rank()
    y = anp.stack([x * (k + rank + 1) for k in range(size)])
    return [
        mpiad.mpi_gather(x * x, root=size - 1),
        mpiad.mpi_gather(y[: rank + 1], root=0, axis=0),
        mpiad.mpi_allgather(anp.sin(y)),
        mpiad.mpi_scatter(anp.exp(y), root=size - 1),
        mpiad.mpi_allreduce(y, MPI.PROD),
        mpiad.mpi_allreduce(x - x[0], MPI.PROD),
    ]


def point_to_point(x):
    size, rank = mpiad.mpi_size(), mpiad.mpi_rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    y = mpiad.mpi_exchange(x * (rank + 1), right, left)
    z = mpiad.mpi_sendrecv(anp.sin(y) * x, size - 1, 0, tag=3)
    if size > 1 and rank == 0:
        mpiad.mpi_send(z * y, 1, tag=5)
    if rank == 1:
        z = z + mpiad.mpi_recv(z, 0, tag=5) ** 2
    return z * x, mpiad.mpi_exchange(z, right, left)


@pytest.mark.also_on(2, 4)
@each_place
@pytest.mark.parametrize("fun", [collectives, point_to_point, agreeing], ids=lambda fun: fun.__name__)
def test_primitives(fun, compiled, rank):
    mpiad.mpi_sendrecv(1.0, 0, 0)  # the first one in a communicator compares what ranks name, which isn't compiled
    check(fun, X + rank, compiled, rank, strict=fun is not agreeing)


@each_place
def test_single_precision(compiled, rank):
    check(lambda x: mpiad.mpi_allreduce(x * x) * x, (X + rank).astype(np.float32), compiled, rank, rounding=1e-6)


@each_place
def test_complex_numbers(compiled, rank):
    fun = lambda x: mpiad.mpi_allreduce((x + 1j * rank) ** 2) * x  # noqa: E731
    jitted = mpiad.jit(fun) if compiled(rank) else fun
    for x in (X, X * 2):
        assert_same(jitted(x), fun(x))
        assert_same(jitted(x * 1j), fun(x * 1j))


def requests(x):
    size, rank = mpiad.mpi_size(), mpiad.mpi_rank()
    received = mpiad.mpi_irecv(x, (rank - 1) % size, tag=2)
    sent = mpiad.mpi_isend(x * (rank + 2), (rank + 1) % size, tag=2)
    total = mpiad.mpi_iallreduce(x * x)
    y = mpiad.mpi_wait(received)
    mpiad.mpi_wait(sent)
    return y * x, mpiad.mpi_wait(total)


@each_place
def test_requests_run_as_they_are(compiled, rank):
    check(requests, X + rank, compiled, rank, strict=False)


GRIDS = [
    ((13,), 1, False, "zero"),
    ((9, 12), 2, (True, False), "edge"),
    ((9, 12), (1, 2), False, "reflect"),
    ((9, 12), 1, (False, True), 2.5),
    ((6, 7, 8), 1, (True, False, True), "zero"),
]


@pytest.mark.also_on(2, 4)
@pytest.mark.parametrize(("shape", "halo", "periodic", "boundary"), GRIDS, ids=str)
def test_halos(shape, halo, periodic, boundary, rank, rng):
    """One field, several in one exchange, one twice, and what was computed between two exchanges; then the edges alone."""
    domain = Domain(shape, halo=halo, periodic=periodic)
    inside = domain.interior

    def fun(u):
        v = anp.sin(u) * u
        first = domain.exchange(v, boundary=boundary)
        second = domain.exchange(first[inside] * u + 1.0, boundary=boundary)
        both = domain.exchange(anp.stack([v, u * 2]), boundary=boundary)
        crossed = domain.exchange(u, boundary=boundary, corners=False)
        return first * second, both[0] * both[1], crossed[inside] + first[inside], domain.sum(second[inside] * v)

    check(fun, rng.standard_normal(domain.local_shape), WHERE[len(shape) % 3], rank)


def test_a_halo_against_the_whole_grid(rank, size, rank_rng):
    """By numpy.roll on one process: a step of diffusion, and the gradient of a sum after it."""
    domain = Domain((12, 9), halo=1, periodic=True)
    whole, weights = rank_rng(100).standard_normal((2, 12, 9))
    mine = weights[domain.owned]

    def step(u):
        v = domain.exchange(u)
        return v[1:-1, 1:-1] + 0.1 * (v[2:, 1:-1] + v[:-2, 1:-1] + v[1:-1, 2:] + v[1:-1, :-2] - 4 * v[1:-1, 1:-1])

    def smoothed(u):
        return u + 0.1 * (sum(np.roll(u, by, axis) for by in (1, -1) for axis in (0, 1)) - 4 * u)

    jitted = mpiad.jit(lambda u: step(step(u)), strict=True)
    gradient = mpiad.grad(mpiad.jit(lambda u: domain.sum(step(step(u)) * mine), strict=True))
    for u in (whole, whole * 2):
        np.testing.assert_allclose(jitted(u[domain.owned]), smoothed(smoothed(u))[domain.owned], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(
            gradient(u[domain.owned]), smoothed(smoothed(weights))[domain.owned], rtol=1e-12, atol=1e-13
        )


def test_ranks_with_different_shapes(rank):
    """Each with programs of its own, one of them with no cells."""

    def fun(x):
        total = mpiad.mpi_allreduce(anp.sum(x * x))
        return x * total + mpiad.mpi_allreduce(anp.sum(x)), total

    for n in (rank, rank + 3, rank):
        check(fun, np.arange(float(n)) + 1, EVERYWHERE, rank)


def test_a_rank_that_decides_among_ranks_that_compile(rank, size, caplog):
    def fun(x):
        y = mpiad.mpi_exchange(x * (rank + 1), (rank + 1) % size, (rank - 1) % size)
        if rank == size - 1 and y[0] > 0:
            y = y * 2
        z = mpiad.mpi_allreduce(y * y)
        return mpiad.mpi_scan(z * x)

    jitted, total = mpiad.jit(fun), mpiad.value_and_grad(mpiad.jit(objective(fun)))
    for x in (X, X * 2, X):
        assert_same(jitted(x + rank), fun(x + rank))
        assert_same(total(x + rank), mpiad.value_and_grad(objective(fun))(x + rank), 1e-11)
    assert len(caplog.records) == (2 if rank == size - 1 else 0)


def test_a_trace_on_one_rank_meets_replays_on_the_others(rank, size):
    jitted = mpiad.jit(lambda x: mpiad.mpi_allreduce(anp.sum(anp.cos(x))) * x[0])
    gradient = mpiad.grad(jitted)
    for turn in range(size):
        x = np.ones(2 if rank != turn else 3 + turn)
        expected = (2 * (size - 1) + 3 + turn) * np.cos(1.0)
        np.testing.assert_allclose(jitted(x), expected, rtol=1e-13)
        # Of the root's number.
        np.testing.assert_allclose(gradient(x)[0], expected * (rank == 0) - np.sin(1.0), rtol=1e-12)


def test_nothing_is_dropped_that_others_wait_for(rank, size):
    """Communications whose results nobody uses, also in the reverse pass."""

    def fun(x):
        mpiad.mpi_allreduce(x)
        mpiad.mpi_exchange(x, (rank + 1) % size, (rank - 1) % size)
        mpiad.mpi_bcast(x * 2)
        return anp.sum(x)

    check(fun, X, lambda rank: rank == 0, rank)


def test_views_of_received_arrays_are_not_changed_later(rank, size):
    def fun(x):
        a = mpiad.mpi_bcast(x)
        b = mpiad.mpi_exchange(x * 2, (rank + 1) % size, (rank - 1) % size)
        return a, b, b[0] * a

    jitted = mpiad.jit(fun, strict=True)
    first = jitted(X)
    kept = [part.copy() for part in first]
    jitted(X * 5)
    assert_same(list(first), kept)


def test_a_broadcast_of_another_shape_is_refused_not_read(rank, size):
    """What comes is known on the root alone; a kernel would read beyond the end of a shorter array."""
    jitted = mpiad.jit(lambda x: mpiad.mpi_bcast(x if rank == 0 else None) * 2.0)
    for n in (3, 3, 2000):
        x = np.ones(n if rank == 0 else 1)
        if rank == 0 or n == 3:
            np.testing.assert_array_equal(jitted(x), np.full(n, 2.0))
        else:
            with pytest.raises(TypeError, match=r"mpi_bcast returns an array of shape \(2000,\)"):
                jitted(x)
