import numpy as np
import pytest
import reference
from against_reference import arrays, assert_close, check, check_exact, check_new_memory
from arrays import each_array, each_root

import mpiad


@each_array
def test_arrays(rngs, size, dtype, shape, layout):
    xs, root = arrays(rngs, shape, dtype, layout), size - 1
    check(lambda x: mpiad.mpi_bcast(x, root), reference.bcast([shape] * size, root), xs, rngs)


@each_root
def test_roots(rngs, size, root):
    root %= size
    check(lambda x: mpiad.mpi_bcast(x, root), reference.bcast([(2, 3)] * size, root), arrays(rngs, (2, 3)), rngs)


@each_root
def test_without_template(rngs, rank, size, root):
    root %= size

    def fun(x):
        return mpiad.mpi_bcast(x if rank == root else None, root)

    check(fun, reference.bcast([(2, 3)] * size, root), arrays(rngs, (2, 3)), rngs)


@each_root
def test_template_of_another_shape(rngs, size, root):
    root %= size
    shapes = [(2, 3) if rank == root else (rank + 1,) for rank in range(size)]
    check(lambda x: mpiad.mpi_bcast(x, root), reference.bcast(shapes, root), arrays(rngs, shapes), rngs)


@pytest.mark.parametrize("dtype", ["f4", "c16", "i8", "?"])
def test_template_of_another_dtype(rngs, rank, size, dtype):
    xs, gs = arrays(rngs, (3,)), arrays(rngs, (3,))
    template = xs[0] if rank == 0 else np.ones(4, dtype)
    vjp, y = mpiad.make_vjp(lambda z: mpiad.mpi_bcast(template) + z)(0.0)
    assert_close(y, xs[0], "f8")
    assert_close(vjp(gs[rank]), gs[rank].sum(), "f8")
    if np.dtype(dtype).kind in "fc":
        cotangent = mpiad.make_vjp(mpiad.mpi_bcast)(template)[0](gs[rank])
        assert_close(cotangent, sum(gs) if rank == 0 else np.zeros(4), template.dtype)


@pytest.mark.parametrize("length", [57, 58, 61, 1000])
def test_lengths_about_that_of_the_header(rngs, rank, size, length):
    """Short arrays travel with their shape, longer ones in a message of their own."""
    xs, gs = arrays(rngs, (length,)), arrays(rngs, (length,))
    vjp, y = mpiad.make_vjp(lambda x: mpiad.mpi_bcast(x if rank == size - 1 else None, size - 1))(xs[rank])
    np.testing.assert_array_equal(y, xs[-1])
    assert_close(vjp(gs[rank]), sum(gs) if rank == size - 1 else np.zeros(length), "f8")


def test_many_dimensions(rank):
    shape = (1,) * 20 + (2,)
    assert mpiad.mpi_bcast(np.ones(shape, "f4") if rank == 0 else None).shape == shape


def test_integers_and_booleans(rngs, size):
    check_exact(mpiad.mpi_bcast, reference.bcast([(2, 3)] * size, 0), rngs)


def test_new_memory():
    check_new_memory(mpiad.mpi_bcast, np.ones(3))
    check_new_memory(mpiad.mpi_bcast, np.ones(100))


@pytest.mark.parametrize("number", [2.5, 2, True, 1j, np.float32(2.5), np.int8(3)], ids=repr)
def test_numbers(rank, number):
    y = mpiad.mpi_bcast(number if rank == 0 else None)
    assert y == number and y.dtype == np.result_type(number)


def test_gradient_by_a_number(rank, size):
    value, gradient = mpiad.value_and_grad(lambda x: mpiad.mpi_bcast(x) ** 2 * (rank + 1), objective="sum")(3.0 + rank)
    total = size * (size + 1) / 2
    assert (value, gradient) == (9 * total, 6 * total if rank == 0 else 0)


def test_root_as_numpy_integer(size, rank):
    assert mpiad.mpi_bcast(rank, np.int64(size - 1)) == size - 1


def test_mistake_of_the_root_is_raised_on_all_ranks(rank, size):
    root = size - 1
    for wrong, got in [([1.0, 2.0], "list"), (None, "NoneType"), (np.array(["a"]), "<U1"), (object(), "object")]:
        with pytest.raises(TypeError, match=f"mpi_bcast: x must be an array.*{got}"):
            mpiad.mpi_bcast(wrong if rank == root else 1.0, root)
        assert mpiad.mpi_bcast(float(rank), root) == root


def test_template_that_cannot_be_sent_is_not_looked_at(rank):
    y = mpiad.mpi_bcast(2.0 if rank == 0 else "anything")
    assert y == 2.0
