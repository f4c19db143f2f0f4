import numpy as np
import pytest
import reference
from against_reference import arrays, check, check_exact
from arrays import each_array
from known_faults import longer_than_its_buffer
from mpi4py import MPI

import mpiad

HIGHEST_TAG = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)


def ring(shape, size):
    """Return the program in which each rank's result is what the one before has sent."""
    return reference.move([shape] * size, [(rank - 1) % size for rank in range(size)])


@each_array
def test_arrays(rngs, rank, size, dtype, shape, layout):
    """The receive is started before the send, as for overlap."""

    def fun(x):
        request = mpiad.mpi_irecv(x, (rank - 1) % size)
        mpiad.mpi_send(x, (rank + 1) % size)
        return mpiad.mpi_wait(request)

    check(fun, ring(shape, size), arrays(rngs, shape, dtype, layout), rngs)


@pytest.mark.parametrize("tag", [32768, HIGHEST_TAG])
def test_both_sides_nonblocking(rngs, rank, size, tag):
    def fun(x):
        requests = [mpiad.mpi_irecv(x, (rank - 1) % size, tag=tag), mpiad.mpi_isend(x, (rank + 1) % size, tag=tag)]
        return mpiad.mpi_waitall(requests)[0]

    check(fun, ring((2, 3), size), arrays(rngs, (2, 3)), rngs)


def test_ranks_with_shapes_of_their_own(rngs, rank, size):
    shapes = [(r + 1, 2) for r in range(size)]
    source = (rank - 1) % size

    def fun(x):
        request = mpiad.mpi_irecv(np.empty(shapes[source]), source)
        mpiad.mpi_send(x, (rank + 1) % size)
        return mpiad.mpi_wait(request)

    check(fun, reference.move(shapes, [(r - 1) % size for r in range(size)]), arrays(rngs, shapes), rngs)


@pytest.mark.parametrize("nobody", [None, MPI.PROC_NULL], ids=["none", "proc-null"])
def test_no_sender(rngs, size, nobody):
    program = reference.move([(2, 3)] * size, [None] * size)
    check(lambda x: mpiad.mpi_wait(mpiad.mpi_irecv(x, nobody)), program, arrays(rngs, (2, 3)), rngs)


def test_integers_and_booleans(rngs, rank, size):
    def fun(x):
        request = mpiad.mpi_irecv(x, (rank - 1) % size)
        mpiad.mpi_send(x, (rank + 1) % size)
        return mpiad.mpi_wait(request)

    check_exact(fun, ring((2, 3), size), rngs)


@pytest.mark.parametrize(
    "length, dtype", [(4, "f8"), (3, "f4"), (1, "?"), pytest.param(2, "f8", marks=longer_than_its_buffer)]
)
def test_template_of_another_size(rank, size, length, dtype):
    request = mpiad.mpi_irecv(np.ones(length), (rank - 1) % size, tag=4)
    mpiad.mpi_send(np.ones(3, dtype), (rank + 1) % size, tag=4)
    text = rf"mpi_irecv: rank {(rank - 1) % size} sent .* bytes with tag 4, .* shape \({length},\) and dtype float64"
    with pytest.raises(ValueError, match=text):
        mpiad.mpi_wait(request)


def test_wrong_arguments(size):
    with pytest.raises(ValueError, match=f"mpi_irecv: source must be a rank from 0 to {size - 1}.* got {size}"):
        mpiad.mpi_irecv(1.0, size)
    with pytest.raises(ValueError, match=f"mpi_irecv: source must be .* got {MPI.ANY_SOURCE}. Only mpi_recv receives"):
        mpiad.mpi_irecv(1.0, MPI.ANY_SOURCE)
    with pytest.raises(ValueError, match=f"mpi_irecv: tag must be .* got {MPI.ANY_TAG}. Only mpi_recv receives"):
        mpiad.mpi_irecv(1.0, 0, tag=MPI.ANY_TAG)
    with pytest.raises(TypeError, match="mpi_irecv: like .* must be an array.* got NoneType"):
        mpiad.mpi_irecv(None, 0)
