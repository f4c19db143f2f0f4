"""A compiled rank makes the communications of an interpreted one, so that they fit together."""

import logging
import sys

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import assert_same, further, objective
from mpi4py import MPI
from neighbors import sum_of_neighbors

import mpiad
from mpiad.domain import Domain
from mpiad.programs import program_cache

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


def reads_the_interpreter(x):
    """On several ranks, mpiad's exception hooks change the class of the module `sys`."""
    if len(x) > 100:
        sys.exit(f"{x.shape} with {sys.argv}")
    return mpiad.mpi_allreduce(x * len(sys.argv) * (2.0 if sys.byteorder == "little" else 3.0)) + sys.maxsize


@each_place
def test_attributes_of_sys(compiled, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program.py"])
    jitted = mpiad.jit(reads_the_interpreter, strict=True) if compiled(mpiad.mpi_rank()) else reads_the_interpreter
    for _ in range(3):
        expected = mpiad.mpi_size() * X * len(sys.argv) * (2.0 if sys.byteorder == "little" else 3.0) + sys.maxsize
        np.testing.assert_allclose(jitted(X), expected, rtol=1e-15)
        sys.argv.append("option")


def of_neighbors(x):
    """An operation whose parameters hold tuples of envelopes."""
    rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    ranks = [(rank + k) % size for k in (1, -1)]
    y = sum_of_neighbors(x * (rank + 1), ranks, ranks[::-1])
    return [anp.sin(y) * x, sum_of_neighbors(y * y, ranks, ranks[::-1], tag=2)]


@each_place
def test_parameters_with_nested_envelopes(compiled, rank, size):
    check(of_neighbors, X * (rank + 1), compiled, rank)
    before, after = (rank - 1) % size, (rank + 1) % size
    fun = mpiad.jit(lambda x: sum_of_neighbors(x, [after, before], [before, after])) if compiled(rank) else None
    for _ in range(3):
        given = X * (rank + 1)
        found = (fun or (lambda x: sum_of_neighbors(x, [after, before], [before, after])))(given)
        np.testing.assert_allclose(found, X * (before + 1) + X * (after + 1))


def agreeing(x):
    """Calls that agree on lengths before; a product with a zero takes another way than one without."""
    size, rank = mpiad.mpi_size(), mpiad.mpi_rank()
    y = anp.stack([x * (k + rank + 1) for k in range(size)])
    return [
        mpiad.mpi_gather(x * x, root=size - 1),
        mpiad.mpi_gather(y[: rank + 1], root=0, axis=0),
        mpiad.mpi_allgather(anp.sin(y)),
        mpiad.mpi_alltoall(y[: rank + 1] * x[0], [int(k <= rank) for k in range(size)]),
        mpiad.mpi_alltoall(anp.sin(y), [1 + (k == 0) - (k == size - 1) for k in range(size)], axis=0),
        mpiad.mpi_scatter(anp.exp(-y), root=size - 1),
        mpiad.mpi_allreduce(y, MPI.PROD),
        mpiad.mpi_allreduce(x - x[0], MPI.PROD),
    ]


def point_to_point(x):
    """The first `mpi_sendrecv` in a communicator compares what ranks name, which only the trace does."""
    size, rank = mpiad.mpi_size(), mpiad.mpi_rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    y = mpiad.mpi_exchange(x * (rank + 1), right, left)
    z = mpiad.mpi_sendrecv(anp.sin(y) * x, size - 1, 0, tag=3)
    if size > 1 and rank == 0:
        mpiad.mpi_send(z * y, 1, tag=5)
    if rank == 1:
        z = z + mpiad.mpi_recv(z, 0, tag=5) ** 2
    return z * x, mpiad.mpi_exchange(z, right, left)


def requests(x):
    """Waited for in another order on each rank."""
    size, rank = mpiad.mpi_size(), mpiad.mpi_rank()
    started = [
        mpiad.mpi_irecv(x, (rank - 1) % size, tag=2),
        mpiad.mpi_isend(x * (rank + 2), (rank + 1) % size, tag=2),
        mpiad.mpi_iallreduce(x * x),
        mpiad.mpi_irecv(x, None),
    ]
    y = anp.sin(x)
    found = {k: mpiad.mpi_wait(started[k]) for k in np.roll(range(4), rank)}
    return found[0] * y, found[1], found[2] * found[0], found[3] + x


def from_any(x):
    """Which message comes first is another rank's in each run; what the root makes of them isn't."""
    size, rank = mpiad.mpi_size(), mpiad.mpi_rank()
    total = x
    for k in range(1, size):
        if rank == 0:
            total = total + mpiad.mpi_recv(x, MPI.ANY_SOURCE, tag=4) ** 2
        elif rank == k:
            mpiad.mpi_send(x * x * rank, 0, tag=4)
    mpiad.mpi_barrier()
    return total


# On two ranks each is the other's neighbor on both sides.
ON_TWO = [
    pytest.param(fun, marks=pytest.mark.also_on(2) if fun in (point_to_point, requests) else pytest.mark.also_on())
    for fun in (collectives, point_to_point, agreeing, requests, from_any)
]


@pytest.mark.few(4)
@each_place
@pytest.mark.parametrize("fun", ON_TWO, ids=lambda fun: fun.__name__)
def test_primitives(fun, compiled, rank):
    check(fun, X + rank, compiled, rank)


def test_a_sender_that_is_another_one_in_each_run(rank, size):
    """A replay doesn't wait for the sender of its trace, and the cotangent goes where the message came from."""
    receive = mpiad.jit(lambda x: mpiad.mpi_recv(x, MPI.ANY_SOURCE, tag=6) * x, strict=True)
    for k in range(4 if size > 1 else 0):
        sender = 1 + k % (size - 1)

        def fun(x):
            if rank == sender:  # noqa: B023
                mpiad.mpi_send(x, 0, tag=6)
            return anp.sum(receive(x)) if rank == 0 else 0.0 * x[0]

        expected = X + sender if rank == 0 else X * (rank == sender)
        np.testing.assert_array_equal(mpiad.grad(fun, objective="sum")(X + rank), expected)


@each_place
def test_single_precision(compiled, rank):
    check(lambda x: mpiad.mpi_allreduce(x * x) * x, (X + rank).astype(np.float32), compiled, rank, rounding=1e-6)


@each_place
def test_complex_numbers(compiled, rank, caplog):

    def fun(x):
        turned = np.exp(1j * rank) * x  # complex, where x is real as well
        return anp.real(mpiad.mpi_allreduce(turned**2) * anp.conj(x)), x + 1

    def real(x):
        return anp.sum(fun(x)[0])

    jitted, total = [mpiad.jit(each, strict=True) if compiled(rank) else each for each in (fun, real)]
    for x in (X, X * 2, X + 1j, (X * 1j).astype(np.complex64)):
        assert_same(jitted(x), fun(x), 1e-6 if x.dtype == np.complex64 else 1e-12)
        assert_same(mpiad.value_and_grad(total)(x), mpiad.value_and_grad(real)(x), 1e-6 if x.itemsize == 8 else 1e-12)
    assert not caplog.records


@pytest.mark.few(1)
@pytest.mark.one_rank
@each_place
@pytest.mark.unguarded
def test_second_derivatives(compiled, rank, size):
    """Products of a function that is jitted, and of what jitted functions are called in."""

    def inner(x, k):
        return mpiad.mpi_exchange(anp.sum(x**3), (rank + 1) % size, (rank - 1) % size) * k * anp.sin(x)

    def fun(x):
        return mpiad.mpi_allreduce(anp.sum(inner(x, 2.0) ** 2 * x)) + anp.sum(inner(x * x, 0.5)[1:])

    def nested(x):
        return mpiad.mpi_allreduce(anp.sum(part(x, 2.0) ** 2 * x)) + anp.sum(part(x * x, 0.5)[1:])

    part = mpiad.jit(inner) if compiled(rank) else inner
    forms = [mpiad.jit(fun), mpiad.jit(nested), nested] if compiled(rank) else [fun] * 3
    v = np.cos(X)
    for x in (X + rank, X, X[:0] if rank == 1 else X):  # and one rank has nothing
        w = v[: len(x)]
        value, gradient, product = mpiad.make_hvp(fun, objective="sum")(x)
        expected = product(w)
        for form in forms:
            assert_same(mpiad.hvp(form, objective="sum")(x, w), expected, 1e-11)
            found = mpiad.make_hvp(form, objective="sum")(x)
            assert_same((*found[:2], found[2](w), found[2](2 * w)), (value, gradient, expected, 2 * expected), 1e-11)
            # The messages of several directions are put together; and products may be differentiated by their direction.
            assert_same(found[2](np.stack([w, x]), batch=True), product(np.stack([w, x]), batch=True), 1e-11)
            squares = [mpiad.grad(lambda w: anp.sum(each(w) ** 2), objective="sum")(w) for each in (product, found[2])]  # noqa: B023
            assert_same(*squares, 1e-10)
            assert_same(found[2](w), expected, 1e-11)


@each_place
@pytest.mark.unguarded
def test_second_derivatives_where_an_argument_is_a_result(compiled, rank, size):
    def inner(x):
        return x, mpiad.mpi_exchange(anp.sum(x**3), (rank + 1) % size, (rank - 1) % size) * anp.sin(x)

    def objective_of(part):
        def fun(x):
            same, other = part(x)
            return mpiad.mpi_allreduce(anp.sum(other**2 * x)) + anp.sum(same**3)

        return fun

    given, v = mpiad.jit(inner) if compiled(rank) else inner, np.cos(X)
    for x in (X + rank, X):
        expected = mpiad.hvp(objective_of(inner), objective="sum")(x, v)
        assert_same(mpiad.hvp(objective_of(given), objective="sum")(x, v), expected, 1e-11)
        several = mpiad.make_hvp(objective_of(given), objective="sum")(x)[2](np.stack([v, 2 * v]), batch=True)
        assert_same(several, np.stack([expected, 2 * expected]), 1e-11)


# Four ranks divide a grid along two axes, which one of these shows; two ranks have one neighbor on both sides.
GRIDS = [
    pytest.param((13,), 1, False, "zero", marks=pytest.mark.also_on(2)),
    pytest.param((9, 12), 2, (True, False), "edge", marks=pytest.mark.also_on()),
    pytest.param((9, 12), (1, 2), False, "reflect", marks=pytest.mark.also_on()),
    pytest.param((9, 12), 1, (False, True), 2.5, marks=pytest.mark.also_on()),
    pytest.param((6, 7, 8), 1, (True, False, True), "zero", marks=pytest.mark.also_on(2, 4)),
]


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


@each_place
def test_halos_in_two_halves(compiled, rank, rng):
    """Two exchanges under way at a time, ended in the other order."""
    domain = Domain((9, 12), periodic=(True, False))

    def fun(u):
        begun = domain.begin_exchange(u * u, boundary="edge")
        faces = domain.begin_exchange([u, anp.sin(u)], corners=False)
        crossed = domain.end_exchange(faces)[1]
        return domain.end_exchange(begun) * crossed

    check(fun, rng.standard_normal(domain.local_shape), compiled, rank)


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


def test_lengths_that_other_ranks_change(rank, size):
    """What comes is known on another rank alone: a kernel would read beyond the end of a shorter array.

    What was communicated before that shows isn't communicated again, and the next call of this kind is compiled.
    """
    last = size - 1
    domain = Domain((4 * size, 3))

    def fun(x, u):
        v = domain.exchange(anp.sin(u))
        w = v[1:-1, 1:-1] + v[2:, 1:-1] * mpiad.mpi_exchange(x[:1], (rank + 1) % size, (rank - 1) % size)
        y = mpiad.mpi_bcast(x * 2 if rank == last else None, root=last)
        z = mpiad.mpi_allgather(x * x, axis=0)
        return anp.sum(w * domain.exchange(w)[:-2, 1:-1]) + anp.sum(z) * y[0] + anp.sum(y) * y.shape[0]

    jitted = mpiad.jit(fun, strict=True)
    total = mpiad.value_and_grad(jitted, (0, 1))
    rng = np.random.default_rng(rank)
    for n in (3, 3, 2000, 2000, 2000):
        x = rng.uniform(1, 2, n if rank == last else 2)
        u = rng.standard_normal(domain.local_shape)
        assert_same(total(x, u), mpiad.value_and_grad(fun, (0, 1))(x, u), 1e-11)
    assert jitted._cache.attempts.traces == 2
    for n in (2000, 3, 3):
        x = rng.uniform(1, 2, n if rank == last else 2)
        np.testing.assert_allclose(jitted(x, u), fun(x, u), rtol=1e-12)


def test_counts_that_other_ranks_change(rank, size):
    """Rank 0 alone meets other counts, so its program ends at the exchange; ranks that know the counts learn nothing."""
    last = size - 1

    def fun(x):
        y = mpiad.mpi_alltoall(anp.sin(x), [len(x)] + [0] * last)
        counts = [len(y)] + [0] * last if rank == 0 else [0] * size
        z = mpiad.mpi_alltoall(y * y, counts, received=counts)
        return anp.sum(z * y) + mpiad.mpi_allreduce(anp.sum(x))

    jitted = mpiad.jit(fun, strict=True)
    gradient, expected = (mpiad.value_and_grad(f, objective="sum") for f in (jitted, fun))
    rng = np.random.default_rng(rank)
    for n in (3, 3, 2000, 2000, 2000):
        x = rng.uniform(1, 2, n if rank == last else 2)
        assert_same(gradient(x), expected(x), 1e-11)
    assert jitted._cache.attempts.traces == (2 if rank in (0, last) else 1)


def test_counts_that_always_change(rank, size, monkeypatch, caplog):
    """After a number of traces the function is interpreted, with one warning."""
    monkeypatch.setattr(program_cache, "MAX_TRACES", 2)
    jitted = mpiad.jit(lambda x: anp.sum(mpiad.mpi_alltoall(x, [len(x)] + [0] * (size - 1)) ** 2))
    caplog.set_level(logging.WARNING, "mpiad")
    for n in range(1, 9):
        x = np.full(n if rank == size - 1 else 2, 2.0)
        assert jitted(x) == (4.0 * (n + 2 * (size - 1)) if rank == 0 else 0)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (rank in (0, size - 1)) and all("it was traced 2 times" in text for text in warned)


def test_products_with_zeros_and_without(rank, size):
    """The gradient of a product of all ranks takes another way where a factor is zero: which one is told by values."""
    fun = lambda x: anp.sum(mpiad.mpi_allreduce(x, MPI.PROD) * anp.arange(1.0, 4.0))  # noqa: E731
    gradient = mpiad.grad(mpiad.jit(fun, strict=True))
    inside = mpiad.jit(mpiad.grad(fun), strict=True)
    every = np.arange(1.0, 3 * size + 1).reshape(size, 3)
    zero = every.copy()
    zero[-1, 1] = 0
    for factors in (every, every * 2, zero, zero * 2, every):
        others = np.prod(np.delete(factors, rank, axis=0), axis=0)
        for found in (gradient, inside):
            np.testing.assert_allclose(found(factors[rank]), np.arange(1.0, 4.0) * others, rtol=1e-13)


def test_requests_are_waited_for_where_they_are_started(rank):
    """One that is left over is the caller's, so that function is interpreted, and its message is sent once."""
    start = mpiad.jit(lambda x: mpiad.mpi_isend(x * 2, rank, tag=7))
    wait = mpiad.jit(lambda request, x: mpiad.mpi_wait(request) * x)
    for x in (X, X * 2, X * 3):
        sent, received = start(x), mpiad.mpi_irecv(x, rank, tag=7)
        np.testing.assert_array_equal(wait(received, x), 2 * x * x)
        mpiad.mpi_wait(sent)


def test_what_a_rank_sends_to_itself(rank):
    """Compiled, that is a copy, which is counted among the messages of interpreted functions."""

    def fun(x):
        return anp.sum(mpiad.mpi_exchange(x**3, rank, rank) * x)

    jitted = mpiad.jit(lambda x: mpiad.mpi_exchange(x * x, rank, rank) + x, strict=True)
    gradient, plain = mpiad.jit(mpiad.value_and_grad(fun, objective="sum")), mpiad.value_and_grad(fun, objective="sum")
    for k in range(1, 4):
        given = k * X + rank
        np.testing.assert_array_equal(jitted(given), given * given + given)
        assert_same(gradient(given)[1], 4 * given**3, 1e-14)
        request = mpiad.mpi_isend(7 * given, rank)
        np.testing.assert_array_equal(mpiad.mpi_recv(X, rank), 7 * given)
        mpiad.mpi_wait(request)
        assert_same(plain(given)[1], 4 * given**3, 1e-14)


@pytest.mark.unguarded
def test_what_a_rank_sends_to_itself_in_another_shape(rank):
    jitted = mpiad.jit(lambda x: mpiad.mpi_exchange(x * x, rank, rank, like=np.ones((2, 3))), strict=True)
    for k in range(3):
        np.testing.assert_array_equal(jitted(X + k), ((X + k) ** 2).reshape(2, 3))


def test_a_channel_with_messages_left_is_refused(rank, size):
    """A replay looks at it, as each call does that isn't compiled."""
    comm = MPI.COMM_WORLD.Dup()
    mpiad.mpi_init(comm)
    right, left = (rank + 1) % size, (rank - 1) % size
    jitted = mpiad.jit(lambda x: mpiad.mpi_exchange(x * 2, right, left, comm=comm))
    np.testing.assert_array_equal(jitted(X + rank), 2 * (X + left))

    def fails(x):
        mpiad.mpi_send(x, rank, tag=1, comm=comm)
        raise KeyError("left")

    with pytest.raises(KeyError):
        mpiad.grad(fails)(X)
    with pytest.raises(mpiad.errors.UnfinishedMessagesError):
        jitted(X + rank)
    mpiad.reset(comm)
    np.testing.assert_array_equal(jitted(X + rank), 2 * (X + left))
    comm.Free()


@pytest.mark.parametrize(
    "derivative",
    [
        lambda fun, x, n: mpiad.value_and_grad(fun, objective="sum")(x, n),
        lambda fun, x, n: mpiad.hvp(lambda x: fun(x, n), objective="sum")(x, x),
        lambda fun, x, n: mpiad.linearize(lambda x: fun(x, n) ** 2)(x).vjp(1.0),
    ],
    ids=["gradient", "product", "linearized"],
)
def test_messages_that_a_compiled_function_has_left(derivative, rank, size):
    """A compiled function that raises in a derivative leaves its communicator as an interpreted one does."""
    right, left = (rank + 1) % size, (rank - 1) % size
    x = np.arange(4.0) + rank

    @mpiad.jit
    def fun(x, n):
        mpiad.mpi_send(x, right, tag=3)
        z = mpiad.mpi_exchange(x[:n], right, left, like=x)  # raises on all ranks if n is too small
        return anp.sum(z * mpiad.mpi_recv(x, left, tag=3))

    for _ in range(3):
        derivative(fun, x, 4)
        with pytest.raises(ValueError, match="mpi_exchange"):
            derivative(fun, 10 * x, 2)
        with pytest.raises(mpiad.errors.UnfinishedMessagesError):
            fun(x, 4)
        mpiad.reset()
    assert fun(x, 4) == np.sum((np.arange(4.0) + left) ** 2)


def along_a_line(x):
    """Exchanges at the ends of a line of ranks have one partner, or none."""
    rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    before, after = (rank - 1 if rank else None), (rank + 1 if rank < size - 1 else None)
    for _ in range(2):
        low = mpiad.mpi_exchange(x * x, after, before, like=x)
        x = anp.sin(x) * low + mpiad.mpi_exchange(x[2:] * (rank + 1), before, after)[0] + x
    return x, mpiad.mpi_exchange(x, None, None, like=x[:2]) + x[:2]


def sent_along_a_line(x):
    """The ranks send one after the other; the end of the line sends to nobody."""
    rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    received = mpiad.mpi_recv(x, rank - 1 if rank else MPI.PROC_NULL, tag=3)
    y = x * x + anp.cos(received)
    return mpiad.mpi_send(y, rank + 1 if rank < size - 1 else MPI.PROC_NULL, tag=3) * y


@pytest.mark.each_value
@each_place
@pytest.mark.parametrize("fun", [along_a_line, sent_along_a_line])
@pytest.mark.parametrize("length", [6, 512, 700])
def test_a_line_of_ranks(fun, compiled, length, rank):
    check(fun, np.linspace(0.5, 1.75, length) + rank, compiled, rank)


@pytest.mark.parametrize("length", [6, 512])
def test_sends_do_not_wait_for_receivers(length, rank, size):
    """All ranks send around a ring before they receive, whatever the size up to which MPI buffers messages."""
    after, before = (rank + 1) % size, (rank - 1) % size

    def fun(x):
        sent = mpiad.mpi_exchange(x * x, after, None)
        y = mpiad.mpi_send(anp.sin(x) + sent, after)
        return mpiad.mpi_exchange(y, None, before) * mpiad.mpi_recv(y, before)

    check(fun, np.linspace(0.5, 1.75, length) + rank, EVERYWHERE, rank)


@pytest.mark.parametrize(("sent", "said"), [(9, "more bytes"), (2, "16 bytes")])
@pytest.mark.parametrize("call", ["mpi_exchange", "mpi_recv"])
@pytest.mark.unguarded
def test_a_message_of_another_size_is_refused_by_a_replay_that_only_receives(call, sent, said, rank, size):
    def receive(x):
        return mpiad.mpi_exchange(x, None, 0) if call == "mpi_exchange" else mpiad.mpi_recv(x, 0)

    jitted = mpiad.jit(lambda x: receive(x * 2.0) + x, strict=True)
    if rank > 1 or size == 1:
        return
    for n in (len(X), len(X), len(X), sent, len(X)):
        if rank == 0:
            mpiad.mpi_send(np.ones(n), 1)
        elif n == len(X):
            np.testing.assert_array_equal(jitted(X), X + 1)
        else:  # Open MPI probes for messages, and knows their sizes
            with pytest.raises(ValueError, match=f"{call}: rank 0 sent ({said}|{8 * sent} bytes)"):
                jitted(X)


@pytest.mark.parametrize(("sent", "dtype", "said"), [(9, "f8", "more bytes"), (2, "f8", "16 bytes"), (3, "f4", "12 bytes")])
@pytest.mark.unguarded
def test_a_message_of_another_size_is_refused_by_a_replay(sent, dtype, said, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    jitted = mpiad.jit(lambda x: mpiad.mpi_exchange(x, right, left) * 2.0, strict=True)
    for k in range(3):
        np.testing.assert_array_equal(jitted(X * k + rank), 2 * (X * k + left))
    if size == 1:
        return
    if rank == 0:
        np.testing.assert_array_equal(mpiad.mpi_exchange(np.ones(sent, dtype), right, left, like=X), X + left)
    elif rank == 1:
        with pytest.raises(ValueError, match=f"mpi_exchange: rank 0 sent {said}"):
            jitted(X + rank)
    else:
        np.testing.assert_array_equal(jitted(X + rank), 2 * (X + left))
    np.testing.assert_array_equal(jitted(X - rank), 2 * (X - left))


@each_place
def test_products_of_one_record(compiled, rank, size):
    """One by one, several at once, and differentiated by what they multiply."""

    def fun(x):
        y = mpiad.mpi_exchange(x, (rank + 1) % size, (rank - 1) % size)
        return mpiad.mpi_allreduce(y**2), anp.argmax(y)

    given = mpiad.jit(fun, strict=True) if compiled(rank) else fun
    for x in (X + rank, 2 * X):
        record = mpiad.linearize(given)(x)
        for w in (np.ones(6), X):
            np.testing.assert_allclose(record.vjp((w, 0)), 2 * size * x * w, rtol=1e-13)
            np.testing.assert_allclose(record.jvp(w)[0], mpiad.mpi_allreduce(2 * x * w), rtol=1e-13)
        several = np.stack([x, X])
        np.testing.assert_allclose(record.vjp((several, 0), batch=True), 2 * x * mpiad.mpi_allreduce(several), rtol=1e-13)
        np.testing.assert_allclose(record.jvp(several, batch=True)[0], mpiad.mpi_allreduce(2 * x * several), rtol=1e-13)
        slope = mpiad.grad(lambda w: anp.sum(record.jvp(w)[0] ** 2), objective="sum")(X)  # noqa: B023
        np.testing.assert_allclose(slope, 4 * size * x * mpiad.mpi_allreduce(2 * x * X), rtol=1e-13)


@each_place
def test_several_cotangents_after_a_message_of_unknown_shape(compiled, rank, size):
    """The shape of a gather is known in a run only; all ranks make each adjoint of a message for all cotangents."""

    def fun(x):
        return mpiad.mpi_allreduce(anp.sum(mpiad.mpi_allgather(anp.sum(x)) ** 2)) * x

    given = mpiad.jit(fun, strict=True) if compiled(rank) else fun
    for x in (X + rank, 2 * X - rank):
        factor = size * mpiad.mpi_allreduce(np.sum(x) ** 2)
        vjp, value = mpiad.make_vjp(given)(x)
        np.testing.assert_allclose(value, factor * x, rtol=1e-13)
        several = np.stack([x, X * rank, np.cos(X)])
        expected = [factor * w + 2 * size * np.sum(x) * mpiad.mpi_allreduce(w @ x) for w in several]
        for w, bar in zip(several, expected):
            np.testing.assert_allclose(vjp(w), bar, rtol=1e-12)
        np.testing.assert_allclose(vjp(several, batch=True), expected, rtol=1e-12)
