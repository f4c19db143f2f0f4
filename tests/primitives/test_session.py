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
    assert mpiad.stop_gradient(x) is x and mpiad.stop_gradient("text") == "text"
    seen = []

    def fun(x):
        seen.append(mpiad.stop_gradient(x))
        return anp.sum(x * mpiad.stop_gradient(x))

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
import inspect
import mpi4py
mpi4py.rc.initialize = False
import numpy as np
from mpi4py import MPI
import mpiad
from mpiad import primitives
from mpiad.errors import CommunicatorError

x = np.ones(2)
given = {"x": x, "like": x, "op": MPI.MAX, "dest": 0, "source": 0}
calls = [lambda comm: mpiad.value_and_grad(lambda x: x, comm=comm)(1.0)]
for name in primitives.__all__:
    takes = inspect.signature(getattr(mpiad, name)).parameters.values()
    needed = [given[each.name] for each in takes if each.default is each.empty and each.name in given]
    if any(each.name == "comm" for each in takes) and name != "mpi_init":
        calls.append(lambda comm, fun=getattr(mpiad, name), needed=needed: fun(*needed, comm=comm))
assert len(calls) > 20

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
        g = mpiad.grad(lambda x, nest=nest, part=part: anp.sum(x * part(mpiad.stop_gradient(nest(x)))), objective="sum")(x)
        np.testing.assert_array_equal(g, x)
