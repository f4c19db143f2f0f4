"""Derivatives in several threads: tapes and trace numbers are each thread's own."""

import sys
import threading

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.tracer import trace_stack
from mpi4py import MPI
from one_process import assert_close

import mpiad

ROUNDS = 30


def in_threads(*works):
    """Run these functions, each many times in a thread of its own, and raise what one raises."""
    errors, gate = [], threading.Barrier(len(works))

    def run(work):
        try:
            gate.wait(10)
            for _ in range(ROUNDS):
                work()
        except BaseException as error:  # shown by the main thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # the threads take turns at every place
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@pytest.fixture
def own_comms():
    """One communicator of this rank alone for each thread."""
    comms = [MPI.COMM_SELF.Dup() for _ in range(3)]
    for comm in comms:
        mpiad.mpi_init(comm)
    yield comms
    for comm in comms:
        comm.Free()


MULTIPLE = MPI.Query_thread() == MPI.THREAD_MULTIPLE


def nested_work(comm, scale):
    """First, second and third derivatives of a local function; deeper in one thread than in the other."""
    x = np.linspace(0.5, 2.0, 5) * scale

    def f(x):
        return anp.sum(anp.sin(x) * x**2)

    def of(fun):
        return mpiad.grad(fun, comm=comm)

    first = 2 * x * np.sin(x) + x**2 * np.cos(x)
    second = 2 * np.sin(x) + 4 * x * np.cos(x) - x**2 * np.sin(x)
    third = 6 * np.cos(x) - 6 * x * np.sin(x) - x**2 * np.cos(x)

    def work():
        assert_close(of(f)(x), first)
        assert_close(of(lambda z: anp.sum(of(f)(z)))(x), second)
        assert_close(mpiad.hvp(f, comm=comm)(x, np.ones(5)), second)
        if scale > 1:
            assert_close(of(lambda z: anp.sum(of(lambda y: anp.sum(of(f)(y)))(z)))(x), third)

    return work


@pytest.mark.skipif(not MULTIPLE, reason="this MPI wasn't started with MPI_THREAD_MULTIPLE")
def test_nested_gradients_in_two_threads(own_comms):
    before = trace_stack.top
    in_threads(nested_work(own_comms[0], 1.0), nested_work(own_comms[1], 2.0), nested_work(own_comms[2], 3.0))
    assert trace_stack.top == before


@pytest.mark.skipif(not MULTIPLE, reason="this MPI wasn't started with MPI_THREAD_MULTIPLE")
def test_threads_that_communicate_on_communicators_of_their_own(rank, size):
    comms = [MPI.COMM_WORLD.Dup() for _ in range(2)]
    for comm in comms:
        mpiad.mpi_init(comm)
    right, left = (rank + 1) % size, (rank - 1) % size

    def work_on(comm, scale):
        x = np.array([1.0, 2.0]) * scale + rank

        def program(x):
            came = mpiad.mpi_exchange(x**2, right, left, comm=comm)
            return mpiad.mpi_allreduce(anp.sum(came * x) ** 2, comm=comm)

        def whole():
            xs = [np.array([1.0, 2.0]) * scale + r for r in range(size)]
            sums = [np.sum(xs[r - 1] ** 2 * xs[r]) for r in range(size)]
            return 2 * sums[rank] * xs[left] ** 2 + 2 * sums[right] * 2 * x * xs[right]

        expected = whole()
        return lambda: assert_close(mpiad.grad(program, comm=comm)(x), expected)

    in_threads(work_on(comms[0], 1.0), work_on(comms[1], -1.5))
    for comm in comms:
        comm.Free()


@pytest.mark.skipif(not MULTIPLE, reason="this MPI wasn't started with MPI_THREAD_MULTIPLE")
def test_j_of_local_functions_in_threads():
    """On a communicator of this rank alone, which all threads use: each gets its own J."""

    def work(scale):
        x = np.arange(1000.0) * scale
        expected = np.sum(x**2)  # of integers, so in any order

        def run():
            for _ in range(10):
                value, _ = mpiad.value_and_grad(lambda z: anp.sum(z**2), comm=MPI.COMM_SELF)(x)
                assert value == expected

        return run

    mpiad.mpi_init(MPI.COMM_SELF)
    in_threads(work(1.0), work(2.0), work(3.0), work(4.0))


def test_local_products_in_threads():
    """These share no J, so nothing is communicated."""

    def work(power):
        x, v = np.array([1.5, 2.0]), np.array([1.0, -1.0])

        def run():
            assert_close(mpiad.jvp(lambda z: z**power, x, v)[1], power * x ** (power - 1) * v)
            vjp, _ = mpiad.make_vjp(lambda z: mpiad.jvp(lambda y: y**power, z, v)[1])(x)
            assert_close(vjp(np.ones(2)), power * (power - 1) * x ** (power - 2) * v)

        return run

    before = trace_stack.top
    in_threads(work(3), work(4), work(5))
    assert trace_stack.top == before


def test_an_exception_in_one_thread_leaves_the_others_right():
    def failing():
        with pytest.raises(ZeroDivisionError):
            mpiad.make_vjp(lambda z: 1 // 0)(np.ones(2))

    def steady():
        vjp, _ = mpiad.make_vjp(lambda z: mpiad.jvp(lambda y: y**3, z, np.ones(2))[1])(np.array([1.0, 2.0]))
        assert_close(vjp(np.ones(2)), np.array([6.0, 12.0]))

    before = trace_stack.top
    in_threads(failing, steady, failing, steady)
    assert trace_stack.top == before


@pytest.mark.parametrize("derivative", [mpiad.grad, mpiad.jacobian, lambda f: lambda x: mpiad.jvp(f, x, x)])
@pytest.mark.parametrize("of_its_own", [False, True])
def test_a_traced_value_in_another_thread_is_refused_as_such(derivative, of_its_own):
    caught, comm = [], MPI.COMM_SELF

    def elsewhere(x):
        try:
            if of_its_own:  # a trace of the other thread's own
                mpiad.grad(lambda y: anp.sum(y * mpiad.mpi_allreduce(x, comm=comm)), comm=comm)(np.ones(2))
            else:
                mpiad.mpi_allreduce(x, comm=comm)
        except Exception as error:
            caught.append(error)

    def program(x):
        thread = threading.Thread(target=elsewhere, args=(x,))
        thread.start()
        thread.join(30)
        return anp.sum(x**2)

    derivative(program)(np.ones(2))
    assert {type(error) for error in caught} == {TypeError}  # one for each evaluation
    assert "in another thread" in str(caught[0]) and "operator" not in str(caught[0])


def test_a_thread_inside_a_trace(rank):
    """A pool started by the differentiated function: what its threads differentiate is theirs."""
    results = {}

    def local(k):
        vjp, _ = mpiad.make_vjp(lambda z: anp.sum(z ** (k + 2)))(np.array([2.0]))
        results[k] = vjp(1.0)

    def program(x):
        threads = [threading.Thread(target=local, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return anp.sum(x**2) * results[1][0]

    assert_close(mpiad.grad(program, objective="sum")(np.ones(2)), np.full(2, 2 * 3 * 4.0))
    assert [float(results[k][0]) for k in range(4)] == [(k + 2) * 2.0 ** (k + 1) for k in range(4)]
