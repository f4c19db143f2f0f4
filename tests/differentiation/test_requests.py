"""Nonblocking calls: waited for in other orders on other ranks, mixed with blocking ones, and never or twice."""

import autograd.numpy as anp
import numpy as np
import pytest
from one_process import assert_close, directions, flat, gradients, hessian_products, inputs

import mpiad
from mpiad.errors import RequestError, UnfinishedMessagesError


def check(program, outputs, xs, rank):
    """Compare value, gradient, tangent and the second order in all four nestings with the one-process program."""
    vs = directions(xs)

    def whole(zs):
        return sum(outputs(zs))

    value, g = mpiad.value_and_grad(program, objective="sum")(xs[rank])
    assert_close(value, whole(xs))
    assert_close(g, gradients(whole, xs)[rank])

    expected = hessian_products(whole, xs, vs)[rank]
    assert_close(mpiad.hvp(program, objective="sum")(xs[rank], vs[rank]), expected)
    gradient = mpiad.grad(program, objective="sum")
    assert_close(mpiad.grad(lambda x: anp.sum(gradient(x) * vs[rank]), objective="sum")(xs[rank]), expected)
    assert_close(mpiad.grad(lambda x: mpiad.jvp(program, x, vs[rank])[1], objective="sum")(xs[rank]), expected)

    mine, ws = lambda zs: outputs(zs)[rank], directions(xs, 6)  # noqa: E731
    tangent = mpiad.jvp(program, xs[rank], vs[rank])[1]
    assert_close(tangent, flat(gradients(mine, xs)) @ flat(vs))
    second = mpiad.jvp(lambda x: mpiad.jvp(program, x, vs[rank])[1], xs[rank], ws[rank])[1]
    assert_close(second, flat(hessian_products(mine, xs, vs)) @ flat(ws))


def ring(size, rank):
    return (rank + 1) % size, (rank - 1) % size


def test_equal_tags_waited_for_in_different_orders(rank, size, rank_rng):
    """Three messages to the same neighbour with the same tag; each rank completes its six requests in its own order."""
    xs, (right, left) = inputs(rank_rng, size, lambda r: (3,)), ring(size, rank)

    def parts(z):
        return [anp.sin(z[:2]) * z[2], z**2, anp.prod(z)]

    def program(x):
        sends = [mpiad.mpi_isend(part, right, tag=6) for part in parts(x)]
        receives = [mpiad.mpi_irecv(like, left, tag=6) for like in (np.zeros(2), np.zeros(3), 0.0)]
        requests, values = [*sends, *receives], {}
        for k in np.random.default_rng([17, rank]).permutation(6):
            values[k] = mpiad.mpi_wait(requests[k]) * anp.sum(x)
        assert values[3].shape == (2,) and values[4].shape == (3,)
        sent = anp.sum(values[0]) + anp.sum(values[1] ** 2)
        return anp.sum(values[3] ** 2) * values[5] + anp.sum(values[4]) ** 3 + sent * values[2]

    def outputs(zs):
        losses = []
        for r, z in enumerate(zs):
            came, mine = [[p * anp.sum(z) for p in parts(y)] for y in (zs[r - 1], z)]
            sent = anp.sum(mine[0]) + anp.sum(mine[1] ** 2)
            losses.append(anp.sum(came[0] ** 2) * came[2] + anp.sum(came[1]) ** 3 + sent * mine[2])
        return losses

    check(program, outputs, xs, rank)


def test_waitall_in_the_reverse_order(rank, size, rank_rng):
    xs, (right, left) = inputs(rank_rng, size, lambda r: (2,)), ring(size, rank)

    def program(x):
        requests = [mpiad.mpi_irecv(x, left), mpiad.mpi_irecv(x, left), mpiad.mpi_isend(x**2, right)]
        requests.append(mpiad.mpi_isend(anp.exp(x), right))
        if rank % 2:
            exponential, square = mpiad.mpi_waitall(requests[1::-1])
            mpiad.mpi_waitall(requests[:1:-1])
        else:
            square, exponential, _, _ = mpiad.mpi_waitall(requests)
        return anp.sum(square * exponential) ** 2

    def outputs(zs):
        return [anp.sum(zs[r - 1] ** 2 * anp.exp(zs[r - 1])) ** 2 for r in range(size)]

    check(program, outputs, xs, rank)


@pytest.mark.parametrize("mix", ["isend to recv", "send to irecv", "exchange to both", "both to exchange"])
def test_nonblocking_calls_meet_blocking_ones(mix, rank, size, rank_rng):
    """Even ranks write their side of the ring one way, odd ranks the other."""
    if size % 2:
        size -= 1  # an odd one out takes no part
    xs = inputs(rank_rng, max(size, 1), lambda r: (3,))
    xs += inputs(rank_rng, mpiad.mpi_size(), lambda r: (3,))[len(xs) :]

    def blocking(y, right, left):
        mpiad.mpi_send(y, right, tag=1)
        return mpiad.mpi_recv(y, left, tag=1)

    def with_isend(y, right, left):
        request = mpiad.mpi_isend(y, right, tag=1)
        came = mpiad.mpi_recv(y, left, tag=1)
        return came + 0 * mpiad.mpi_wait(request)

    def with_irecv(y, right, left):
        request = mpiad.mpi_irecv(y, left, tag=1)
        mpiad.mpi_send(y, right, tag=1)
        return mpiad.mpi_wait(request)

    def exchanging(y, right, left):
        return mpiad.mpi_exchange(y, right, left, tag=1)

    even, odd = {
        "isend to recv": (with_isend, blocking),
        "send to irecv": (blocking, with_irecv),
        "exchange to both": (exchanging, with_irecv),
        "both to exchange": (with_isend, exchanging),
    }[mix]

    def program(x):
        if rank >= size:
            return anp.sum(x**2)
        right, left = ring(size, rank)
        shift = odd if rank % 2 else even
        y = shift(anp.sin(x) * (rank + 1.0), right, left)
        z = shift(y**2 * x, right, left)  # the same tag again
        return anp.sum(z**2)

    def outputs(zs):
        losses = []
        for r in range(len(zs)):
            if r >= size:
                losses.append(anp.sum(zs[r] ** 2))
                continue
            y = lambda s: anp.sin(zs[(s - 1) % size]) * ((s - 1) % size + 1.0)  # noqa: E731
            losses.append(anp.sum((y((r - 1) % size) ** 2 * zs[(r - 1) % size]) ** 2))
        return losses

    check(program, outputs, xs, rank)


@pytest.mark.few(2)
@pytest.mark.also_jitted
def test_a_pipeline_of_requests_over_steps(rank, size, rank_rng):
    """Each step waits for the receive of the step before: communication overlaps computation."""
    xs, (right, left) = inputs(rank_rng, size, lambda r: (2,)), ring(size, rank)

    def program(x):
        y, pending = x, None
        for _ in range(4):
            sending, receiving = mpiad.mpi_isend(y, right), mpiad.mpi_irecv(y, left)
            local = anp.sin(y)
            if pending is not None:
                local = local + mpiad.mpi_wait(pending[1])
                mpiad.mpi_wait(pending[0])
            y, pending = local, (sending, receiving)
        mpiad.mpi_wait(pending[0])
        return anp.sum((y + mpiad.mpi_wait(pending[1])) ** 2)

    def outputs(zs):
        ys, late = list(zs), None
        for _ in range(4):
            came = [ys[r - 1] for r in range(size)]
            ys = [anp.sin(y) if late is None else anp.sin(y) + late[r] for r, y in enumerate(ys)]
            late = came
        return [anp.sum((y + c) ** 2) for y, c in zip(ys, late)]

    check(program, outputs, xs, rank)


@pytest.mark.also_jitted
def test_reductions_waited_for_in_different_orders(rank, size, rank_rng):
    xs = inputs(rank_rng, size)

    def program(x):
        first = mpiad.mpi_iallreduce(anp.sin(x[:2]))
        total = mpiad.mpi_allreduce(anp.sum(x))  # a blocking one between
        second = mpiad.mpi_iallreduce(x[:3] ** 2 * total)
        third = mpiad.mpi_iallreduce(anp.sum(x**3))
        values, requests = {}, [first, second, third]
        for k in np.random.default_rng([5, rank]).permutation(3):
            values[k] = mpiad.mpi_wait(requests[k])
        return anp.sum(values[0]) * anp.sum(values[1] * x[:3]) * (rank + 1.0) + values[2] ** 2

    def outputs(zs):
        total = sum(anp.sum(z) for z in zs)
        first, second = sum(anp.sin(z[:2]) for z in zs), sum(z[:3] ** 2 * total for z in zs)
        third = sum(anp.sum(z**3) for z in zs)
        return [anp.sum(first) * anp.sum(second * z[:3]) * (r + 1.0) + third**2 for r, z in enumerate(zs)]

    check(program, outputs, xs, rank)


@pytest.mark.parametrize("length", [1, 300_000])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_blocking_send_before_a_receive_that_is_started(length, shift, rank, size):
    """Backwards the start of the receive must not wait for the message back: its receiver comes to it only after that."""

    def program(x):
        mpiad.mpi_send(x**2, (rank + shift) % size)
        came = mpiad.mpi_wait(mpiad.mpi_irecv(x, (rank - shift) % size))
        return anp.sum(came * np.arange(1.0, length + 1))

    x = np.full(length, 2.0 + rank)
    g = mpiad.grad(program, objective="sum")(x)
    np.testing.assert_array_equal(g, 2 * x * np.arange(1.0, length + 1))


@pytest.mark.parametrize("length", [1, 300_000])
def test_a_send_that_is_waited_for_before_its_receiver_comes(length, rank, size):
    def program(x):
        mpiad.mpi_wait(mpiad.mpi_isend(x**2, (rank + 1) % size))
        return anp.sum(mpiad.mpi_recv(x, (rank - 1) % size))

    x = np.full(length, 2.0 + rank)
    np.testing.assert_array_equal(mpiad.grad(program, objective="sum")(x), 2 * x)


def test_no_partner(rank, size, rank_rng):
    """PROC_NULL or None: a send that goes nowhere, a receive of zeros."""

    def program(x):
        sending, receiving = mpiad.mpi_isend(x**2, None), mpiad.mpi_irecv(x, None)
        return anp.sum(mpiad.mpi_wait(sending) * 3 + mpiad.mpi_wait(receiving))

    check(program, lambda zs: [anp.sum(3 * z**2) for z in zs], inputs(rank_rng, size), rank)


def test_changing_an_array_after_the_start_changes_nothing_sent(rank, size):
    right, left = ring(size, rank)

    def program(x):
        a = np.full(3, rank + 1.0)
        requests = [mpiad.mpi_isend(a, right), mpiad.mpi_iallreduce(a), mpiad.mpi_irecv(a, left)]
        a[:] = -7.0
        sent, total, came = mpiad.mpi_waitall(requests)
        assert np.all(mpiad.stop_gradient(sent) == rank + 1) and np.all(mpiad.stop_gradient(total) == sum(range(size + 1)))
        return anp.sum(came) * x

    value, g = mpiad.value_and_grad(program, objective="sum")(2.0)
    assert_close(g, 3.0 * (left + 1))


# ---- mistakes


@pytest.fixture
def renewed():
    """Whatever a mistake leaves under way ends with its test."""
    yield
    mpiad.reset()


@pytest.mark.usefixtures("renewed")
@pytest.mark.parametrize("traced", [False, True])
def test_waiting_twice_raises(traced, rank):
    def program(x):
        sending, receiving = mpiad.mpi_isend(x, rank), mpiad.mpi_irecv(x, rank)
        mpiad.mpi_waitall([sending, receiving])
        with pytest.raises(RequestError, match=r"mpi_wait: .*mpi_irecv of shape \(2,\).*waited for before"):
            mpiad.mpi_wait(receiving)
        with pytest.raises(RequestError, match="mpi_isend"):
            mpiad.mpi_waitall([sending])
        return anp.sum(x)

    if traced:
        mpiad.grad(program)(np.ones(2))
    else:
        program(np.ones(2))


@pytest.mark.usefixtures("renewed")
def test_waiting_in_another_trace_than_the_start_raises(rank):
    outside = mpiad.mpi_irecv(np.zeros(2), rank)
    mpiad.mpi_send(np.ones(2), rank)
    with pytest.raises(RequestError, match="started outside any trace"):
        mpiad.grad(lambda x: anp.sum(mpiad.mpi_wait(outside) * x))(np.ones(2))
    assert_close(mpiad.mpi_wait(outside), np.ones(2))  # where it was started it can still be completed

    def outer(x):
        request = mpiad.mpi_iallreduce(x)
        with pytest.raises(RequestError, match="in another trace"):
            mpiad.grad(lambda y: anp.sum(mpiad.mpi_wait(request) * y))(np.ones(2))
        return anp.sum(mpiad.mpi_wait(request))

    assert_close(mpiad.grad(outer, objective="sum")(np.ones(2)), np.full(2, float(mpiad.mpi_size())))


@pytest.mark.usefixtures("renewed")
def test_a_request_of_an_ended_trace_is_refused(rank):
    kept = []

    def program(x):
        kept.append(mpiad.mpi_irecv(x, rank))
        mpiad.mpi_send(x, rank)
        return anp.sum(x)

    with pytest.raises(RequestError):
        mpiad.grad(program)(np.ones(2))
    mpiad.reset()
    with pytest.raises(RequestError):
        mpiad.mpi_wait(kept[0])


@pytest.mark.usefixtures("renewed")
@pytest.mark.parametrize("start", ["isend", "irecv", "iallreduce"])
def test_a_request_never_waited_for_raises_on_all_ranks(start, rank, size, rank_rng):
    """On the last rank only; the others would go on to the next communication."""
    xs, last = inputs(rank_rng, size, lambda r: (2,)), size - 1

    def program(x, waits):
        if start == "iallreduce":
            request = mpiad.mpi_iallreduce(x)
        elif rank == last:
            request = mpiad.mpi_isend(x, 0) if start == "isend" else mpiad.mpi_irecv(x, 0)
        if start == "isend" and rank == 0:
            mpiad.mpi_recv(x, last)
        if start == "irecv" and rank == 0:
            mpiad.mpi_send(x, last)
        if start == "iallreduce" and rank != last or rank == last and waits:
            mpiad.mpi_wait(request)
        return mpiad.mpi_allreduce(anp.sum(x**2))

    with pytest.raises(RequestError, match=f"1 request.*<mpi_{start} of .*mpi_wait.* on rank {last}"):
        mpiad.value_and_grad(program)(xs[rank], False)
    if rank == last:
        with pytest.raises(UnfinishedMessagesError, match="reset"):
            mpiad.mpi_size()
            mpiad.mpi_allreduce(1.0)
    mpiad.reset()
    value, g = mpiad.value_and_grad(program)(xs[rank], True)
    assert_close(value, sum(np.sum(x**2) for x in xs))
    assert_close(g, 2 * xs[rank])


@pytest.mark.usefixtures("renewed")
def test_a_request_never_waited_for_raises_under_the_other_functions(rank):
    def program(x):
        mpiad.mpi_irecv(x, rank)
        mpiad.mpi_send(x, rank)
        return x

    for call in (
        lambda: mpiad.make_vjp(program)(np.ones(2)),
        lambda: mpiad.jvp(program, np.ones(2), np.ones(2)),
        lambda: mpiad.hvp(lambda x: anp.sum(program(x)))(np.ones(2), np.ones(2)),
        lambda: mpiad.jacobian(program)(np.ones(2)),
    ):
        with pytest.raises(RequestError, match="1 request"):
            call()
        mpiad.reset()


@pytest.mark.parametrize("wrong", [None, 3, "request", np.ones(2)], ids=str)
def test_what_is_no_request_is_refused(wrong):
    with pytest.raises(TypeError, match=f"mpi_wait: .*{type(wrong).__name__}"):
        mpiad.mpi_wait(wrong)
