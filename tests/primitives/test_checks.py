"""What all primitives refuse alike: arrays that can't be sent, ranks that aren't there, communicators."""

import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.errors import CommunicatorError

COLLECTIVE = {
    "mpi_bcast": lambda x, **more: mpiad.mpi_bcast(x, **more),
    "mpi_sum": lambda x, **more: mpiad.mpi_sum(x, **more),
    "mpi_reduce": lambda x, **more: mpiad.mpi_reduce(x, MPI.PROD, **more),
    "mpi_allreduce": lambda x, **more: mpiad.mpi_allreduce(x, **more),
    "mpi_gather": lambda x, **more: mpiad.mpi_gather(x, **more),
    "mpi_allgather": lambda x, **more: mpiad.mpi_allgather(x, **more),
    "mpi_scatter": lambda x, **more: mpiad.mpi_scatter(x, **more),
    "mpi_reduce_scatter": lambda x, **more: mpiad.mpi_reduce_scatter(x, **more),
    "mpi_alltoall": lambda x, **more: mpiad.mpi_alltoall(x, **more),
    "mpi_scan": lambda x, **more: mpiad.mpi_scan(x, **more),
    "mpi_exscan": lambda x, **more: mpiad.mpi_exscan(x, **more),
    "mpi_iallreduce": lambda x, **more: mpiad.mpi_iallreduce(x, **more),
}
POINT_TO_POINT = {
    "mpi_send": lambda x, **more: mpiad.mpi_send(x, 0, **more),
    "mpi_isend": lambda x, **more: mpiad.mpi_isend(x, 0, **more),
    "mpi_recv": lambda x, **more: mpiad.mpi_recv(x, 0, **more),
    "mpi_irecv": lambda x, **more: mpiad.mpi_irecv(x, 0, **more),
    "mpi_exchange": lambda x, **more: mpiad.mpi_exchange(x, 0, 0, **more),
}
OF_A_COMMUNICATOR = {
    "mpi_sendrecv": lambda x, **more: mpiad.mpi_sendrecv(x, 0, 0, **more),
    "mpi_barrier": lambda x, **more: mpiad.mpi_barrier(**more),
    "mpi_print": lambda x, **more: mpiad.mpi_print(x, **more),
    "mpi_rank": lambda x, **more: mpiad.mpi_rank(**more),
    "mpi_size": lambda x, **more: mpiad.mpi_size(**more),
    "mpi_init": lambda x, **more: mpiad.mpi_init(**more),
    "reset": lambda x, **more: mpiad.reset(**more),
}
SENDING = {**COLLECTIVE, **POINT_TO_POINT}
ROOTED = ["mpi_bcast", "mpi_sum", "mpi_reduce", "mpi_gather", "mpi_scatter"]

NO_ARRAYS = [
    ([1.0, 2.0], "list"),
    ((1.0, 2.0), "tuple"),
    ("text", "str"),
    (b"text", "bytes"),
    ({}, "dict"),
    (object(), "object"),
    (None, "NoneType"),
    (np.ma.masked_array([1.0], [True]), "MaskedArray"),
    (np.array(["a", "b"]), "<U1"),
    (np.array([object()]), "'O'"),
    (np.array([1, "a", None], dtype=object), "'O'"),
    (np.ones(2, "f2"), r"float16.*Pass (x|like)\.astype\('float64'\)"),
    (np.float16(1), "float16"),
    (np.array(["2020-01-01"], "M8[D]"), "M8"),
    (np.ones(2, [("a", "f8")]), "'a'"),
    (np.ones(2, np.dtype("f8").newbyteorder()), r">f8.*another order .* pass (x|like)\.astype\('float64'\)"),
]


@pytest.mark.parametrize("name", list(SENDING))
def test_what_is_no_array(size, name):
    for wrong, got in NO_ARRAYS:
        if got == "MaskedArray" and "recv" in name:
            continue  # of a template only shape and dtype count
        text = f"^{name}: (x|like) .*an array or number of dtype float32/64, .*but got .*{got}"
        with pytest.raises(TypeError, match=text):
            SENDING[name](wrong)
    assert mpiad.mpi_allreduce(1) == size


@pytest.mark.parametrize("name", ROOTED)
def test_root_that_is_not_there(size, name):
    x, allowed = np.ones(size), f"a rank from 0 to {size - 1}"
    for root in (size, -1, MPI.PROC_NULL, 10**10):
        with pytest.raises(ValueError, match=rf"^{name}: root must be {allowed} \(.* {size} ranks\), but got {root}"):
            COLLECTIVE[name](x, root=root)
    for root, got in ((0.0, "float 0.0"), ("0", "str '0'"), (None, "NoneType None"), (np.float64(0), "float64")):
        with pytest.raises(TypeError, match=f"^{name}: root must be {allowed}, but got {got}"):
            COLLECTIVE[name](x, root=root)
    COLLECTIVE[name](x, root=np.int16(size - 1))


ALL = {**SENDING, **OF_A_COMMUNICATOR}


@pytest.mark.parametrize("name", list(ALL))
def test_what_is_no_communicator(size, name):
    freed = MPI.COMM_WORLD.Dup()
    mpiad.mpi_init(freed)
    freed.Free()
    x = np.ones(size)
    for comm in (freed, MPI.COMM_NULL):
        with pytest.raises(CommunicatorError, match=f"^{name}: comm is the null communicator: it was freed"):
            ALL[name](x, comm=comm)
    for comm in (0, "world", MPI.COMM_WORLD.group, MPI):
        text = f"^{name}: comm must be an mpi4py intracommunicator.* got {type(comm).__name__}"
        with pytest.raises(TypeError, match=text):
            ALL[name](x, comm=comm)


@pytest.mark.mpi(min_size=2)
def test_intercommunicator(rank, size):
    half = MPI.COMM_WORLD.Split(rank % 2)
    between = half.Create_intercomm(0, MPI.COMM_WORLD, 1 - rank % 2)
    for name, call in ALL.items():
        with pytest.raises(CommunicatorError, match=f"^{name}: comm is an intercommunicator .*comm.Merge"):
            call(np.ones(size), comm=between)
    between.Free()
    half.Free()


@pytest.mark.parametrize("name", list(POINT_TO_POINT))
def test_point_to_point_on_a_communicator_that_was_not_prepared(rank, size, name):
    comm = MPI.COMM_WORLD.Dup()
    text = rf"^{name}: this communicator of {size} ranks was never prepared.*mpi_init\(comm\)"
    with pytest.raises(CommunicatorError, match=text):
        POINT_TO_POINT[name](1.0, comm=comm)
    mpiad.mpi_init(comm)
    assert mpiad.mpi_exchange(rank, (rank + 1) % size, (rank - 1) % size, comm=comm) == (rank - 1) % size
    comm.Free()


def test_communicator_errors_are_value_errors():
    assert issubclass(CommunicatorError, ValueError)
