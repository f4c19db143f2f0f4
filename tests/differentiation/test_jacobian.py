"""`jacobian`: array-valued objectives."""

import sys

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from one_process import assert_close, inputs, jacobian, objective

import mpiad


@pytest.fixture(params=[0, 10**9], ids=["columns", "rows"], autouse=True)
def _by_columns_or_rows(request, monkeypatch):
    """Jacobians are computed by columns, or by rows, whatever their shape."""
    monkeypatch.setattr(sys.modules["mpiad.differentiation.jacobian"], "_ROWS_PER_COLUMN", request.param)


def program(x, rank, size):
    total = mpiad.mpi_allreduce(anp.array([[anp.sum(x**2), anp.prod(x)], [anp.sum(x), rank + 1.0]]))
    return total * anp.sum(anp.sin(x)) + mpiad.mpi_scan(anp.sum(x**3))


def outputs(xs):
    total = sum(anp.array([[anp.sum(x**2), anp.prod(x)], [anp.sum(x), r + 1.0]]) for r, x in enumerate(xs))
    return [total * anp.sum(anp.sin(x)) + sum(anp.sum(y**3) for y in xs[: r + 1]) for r, x in enumerate(xs)]


def columns_of(dense, xs, rank):
    start = sum(np.size(x) for x in xs[:rank])
    return dense[:, start : start + np.size(xs[rank])]


@pytest.mark.parametrize("kind", ["root", "sum", "mean"])
def test_each_objective(kind, rank, size, rank_rng):
    xs, root = inputs(rank_rng, size), size - 1
    got = mpiad.jacobian(program, objective=kind, root=root)(xs[rank], rank, size)
    dense = jacobian(lambda zs: [objective(outputs(zs), kind, root)], xs)
    assert_close(got, columns_of(dense, xs, rank).reshape(2, 2, *xs[rank].shape))


def test_all_blocks_root_by_root(rank, size, rank_rng):
    """The derivative of every rank's result by every rank's input."""
    xs = inputs(rank_rng, size)
    dense = columns_of(jacobian(outputs, xs), xs, rank).reshape(size, 2, 2, *xs[rank].shape)
    for root in range(size):
        assert_close(mpiad.jacobian(program, root=root)(xs[rank], rank, size), dense[root])


def test_a_compiled_function(rank, size):
    times = np.linspace(0.0, 1.0, 12)

    def model(p):
        return mpiad.mpi_allreduce(p[0] * anp.exp(-p[1] * times)) * p[2]

    p = np.array([1.0, 2.0, 0.5]) + 0.1 * rank
    total = sum((1.0 + 0.1 * r) * np.exp(-(2.0 + 0.1 * r) * times) for r in range(size))
    decay = np.exp(-p[1] * times)
    # Each rank's value is scaled by its own p[2]; all values are summed.
    scale = sum(0.5 + 0.1 * r for r in range(size))
    dense = np.stack([scale * decay, -scale * p[0] * times * decay, total], axis=1)
    evaluate = mpiad.jacobian(mpiad.jit(model, strict=True), objective="sum")
    for _ in range(3):
        np.testing.assert_allclose(evaluate(p), dense, rtol=1e-13)


def test_shared_variables_in_a_nest(rank, size, rank_rng):
    xs = inputs(rank_rng, size)
    theta = {"a": np.array([0.5, 1.5]), "b": 2.0}

    def model(theta, x):
        return theta["a"] ** 2 * anp.sum(x) + theta["b"] * theta["a"][0]

    got = mpiad.jacobian(model, objective="sum", shared=True)(theta, xs[rank])
    assert_close(got["a"], autograd.jacobian(lambda a: sum(model({"a": a, "b": 2.0}, x) for x in xs))(theta["a"]))
    assert_close(got["b"], autograd.jacobian(lambda b: sum(model({"a": theta["a"], "b": b}, x) for x in xs))(2.0))


def test_argnum_as_a_tuple(rank, size):
    def f(a, b):
        return mpiad.mpi_allreduce(a * b)

    by_b, by_a = mpiad.jacobian(f, argnum=(1, 0))(np.array([1.0, 2.0]) + rank, 3.0 + rank)
    assert_close(by_b, np.array([1.0, 2.0]) + rank)
    assert_close(by_a, np.eye(2) * (3.0 + rank))


def test_scalars_and_no_entries(rank):
    assert_close(mpiad.jacobian(lambda x: mpiad.mpi_allreduce(anp.sum(x**2)))(np.ones(2) * rank), np.full(2, 2.0 * rank))
    assert_close(mpiad.jacobian(lambda x: x[:0])(np.ones(2)), np.zeros((0, 2)))


def test_other_ranks_than_the_root_may_return_nothing(rank, size):
    root = size - 1

    def program(x):
        every = mpiad.mpi_gather(x**2, root=root)
        return every if rank == root else None

    got = mpiad.jacobian(program, root=root)(rank + 1.0)
    assert_close(got, 2.0 * (rank + 1) * (np.arange(size) == rank))


@pytest.mark.parametrize("wrong", ["text", None, 1j, np.ones(2) * 1j], ids=str)
def test_what_is_no_real_array_raises_on_all_ranks(wrong, rank, size):
    with pytest.raises(TypeError, match="real array"):
        mpiad.jacobian(lambda x: wrong if rank == size - 1 else x, objective="sum")(np.ones(2))
    assert_close(mpiad.jacobian(lambda x: x)(np.ones(2)), np.eye(2) * (rank == 0))


@pytest.mark.mpi(min_size=2)
def test_shapes_that_differ_raise_on_all_ranks(rank):
    with pytest.raises(TypeError, match=r"\(2,\).*\(3,\)"):
        mpiad.jacobian(lambda x: x, objective="mean")(np.ones(2 + (rank > 0)))


@pytest.mark.parametrize("nest", [tuple, list])
def test_a_nest_is_no_array(nest):
    with pytest.raises(TypeError, match=f"the function returned {nest.__name__}"):
        mpiad.jacobian(lambda x: nest((x[0] ** 2, x[1])))(np.ones(2))


@pytest.mark.parametrize("kind", ["root", "sum", "mean"])
def test_hessian(kind, rank, size):
    """Compared with products with the Hessian, for a variable of all ranks."""

    def loss(scale, x):
        return scale * mpiad.mpi_allreduce(anp.sum(anp.sin((rank + 1.0) * x))) * anp.prod(x) + (rank + 1.0) * anp.sum(x**3)

    x = np.array([[0.3, -0.5], [0.7, 1.1]])
    got = mpiad.hessian(loss, 1, objective=kind, root=size - 1)(1.25, x)
    product = mpiad.hvp(loss, 1, objective=kind, root=size - 1, shared=True)
    columns = [product(1.25, x, v.reshape(2, 2)).ravel() for v in np.eye(4)]
    assert got.shape == (2, 2, 2, 2)
    np.testing.assert_allclose(got.reshape(4, 4), np.stack(columns, axis=1), 1e-12, 1e-12)
    np.testing.assert_allclose(got.reshape(4, 4), got.reshape(4, 4).T, 1e-12, 1e-12)


def test_hessian_of_a_number(size):
    assert mpiad.hessian(lambda x: mpiad.mpi_allreduce(x**3) / size)(2.0) == pytest.approx(12.0)


def test_a_hessian_is_that_of_a_shared_variable(size):
    fun = lambda x: mpiad.mpi_allreduce(x**3) / size  # noqa: E731
    assert mpiad.hessian(fun, shared=True)(2.0) == pytest.approx(12.0)
    with pytest.raises(ValueError, match=r"^hessian: shared must be True, .* but got False; .* mpiad\.hvp\(fun\)\(x, v\)"):
        mpiad.hessian(fun, shared=False)


def test_errors_of_a_hessian_name_it():
    with pytest.raises(TypeError, match="^hessian: the function must return one real number"):
        mpiad.hessian(lambda x: x**2)(np.ones(3))
