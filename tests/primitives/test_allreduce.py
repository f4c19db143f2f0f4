import numpy as np
import pytest
import reference
from against_reference import ULPS, arrays, assert_close, check, check_exact, check_new_memory, random
from arrays import EXACT_DTYPES, each_array, each_real_array
from mpi4py import MPI

import mpiad


@each_array
def test_sum(rngs, size, dtype, shape, layout):
    xs = arrays(rngs, shape, dtype, layout)
    check(mpiad.mpi_allreduce, reference.allreduce([shape] * size), xs, rngs)


@pytest.mark.few(8)
@pytest.mark.also_on(4)  # where the others' factors are an even number and one
@each_array
def test_product(rngs, size, dtype, shape, layout):
    xs = arrays(rngs, shape, dtype, layout)
    check(lambda x: mpiad.mpi_allreduce(x, MPI.PROD), reference.reduction("PROD", [shape] * size), xs, rngs)


@each_real_array
def test_maximum(rngs, size, dtype, shape, layout):
    xs = arrays(rngs, shape, dtype, layout)
    check(lambda x: mpiad.mpi_allreduce(x, MPI.MAX), reference.reduction("MAX", [shape] * size), xs, rngs)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_product_with_zeros(rngs, size, dtype):
    """Entries: no zero; one on the first rank; one on the last; on first and last; on all ranks; on all but one."""
    xs = [random(rng, (6,), dtype) for rng in rngs]
    xs[0][[1, 3, 4]] = 0
    xs[-1][[2, 3, 4]] = 0
    for x in xs:
        x[4] = 0
    for x in xs[1:]:
        x[5] = 0
    check(lambda x: mpiad.mpi_allreduce(x, MPI.PROD), reference.reduction("PROD", [(6,)] * size), xs, rngs)


@pytest.mark.parametrize("small", [1e-5, 1e-12, 1e-100])
def test_product_with_a_small_factor(rngs, size, small):
    """The second derivative by that factor is zero, and must not be the difference of two large numbers."""
    xs = arrays(rngs, (3,))
    xs[-1] = xs[-1] * small
    check(lambda x: mpiad.mpi_allreduce(x, MPI.PROD), reference.reduction("PROD", [(3,)] * size), xs, rngs)


@pytest.mark.parametrize("exponent", [-200, 200, -155, 155])
def test_product_that_leaves_the_range_of_floats(rngs, rank, size, exponent):
    """Each slope is the product of the others' factors, which is in range on two ranks while the product is not."""
    xs = [np.array([10.0**exponent * (rank + 1)]) for rank in range(size)]
    with np.errstate(over="ignore", under="ignore"):
        slope = np.prod([x for other, x in enumerate(xs) if other != rank])
        cotangent = mpiad.make_vjp(lambda x: mpiad.mpi_allreduce(x, MPI.PROD))(xs[rank])[0](np.ones(1))
        np.testing.assert_allclose(cotangent, [size * slope], rtol=ULPS * np.finfo("f8").eps)


@pytest.mark.parametrize("name", ["MAX", "MIN"])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_ties(rngs, size, dtype, name):
    """Of few different values, so that some entries are tied on two ranks, some on all, and some not at all."""
    op = {"MAX": MPI.MAX, "MIN": MPI.MIN}[name]
    xs = [rng.integers(0, 3, 12).astype(dtype) for rng in rngs]
    for x in xs:
        x[:3] = 1
    xs[0][2] = xs[-1][2] = 2
    xs[0][1] = 0
    check(lambda x: mpiad.mpi_allreduce(x, op), reference.reduction(name, [(12,)] * size), xs, rngs)


def test_infinite_maximum_is_a_tie_like_any_other(rank, size):
    cotangent = mpiad.make_vjp(lambda x: mpiad.mpi_allreduce(x, MPI.MAX))(np.array([np.inf]))[0](np.ones(1))
    assert_close(cotangent, np.ones(1), "f8")


def test_integers(rngs, size):
    check_exact(mpiad.mpi_allreduce, reference.allreduce([(2, 3)] * size), rngs, EXACT_DTYPES[1:])


@pytest.mark.parametrize(
    "op, function",
    [(MPI.MAX, np.maximum), (MPI.MIN, np.minimum), (MPI.PROD, np.multiply), (MPI.BAND, np.bitwise_and)]
    + [(MPI.BOR, np.bitwise_or), (MPI.BXOR, np.bitwise_xor)],
    ids=["max", "min", "prod", "band", "bor", "bxor"],
)
def test_integers_with_any_operation(rngs, rank, op, function):
    for dtype in ("i4", "u8"):
        xs = [rng.integers(0, 6, (2, 3)).astype(dtype) for rng in rngs]
        y = mpiad.mpi_allreduce(xs[rank], op)
        np.testing.assert_array_equal(y, function.reduce(xs))
        assert y.dtype == dtype


@pytest.mark.parametrize(
    "op, function",
    [(MPI.LAND, np.logical_and), (MPI.LOR, np.logical_or), (MPI.LXOR, np.logical_xor)],
    ids=["land", "lor", "lxor"],
)
def test_booleans(rngs, rank, op, function):
    xs = [rng.integers(0, 2, (2, 3)).astype(bool) for rng in rngs]
    y = mpiad.mpi_allreduce(xs[rank], op)
    np.testing.assert_array_equal(y, function.reduce(xs))
    assert y.dtype == bool
    assert mpiad.mpi_allreduce(rank == 0, MPI.LOR) and mpiad.mpi_allreduce(True, MPI.LAND)


def test_operation_of_the_users_own_on_integers(rank, size):
    def combine(one, other, datatype):
        other = np.frombuffer(other, "i8")
        other[:] = np.gcd(np.frombuffer(one, "i8"), other)

    gcd = MPI.Op.Create(combine, commute=True)
    try:
        np.testing.assert_array_equal(mpiad.mpi_allreduce(np.array([6 * (rank + 1), 7]), gcd), [6, 7])
    finally:
        gcd.Free()


def test_integer_result_as_loop_count_inside_a_trace(rank, size):
    def fun(x):
        for _ in range(mpiad.mpi_allreduce(2)):
            x = mpiad.mpi_allreduce(x) / size
        return x**2 * (rank + 1)

    value, gradient = mpiad.value_and_grad(fun, objective="sum")(1.0 + rank)
    mean, total = (size + 1) / 2, size * (size + 1) / 2
    assert value == pytest.approx(mean**2 * total)
    assert gradient == pytest.approx(2 * mean * total / size)


def test_branch_on_a_traced_comparison(rank, size):
    def fun(x):
        return x**2 if mpiad.mpi_allreduce(x > 0, MPI.LAND) else 5 * x

    assert mpiad.grad(fun, objective="sum")(2.0 + rank) == 2 * (2.0 + rank)
    assert mpiad.grad(fun, objective="sum")(-1.0 if rank == 0 else 1.0) == 5


@pytest.mark.parametrize("op", [MPI.SUM, MPI.PROD, MPI.MAX])
def test_new_memory(op):
    check_new_memory(lambda x: mpiad.mpi_allreduce(x, op), np.ones(3))


def test_numbers(rank, size):
    for one in (1, 1.0, 1j, np.float32(1)):
        y = mpiad.mpi_allreduce(one * (rank + 1))
        assert y == one * (size * (size + 1) // 2) and y.dtype == np.result_type(one)


@pytest.mark.parametrize("dtype, name", [("c8", "complex64"), ("c16", "complex128")])
def test_order_of_complex_numbers(dtype, name):
    for op, text in ((MPI.MAX, "MPI.MAX"), (MPI.MIN, "MPI.MIN"), (MPI.LAND, "MPI.LAND")):
        with pytest.raises(TypeError, match=f"mpi_allreduce: op must be MPI.SUM, MPI.PROD for .*{name}.* got {text}"):
            mpiad.mpi_allreduce(np.ones(2, dtype), op)


def test_floats_with_an_operation_for_integers():
    text = "mpi_allreduce: op must be MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN for .*float64.* got MPI.BAND"
    with pytest.raises(TypeError, match=text):
        mpiad.mpi_allreduce(np.ones(2), MPI.BAND)


def test_what_is_no_operation():
    for op in (np.add, "sum", None):
        with pytest.raises(TypeError, match="mpi_allreduce: op must be an mpi4py operation such as MPI.SUM, but got"):
            mpiad.mpi_allreduce(1.0, op)


def test_sum_of_booleans_is_not_defined_in_mpi():
    text = "mpi_allreduce: op must be MPI.LAND, MPI.LOR, MPI.LXOR for .*bool.* got MPI.SUM"
    for x in (True, np.array([True])):
        with pytest.raises(TypeError, match=text):
            mpiad.mpi_allreduce(x)


def test_operations_that_mpi_does_not_reduce_by(size):
    for op in (MPI.MINLOC, MPI.REPLACE, MPI.NO_OP, MPI.OP_NULL):
        with pytest.raises(TypeError, match="mpi_allreduce: op must be MPI.SUM, .*MPI.BXOR for x of dtype int64"):
            mpiad.mpi_allreduce(np.array([1, 2]), op)
    assert mpiad.mpi_allreduce(1) == size


@pytest.mark.parametrize("name", ["MAX", "MIN"])
def test_derivatives_of_a_maximum_that_is_nan_are_nan_on_all_ranks(rank, size, name):
    op, extreme, winner = {"MAX": (MPI.MAX, size, size - 1), "MIN": (MPI.MIN, 1, 0)}[name]
    for where in range(size):
        x, v = np.array([np.nan if rank == where else 1.0, 1.0 + rank]), np.full(2, rank + 1.0)
        vjp, y = mpiad.make_vjp(lambda x: mpiad.mpi_allreduce(x, op))(x)
        np.testing.assert_array_equal(y, [np.nan, extreme])
        np.testing.assert_array_equal(vjp(v), [np.nan, size * (size + 1) / 2 if rank == winner else 0])
        tangent = mpiad.jvp(lambda x: mpiad.mpi_allreduce(x, op), x, v)[1]
        np.testing.assert_array_equal(tangent, [np.nan, winner + 1])


def test_a_loop_ends_on_all_ranks_alike_where_a_residual_was_nan(rank, size):
    for where in range(size):
        turns, largest = 0, np.array([0.0])
        # A rank that left the loop alone would meet the others' reductions with its next call, and be told.
        with mpiad.debug.checked():
            while not largest[0] > 2 and turns < 9:
                residual = np.nan if rank == where and turns < 4 else 3.0 - rank / size
                largest, turns = mpiad.mpi_allreduce(np.array([residual]), op=MPI.MAX), turns + 1
            assert mpiad.mpi_allgather(turns).tolist() == [5] * size
