import re

import autograd.numpy as anp
import numpy as np
import pytest
import reference
from against_reference import arrays, check, check_exact, check_new_memory
from arrays import contiguous, each_array, strided
from mpi4py import MPI

import mpiad
from mpiad.debug import checked
from mpiad.transport import channel


@each_array
def test_against_reference(rngs, size, dtype, shape, layout):
    shape = (size, *shape)
    check(mpiad.mpi_alltoall, reference.alltoall([shape] * size), arrays(rngs, shape, dtype, layout), rngs)


def test_integers_and_booleans(rngs, size):
    check_exact(mpiad.mpi_alltoall, reference.alltoall([(size, 3)] * size), rngs)


def test_new_memory(size):
    check_new_memory(mpiad.mpi_alltoall, np.ones((size, 3)))
    check_new_memory(lambda x: mpiad.mpi_alltoall(x, [3] + [0] * (size - 1), axis=1), np.ones((2, 3)))


def test_first_axis_that_is_not_the_number_of_ranks(size):
    for shape in [(), (size + 1,), (size + 1, size)]:
        text = f"mpi_alltoall: .*first axis of x must be the number of ranks, {size}, but x has shape "
        with pytest.raises(ValueError, match=text + re.escape(str(shape))):
            mpiad.mpi_alltoall(np.ones(shape))


def test_advice(size):
    with pytest.raises(ValueError, match=rf"Reshape x to \({size}, \.\.\.\), pad it .* or pass counts="):
        mpiad.mpi_alltoall(np.ones(2 * size + 1))


# ---- Blocks of different lengths

# Numbers of entries from each rank (row) to each rank (column): rank 1 sends nothing, rank 2 receives nothing.
COUNTS = np.array([[2, 1, 0, 3, 1], [0, 0, 0, 0, 0], [1, 4, 0, 0, 2], [3, 0, 0, 1, 0], [0, 2, 0, 5, 1]])
AXES = [(0, ()), (0, (2,)), (1, (2, 0, 3)), (-1, (2, 0)), (-2, (3, 0, 2))]


def along(axis, rest, lengths):
    """Return shapes with these lengths along the axis."""
    return [(n, *rest) if axis == 0 else (*rest[: rest.index(0)], n, *rest[rest.index(0) + 1 :]) for n in lengths]


def exchange(counts, rank, axis=0, learned=True):
    """Return the exchange as a function of this rank's array."""
    received = None if learned else counts[:, rank].tolist()
    return lambda x: mpiad.mpi_alltoall(x, counts[rank].tolist(), axis, received=received)


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "received"])
@pytest.mark.parametrize("axis, rest", AXES)
@pytest.mark.parametrize("dtype, layout", [("f8", contiguous), ("c8", strided), ("f4", np.asfortranarray)])
def test_counts(rngs, rank, size, axis, rest, learned, dtype, layout):
    counts = COUNTS[:size, :size]
    shapes = along(axis, rest, counts.sum(axis=1))
    program = reference.alltoallv(shapes, counts, axis)
    check(exchange(counts, rank, axis, learned), program, arrays(rngs, shapes, dtype, layout), rngs)


def test_nothing_at_all(rngs, size):
    shapes = [(0, 2)] * size
    check(
        lambda x: mpiad.mpi_alltoall(x, [0] * size),
        reference.alltoallv(shapes, [[0] * size] * size),
        arrays(rngs, shapes),
        rngs,
    )


def test_counts_of_integers_and_booleans(rngs, rank, size):
    counts = COUNTS[:size, :size]
    shapes = along(-1, (2, 0), counts.sum(axis=1))
    check_exact(exchange(counts, rank, -1), reference.alltoallv(shapes, counts, -1), rngs)


def test_another_communicator(rngs, size):
    comm = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)
    counts = COUNTS[:size, :size]
    shapes = along(0, (2,), counts.sum(axis=1))
    program = reference.alltoallv(shapes, counts)
    xs = arrays(rngs, shapes)
    check(lambda x: mpiad.mpi_alltoall(x, counts[comm.rank], comm=comm), program, xs, rngs, comm)
    comm.Free()


@pytest.mark.unguarded
@pytest.mark.interpreted  # it counts calls
def test_derivatives_use_the_counts_of_the_call(rank, size, monkeypatch):
    """One exchange of counts, in the call."""
    calls, counts = [], COUNTS[:size, :size]
    comm = channel(None, "test").data
    alltoall = mpiad.primitives.alltoall.collectives.lengths_of_all
    monkeypatch.setattr(
        mpiad.primitives.alltoall.collectives,
        "lengths_of_all",
        lambda *args, **rest: calls.append(args[0].data is comm) or alltoall(*args, **rest),
    )
    fun = exchange(counts, rank)
    x = np.arange(float(counts[rank].sum()))
    mpiad.hvp(lambda x: anp.sum(fun(x * x) ** 2), objective="sum")(x, x)
    assert calls == [True]


# ---- Errors


def mistakes(size):
    """Return kinds of error, parts of their text, and a rank's x, counts and axis."""
    ones, each = np.ones(size), [1] * size
    return [
        (TypeError, "x must be an array.*got list", [1.0], each, 0),
        (TypeError, "x must be an array.*dtype", np.ones(size, object), each, 0),
        (ValueError, "axis must be None or from -1 to 0.*got 1", ones, each, 1),
        (ValueError, "counts need an axis", ones, each, None),
        (ValueError, f"counts must be {size} integers.*add up to {size + 1}", np.ones(size + 1), each, 0),
        (ValueError, f"counts must be {size} integers", ones, [*each, 0], 0),
        (ValueError, r"none negative.*got \[-1, ", ones, [-1, size + 1, *[0] * size][:size], 0) if size > 1
        else (ValueError, r"none negative.*got \[-1\]", ones, [-1], 0),
        (TypeError, "counts must be integers, but got float 1.0", ones, [1.0] * size, 0),
        (TypeError, f"counts must be a list of {size} integers, but got int 3", ones, 3, 0),
    ]  # fmt: skip


@pytest.mark.unguarded
def test_mistake_of_one_rank_is_raised_on_all_ranks(rank, size):
    wrong = size - 1
    for kind, text, x, counts, axis in mistakes(size):
        with pytest.raises(kind, match=f"mpi_alltoall: .*{text}") as raised:
            if rank == wrong:
                mpiad.mpi_alltoall(x, counts, axis)
            else:
                mpiad.mpi_alltoall(np.ones(size), [1] * size)
        assert (f"raised on rank {wrong}" in str(raised.value)) == (rank != wrong)
        assert mpiad.mpi_bcast(rank, wrong) == wrong


@pytest.mark.parametrize("shape, dtype", [((2, 4), "f8"), ((2, 3), "f4"), ((2, 3, 1), "f8")])
def test_shapes_or_dtypes_that_differ(rank, size, shape, dtype):
    if size == 1:
        return
    shape, dtype = (shape, dtype) if rank == 1 else ((2, 3), "f8")
    with pytest.raises(ValueError, match="may differ along axis 0 only, but got rank 0: .*, rank 1: "):
        mpiad.mpi_alltoall(np.ones(shape, dtype), [2] + [0] * (size - 1))


def test_mistakes_that_need_no_message(size):
    with pytest.raises(TypeError, match="counts must be a list of integers, but got a communicator. Pass it as comm="):
        mpiad.mpi_alltoall(np.ones(size), MPI.COMM_WORLD)
    with pytest.raises(ValueError, match="without counts, axis must be 0"):
        mpiad.mpi_alltoall(np.ones((size, size)), axis=1)
    with pytest.raises(ValueError, match="without counts, .* received None"):
        mpiad.mpi_alltoall(np.ones(size), received=[1] * size)
    with pytest.raises(ValueError, match=f"received must be {size} integers, none negative"):
        mpiad.mpi_alltoall(np.ones(size), [1] * size, received=[-1] * size)
    with pytest.raises(ValueError, match=f"counts must be {size} integers that add up to {size + 1}"):
        mpiad.mpi_alltoall(np.ones(size + 1), [1] * size, received=[1] * size)


def test_wrong_received_counts_are_found_in_debug_mode(rank, size):
    if size == 1:
        return
    received = [2] * size if rank == 1 else [1] * size
    with (
        checked(),
        pytest.raises(ValueError, match=r"received must be the counts of the ranks for this rank, \[1, ") as raised,
    ):
        mpiad.mpi_alltoall(np.ones(size), [1] * size, received=received)
    assert ("raised on rank 1" in str(raised.value)) == (rank != 1)
