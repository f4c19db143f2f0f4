"""What all primitives refuse alike: arrays that can't be sent, ranks that aren't there, communicators."""

import inspect
import re

import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad import primitives
from mpiad.errors import CommunicatorError

TAKES = {name: inspect.signature(getattr(mpiad, name)).parameters for name in primitives.__all__}
GIVEN = {"op": MPI.PROD, "dest": 0, "source": 0}


def called(name, x, **more):
    """Call a primitive with an array, where it takes one, and what else it needs."""
    taken = [found for found in TAKES[name].values() if found.kind is not found.VAR_KEYWORD]
    needed = [found.name for found in taken if found.default is found.empty or found.name == "op"]
    return getattr(mpiad, name)(*[GIVEN.get(each, x) for each in needed], **more)


ALL = [name for name in TAKES if "comm" in TAKES[name]]
# Of `mpi_sendrecv` only two ranks' arrays and partners count.
SENDING = [name for name in ALL if {"x", "like"} & set(TAKES[name]) and name != "mpi_sendrecv"]
POINT_TO_POINT = [name for name in SENDING if {"dest", "source"} & set(TAKES[name])]
ROOTED = [name for name in ALL if "root" in TAKES[name]]

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


@pytest.mark.parametrize("name", SENDING)
def test_what_is_no_array(size, name):
    for wrong, got in NO_ARRAYS:
        if got == "MaskedArray" and "recv" in name:
            continue  # of a template only shape and dtype count
        text = f"^{name}: (x|like) .*an array or number of dtype float32/64, .*but got .*{got}"
        with pytest.raises(TypeError, match=text):
            called(name, wrong)
    assert mpiad.mpi_allreduce(1) == size


@pytest.mark.parametrize("name", ROOTED)
def test_root_that_is_not_there(size, name):
    x, allowed = np.ones(size), f"a rank from 0 to {size - 1}"
    for root in (size, -1, MPI.PROC_NULL, 10**10):
        with pytest.raises(ValueError, match=rf"^{name}: root must be {allowed} \(.* {size} ranks\), but got {root}"):
            called(name, x, root=root)
    for root, got in ((0.0, "float 0.0"), ("0", "str '0'"), (None, "NoneType None"), (np.float64(0), "float64")):
        with pytest.raises(TypeError, match=f"^{name}: root must be {allowed}, but got {got}"):
            called(name, x, root=root)
    called(name, x, root=np.int16(size - 1))


@pytest.mark.parametrize("name", ALL)
def test_tag_and_comm_are_keywords(name):
    kinds = {each.name: each.kind for each in TAKES[name].values() if each.name in ("tag", "comm", "like", "received")}
    session = name in ("mpi_init", "mpi_rank", "mpi_size", "reset")
    for argument, kind in kinds.items():
        first = argument == next(iter(TAKES[name])) and (session or argument == "like")
        assert kind == (inspect.Parameter.POSITIONAL_OR_KEYWORD if first else inspect.Parameter.KEYWORD_ONLY)


# Calls of mpi4py with the names of mpiad's functions.
PORTED = [
    lambda x, y: mpiad.mpi_gather(x, y),
    lambda x, y: mpiad.mpi_scatter(x, y),
    lambda x, y: mpiad.mpi_bcast(x, [x, MPI.DOUBLE]),
    lambda x, y: mpiad.mpi_sum(x, y),
    lambda x, y: mpiad.mpi_allgather(x, y),
    lambda x, y: mpiad.mpi_allreduce(x, y),
    lambda x, y: mpiad.mpi_allreduce(MPI.IN_PLACE, y),
    lambda x, y: mpiad.mpi_reduce(x, y, MPI.SUM),
    lambda x, y: mpiad.mpi_reduce_scatter(x, y),
    lambda x, y: mpiad.mpi_alltoall(x, y),
]


@pytest.mark.parametrize("call", PORTED)
def test_receive_buffers(size, call):
    with pytest.raises(TypeError, match="Results are returned, not written into an argument") as found:
        call(np.ones(size), np.empty(size))
    assert f"y = {str(found.value).partition(':')[0]}(" in str(found.value)


def test_counts_that_are_floats(size):
    with pytest.raises(TypeError, match=r"counts must be a list of \d integers.*Convert .*counts\.astype\(int\)"):
        mpiad.mpi_alltoall(np.ones(size), np.ones(size))
    np.testing.assert_array_equal(mpiad.mpi_alltoall(np.ones(size), np.ones(size).astype(int)), np.ones(size))


# Arguments in the places of others, and what to write.
MISPLACED = [
    (lambda x: mpiad.mpi_scatter(x, [3, 3]), "Pass lengths by name: axis=0, counts=[3, 3]."),
    (lambda x: mpiad.mpi_scatter(x, 0, [3, 3]), "Pass lengths by name: axis=0, counts=[3, 3]."),
    (lambda x: mpiad.mpi_reduce_scatter(x, (3, 3)), "Pass lengths by name: axis=0, counts=[3, 3]."),
    (lambda x: mpiad.mpi_scatter([x[:3], x[3:]]), "joins, with axis=0, counts=[3, 2]."),
    (lambda x: mpiad.mpi_alltoall([x[:3], x[3:]]), "joins, with axis=0, counts=[3, 2]."),
    (lambda x: mpiad.mpi_scatter([]), "Make it an array with autograd.numpy.array"),
    (lambda x: mpiad.mpi_gather(x, [3, 3]), "mpi_gather(x, axis=0) joins blocks of any lengths, which needn't be passed."),
    (lambda x: mpiad.mpi_allgather(x, [3, 3]), "mpi_allgather(x, axis=0) joins blocks of any lengths"),
    *[
        (lambda x, name=name: getattr(mpiad, name)(x, MPI.COMM_WORLD), "Pass a communicator by name: comm=comm.")
        for name in """mpi_allgather mpi_allreduce mpi_bcast mpi_gather mpi_recv mpi_reduce mpi_reduce_scatter mpi_scatter
        mpi_send mpi_sum""".split()
    ],
    (lambda x: mpiad.mpi_reduce(x, 0), "Pass a rank by name: root=0."),
    (lambda x: mpiad.mpi_sum(x, MPI.SUM), "mpi_sum has no operation: leave it out, or call mpi_reduce(x, op)"),
    (lambda x: mpiad.mpi_reduce(x, MPI.SUM, MPI.SUM), "Pass an operation by name: op=MPI.SUM."),
    *[
        (lambda x, op=op: mpiad.mpi_allreduce(x, op), f"With y = mpi_allreduce(x, op=MPI.{extremum}), the lowest rank that")
        for op, extremum in ((MPI.MAXLOC, "MAX"), (MPI.MINLOC, "MIN"))
    ],
]


@pytest.mark.parametrize(("call", "advice"), MISPLACED)
def test_misplaced_arguments(call, advice):
    with pytest.raises(TypeError, match=rf"^mpi_\w+: .*{re.escape(advice)}"):
        call(np.ones(5))


def test_the_owner_of_an_extremum(rank, size):
    x = np.array([rank, -rank, 2.0])
    for op, owners in ((MPI.MAX, [size - 1, 0, 0]), (MPI.MIN, [0, size - 1, 0])):
        y = mpiad.mpi_allreduce(x, op=op)
        owner = mpiad.mpi_allreduce(np.where(x == y, mpiad.mpi_rank(), mpiad.mpi_size()), op=MPI.MIN)
        assert owner.tolist() == owners
        assert mpiad.mpi_bcast(rank * 1.0, root=owner[1]) == owners[1]


def test_buffers_of_mpi4py(size):
    for x, text in ((MPI.IN_PLACE, "the result is returned"), ([np.ones(size), MPI.DOUBLE], "Pass the array alone")):
        for name in SENDING:
            with pytest.raises(TypeError, match=text if "x" in TAKES[name] else "must be an array or number"):
                called(name, x)


def test_the_order_of_sendrecv(size):
    buffer = np.empty(2)
    with pytest.raises(TypeError, match="mpi_exchange.* takes 3 positional arguments but 5"):
        mpiad.mpi_exchange(np.ones(2), 0, 0, buffer, 0)


@pytest.mark.parametrize("keyword", ["status", "sendtag", "recvtag"])
@pytest.mark.parametrize("name", ["mpi_recv", "mpi_exchange", "mpi_sendrecv"])
def test_keywords_of_mpi4py(size, name, keyword):
    advice = {"status": r"n = mpi_recv\(np.zeros\(2, int\), MPI.ANY_SOURCE\)"}.get(
        keyword, r"mpi_isend\(x, dest, tag=\.\.\."
    )
    partners = (0,) if name == "mpi_recv" else (0, 0)
    function = lambda x: getattr(mpiad, name)(x, *partners, **{keyword: 1})  # noqa: E731
    for call in (function, mpiad.grad(function), mpiad.jit(function, strict=True)):
        with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument '{keyword}': .*{advice}"):
            call(np.ones(2))


def test_an_unknown_keyword(size):
    with pytest.raises(TypeError, match=r"^mpi_recv\(\) got an unexpected keyword argument 'tags'$"):
        mpiad.mpi_recv(np.ones(2), 0, tags=1)


def test_the_advice_in_place_of_a_status(rank, size):
    """The sender and the number of entries, in a message before the array, of any rank and with the same tag."""

    def loss(x):
        if rank:
            mpiad.mpi_send(np.array([rank, 2 * rank]), 0)
            mpiad.mpi_send(x[: 2 * rank] * rank, 0)
            return 0.0
        total = 0.0
        for _ in range(size - 1):
            source, n = mpiad.mpi_recv(np.zeros(2, int), MPI.ANY_SOURCE)
            total = total + source * np.sum(mpiad.mpi_recv(np.zeros(n), source) ** 2)
        return total

    x = np.arange(2.0 * size)
    expected = np.where(np.arange(2 * size) < 2 * rank, 2.0 * rank**3 * x, 0.0)
    assert mpiad.grad(loss, objective="sum")(x).tolist() == expected.tolist()


def test_the_advice_in_place_of_two_tags(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size

    def loss(x):
        requests = [mpiad.mpi_irecv(x, before, tag=before), mpiad.mpi_isend(x, after, tag=rank)]
        received, _ = mpiad.mpi_waitall(requests)
        return (rank + 1.0) * np.sum(received**2)

    assert mpiad.grad(loss, objective="sum")(np.full(2, 3.0)).tolist() == [6.0 * (after + 1)] * 2


@pytest.mark.parametrize("name", ALL)
def test_what_is_no_communicator(size, name):
    freed = MPI.COMM_WORLD.Dup()
    mpiad.mpi_init(freed)
    freed.Free()
    x = np.ones(size)
    for comm in (freed, MPI.COMM_NULL):
        with pytest.raises(CommunicatorError, match=f"^{name}: comm is the null communicator: it was freed"):
            called(name, x, comm=comm)
    for comm in (0, "world", MPI.COMM_WORLD.group, MPI):
        text = f"^{name}: comm must be an mpi4py intracommunicator.* got {type(comm).__name__}"
        with pytest.raises(TypeError, match=text):
            called(name, x, comm=comm)


@pytest.mark.mpi(min_size=2)
def test_intercommunicator(rank, size):
    half = MPI.COMM_WORLD.Split(rank % 2)
    between = half.Create_intercomm(0, MPI.COMM_WORLD, 1 - rank % 2)
    for name in ALL:
        with pytest.raises(CommunicatorError, match=f"^{name}: comm is an intercommunicator .*comm.Merge"):
            called(name, np.ones(size), comm=between)
    between.Free()
    half.Free()


@pytest.mark.parametrize("name", POINT_TO_POINT)
def test_point_to_point_on_a_communicator_that_was_not_prepared(rank, size, name):
    comm = MPI.COMM_WORLD.Dup()
    text = rf"^{name}: this communicator of {size} ranks was never prepared.*mpi_init\(comm\)"
    with pytest.raises(CommunicatorError, match=text):
        called(name, 1.0, comm=comm)
    mpiad.mpi_init(comm)
    assert mpiad.mpi_exchange(rank, (rank + 1) % size, (rank - 1) % size, comm=comm) == (rank - 1) % size
    comm.Free()


def test_communicator_errors_are_value_errors():
    assert issubclass(CommunicatorError, ValueError)
