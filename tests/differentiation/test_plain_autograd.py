"""Communication under plain autograd: right, or refused; and our derivatives and autograd's inside each other."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from autograd.core import make_jvp as autograd_make_jvp
from autograd.tracer import trace_stack
from mpi4py import MPI
from one_process import assert_close, directions, flat, gradients, inputs, jacobian

import mpiad
from mpiad.errors import ForeignTraceError

# ---- collectives in the right order


def symmetrical(x, size):
    """The same on all ranks: plain autograd runs the adjoints in the same order everywhere."""
    total = mpiad.mpi_allreduce(anp.sum(anp.sin(x)))
    copied = mpiad.mpi_bcast(x[:2] * total, root=size - 1)
    return mpiad.mpi_allreduce(anp.sum(copied * x[1:3]) ** 2) * total


def symmetrical_whole(zs):
    total = sum(anp.sum(anp.sin(z)) for z in zs)
    copied = zs[-1][:2] * total
    return sum(anp.sum(copied * z[1:3]) ** 2 for z in zs) * total


def test_collectives_in_order_are_right(rank, size, rank_rng):
    """Each rank seeds its own result, so that the objective is the sum of all of them."""
    xs = inputs(rank_rng, size)
    g = autograd.grad(lambda x: symmetrical(x, size))(xs[rank])
    assert_close(g, gradients(lambda zs: size * symmetrical_whole(zs), xs)[rank])


def test_a_chain_of_collectives(rank, size, rank_rng):
    xs = inputs(rank_rng, size, lambda r: (2,))

    def chain(x):
        for root in range(size):
            x = anp.tanh(mpiad.mpi_scan(x) + mpiad.mpi_bcast(x, root=root))
        return anp.sum(mpiad.mpi_allgather(x) ** 2)

    def whole(zs):
        for root in range(size):
            zs = [anp.tanh(sum(zs[: r + 1]) + zs[root]) for r in range(size)]
        return size * sum(anp.sum(z**2) for z in zs)

    assert_close(autograd.grad(chain)(xs[rank]), gradients(whole, xs)[rank])


def test_collectives_carry_tangents_of_plain_autograd(rank, size, rank_rng):
    xs = inputs(rank_rng, size)
    vs = directions(xs)
    value, tangent = autograd_make_jvp(lambda x: symmetrical(x, size), xs[rank])(vs[rank])
    assert_close(value, symmetrical_whole(xs))
    assert_close(tangent, flat(gradients(symmetrical_whole, xs)) @ flat(vs))


# ---- out of order, or between two ranks alone: refused


def test_collectives_out_of_order_are_refused(rank, size):
    """The reverse pass of plain autograd follows the expression: nobody uses the second, so its adjoint never runs."""

    def program(x):
        first = mpiad.mpi_allreduce(x)
        mpiad.mpi_allreduce(x**2)
        return anp.sum(first)

    with pytest.raises(ForeignTraceError, match=r"mpi_allreduce.*mpiad\.grad"):
        autograd.grad(program)(np.ones(2))
    # The next one, in order, isn't troubled by what was left.
    g = autograd.grad(lambda x: anp.sum(mpiad.mpi_allreduce(x)))(np.ones(2))
    assert_close(g, np.full(2, float(size)))


CALLS = {
    "mpi_send": lambda x, rank: mpiad.mpi_send(x, rank),
    "mpi_recv": lambda x, rank: mpiad.mpi_recv(x, rank),
    "mpi_exchange": lambda x, rank: mpiad.mpi_exchange(x, rank, rank),
    "mpi_sendrecv": lambda x, rank: mpiad.mpi_sendrecv(x, 0, 0),
    "mpi_isend": lambda x, rank: mpiad.mpi_isend(x, rank),
    "mpi_irecv": lambda x, rank: mpiad.mpi_irecv(x, rank),
    "mpi_iallreduce": lambda x, rank: mpiad.mpi_iallreduce(x),
}


DERIVATIVES = {
    "grad": lambda f, x: autograd.grad(f)(x),
    "jvp": lambda f, x: autograd_make_jvp(f, x)(np.ones_like(x)),
    "inner": lambda f, x: mpiad.grad(lambda y: anp.sum(autograd.grad(f)(y)))(x),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("traced", [True, False], ids=["traced input", "no traced input"])
@pytest.mark.parametrize("call", CALLS)
def test_point_to_point_calls_are_refused_at_once(call, traced, derivative, rank):
    """Also where no input is traced, as of a receive: nothing would tell of it backwards or of its tangent."""
    reached = []

    def program(x):
        CALLS[call](x if traced else np.ones(2), rank)
        reached.append(True)
        return anp.sum(x)

    before = trace_stack.top
    with pytest.raises(ForeignTraceError, match=rf"{call}.*mpiad\.grad"):
        DERIVATIVES[derivative](program, np.ones(2))
    trace_stack.top = before  # autograd leaves it raised
    assert not reached
    # Nothing was sent: the next message is the next one's.
    mpiad.mpi_send(np.array([3.0]), rank)
    assert_close(mpiad.mpi_recv(np.zeros(1), rank), np.array([3.0]))


@pytest.mark.parametrize("exceptions", [1, 2])
def test_a_counter_left_raised_by_an_exception_refuses_nothing(exceptions, rank, size):
    """Autograd doesn't restore its counter, which alone would look like an open trace."""
    before = trace_stack.top

    def interrupted(x):
        raise ValueError

    for _ in range(exceptions):
        with pytest.raises(ValueError):
            autograd.grad(interrupted)(1.0)
    assert trace_stack.top > before  # else this test shows nothing
    try:
        right, left = (rank + 1) % size, (rank - 1) % size
        assert mpiad.mpi_exchange(float(rank), right, left) == left
        g = mpiad.grad(lambda x: anp.sum(mpiad.mpi_exchange(x, right, left) ** 3), objective="sum")(np.ones(2))
        assert_close(g, np.full(2, 3.0))
    finally:
        trace_stack.top = before


def test_an_exception_in_plain_autograd_that_is_caught_inside_ours(rank, size, rank_rng):
    """The counter is raised for the rest of our trace: messages and further derivatives go on as before."""
    xs, right, left = inputs(rank_rng, size), (rank + 1) % size, (rank - 1) % size
    before = trace_stack.top

    def program(x):
        with pytest.raises(ZeroDivisionError):
            autograd.grad(lambda y: 1 // 0)(x)
        came = mpiad.mpi_exchange(x[:2], right, left)
        inner = mpiad.grad(lambda y: mpiad.mpi_allreduce(anp.sum(y**3)))(x)
        return anp.sum(came * x[1:3]) * anp.sum(autograd.grad(lambda y: anp.sum(y**2))(inner))

    def whole(zs):
        return sum(anp.sum(zs[r - 1][:2] * z[1:3]) * anp.sum(6 * z**2) for r, z in enumerate(zs))

    assert_close(mpiad.grad(program, objective="sum")(xs[rank]), gradients(whole, xs)[rank])
    assert trace_stack.top == before


# ---- inside each other


def test_plain_autograd_of_local_code_inside_ours(rank, size, rank_rng):
    """A local gradient is part of the program: a Newton step, of other numbers of steps on every rank."""
    xs = inputs(rank_rng, size)

    def local_minimum(x, steps):
        energy = lambda u: anp.sum((u - x) ** 4) + anp.sum(u**2) / 2  # noqa: E731
        u = x
        for _ in range(steps):
            u = u - 0.1 * autograd.grad(energy)(u)
        return u

    def program(x):
        total = mpiad.mpi_allreduce(anp.sum(local_minimum(x, rank + 1)))
        return mpiad.mpi_allreduce(anp.sum(local_minimum(x * total, 2)) * total)

    def whole(zs):
        total = sum(anp.sum(local_minimum(z, r + 1)) for r, z in enumerate(zs))
        return sum(anp.sum(local_minimum(z * total, 2)) * total for z in zs)

    assert_close(mpiad.grad(program)(xs[rank]), gradients(whole, xs)[rank])


def test_jacobians_of_plain_autograd_inside_ours(rank, size, rank_rng):
    xs = inputs(rank_rng, size, lambda r: (2,))

    def determinant(x):
        slopes = autograd.jacobian(lambda u: anp.array([u[0] ** 2 * u[1], anp.sin(u[1]) * u[0]]))(x)
        return slopes[0, 0] * slopes[1, 1] - slopes[0, 1] * slopes[1, 0]

    got = mpiad.grad(lambda x: mpiad.mpi_allreduce(determinant(x)) ** 2)(xs[rank])
    assert_close(got, gradients(lambda zs: sum(determinant(z) for z in zs) ** 2, xs)[rank])


def test_ours_inside_plain_autograd(rank, size, rank_rng):
    """The inner gradient communicates; the outer, of plain autograd, runs collectives only, in order."""
    xs = inputs(rank_rng, size, lambda r: (2,))

    def inner(y):
        return mpiad.mpi_allreduce(anp.sum(y**3))

    def outer(x):
        value, g = mpiad.value_and_grad(inner)(x)
        return anp.sum(g**2) + value

    def whole(zs):  # plain autograd seeds every rank's own result: the sum of all of them
        g = gradients(lambda ys: sum(anp.sum(y**3) for y in ys), zs)
        return sum(anp.sum(part**2) for part in g) + size * sum(anp.sum(z**3) for z in zs)

    assert_close(autograd.grad(outer)(xs[rank]), gradients(whole, xs)[rank])


def test_ours_of_local_code_inside_plain_autograd():
    """A communicator of this rank alone: nothing meets the other ranks."""

    def outer(x):
        return anp.sum(mpiad.grad(lambda y: anp.sum(y**4), comm=MPI.COMM_SELF)(x) * x)

    x = np.array([1.0, -2.0])
    assert_close(autograd.grad(outer)(x), 16 * x**3)
    second = autograd.grad(mpiad.grad(lambda y: y**4, comm=MPI.COMM_SELF))
    assert_close(second(2.0), np.float64(48.0))


def test_three_levels_of_both(rank, size, rank_rng):
    """Ours over plain over ours' variable, and the value of each used by the next."""
    xs = inputs(rank_rng, size, lambda r: (2,))

    def program(x, reduced):
        def middle(y):
            return anp.sum(anp.sin(y) * x**2) * anp.sum(y)

        g = autograd.grad(middle)(x * 2.0)
        return reduced(anp.sum(g * x) ** 2)

    def ours(x):
        return anp.sum(mpiad.grad(lambda z: program(z, mpiad.mpi_allreduce))(x) ** 2)

    def whole(zs):
        g = gradients(lambda ys: sum(program(y, lambda u: u) for y in ys), zs)
        return sum(anp.sum(part**2) for part in g)

    assert_close(mpiad.grad(ours, objective="sum")(xs[rank]), gradients(whole, xs)[rank])


def test_a_box_of_plain_autograd_as_the_variable(rank, size, rank_rng):
    """`make_vjp` and `jvp` inside plain autograd's trace, with collectives in order."""
    xs = inputs(rank_rng, size, lambda r: (2,))
    vs = directions(xs)

    def outputs(zs):
        total = sum(anp.sum(z**2) for z in zs)
        return [anp.sin(z) * total for z in zs]

    def mine(x):
        return anp.sin(x) * mpiad.mpi_allreduce(anp.sum(x**2))

    def along(zs):  # Σ_r 1·(J v)_r
        total, slope = sum(anp.sum(z**2) for z in zs), sum(anp.sum(2 * z * v) for z, v in zip(zs, vs))
        return sum(anp.sum(anp.cos(z) * v * total + anp.sin(z) * slope) for z, v in zip(zs, vs))

    assert_close(along(xs), np.sum(jacobian(outputs, xs) @ flat(vs)))
    got = autograd.grad(lambda x: anp.sum(mpiad.jvp(mine, x, vs[rank])[1]))(xs[rank])
    assert_close(got, gradients(along, xs)[rank])
