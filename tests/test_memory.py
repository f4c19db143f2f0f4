"""Memory comes back when the result is dropped, without the garbage collector, also after exceptions."""

import gc
import os
import weakref

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.extend import defvjp, primitive
from mpi4py import MPI

import mpiad
from mpiad import ensemble
from mpiad.ensemble import EnsembleProblem, ODEProblem

LENGTH = 100_000
ARRAY_BYTES = 8 * LENGTH


class InterruptedStep(Exception):
    """What the program here raises now and then."""


@pytest.fixture
def no_collector():
    """Without the garbage collector, and nothing left for it from before."""
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def program(x, rank, size, interrupted=False):
    """Sends, receives, requests and reductions of the whole array."""
    right, left = (rank + 1) % size, (rank - 1) % size
    y = mpiad.mpi_send(x * x, right)
    if interrupted:
        raise InterruptedStep
    z = mpiad.mpi_recv(x, left) * y
    total = mpiad.mpi_allreduce(z)
    request = mpiad.mpi_irecv(x[:10], left, tag=2)
    mpiad.mpi_wait(mpiad.mpi_isend(total[:10], right, tag=2))
    return mpiad.mpi_allreduce(anp.sum(total * z)) + anp.sum(mpiad.mpi_wait(request))


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.one_rank
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
@pytest.mark.limit(180)
def test_hundreds_of_gradients_do_not_grow_the_memory(no_collector, rank, size):
    """Every twentieth is interrupted between a send and its receive, and may not keep an array either."""
    x = np.linspace(-1.0, 1.0, LENGTH) + rank
    gradient = mpiad.grad(program)
    steps = 400 if size <= 2 else 200  # ranks that share two cores take as long for these
    settled = steps // 5
    for step in range(steps):
        if step == settled:
            before = resident_bytes()
        if step % 20 == 10:
            try:
                gradient(x, rank, size, interrupted=True)
            except InterruptedStep:
                mpiad.reset()
        else:
            gradient(x, rank, size)
    grown = resident_bytes() - before
    assert grown < 4 * ARRAY_BYTES, f"{grown / 1e6:.1f} MB more"


CALLS = {
    "value_and_grad": lambda f, x, v: mpiad.value_and_grad(f)(x),
    "shared": lambda f, x, v: mpiad.value_and_grad(lambda t: f(t[0]), shared=True)([x, 1.0]),
    "hvp": lambda f, x, v: mpiad.hvp(f)(x, v),
    "reverse over reverse": lambda f, x, v: mpiad.grad(lambda y: anp.sum(mpiad.grad(f)(y) * v))(x),
    "reverse over forward": lambda f, x, v: mpiad.grad(lambda y: mpiad.jvp(f, y, v)[1])(x),
    "jvp": lambda f, x, v: mpiad.jvp(f, x, v),
    "make_vjp": lambda f, x, v: mpiad.make_vjp(f)(x)[0](1.0),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_reference_cycles(call, no_collector, rank, size):
    """The collector finds nothing that only it could return."""
    x = np.linspace(0.5, 1.0, 20) + (0 if call == "shared" else rank)
    run = lambda: CALLS[call](lambda y: program(y, rank, size), x, np.ones(20))  # noqa: E731
    run()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    run()
    gc.collect()
    assert [type(found).__name__ for found in gc.garbage] == []


def test_no_reference_cycles_after_an_exception(no_collector, rank, size):
    def run():
        try:
            mpiad.grad(program)(np.ones(20), rank, size, interrupted=True)
        except InterruptedStep:
            mpiad.reset()

    run()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    run()
    gc.collect()
    assert [type(found).__name__ for found in gc.garbage] == []


@pytest.fixture
def watched():
    """Weak references to what `watch` is given: the arrays behind traced values."""
    return []


def watching(watched, rank, size, interrupted=False):
    def loss(x):
        y = anp.sin(x)
        total = mpiad.mpi_allreduce(y)
        z = mpiad.mpi_exchange(total * y, (rank + 1) % size, (rank - 1) % size)
        for value in (y, total, z):
            watched.append(weakref.ref(mpiad.stop_gradient(value)))
        if interrupted:
            raise InterruptedStep
        return anp.sum(z**2)

    return loss


@pytest.mark.parametrize("call", CALLS)
def test_arrays_die_with_the_result(call, no_collector, watched, rank, size):
    x = np.linspace(0.5, 1.0, 1000) + (0 if call == "shared" else rank)
    result = CALLS[call](watching(watched, rank, size), x, np.ones(1000))
    assert result is not None and watched
    assert [reference() is None for reference in watched] == [True] * len(watched)


def test_arrays_live_as_long_as_a_vjp_that_needs_them(no_collector, watched, rank, size):
    vjp, _ = mpiad.make_vjp(watching(watched, rank, size))(np.ones(1000))
    assert any(reference() is not None for reference in watched)
    vjp(1.0)
    vjp(2.0)
    assert any(reference() is not None for reference in watched)
    del vjp
    assert all(reference() is None for reference in watched)


def test_arrays_die_with_an_exception(no_collector, watched, rank, size):
    try:
        mpiad.grad(watching(watched, rank, size, interrupted=True))(np.ones(1000))
    except InterruptedStep:
        pass
    assert watched and all(reference() is None for reference in watched)
    mpiad.reset()


@pytest.mark.unguarded
def test_a_reverse_pass_returns_memory_on_the_way(no_collector, rank):
    """When the cotangent reaches the first half of a long program, what the second half kept is gone."""
    alive, watched = [], []

    def half(x):
        for _ in range(10):
            x = anp.sin(x) * x
            watched.append(weakref.ref(mpiad.stop_gradient(x)))
        return x

    def look(g):
        alive.append(sum(reference() is not None for reference in watched[10:]))
        return g

    middle = primitive(lambda x: x * 1.0)
    defvjp(middle, lambda ans, x: look)
    mpiad.grad(lambda x: anp.sum(half(middle(half(x)))), comm=MPI.COMM_SELF)(np.ones(1000))
    assert alive == [0]


def test_buffers_of_a_freed_communicator_come_back(no_collector):
    """A channel hangs on the communicator and is freed with it."""
    comm = MPI.COMM_WORLD.Dup()
    mpiad.mpi_init(comm)
    mpiad.mpi_send(np.ones(1000), comm.rank, comm=comm)
    received = mpiad.mpi_recv(np.zeros(1000), comm.rank, comm=comm)
    reference = weakref.ref(received)
    comm.Free()
    del received
    assert reference() is None


@pytest.mark.one_rank
@pytest.mark.unguarded
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
def test_the_trace_of_a_program_holds_no_memory_for_its_values():
    """Of the ten arrays in each of 30 steps and more in its reverse pass, the compiled gradient keeps one or two."""

    def polynomials(x):
        for _ in range(30):
            x = (x + 0.25 * x * x - 0.125 * x * x * x + 0.5 - 0.3 * x) * 0.9
        return anp.sum(x * x)

    x = np.linspace(-1.0, 1.0, LENGTH)
    gradient = mpiad.jit(mpiad.grad(polynomials), strict=True)
    gradient(x[:20_000])  # imports the compiler
    before = resident_bytes()
    found = gradient(x)
    assert (resident_bytes() - before) / ARRAY_BYTES < 70
    np.testing.assert_allclose(found, mpiad.grad(polynomials)(x), rtol=1e-12, atol=1e-16)


@pytest.mark.thorough
@pytest.mark.one_rank
@pytest.mark.limit(600)
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
def test_ensembles_of_new_functions_leave_nothing():
    """After the first kernel, which loads LLVM: 80 MB, of which all but 10 MB are pages of its library's file."""

    def private():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1e3

    def solve(k):
        c = 1.0 + 1e-3 * k
        problem = ODEProblem(
            lambda u, p, t: anp.array([p[0] * u[1] * c, -u[0] * c]), np.array([1.0, 0.0]), (0.0, 1.0), np.ones(1)
        )
        p = np.linspace(0.5, 1.5, 8)[:, None]
        mpiad.grad(lambda p: anp.sum(ensemble.solve(EnsembleProblem(problem, p=p)).u_end ** 2), comm=MPI.COMM_SELF)(p)

    for k in range(100):
        solve(k)
    gc.collect()
    before, objects = private(), len(gc.get_objects())
    for k in range(100, 600):
        solve(k)
    gc.collect()
    assert private() - before < 10.0 and len(gc.get_objects()) - objects < 8000  # caches of 64 to 256 entries
