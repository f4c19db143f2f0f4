from collections import OrderedDict, namedtuple

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad


def test_who_and_how_many(rank, size):
    assert (mpiad.mpi_rank(), mpiad.mpi_size()) == (rank, size)
    assert (mpiad.mpi_rank(MPI.COMM_SELF), mpiad.mpi_size(MPI.COMM_SELF)) == (0, 1)
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    assert mpiad.mpi_local_rank() == node.allgather(rank).index(rank)
    node.Free()


def test_initialised_by_the_import():
    assert mpiad.mpi_initialized() and not mpiad.mpi_finalized()
    mpiad.mpi_init()
    mpiad.mpi_init(MPI.COMM_WORLD)
    assert mpiad.mpi_initialized()


def test_init_prepares_a_communicator_once(rank, size):
    comm = MPI.COMM_WORLD.Split(rank % 2, -rank)
    for _ in range(2):
        mpiad.mpi_init(comm)
        assert mpiad.mpi_exchange(7, None, None, comm=comm) == 0
    comm.Free()


@pytest.mark.interpreted
def test_stop(rank):
    x = np.ones(3)
    assert mpiad.stop(x) is x and mpiad.stop("text") == "text"
    seen = []

    def fun(x):
        seen.append(mpiad.stop(x))
        return anp.sum(x * mpiad.stop(x))

    def outer(x):
        return anp.sum(mpiad.grad(fun, objective="sum")(x) ** 2)

    np.testing.assert_array_equal(mpiad.grad(fun, objective="sum")(3 * x), 3 * x)
    mpiad.grad(outer, objective="sum")(3 * x)
    assert all(type(value) is np.ndarray for value in seen) and len(seen) == 2


def test_reset_outside_of_any_fault_keeps_everything_working(rank, size):
    mpiad.reset()
    assert mpiad.mpi_exchange(1.0 * rank, (rank + 1) % size, (rank - 1) % size) == (rank - 1) % size
    comm = MPI.COMM_WORLD.Dup()
    mpiad.reset(comm)
    assert mpiad.mpi_allreduce(1, comm=comm) == size
    comm.Free()


BEFORE_AND_AFTER = """
import mpi4py
mpi4py.rc.initialize = False
import numpy as np
from mpi4py import MPI
import mpiad
from mpiad.errors import CommunicatorError

x = np.ones(2)
calls = [
    lambda comm: mpiad.mpi_bcast(x, comm=comm), lambda comm: mpiad.mpi_sum(x, comm=comm),
    lambda comm: mpiad.mpi_reduce(x, MPI.MAX, comm=comm), lambda comm: mpiad.mpi_allreduce(x, comm=comm),
    lambda comm: mpiad.mpi_gather(x, comm=comm), lambda comm: mpiad.mpi_allgather(x, comm=comm),
    lambda comm: mpiad.mpi_scatter(x, comm=comm), lambda comm: mpiad.mpi_reduce_scatter(x, comm=comm),
    lambda comm: mpiad.mpi_alltoall(x, comm=comm), lambda comm: mpiad.mpi_scan(x, comm=comm),
    lambda comm: mpiad.mpi_exscan(x, comm=comm), lambda comm: mpiad.mpi_send(x, 0, comm=comm),
    lambda comm: mpiad.mpi_recv(x, 0, comm=comm), lambda comm: mpiad.mpi_sendrecv(x, 0, 1, comm=comm),
    lambda comm: mpiad.mpi_exchange(x, 0, 0, comm=comm), lambda comm: mpiad.mpi_isend(x, 0, comm=comm),
    lambda comm: mpiad.mpi_irecv(x, 0, comm=comm), lambda comm: mpiad.mpi_iallreduce(x, comm=comm),
    lambda comm: mpiad.mpi_barrier(comm=comm), lambda comm: mpiad.mpi_print(x, comm=comm),
    lambda comm: mpiad.mpi_rank(comm), lambda comm: mpiad.mpi_size(comm), lambda comm: mpiad.reset(comm),
    lambda comm: mpiad.value_and_grad(lambda x: x, comm=comm)(1.0),
]

def refused(part, calls):
    for place, call in enumerate(calls):
        for comm in (None, MPI.COMM_WORLD):
            try:
                call(comm)
            except CommunicatorError as error:
                assert part in str(error), error
            else:
                raise SystemExit(f"call {place} was not refused")

assert not mpiad.mpi_initialized() and not mpiad.mpi_finalized() and not MPI.Is_initialized()
refused("Call mpiad.mpi_init() on all ranks first", calls)
mpiad.mpi_init()
assert mpiad.mpi_initialized()
size = mpiad.mpi_size()
assert mpiad.mpi_allreduce(1.0) == size
mpiad.mpi_send(x, (mpiad.mpi_rank() + 1) % size)
mpiad.mpi_recv(x, (mpiad.mpi_rank() - 1) % size)
mpiad.mpi_finalize()
mpiad.mpi_finalize()
assert mpiad.mpi_finalized() and not mpiad.mpi_initialized() and MPI.Is_finalized()
refused("called after mpi_finalize", [*calls, mpiad.mpi_init])
print("refused before and after")
"""


@pytest.mark.launches
def test_calls_before_the_start_and_after_the_end(mpirun):
    done = mpirun(2, BEFORE_AND_AFTER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused before and after") == 2


FINALIZED_BY_THE_USER = """
from mpi4py import MPI
import mpiad
comm = MPI.COMM_WORLD.Dup()
mpiad.mpi_init(comm)
MPI.Finalize()
for used in (None, comm):
    try:
        mpiad.mpi_allreduce(1.0, comm=used)
    except mpiad.errors.CommunicatorError as error:
        print(error)
assert mpiad.mpi_finalized()
"""


@pytest.mark.launches
def test_end_by_mpi4pys_own_call(mpirun):
    done = mpirun(2, FINALIZED_BY_THE_USER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mpi_allreduce: called after mpi_finalize") == 4


def test_stop_reaches_into_nests():
    x = np.array([1.0, 2.0])
    pair = namedtuple("pair", "a b")
    nests = (lambda x: [x], lambda x: (3, {"a": x}), lambda x: pair(x, 2), lambda x: OrderedDict(a=[x]))
    for nest, part in zip(nests, (lambda n: n[0], lambda n: n[1]["a"], lambda n: n.a, lambda n: n["a"][0])):
        g = mpiad.grad(lambda x, nest=nest, part=part: anp.sum(x * part(mpiad.stop(nest(x)))), objective="sum")(x)
        np.testing.assert_array_equal(g, x)
