"""Derivatives of derivatives: every nesting of the two directions, up to third order, and the gradient of J itself."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from one_process import assert_close, directions, flat, gradients, hessian, hessian_products, inputs, pieces

import mpiad


def loss(x, rank, size):
    """Mix five primitives, a send among them whose result its sender doesn't use."""
    last, right, left = size - 1, (rank + 1) % size, (rank - 1) % size
    total = mpiad.mpi_allreduce(anp.sum(anp.sin(x)) * (rank + 1.0))
    copied = mpiad.mpi_bcast(x[:2] * total, root=last)
    every = mpiad.mpi_allgather(x * copied[0], axis=0)
    mpiad.mpi_send(anp.cos(x[:2]) * total, right, tag=7)
    came = mpiad.mpi_recv(np.zeros(2), left, tag=7)
    before = mpiad.mpi_scan(anp.prod(came) * copied[1])
    return anp.sum(every**2) * before + anp.sum(came * x[1:3]) ** 2 * (rank + 1.0)


def losses(xs):
    size = len(xs)
    total = sum(anp.sum(anp.sin(x)) * (r + 1.0) for r, x in enumerate(xs))
    copied = xs[-1][:2] * total
    every = flat(xs) * copied[0]
    came = [anp.cos(xs[(r - 1) % size][:2]) * total for r in range(size)]
    before = [sum(anp.prod(c) * copied[1] for c in came[: r + 1]) for r in range(size)]
    return [anp.sum(every**2) * before[r] + anp.sum(came[r] * xs[r][1:3]) ** 2 * (r + 1.0) for r in range(size)]


def summed(xs):
    return sum(losses(xs))


@pytest.fixture
def xs(rank_rng, size):
    return [x / 2 for x in inputs(rank_rng, size)]


def mine(rank, size, **keywords):
    """The gradient of the sum of all ranks' losses, as a function of this rank's input."""
    return mpiad.grad(lambda x: loss(x, rank, size), objective="sum", **keywords)


def test_the_gradient_first(xs, rank, size):
    value, g = mpiad.value_and_grad(loss, objective="sum")(xs[rank], rank, size)
    assert_close(value, summed(xs))
    assert_close(g, gradients(summed, xs)[rank])


def test_the_full_hessian_by_jacobians_of_the_gradient(xs, rank, size):
    """Row block q, column block r: the derivative of rank q's gradient by rank r's input."""
    dense = np.split(hessian(summed, xs), np.cumsum([np.size(x) for x in xs])[:-1])
    start = sum(np.size(x) for x in xs[:rank])
    for q in range(size):
        block = mpiad.jacobian(mine(rank, size), root=q)(xs[rank])
        assert_close(block, dense[q][:, start : start + np.size(xs[rank])])


def test_the_full_hessian_by_products(xs, rank, size):
    dense = hessian(summed, xs)
    columns = []
    for unit in np.eye(len(dense)):
        v = pieces(unit, xs)[rank]
        columns.append(mpiad.hvp(loss, objective="sum")(xs[rank], rank, size, v))
    start = sum(np.size(x) for x in xs[:rank])
    assert_close(np.stack(columns, axis=1), dense[start : start + np.size(xs[rank])])


def forward_over_reverse(f, x, v):
    return mpiad.jvp(mpiad.grad(f, objective="sum"), x, v)[1]


def reverse_over_reverse(f, x, v):
    return mpiad.grad(lambda z: anp.sum(mpiad.grad(f, objective="sum")(z) * v), objective="sum")(x)


def reverse_over_forward(f, x, v):
    return mpiad.grad(lambda z: mpiad.jvp(f, z, v)[1], objective="sum")(x)


@pytest.mark.parametrize("product", [forward_over_reverse, reverse_over_reverse, reverse_over_forward])
def test_second_order(product, xs, rank, size):
    vs = directions(xs)
    got = product(lambda x: loss(x, rank, size), xs[rank], vs[rank])
    assert_close(got, hessian_products(summed, xs, vs)[rank])


def test_forward_over_forward(xs, rank, size):
    vs, ws = directions(xs, 1), directions(xs, 2)
    f = lambda x: loss(x, rank, size)  # noqa: E731
    got = mpiad.jvp(lambda z: mpiad.jvp(f, z, vs[rank])[1], xs[rank], ws[rank])[1]
    of_one_rank = hessian(lambda zs: losses(zs)[rank], xs)
    assert_close(got, flat(ws) @ of_one_rank @ flat(vs))


THIRD_ORDER = {
    "rrr": lambda f, x, v, w: reverse_over_reverse(lambda z: anp.sum(mpiad.grad(f, objective="sum")(z) * v), x, w),
    "frr": lambda f, x, v, w: mpiad.jvp(lambda z: reverse_over_reverse(f, z, v), x, w)[1],
    "rfr": lambda f, x, v, w: mpiad.grad(lambda z: anp.sum(forward_over_reverse(f, z, v) * w), objective="sum")(x),
    "rrf": lambda f, x, v, w: reverse_over_reverse(lambda z: mpiad.jvp(f, z, v)[1], x, w),
    "ffr": lambda f, x, v, w: mpiad.jvp(lambda z: forward_over_reverse(f, z, v), x, w)[1],
    "frf": lambda f, x, v, w: forward_over_reverse(lambda z: mpiad.jvp(f, z, v)[1], x, w),
    "rff": lambda f, x, v, w: reverse_over_forward(lambda z: mpiad.jvp(f, z, v)[1], x, w),
}


@pytest.mark.each_value
@pytest.mark.parametrize("nesting", THIRD_ORDER)
def test_third_order(nesting, xs, rank, size):
    """Σ_jk ∂³J/∂x_i∂x_j∂x_k v_j w_k, outermost derivative first in the name (r reverse, f forward)."""
    vs, ws = directions(xs, 1), directions(xs, 2)

    def along_v(zs):
        return sum(anp.sum(g * v) for g, v in zip(gradients(summed, zs), vs))

    expected = hessian_products(along_v, xs, ws)[rank]
    got = THIRD_ORDER[nesting](lambda x: loss(x, rank, size), xs[rank], vs[rank], ws[rank])
    assert_close(got, expected, rounding=1e-10)


@pytest.mark.parametrize("kind, factor", [("root", 1), ("sum", None), ("mean", 1)])
def test_the_gradient_of_j_itself(kind, factor, xs, rank, size):
    """J is the same on all ranks: its sum is P times what its mean and its root's are."""

    def value(x):
        return mpiad.value_and_grad(loss, objective="sum")(x, rank, size)[0] ** 2

    outer, g = mpiad.value_and_grad(value, objective=kind)(xs[rank])
    factor = factor or size
    assert_close(outer, summed(xs) ** 2 * factor)
    expected = gradients(lambda zs: summed(zs) ** 2 * factor, xs)[rank]
    assert_close(g, expected)


def test_j_and_the_gradient_together_in_an_outer_trace(xs, rank, size):
    """A penalty on the norm of the gradient, as in a line search: J + Σ_r |dJ/dx_r|² / 2."""

    def penalised(x):
        value, g = mpiad.value_and_grad(loss, objective="sum")(x, rank, size)
        return value / size + anp.sum(g**2) / 2

    def whole(zs):
        return summed(zs) + sum(anp.sum(g**2) for g in gradients(summed, zs)) / 2

    value, g = mpiad.value_and_grad(penalised, objective="sum")(xs[rank])
    assert_close(value, whole(xs))
    assert_close(g, gradients(whole, xs)[rank])


def test_the_tangent_of_j_itself(xs, rank, size):
    vs = directions(xs)
    value, tangent = mpiad.jvp(lambda x: mpiad.value_and_grad(loss, objective="mean")(x, rank, size)[0], xs[rank], vs[rank])
    assert_close(value, summed(xs) / size)
    assert_close(tangent, sum(np.sum(g * v) for g, v in zip(gradients(summed, xs), vs)) / size)


IN_NUMBERS = {
    "hvp": lambda f: mpiad.hvp(f, objective="sum")(3.0, 1.0),
    "reverse over reverse": lambda f: mpiad.grad(mpiad.grad(f, objective="sum"), objective="sum")(3.0),
    "reverse over forward": lambda f: mpiad.grad(lambda y: mpiad.jvp(f, y, 1.0)[1], objective="sum")(3.0),
    "jacobian": lambda f: mpiad.jacobian(mpiad.grad(f, objective="sum"), objective="sum")(3.0),
    "plain autograd": lambda f: autograd.grad(mpiad.grad(f, objective="sum"))(3.0),
}


@pytest.mark.filterwarnings("ignore:Output seems independent of input")
@pytest.mark.parametrize("nesting", IN_NUMBERS)
def test_derivatives_by_python_numbers(nesting, size):
    """Also of the variable itself, whose box has no array behind it."""
    assert_close(np.float64(IN_NUMBERS[nesting](lambda x: x)), np.float64(0.0))
    assert_close(np.float64(IN_NUMBERS[nesting](lambda x: x**3)), np.float64(18.0))
    if nesting != "plain autograd":  # it would never run the adjoint of the sharing of J, which isn't used here
        total = IN_NUMBERS[nesting](lambda x: mpiad.mpi_allreduce(x) ** 2)
        assert_close(np.float64(total), np.float64(2.0 * size**2))


# ---- bilevel programs: the solution of an inner problem that communicates enters an outer one that does


def descend(gradient, w, steps=3, rate=0.1):
    for _ in range(steps):
        w = w - rate * gradient(w)
    return w


@pytest.mark.parametrize("kind", ["root", "mean"])
def test_bilevel_with_a_shared_inner_variable(kind, rank, size, rank_rng):
    xs = inputs(rank_rng, size, lambda r: (r + 1, 2))
    start = np.array([0.3, -0.8])

    def fit(w, x):
        return anp.sum((anp.tanh(anp.dot(x, w)) - x[:, 0] ** 2) ** 2)

    def program(x):
        inner = mpiad.value_and_grad(lambda w: mpiad.mpi_allreduce(fit(w, x)), shared=True, objective=kind)
        best = descend(lambda w: inner(w)[1], start)
        smoothed = mpiad.mpi_exchange(best * anp.sum(x), (rank + 1) % size, (rank - 1) % size)
        return mpiad.mpi_allreduce(anp.sum(smoothed**2) * (rank + 1.0)) + inner(best)[0]

    def whole(zs):
        inner = lambda w: sum(fit(w, z) for z in zs)  # noqa: E731
        best = descend(autograd.grad(inner), start)
        smoothed = [best * anp.sum(zs[(r - 1) % size]) for r in range(size)]
        return sum(anp.sum(s**2) * (r + 1.0) for r, s in enumerate(smoothed)) + inner(best)

    value, g = mpiad.value_and_grad(program)(xs[rank])
    assert_close(value, whole(xs))
    assert_close(g, gradients(whole, xs)[rank])


def coupled(u, x, exchange):
    """An energy of this rank's u, of its neighbour's, and of the data."""
    return anp.sum((u - anp.sin(x)) ** 2) + anp.sum(exchange(u) * u) / 4 + anp.sum(u**4) / 8


def test_bilevel_with_an_inner_variable_on_each_rank(rank, size, rank_rng):
    xs = inputs(rank_rng, size, lambda r: (2,))

    def shift(u):
        return mpiad.mpi_exchange(u, (rank + 1) % size, (rank - 1) % size)

    def program(x):
        u = descend(mpiad.grad(lambda u: coupled(u, x, shift), objective="sum"), np.zeros(2))
        return mpiad.mpi_reduce(anp.prod(u), op=MPI.PROD, root=size - 1) + mpiad.mpi_sum(anp.sum(u * x), size - 1)

    def whole(zs):
        def energy(us):
            return sum(coupled(u, z, lambda _, r=r: us[r - 1]) for r, (u, z) in enumerate(zip(us, zs)))

        us = [np.zeros(2) for _ in zs]
        for _ in range(3):
            us = [u - 0.1 * g for u, g in zip(us, autograd.grad(energy)(us))]
        product = 1.0
        for u in us:
            product = product * anp.prod(u)
        return product + sum(anp.sum(u * z) for u, z in zip(us, zs))

    value, g = mpiad.value_and_grad(program, root=size - 1)(xs[rank])
    assert_close(value, whole(xs))
    assert_close(g, gradients(whole, xs)[rank])


def test_an_inner_problem_on_the_root_alone(rank, size, rank_rng):
    """The root solves by itself, with a local gradient of another form on each rank, and hands the result round."""
    xs = inputs(rank_rng, size, lambda r: (2,))

    def inner(w, a):
        return anp.sum((w**2 - a) ** 2)

    def program(x):
        a = mpiad.mpi_sum(x**2 + 1.0)
        w = np.ones(2)
        if rank == 0:
            w = descend(autograd.grad(lambda w: inner(w, a)), w, rate=0.01)
        w = mpiad.mpi_bcast(w)
        return mpiad.mpi_allreduce(anp.sum(w * x))

    def whole(zs):
        a = sum(z**2 + 1.0 for z in zs)
        w = descend(autograd.grad(lambda w: inner(w, a)), np.ones(2), rate=0.01)
        return sum(anp.sum(w * z) for z in zs)

    value, g = mpiad.value_and_grad(program)(xs[rank])
    assert_close(value, whole(xs))
    assert_close(g, gradients(whole, xs)[rank])
