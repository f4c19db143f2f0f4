import autograd.numpy as anp
import numpy as np
import pytest
import reference
from against_reference import arrays, assert_close, check, check_exact
from arrays import each_array
from mpi4py import MPI

import mpiad

WORLD = MPI.COMM_WORLD
HIGHEST_TAG = WORLD.Get_attr(MPI.TAG_UB)


def around(size):
    """Return the rank that each rank of a ring receives from."""
    return [(rank - 1) % size for rank in range(size)]


def kept_and_received(rank, size, tag=0):
    """Return the program in which all ranks of a ring send first, and which returns what they kept and received."""

    def fun(x):
        kept = mpiad.mpi_send(x, (rank + 1) % size, tag=tag)
        return anp.stack((kept, mpiad.mpi_recv(x, (rank - 1) % size, tag=tag)))

    return fun


def ring(shape, size):
    """Return the reference of `kept_and_received`."""
    return reference.stack(reference.keep([shape] * size), reference.move([shape] * size, around(size)))


@each_array
def test_arrays(rngs, rank, size, dtype, shape, layout):
    check(kept_and_received(rank, size), ring(shape, size), arrays(rngs, shape, dtype, layout), rngs)


@pytest.mark.parametrize("tag", [1, 32768, 10**6, HIGHEST_TAG])
def test_tags(rngs, rank, size, tag):
    check(kept_and_received(rank, size, tag), ring((3,), size), arrays(rngs, (3,)), rngs)


def test_integers_and_booleans(rngs, rank, size):
    def fun(x):
        mpiad.mpi_send(x, (rank + 1) % size)
        return mpiad.mpi_recv(x, (rank - 1) % size)

    check_exact(fun, reference.move([(2, 3)] * size, around(size)), rngs)


def test_x_is_passed_through(rank, size):
    x = np.arange(3.0)
    assert mpiad.mpi_send(x, (rank + 1) % size) is x
    mpiad.mpi_recv(x, (rank - 1) % size)


def test_numbers(rank, size):
    for number in (2.5, 2, True, 1j, np.float32(2.5)):
        kept = mpiad.mpi_send(number, (rank + 1) % size)
        got = mpiad.mpi_recv(number, (rank - 1) % size)
        assert kept == got == number and kept.dtype == got.dtype == np.result_type(number)


@pytest.mark.parametrize("length", [3, 200_000])
@pytest.mark.parametrize("step", [1, -2])
def test_changing_x_afterwards_changes_nothing_sent(rank, size, length, step):
    """Short messages are on their way at once; long ones wait in the sender's memory for their receiver."""
    x = np.full(length, float(rank))[::step]
    mpiad.mpi_send(x, (rank + 1) % size)
    x[:] = -1
    assert np.all(mpiad.mpi_recv(x, (rank - 1) % size) == (rank - 1) % size)


def test_changing_a_scalar_array_afterwards_changes_nothing_sent(rank, size):
    x = np.array(float(rank))
    mpiad.mpi_send(x, (rank + 1) % size)
    x[...] = -1
    assert mpiad.mpi_recv(0.0, (rank - 1) % size) == (rank - 1) % size


def test_long_messages_that_all_ranks_send_first(rank, size):
    """200,000 numbers: more than MPI takes without a receiver, in either direction."""

    def fun(x):
        for _ in range(3):
            mpiad.mpi_send(x, (rank + 1) % size)
        got = [mpiad.mpi_recv(x, (rank - 1) % size) for _ in range(3)]
        return anp.sum((rank + 1) * got[0] ** 2 + got[1] * got[2])

    gradient = mpiad.grad(fun, objective="sum")(np.full(200_000, 1.0 + rank))
    assert np.all(gradient == 2 * (1 + rank) * ((rank + 1) % size + 2))


@pytest.mark.parametrize("nobody", [None, MPI.PROC_NULL], ids=["none", "proc-null"])
def test_no_receiver(rngs, size, nobody):
    check(lambda x: mpiad.mpi_send(x, nobody), reference.keep([(2, 3)] * size), arrays(rngs, (2, 3)), rngs)


def test_pipeline(rngs, rank, size):
    """Each rank adds its own to what the one before has passed on: prefix sums."""
    before, after = (rank - 1 if rank else None), (rank + 1 if rank + 1 < size else None)

    def fun(x):
        return mpiad.mpi_send(x + mpiad.mpi_recv(x, before), after)

    check(fun, reference.scan([(2, 3)] * size), arrays(rngs, (2, 3)), rngs)


def test_one_receiver_of_many_messages(rngs, rank, size):
    """All ranks send to the first, which receives in the reverse order of ranks."""

    def fun(x):
        mpiad.mpi_send(x, 0)
        if rank > 0:
            return anp.zeros((0, 3))
        return anp.stack([mpiad.mpi_recv(x, source) for source in reversed(range(size))][::-1])

    check(fun, reference.gather([(3,)] * size, 0), arrays(rngs, (3,)), rngs)


def test_many_messages_with_equal_tags(rngs, rank, size):
    """Each has a weight of its own, so a cotangent that came back to another message would be seen."""
    count = 60
    xs, ws = arrays(rngs, (count,)), arrays(rngs, (count,))

    def fun(x):
        for k in range(count):
            mpiad.mpi_send(x[k], (rank + 1) % size, tag=7)
        got = [mpiad.mpi_recv(0.0, (rank - 1) % size, tag=7) for _ in range(count)]
        return sum(w * y**2 for w, y in zip(ws[rank], got))

    after = (rank + 1) % size
    assert_close(mpiad.grad(fun, objective="sum")(xs[rank]), 2 * ws[after] * xs[rank], "f8")


@pytest.mark.interpreted
@pytest.mark.parametrize("comm", [None, WORLD], ids=["default", "world"])
def test_users_own_messages_with_the_same_tags_in_between(rank, size, comm):
    after, before = (rank + 1) % size, (rank - 1) % size
    mine, own = np.array([100.0 + rank, 200.0 + rank]), np.empty(2)
    requests = []

    def fun(x):
        requests.append(WORLD.Isend(mine[:1], after, 3))
        mpiad.mpi_send(x, after, tag=3, comm=comm)
        requests.append(WORLD.Isend(mine[1:], after, 3))  # still under way when the reverse pass sends
        requests.append(WORLD.Irecv(own[:1], before, 3))
        return (rank + 1) * mpiad.mpi_recv(x, before, tag=3, comm=comm) ** 2

    assert mpiad.grad(fun, objective="sum")(1.0 + rank) == 2 * (after + 1) * (1.0 + rank)
    WORLD.Recv(own[1:], before, 3)
    MPI.Request.Waitall(requests)
    np.testing.assert_array_equal(own, [100.0 + before, 200.0 + before])


def test_receiver_that_is_not_there(size):
    allowed = rf"a rank from 0 to {size - 1} or MPI.PROC_NULL"
    for dest in (size, -7, 10**6):
        with pytest.raises(ValueError, match=rf"mpi_send: dest must be {allowed} \(.* {size} ranks\), but got {dest}"):
            mpiad.mpi_send(1.0, dest)
    for dest, got in ((0.0, "float 0.0"), ("0", "str '0'"), ([0], r"list \[0\]")):
        with pytest.raises(TypeError, match=f"mpi_send: dest must be {allowed}, but got {got}"):
            mpiad.mpi_send(1.0, dest)
    with pytest.raises(ValueError, match=f"mpi_send: dest must be {allowed}.* got {MPI.ANY_SOURCE}"):
        mpiad.mpi_send(1.0, MPI.ANY_SOURCE)


def test_tag_that_is_not_there():
    for tag in (-5, MPI.ANY_TAG, HIGHEST_TAG + 1):
        with pytest.raises(ValueError, match=f"mpi_send: tag must be an integer from 0 to {HIGHEST_TAG}, but got {tag}"):
            mpiad.mpi_send(1.0, 0, tag=tag)
    for tag in (1.0, "a", None):
        with pytest.raises(TypeError, match=f"mpi_send: tag must be an integer from 0 to .*got {type(tag).__name__}"):
            mpiad.mpi_send(1.0, 0, tag=tag)
