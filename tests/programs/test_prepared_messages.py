"""Messages of small arrays are prepared once for each program; results are those of the interpreted function."""

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import assert_same, forget_programs
from mpi4py import MPI

import mpiad
from mpiad.programs import replay
from mpiad.transport.core import linked_calls, messages

FORMS = [lambda f: f, *(lambda f, form=form: form(f, objective="sum") for form in (mpiad.grad, mpiad.value_and_grad))]
NONE = MPI.PROC_NULL


@pytest.fixture
def unprepared(monkeypatch):
    """Return the messages that are received one by one, by the functions that calls outside of programs use."""
    found, receive, finish = [], messages.receive, messages.finish_receive
    monkeypatch.setattr(messages, "finish_receive", lambda *args: found.append(args[-1]) or finish(*args))
    for module in ("exchange", "recv", "wait"):
        name = "finish_receive" if module == "wait" else "receive"
        made = finish if module == "wait" else receive
        path = f"mpiad.primitives.{module}.{name}"
        monkeypatch.setattr(path, lambda *args, made=made: found.append(args[-1]) or made(*args))
    return found


def neighbors(rank, size):
    return (rank - 1 if rank else NONE), (rank + 1 if rank + 1 < size else NONE)


def one_sided_exchanges(x):
    before, after = neighbors(mpiad.mpi_rank(), mpiad.mpi_size())
    low = mpiad.mpi_exchange(anp.sin(x[:3]), dest=after, source=before)
    high = mpiad.mpi_exchange(x[-3:] * low, dest=before, source=after)
    return anp.sum((x[:3] - low) ** 2 * (1.0 + high))


def requests(x):
    before, after = neighbors(mpiad.mpi_rank(), mpiad.mpi_size())
    started = [
        mpiad.mpi_irecv(x[:3], before, tag=3),
        mpiad.mpi_isend(x[-3:] ** 2, after, tag=3),
        mpiad.mpi_irecv(x[:3], after, tag=3),
        mpiad.mpi_isend(anp.cos(x[:3]), before, tag=3),
    ]
    inner = x[1:-1] * 0.5
    low, _, high, _ = mpiad.mpi_waitall(started)
    return anp.sum(inner**2) + anp.sum(low * high[::-1] + anp.sin(low) + high**2)


def chain_of_sends(x):
    before, after = neighbors(mpiad.mpi_rank(), mpiad.mpi_size())
    received = mpiad.mpi_recv(x, before)
    y = mpiad.mpi_send(anp.tanh(x + received), after)
    return anp.sum(y**2 * (1.0 + mpiad.mpi_rank()))


def ring(x):
    """All ranks send before they receive, as much as MPI buffers."""
    rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    large = anp.concatenate([x * (k + 1.0) for k in range(50)])  # 4,000 bytes
    mpiad.mpi_send(large, (rank + 1) % size)
    return anp.sum(anp.sin(mpiad.mpi_recv(large, (rank - 1) % size)))


def broadcast(x):
    last = mpiad.mpi_size() - 1
    return anp.sum(mpiad.mpi_bcast(x, root=last) ** 3 * x)


def unused_results(x):
    before, after = neighbors(mpiad.mpi_rank(), mpiad.mpi_size())
    mpiad.mpi_exchange(x[:2], dest=after, source=before)
    mpiad.mpi_send(x[:1], after)
    mpiad.mpi_recv(x[:1], before)
    return anp.sum(x**2)


PROGRAMS = [one_sided_exchanges, requests, chain_of_sends, broadcast, unused_results]


def test_numbers_that_are_constants(rank, size, rng):
    """They have no buffer, since the function computes them from shapes and ranks."""
    before, after = neighbors(rank, size)

    def count(x):
        return anp.sum(anp.sin(x)) / mpiad.mpi_allreduce(float(x.size + rank))

    def exchanged(x):
        return anp.sum(x**2) * mpiad.mpi_exchange(3.0 + rank, dest=after, source=before)

    def sent(x):
        received = mpiad.mpi_recv(0.0, before) if rank else 1.0
        return anp.sum(x**3) * received + mpiad.mpi_send(2.0 + rank, after) * anp.sum(x)

    numbers, of_before = [(5 + r) + r for r in range(size)], 2.0 + rank if rank else 0.0
    references = {
        count: (lambda x: np.sum(np.sin(x)) / sum(numbers), lambda x: np.cos(x) / sum(numbers)),
        exchanged: (lambda x: np.sum(x**2) * of_before, lambda x: 2 * x * of_before),
        sent: (
            lambda x: np.sum(x**3) * (1.0 + rank) + (2.0 + rank) * np.sum(x),
            lambda x: 3 * x**2 * (1.0 + rank) + 2.0 + rank,
        ),
    }
    for fun, (value, gradient) in references.items():
        jitted = mpiad.jit(fun, strict=True)
        both = mpiad.value_and_grad(mpiad.jit(fun, strict=True), objective="sum")
        for _ in range(4):
            x = rng.normal(size=5 + rank)
            assert jitted(x) == pytest.approx(value(x), rel=1e-13)
            np.testing.assert_allclose(both(x)[1], gradient(x), rtol=1e-13)


@pytest.mark.parametrize("fun", [*PROGRAMS, ring], ids=lambda fun: fun.__name__)
@pytest.mark.parametrize("form", FORMS, ids=["value", "grad", "value_and_grad"])
def test_runs_with_other_values(fun, form, rng):
    compiled, interpreted = form(mpiad.jit(fun, strict=True)), form(fun)
    for _ in range(4):
        x = rng.standard_normal(10)
        assert_same(compiled(x), interpreted(x), 1e-12)


@pytest.mark.unguarded  # under a watch nothing is prepared
@pytest.mark.parametrize("fun", PROGRAMS, ids=lambda fun: fun.__name__)
def test_nothing_is_received_by_itself(fun, unprepared, rng):
    gradient, x = mpiad.grad(mpiad.jit(fun, strict=True), objective="sum"), rng.standard_normal(10)
    for _ in range(2):
        gradient(x)
    unprepared.clear()
    gradient(x)
    assert not unprepared


def test_waits_in_another_order(rank, size, rng):
    """The receives have one tag, so that the first that is started gets the first message."""
    after, before = (rank + 1) % size, (rank - 1) % size

    def fun(x):
        first, second = mpiad.mpi_irecv(x, before), mpiad.mpi_irecv(x, before)
        sends = [mpiad.mpi_isend(x, after), mpiad.mpi_isend(anp.sin(x), after)]
        later = mpiad.mpi_wait(second)
        third = mpiad.mpi_exchange(x * later, dest=after, source=before)
        mpiad.mpi_waitall(sends)
        return anp.sum(later * 2.0 + third) + anp.sum(mpiad.mpi_wait(first) ** 2)

    compiled, interpreted = (mpiad.value_and_grad(f, objective="sum") for f in (mpiad.jit(fun, strict=True), fun))
    for _ in range(3):
        x = rng.standard_normal(4)
        assert_same(compiled(x), interpreted(x), 1e-12)


def test_values_that_were_sent(rank, size, rng):
    """A wait for a send returns the values at its start, although the array changes before the wait."""
    after, before = (rank + 1) % size, (rank - 1) % size

    def fun(x):
        y = 2.0 * x
        sending, receiving = mpiad.mpi_isend(y, after), mpiad.mpi_irecv(x, before)
        y = y * 3.0
        sent, received = mpiad.mpi_waitall([sending, receiving])
        return anp.sum(sent**2 * y) + anp.sum(received)

    compiled, interpreted = (mpiad.grad(f, objective="sum") for f in (mpiad.jit(fun, strict=True), fun))
    for _ in range(3):
        x = rng.standard_normal(4)
        assert_same(compiled(x), interpreted(x), 1e-12)


def test_a_request_without_a_partner_beside_large_messages(rank, size, rng):
    """The start and the wait of a request are both prepared, or none of them."""
    before, after = neighbors(rank, size)

    def fun(x):
        large = anp.concatenate([x] * 200)
        started = [mpiad.mpi_irecv(large, before), mpiad.mpi_isend(large, after), mpiad.mpi_irecv(x, None)]
        received, sent, zeros = mpiad.mpi_waitall(started)
        return anp.sum(received**2 * sent) + anp.sum(zeros + x)

    compiled, interpreted = (mpiad.grad(f, objective="sum") for f in (mpiad.jit(fun, strict=True), fun))
    for _ in range(3):
        x = rng.standard_normal(4)
        assert_same(compiled(x), interpreted(x), 1e-12)


def test_answers_to_messages_from_any_rank(rank, size, rng):
    """The sender differs between runs of the receiver's program, and so does the receiver of the cotangent."""

    def fun(x, sender):
        if rank == 0:
            return anp.sum(mpiad.mpi_recv(x, MPI.ANY_SOURCE) ** 3 * x)
        return anp.sum(mpiad.mpi_send(x, 0) ** 2 if rank == sender else x)

    compiled, interpreted = (mpiad.grad(f, objective="sum") for f in (mpiad.jit(fun), fun))
    for sender in (1, 2, 1, 2, 2, 1) if size > 2 else ():
        x = rng.standard_normal(3)
        assert_same(compiled(x, sender), interpreted(x, sender), 1e-12)


@pytest.mark.parametrize("way", ["recv", "irecv", "exchange"])
def test_a_message_of_another_size(way, rank, size):
    """The sender's program is another one than in earlier runs: the receiver's raises the error of its line."""
    if size == 1:
        return  # nobody sends

    @mpiad.jit
    def fun(x):
        if rank == 0:
            mpiad.mpi_send(x * 2.0, 1, tag=5)
            return x
        if rank > 1:
            return x
        if way == "exchange":
            return mpiad.mpi_exchange(x, None, 0, tag=5) + x
        return (mpiad.mpi_recv(x, 0, tag=5) if way == "recv" else mpiad.mpi_wait(mpiad.mpi_irecv(x, 0, tag=5))) + x

    for _ in range(3):
        fun(np.ones(5))
    for other in (np.ones(9), np.ones(3), np.ones(5, "f4")):
        if rank == 1:
            with pytest.raises(ValueError, match=rf"mpi_{way}: rank 0 sent .* bytes with tag 5.*\(5,\)"):
                fun(np.ones(5))
        else:
            fun(other if rank == 0 else np.ones(5))
        mpiad.reset()
    np.testing.assert_array_equal(fun(np.ones(5)), 3.0 if rank == 1 else 1.0)


@pytest.mark.parametrize("dtype", [int, bool, float])
def test_results_from_nobody_are_zeros(dtype, rank, size):
    """Also integers, with which loops don't compute; a result is a new array in each call."""
    before, after = neighbors(rank, size)

    @mpiad.jit(strict=True)
    def fun(x):
        request = mpiad.mpi_irecv(x, None)
        alone = mpiad.mpi_exchange(x, after, before), mpiad.mpi_recv(x, None), mpiad.mpi_wait(request)
        return *alone, mpiad.mpi_exchange(x, None, None) + x

    x = (np.arange(3) + rank).astype(dtype)
    for _ in range(3):
        found, *zeros, same = fun(x)
        np.testing.assert_array_equal(found, 0 * x if before == NONE else (np.arange(3) + rank - 1).astype(dtype))
        np.testing.assert_array_equal(zeros, 0 * np.array([x, x]))
        np.testing.assert_array_equal(same, x)
        assert all(array.dtype == x.dtype for array in (found, *zeros, same))
        for array in (found, *zeros, same):
            array[...] = 7


def test_replays_that_are_watched_prepare_nothing(rng):
    compiled = mpiad.jit(requests, strict=True)
    x = rng.standard_normal(10)
    with mpiad.debug.checked():
        found = compiled(x)
    assert_same(found, compiled(x), 1e-14)


def linked_messages(x):
    before, after = neighbors(mpiad.mpi_rank(), mpiad.mpi_size())
    for k in range(3):
        low = mpiad.mpi_exchange(anp.sin(x[:3]), dest=after, source=before, tag=k)
        mpiad.mpi_send(x[-2:] * (k + 1.0), after)
        x = x * anp.concatenate([low + 1.0, mpiad.mpi_recv(x[:2], before), x[:1]]) + 0.1 * mpiad.mpi_allreduce(x)
    return anp.sum(anp.tanh(x))


@pytest.mark.unguarded
def test_messages_between_kernels_are_called_by_machine_code(monkeypatch, rank, rng):
    """Python isn't called between the kernels of a part, and the results have the bits of calls from Python."""
    x, texts = rng.standard_normal(6), []
    monkeypatch.setattr(replay, "compile", lambda text, *rest: texts.append(text) or compile(text, *rest), raising=False)
    found = [mpiad.value_and_grad(mpiad.jit(linked_messages), objective="sum")(x)]
    if MPI.get_vendor()[0] == "MPICH":
        calls = [line for line in texts[-1].splitlines() if line.strip().startswith(("k", "f"))]
        assert len(calls) == 2  # one for each part
    monkeypatch.setattr(linked_calls, "_kernels", dict)
    forget_programs()
    found.append(mpiad.value_and_grad(mpiad.jit(linked_messages), objective="sum")(x))
    assert sum(line.strip().startswith("f") for line in texts[-1].splitlines()) >= 6
    found.append(mpiad.value_and_grad(linked_messages, objective="sum")(x))
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert_same(found[0], found[2], 1e-12)
