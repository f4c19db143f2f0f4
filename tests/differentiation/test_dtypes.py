"""Gradients have the dtype of their variables, and are sent in it, however the dtypes are mixed on the way."""

import autograd.numpy as anp
import numpy as np
import pytest
from one_process import assert_close, gradients, inputs

import mpiad

F4 = 2e-6
"""Relative rounding of a few operations in float32."""


def test_float32_data_with_float64_weights(rank, size, rank_rng):
    data = [x.astype(np.float32) for x in inputs(rank_rng, size)]
    weights = [rank_rng(r + 50).standard_normal(3 + r) for r in range(size)]
    right, left = (rank + 1) % size, (rank - 1) % size

    def program(x, w):
        came = mpiad.mpi_exchange(x[:2], right, left)  # float32 travels
        assert mpiad.stop_gradient(came).dtype == np.float32
        mixed = anp.sum(came) * anp.sum(x * w)  # float64 from here
        return mpiad.mpi_allreduce(mixed) + mpiad.mpi_allreduce(anp.sum(x**2))

    def whole(zs):
        xs, ws = zs[:size], zs[size:]
        return sum(anp.sum(xs[r - 1][:2]) * anp.sum(x * w) + anp.sum(x**2) for r, (x, w) in enumerate(zip(xs, ws)))

    value, (by_data, by_weights) = mpiad.value_and_grad(program, argnum=(0, 1))(data[rank], weights[rank])
    expected = gradients(whole, [x.astype(float) for x in data] + weights)

    assert by_data.dtype == np.float32 and by_weights.dtype == np.float64
    assert_close(by_data, expected[rank].astype(np.float32), rounding=F4)
    assert_close(by_weights, expected[size + rank], rounding=F4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
def test_each_dtype_through_the_tape(dtype, rank, size, rank_rng):
    complex_ = np.issubdtype(dtype, np.complexfloating)
    xs = [rank_rng(r).standard_normal((2, 4)) for r in range(size)]
    xs = [(x[0] + 1j * x[1] if complex_ else x[0]).astype(dtype) for x in xs]
    right, left = (rank + 1) % size, (rank - 1) % size

    def real(z):
        return anp.real(z * anp.conj(z)) if complex_ else z**2

    def program(x):
        total = mpiad.mpi_allreduce(x)
        request = mpiad.mpi_irecv(x, left)
        mpiad.mpi_send(x * total, right)
        return mpiad.mpi_sum(anp.sum(real(mpiad.mpi_wait(request) * x)))

    def whole(zs):
        total = sum(zs)
        return sum(anp.sum(real(zs[r - 1] * total * z)) for r, z in enumerate(zs))

    g = mpiad.grad(program)(xs[rank])
    precise = [x.astype(np.complex128 if complex_ else np.float64) for x in xs]
    assert g.dtype == dtype
    rounding = 1e-11 if np.finfo(dtype).bits == 64 else 1e-5
    assert_close(g, gradients(whole, precise)[rank].astype(dtype), rounding=rounding)
    tangent = mpiad.jvp(program, xs[rank], np.ones_like(xs[rank]))[1]
    assert tangent.dtype == np.empty(0, dtype).real.dtype


def test_another_dtype_on_every_rank(rank, size, rank_rng):
    """A variable in float32 on even ranks and in float64 on odd ones; what travels has one dtype."""
    kinds = [np.float32 if r % 2 == 0 else np.float64 for r in range(size)]
    xs = [x.astype(kinds[r]) for r, x in enumerate(inputs(rank_rng, size, lambda r: (3,)))]

    def program(x):
        total = mpiad.mpi_allreduce(anp.sum(x.astype(np.float64) ** 2))
        return total**2

    value, g = mpiad.value_and_grad(program)(xs[rank])
    total = sum(np.sum(x.astype(float) ** 2) for x in xs)
    assert g.dtype == kinds[rank]
    assert_close(value, total**2)
    assert_close(g, (4 * total * xs[rank].astype(float)).astype(kinds[rank]), rounding=F4)


def test_losses_of_other_dtypes_on_other_ranks(rank, size):
    """J is float64 on all ranks, also of losses in float32, integers and Python numbers."""

    def program(x):
        total = anp.sum(x**2)
        return [total, total.astype(np.float32), 2, 1.5][rank % 4]

    value, g = mpiad.value_and_grad(program, objective="sum")(np.array([1.0, 2.0]))
    assert_close(value, np.float64(sum([5.0, 5.0, 2.0, 1.5][r % 4] for r in range(size))))
    assert_close(g, np.array([2.0, 4.0]) if rank % 4 < 2 else np.zeros(2))


def test_real_variables_through_complex_numbers(rank, size, rank_rng):
    xs = inputs(rank_rng, size, lambda r: (4,))

    def spectrum(x):
        return x * np.exp(1j * np.arange(4))

    def program(x):
        total = mpiad.mpi_allreduce(spectrum(x))
        return anp.sum(anp.real(total) ** 2 * anp.imag(total))

    def whole(zs):
        total = sum(spectrum(z) for z in zs)
        return anp.sum(anp.real(total) ** 2 * anp.imag(total))

    value, g = mpiad.value_and_grad(program)(xs[rank])
    assert_close(value, whole(xs))
    assert_close(g, gradients(whole, xs)[rank])


def test_a_variable_used_in_two_precisions(rank, size):
    x = np.array([1.0, 2.0]) + rank

    def program(x):
        low = mpiad.mpi_allreduce(x.astype(np.float32))
        assert mpiad.stop_gradient(low).dtype == np.float32
        return mpiad.mpi_allreduce(anp.sum(low * x))

    g = mpiad.grad(program)(x)
    total = sum(np.array([1.0, 2.0]) + r for r in range(size))
    assert_close(g, 2 * total, rounding=F4)


def test_second_order_in_float32(rank, size, rank_rng):
    xs = [x.astype(np.float32) for x in inputs(rank_rng, size)]
    v = np.ones_like(xs[rank])

    def program(x):
        return mpiad.mpi_allreduce(anp.sum(x**2)) ** 2

    got = mpiad.hvp(program)(xs[rank], v)
    total = sum(np.sum(x.astype(float) ** 2) for x in xs)
    along = sum(np.sum(x.astype(float)) for x in xs)
    assert_close(got, (4 * total * v + 8 * xs[rank] * along).astype(np.float32), rounding=1e-5)


@pytest.mark.serial
def test_integers_of_traced_values_are_constants():
    """They may be indices; as in NumPy, they are towards zero."""
    x, table = np.array([0.5, 1.7, 2.2, -0.9]), np.arange(5.0) ** 2
    index = np.array([0, 1, 2, 0])
    cases = (
        (lambda x: anp.sum(table[x.astype(int)] * x**2), 2 * table[index] * x),
        (lambda x: anp.sum((x**2)[x.astype(np.int8)] * x), x[index] ** 2 + 2 * x * np.bincount(index, x, minlength=4)),
        (lambda x: anp.sum(mpiad.segment_sum(x, x.astype(int), 3) ** 2), 2 * np.bincount(index, x)[index]),
        (lambda x: anp.sum((x - x.astype(int)) ** 2), 2 * (x - index)),
        (lambda x: anp.sum(x[(x > 0).astype(bool)]) + anp.sum(x.astype(bool)), (x > 0) * 1.0),
    )
    direction = np.array([1.0, -2.0, 0.5, 3.0])
    for fun, gradient in cases:
        for f in (fun, mpiad.jit(fun)):
            np.testing.assert_allclose(mpiad.grad(f)(x), gradient, rtol=1e-14)
            assert mpiad.jvp(f, x, direction)[1] == pytest.approx(gradient @ direction, rel=1e-13)
