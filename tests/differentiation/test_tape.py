"""The ordered tape: every communication is visited, on every rank, whatever its loss depends on."""

import gc
import time

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from one_process import assert_close, directions, gradients, hessian_products, inputs

import mpiad

PAIRS = pytest.mark.mpi(min_size=2)


def check(program, whole, xs, rank, root=0, objective="root", second=True):
    """Compare J, the gradient and the product of the Hessian with the one-process program."""
    value, g = mpiad.value_and_grad(program, root=root, objective=objective)(xs[rank])
    assert_close(value, whole(xs))
    assert_close(g, gradients(whole, xs)[rank])
    if second:
        vs = directions(xs)
        got = mpiad.hvp(program, root=root, objective=objective)(xs[rank], vs[rank])
        assert_close(got, hessian_products(whole, xs, vs)[rank])


def test_a_send_whose_result_nobody_uses(rank, size, rank_rng):
    """The sender's own loss doesn't depend on what it sent; the root's does."""
    xs, right, left = inputs(rank_rng, size), (rank + 1) % size, (rank - 1) % size

    def program(x):
        mpiad.mpi_send(anp.sin(x[:2]), right)
        came = mpiad.mpi_recv(np.zeros(2), left)
        return anp.sum(came**3) if rank == size - 1 else 7.0

    check(program, lambda zs: anp.sum(anp.sin(zs[(size - 2) % size][:2]) ** 3), xs, rank, root=size - 1)


def test_a_receive_whose_result_nobody_uses(rank, size, rank_rng):
    xs, right, left = inputs(rank_rng, size), (rank + 1) % size, (rank - 1) % size

    def program(x):
        x = mpiad.mpi_send(x, right)
        mpiad.mpi_recv(np.zeros(3 + left), left)
        return mpiad.mpi_sum(anp.sum(x**3))

    check(program, lambda zs: sum(anp.sum(z**3) for z in zs), xs, rank)


@PAIRS
def test_a_receive_with_no_traced_input(rank, size, rank_rng):
    """What the last rank computes comes from the first alone, its own variable isn't used."""
    xs, last = inputs(rank_rng, size), size - 1

    def program(x):
        if rank == 0:
            mpiad.mpi_send(x**2, last, tag=4)
        if rank == last:
            return anp.sum(mpiad.mpi_recv(np.zeros(3), 0, tag=4) ** 2)
        return None

    check(program, lambda zs: anp.sum(zs[0] ** 4), xs, rank, root=last)


@PAIRS
def test_a_rank_that_returns_a_constant(rank, size, rank_rng):
    xs = inputs(rank_rng, size)

    def program(x):
        total = mpiad.mpi_allreduce(anp.sum(x**3))
        return 1.5 if rank == 1 else total * (rank + 1.0)

    def whole(zs):
        total = sum(anp.sum(z**3) for z in zs)
        return sum(1.5 if r == 1 else total * (r + 1.0) for r in range(size))

    check(program, whole, xs, rank, objective="sum")


def test_no_rank_uses_what_was_communicated(rank, size, rank_rng):
    xs, right, left = inputs(rank_rng, size), (rank + 1) % size, (rank - 1) % size

    def program(x):
        mpiad.mpi_allreduce(anp.sum(x))
        mpiad.mpi_exchange(x[:2], right, left)
        mpiad.mpi_barrier()
        mpiad.mpi_wait(mpiad.mpi_iallreduce(x[0]))
        return anp.sum(x**2) * (rank + 1.0)

    check(program, lambda zs: sum(anp.sum(z**2) * (r + 1.0) for r, z in enumerate(zs)), xs, rank, objective="sum")


def test_different_numbers_of_local_operations(rank, size, rank_rng):
    xs = inputs(rank_rng, size)

    def between(x, r):
        for _ in range(3 * r):
            x = anp.sin(x) + x[::-1] / 3
        return x

    def program(x):
        total = mpiad.mpi_allreduce(anp.sum(between(x, rank)))
        return mpiad.mpi_allreduce(anp.sum(between(x * total, size - rank))) ** 2

    def whole(zs):
        total = sum(anp.sum(between(z, r)) for r, z in enumerate(zs))
        return sum(anp.sum(between(z * total, size - r)) for r, z in enumerate(zs)) ** 2

    check(program, whole, xs, rank)


@PAIRS
def test_a_branch_that_depends_on_the_rank(rank, size, rank_rng):
    """Even ranks ask, odd ranks answer, an odd one out does neither."""
    xs = inputs(rank_rng, size)

    def program(x):
        if rank % 2 == 0 and rank + 1 < size:
            mpiad.mpi_send(anp.exp(x[0]), rank + 1)
            here = mpiad.mpi_recv(0.0, rank + 1) * anp.sum(x)
        elif rank % 2 == 1:
            asked = mpiad.mpi_recv(0.0, rank - 1)
            mpiad.mpi_send(asked**2 * anp.prod(x), rank - 1)
            here = anp.sum(x)
        else:
            here = anp.prod(x)
        return mpiad.mpi_sum(here, root=1)

    def whole(zs):
        total = 0.0
        for r, z in enumerate(zs):
            if r % 2 == 0 and r + 1 < size:
                total = total + anp.exp(z[0]) ** 2 * anp.prod(zs[r + 1]) * anp.sum(z)
            else:
                total = total + (anp.sum(z) if r % 2 else anp.prod(z))
        return total

    check(program, whole, xs, rank, root=1)


def test_a_branch_that_depends_on_reduced_values(rank, size, rank_rng):
    xs = inputs(rank_rng, size)

    taken = []

    def program(x):
        total = mpiad.mpi_allreduce(anp.sum(x))
        for _ in range(20):
            taken.append(bool(total > 0.25))
            if taken[-1]:
                total = mpiad.mpi_allreduce(anp.sum(x**2)) / (2 + total**2) / 40
            else:
                total = total + mpiad.mpi_allreduce(anp.sum(x**2)) / 5
        return total

    def whole(zs):
        total, squares = sum(anp.sum(z) for z in zs), sum(anp.sum(z**2) for z in zs)
        for _ in range(20):
            total = squares / (2 + total**2) / 40 if total > 0.25 else total + squares / 5
        return total

    check(program, whole, xs, rank)
    assert set(taken) == {True, False}


def test_integer_results_as_loop_counts(rank, size, rank_rng):
    xs = inputs(rank_rng, size)

    def program(x):
        steps = mpiad.mpi_allreduce(2)
        assert steps == 2 * size
        most = mpiad.mpi_allreduce(len(x), op=MPI.MAX)
        counts = mpiad.mpi_allgather(np.array(len(x)))
        for _ in range(steps):
            x = anp.sin(x) * counts[rank] / most
        for _ in range(mpiad.mpi_bcast(3 if rank == size - 1 else 0, root=size - 1)):
            x = x + mpiad.mpi_allreduce(anp.sum(x))
        return mpiad.mpi_allreduce(anp.sum(x**2))

    def whole(zs):
        for _ in range(2 * size):
            zs = [anp.sin(z) * (3 + r) / (2 + size) for r, z in enumerate(zs)]
        for _ in range(3):
            total = sum(anp.sum(z) for z in zs)
            zs = [z + total for z in zs]
        return sum(anp.sum(z**2) for z in zs)

    check(program, whole, xs, rank)


def test_integers_are_sent_and_received_inside_a_trace(rank, size, rank_rng):
    """Integer messages leave no trace, so their order among the others must not matter backwards."""
    xs, right, left = inputs(rank_rng, size), (rank + 1) % size, (rank - 1) % size

    def program(x):
        length = mpiad.mpi_exchange(len(x), right, left, tag=2)
        mpiad.mpi_send(np.array([rank, 5]), right, tag=2)
        mpiad.mpi_send(x**2, right, tag=2)
        who = mpiad.mpi_recv(np.zeros(2, int), left, tag=2)
        assert length == 3 + left and list(who) == [left, 5]
        return mpiad.mpi_allreduce(anp.sum(mpiad.mpi_recv(np.zeros(length), left, tag=2) * x[0]))

    check(program, lambda zs: sum(anp.sum(zs[r - 1] ** 2) * z[0] for r, z in enumerate(zs)), xs, rank)


def test_stop_lets_no_derivative_through(rank, size, rank_rng):
    xs = inputs(rank_rng, size)
    constants = [np.sum(x) for x in xs]

    def program(x):
        return mpiad.mpi_allreduce(anp.sum(x**2) * mpiad.stop_gradient(anp.sum(x)))

    check(program, lambda zs: sum(anp.sum(z**2) * c for z, c in zip(zs, constants)), xs, rank)


def test_a_function_without_communication(rank, size, rank_rng):
    xs = inputs(rank_rng, size)
    check(lambda x: anp.sum(x**3) * (rank + 1.0), lambda zs: anp.sum(zs[-1] ** 3) * size, xs, rank, root=size - 1)


def test_variables_closed_over_from_an_outer_trace(rank, size, rank_rng):
    """The inner function sends a variable of the outer one, as a closure, and its own."""
    xs, right, left = inputs(rank_rng, size), (rank + 1) % size, (rank - 1) % size

    def program(x):
        def inner(y):
            came = mpiad.mpi_exchange(x[:2] * y, right, left)
            return anp.sum(came**2)

        return anp.sum(mpiad.grad(inner, objective="sum")(x[1:3]) * x[0])

    def whole(zs):
        inner = lambda ys: sum(anp.sum((z[:2] * y) ** 2) for z, y in zip(zs, ys))  # noqa: E731
        found = gradients(inner, [z[1:3] for z in zs])
        return sum(anp.sum(g * z[0]) for g, z in zip(found, zs))

    check(program, whole, xs, rank, objective="sum")


def many(x, count, rank, size):
    """Messages to this rank itself, so that the time measured is the tape's; to the neighbour now and then."""
    right, left = (rank + 1) % size, (rank - 1) % size
    y = x
    for k in range(count // 4):
        z = mpiad.mpi_exchange(y, rank, rank)
        request = mpiad.mpi_irecv(z, rank)
        mpiad.mpi_send(z * 1.0001, rank)
        y = mpiad.mpi_wait(request)
        if k % 250 == 249:
            y = mpiad.mpi_exchange(y, right, left)
    return mpiad.mpi_allreduce(anp.sum(y**2))


@pytest.mark.thorough
@pytest.mark.one_rank
@pytest.mark.limit(120)
def test_ten_thousand_communications_take_time_linear_in_their_number(rank, size):
    """A quadratic tape would take sixteen times as long for four times as many; no recursion limit is met."""
    x = np.array([1.0, 2.0]) + rank

    def seconds(count, times):
        best = np.inf
        for _ in range(times):
            gc.collect()
            mpiad.mpi_barrier()
            start = time.process_time()
            value, g = mpiad.value_and_grad(lambda x: many(x, count, rank, size))(x)
            best = min(best, time.process_time() - start)
        steps = count // 4
        assert_close(g, 2 * 1.0001 ** (2 * steps) * x)
        assert_close(value, 1.0001 ** (2 * steps) * sum(np.sum((np.array([1.0, 2.0]) + r) ** 2) for r in range(size)))
        return best

    gc.disable()  # its passes over all that the test session holds would be measured too
    try:
        for _ in range(3):  # the machine's speed may change between
            few, many_times = seconds(2_500, times=2), seconds(10_000, times=1)
            ratio = mpiad.mpi_allreduce(many_times / few) / size
            if ratio < 8:
                break
    finally:
        gc.enable()
    assert ratio < 8, f"10,000 communications took {many_times:.2f} s, 2,500 took {few:.2f} s: a factor of {ratio:.1f}"
