import autograd.numpy as anp
import numpy as np
import pytest
import reference
from against_reference import arrays, check, check_exact
from arrays import each_array
from mpi4py import MPI

import mpiad

HIGHEST_TAG = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)


def ring(shape, size):
    """Return the program whose result stacks what each rank has sent and received."""
    shapes = [shape] * size
    return reference.stack(reference.keep(shapes), reference.move(shapes, [(rank - 1) % size for rank in range(size)]))


@each_array
def test_arrays(rngs, rank, size, dtype, shape, layout):
    """The value of the request is what was sent, and is used too."""

    def fun(x):
        request = mpiad.mpi_isend(x, (rank + 1) % size)
        received = mpiad.mpi_recv(x, (rank - 1) % size)
        return anp.stack((mpiad.mpi_wait(request), received))

    check(fun, ring(shape, size), arrays(rngs, shape, dtype, layout), rngs)


@pytest.mark.parametrize("tag", [32768, HIGHEST_TAG])
def test_value_of_the_request_unused(rngs, rank, size, tag):
    def fun(x):
        request = mpiad.mpi_isend(x, (rank + 1) % size, tag=tag)
        received = mpiad.mpi_recv(x, (rank - 1) % size, tag=tag)
        mpiad.mpi_wait(request)
        return received

    program = reference.move([(2, 3)] * size, [(r - 1) % size for r in range(size)])
    check(fun, program, arrays(rngs, (2, 3)), rngs)


@pytest.mark.parametrize("nobody", [None, MPI.PROC_NULL], ids=["none", "proc-null"])
def test_no_receiver(rngs, size, nobody):
    program = reference.keep([(2, 3)] * size)
    check(lambda x: mpiad.mpi_wait(mpiad.mpi_isend(x, nobody)), program, arrays(rngs, (2, 3)), rngs)


def test_integers_and_booleans(rngs, rank, size):
    def fun(x):
        request = mpiad.mpi_isend(x, (rank + 1) % size)
        received = mpiad.mpi_recv(x, (rank - 1) % size)
        assert mpiad.mpi_wait(request).dtype == x.dtype
        return received

    check_exact(fun, reference.move([(2, 3)] * size, [(r - 1) % size for r in range(size)]), rngs)


@pytest.mark.parametrize("length", [3, 200_000])
def test_changing_x_afterwards_changes_nothing_sent(rank, size, length):
    x = np.full(length, float(rank))
    request = mpiad.mpi_isend(x, (rank + 1) % size)
    x[:] = -1
    assert np.all(mpiad.mpi_recv(x, (rank - 1) % size) == (rank - 1) % size)
    assert np.all(mpiad.mpi_wait(request) == rank)


def test_value_is_new_memory(rank, size):
    x = np.ones(3)
    request = mpiad.mpi_isend(x, None)
    assert not np.shares_memory(mpiad.mpi_wait(request), x)


def test_numbers():
    for number in (2.5, 2, True, 1j, np.float32(2.5)):
        y = mpiad.mpi_wait(mpiad.mpi_isend(number, None))
        assert y == number and y.dtype == np.result_type(number)


def test_wrong_arguments(size):
    with pytest.raises(ValueError, match=f"mpi_isend: dest must be a rank from 0 to {size - 1}.* got {size}"):
        mpiad.mpi_isend(1.0, size)
    with pytest.raises(ValueError, match="mpi_isend: tag must be .* got -1"):
        mpiad.mpi_isend(1.0, 0, tag=-1)
    with pytest.raises(TypeError, match="mpi_isend: x must be an array.* got str"):
        mpiad.mpi_isend("text", 0)
