"""Cotangents and tangents take the shape and dtype of what they belong to before they travel."""

import autograd.numpy as anp
import numpy as np
import pytest
from against_reference import arrays, assert_close
from linear_primitives import LINEAR_PRIMITIVES
from mpi4py import MPI

import mpiad
from mpiad.primitives.cotangents import conform

each_primitive = pytest.mark.parametrize("name", list(LINEAR_PRIMITIVES))


@each_primitive
def test_single_precision_with_weights_in_double(rngs, rank, size, name):
    """On the last rank only: a cotangent that was sent in the weights' precision would not fit its message."""
    fun, make = LINEAR_PRIMITIVES[name]
    program = make([(3, 2)] * size)
    xs = arrays(rngs, (3, 2), "f4")
    ws = [w.astype("f8" if r == size - 1 else "f4") for r, w in enumerate(arrays(rngs, program.out_shapes))]
    gradient = mpiad.grad(lambda x: anp.sum(ws[rank] * fun(x, MPI.COMM_WORLD)), objective="sum")(xs[rank])
    assert_close(gradient, program.adjoint(xs, ws)[rank], "f4")


@each_primitive
def test_real_numbers_with_complex_weights(rngs, rank, size, name):
    """What reaches the real result is Re(w): the imaginary part of its cotangent has no meaning."""
    fun, make = LINEAR_PRIMITIVES[name]
    program = make([(3, 2)] * size)
    xs, ws = arrays(rngs, (3, 2)), arrays(rngs, program.out_shapes, "c16")
    gradient = mpiad.grad(lambda x: anp.real(anp.sum(ws[rank] * fun(x, MPI.COMM_WORLD))), objective="sum")(xs[rank])
    assert_close(gradient, program.adjoint(xs, [w.real for w in ws])[rank], "f8")


@each_primitive
def test_one_number_as_the_cotangent_of_all_entries(rngs, rank, size, name):
    """The cotangent of a sum is one number spread out: a view without strides."""
    fun, make = LINEAR_PRIMITIVES[name]
    program = make([(3, 2)] * size)
    xs = arrays(rngs, (3, 2))
    gradient = mpiad.grad(lambda x: (rank + 1) * anp.sum(fun(x, MPI.COMM_WORLD)), objective="sum")(xs[rank])
    gs = [np.full(shape, r + 1.0) for r, shape in enumerate(program.out_shapes)]
    assert_close(gradient, program.adjoint(xs, gs)[rank], "f8")
    gradient += 1  # it is the caller's own


def test_seeds_and_directions_of_another_dtype(rank, size):
    """`make_vjp` and `make_jvp` take what NumPy can cast to the dtype of the variable."""
    vjp, _ = mpiad.make_vjp(mpiad.mpi_allreduce)(np.ones(2, "f4"))
    assert_close(vjp(np.full(2, rank)), np.full(2, size * (size - 1) / 2), "f4")
    _, tangent = mpiad.make_jvp(mpiad.mpi_allreduce)(np.ones(2, "f4"))(np.full(2, rank))
    assert_close(tangent, np.full(2, size * (size - 1) / 2), "f4")


def test_a_real_input_gets_the_real_part():
    got = conform(np.array([-1 + 2j, 3 - 4j]), (2,), np.dtype(np.float64))
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, [-1, 3])
