import autograd.numpy as anp
import numpy as np
import pytest
import reference
from against_reference import arrays, check
from mpi4py import MPI

import mpiad
from mpiad.errors import RequestError


def received(size, count):
    """Return the program in which each rank's result is the array that the one before has sent in pieces."""
    return reference.move([(count, 3)] * size, [(rank - 1) % size for rank in range(size)])


@pytest.mark.parametrize("start", [mpiad.mpi_send, mpiad.mpi_isend], ids=["send", "isend"])
def test_equal_tags_waited_for_in_orders_of_each_ranks_own(rngs, rank, size, start):
    """Messages meet in the order of their start, whichever order they are waited for in."""
    count = 4
    after, before = (rank + 1) % size, (rank - 1) % size
    orders = [np.random.default_rng([rank, side]).permutation(2 * count) for side in range(2)]

    def fun(x):
        requests = [mpiad.mpi_irecv(x[0], before, tag=9) for _ in range(count)]
        for row in x:
            made = start(row, after, tag=9)
            if start is mpiad.mpi_isend:
                requests.append(made)
        values = {place: mpiad.mpi_wait(requests[place]) for place in orders[0] if place < len(requests)}
        return anp.stack([values[place] for place in range(count)])

    check(fun, received(size, count), arrays(rngs, (count, 3)), rngs)


def test_many_requests_with_equal_tags(rngs, rank, size):
    count = 30
    after, before = (rank + 1) % size, (rank - 1) % size

    def fun(x):
        requests = [mpiad.mpi_isend(row, after) for row in x]
        requests += [mpiad.mpi_irecv(x[0], before) for _ in range(count)]
        requests = requests[::-1] if rank % 2 else requests
        values = mpiad.mpi_waitall(requests)
        return anp.stack(values[:count][::-1] if rank % 2 else values[count:])

    check(fun, received(size, count), arrays(rngs, (count, 3)), rngs)


def test_waitall_keeps_the_order_and_takes_any_iterable(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size
    sends = [mpiad.mpi_isend(10.0 * rank + k, after, tag=k) for k in range(3)]
    receives = {k: mpiad.mpi_irecv(0.0, before, tag=k) for k in (2, 0, 1)}
    assert mpiad.mpi_waitall(receives.values()) == [10.0 * before + k for k in (2, 0, 1)]
    assert mpiad.mpi_waitall(request for request in sends) == [10.0 * rank + k for k in range(3)]
    assert mpiad.mpi_waitall([]) == []


def test_request_shows_what_it_is(rank, size):
    request = mpiad.mpi_irecv(np.ones((2, 3), "f4"), rank, tag=5)
    assert repr(request) == f"<mpi_irecv of shape (2, 3), dtype float32, peer {rank}, tag 5: active>"
    mpiad.mpi_send(np.ones((2, 3), "f4"), rank, tag=5)
    mpiad.mpi_wait(request)
    assert repr(request).endswith(": done>")


def test_the_methods_of_mpi4pys_requests():
    request = mpiad.mpi_isend(1.0, None)
    for name in ("Wait", "wait", "Test", "Cancel"):
        with pytest.raises(
            AttributeError, match=rf"no attribute '{name}'\. Complete it by y = mpi_wait\(request\), or .*mpi_waitall"
        ):
            getattr(request, name)()
    with pytest.raises(TypeError, match="completed by mpi_wait or mpi_waitall.* to mpi4py"):
        MPI.Request.Waitall([request])
    assert mpiad.mpi_wait(request) == 1.0


def test_waiting_twice():
    request = mpiad.mpi_isend(1.0, None)
    mpiad.mpi_wait(request)
    for again in (lambda: mpiad.mpi_wait(request), lambda: mpiad.mpi_waitall([request])):
        with pytest.raises(RequestError, match="mpi_wait: <mpi_isend .*> was waited for before"):
            again()


def test_waiting_in_another_trace():
    outside = mpiad.mpi_isend(1.0, None)
    with pytest.raises(RequestError, match="mpi_wait: <mpi_isend .*> was started outside any trace"):
        mpiad.make_vjp(lambda x: mpiad.mpi_wait(outside) * x)(1.0)
    assert mpiad.mpi_wait(outside) == 1.0


def test_what_is_no_request():
    for wrong in (None, MPI.REQUEST_NULL, 1.0, [mpiad.mpi_isend(1.0, None)]):
        with pytest.raises(TypeError, match=f"mpi_wait: expected a request of .*, but got {type(wrong).__name__}"):
            mpiad.mpi_wait(wrong)


def test_sent_values_are_read_only(rank, size):
    """MPI may still read them after the wait."""
    x = np.arange(3.0) + rank
    request = mpiad.mpi_isend(x, (rank + 1) % size)
    x[:] = -1.0
    sent = mpiad.mpi_wait(request)
    np.testing.assert_array_equal(sent, np.arange(3.0) + rank)
    with pytest.raises(ValueError, match="read-only"):
        sent[0] = 5.0
    np.testing.assert_array_equal(mpiad.mpi_recv(x, (rank - 1) % size), np.arange(3.0) + (rank - 1) % size)
