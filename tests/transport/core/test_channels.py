"""Communicators of all kinds, and the library's duplicates of them."""

import contextlib
import threading
import time
import weakref
from pathlib import Path

import autograd.numpy as anp
import numpy as np
import pytest
import reference
from against_reference import arrays, check
from each_line import interrupted_before_each_line
from linear_primitives import LINEAR_PRIMITIVES
from mpi4py import MPI

import mpiad
from mpiad.errors import CommunicatorError, UnfinishedMessagesError
from mpiad.transport import Envelope, Spec, channel
from mpiad.transport.core import channels, messages
from mpiad.transport.core.polling import Mailbox, StateExchange, packed

WORLD = MPI.COMM_WORLD


@pytest.fixture
def parity(rank):
    """The ranks of this rank's parity, in reverse order."""
    comm = WORLD.Split(rank % 2, -rank)
    mpiad.mpi_init(comm)
    yield comm
    comm.Free()


def parities(size):
    """Return the groups of `parity`, as the reference takes them."""
    return [group for group in (list(range(size))[::-1][first::2] for first in (0, 1)) if group]


@pytest.mark.parametrize("name", list(LINEAR_PRIMITIVES))
def test_part_of_the_ranks(rngs, parity, size, name):
    fun, make = LINEAR_PRIMITIVES[name]
    program = reference.within(parities(size), [(3, 2)] * size, make)
    check(lambda x: fun(x, parity), program, arrays(rngs, (3, 2)), rngs)


def test_product_over_part_of_the_ranks(rngs, parity, rank, size):
    """Its adjoint gathers the factors, on the communicator that they were multiplied on."""
    group = next(group for group in parities(size) if rank in group)
    xs = [np.where(rng.uniform(size=4) < 0.3, 0, x) for rng, x in zip(rngs, arrays(rngs, (4,)))]
    program = reference.reduction("PROD", [(4,)] * len(group))
    own, own_rngs = [xs[r] for r in group], [rngs[r] for r in group]
    check(lambda x: mpiad.mpi_allreduce(x, MPI.PROD, comm=parity), program, own, own_rngs, parity)


def test_only_some_ranks_call(rngs, parity, rank, size):
    """What one part of the ranks does, the other needn't know."""
    own_rngs = [rngs[r] for r in next(group for group in parities(size) if rank in group)]
    if rank % 2 == 0:
        xs = arrays(own_rngs, (3,))
        check(lambda x: mpiad.mpi_scan(x, comm=parity), reference.scan([(3,)] * len(xs)), xs, own_rngs, parity)


def test_two_communicators_and_the_world_interleaved(rngs, parity, rank, size):
    halves = [list(range(size))[: size // 2], list(range(size))[size // 2 :]]
    half = WORLD.Split(rank >= size // 2, rank)

    def fun(x):
        a = mpiad.mpi_allreduce(x, comm=parity)
        b = mpiad.mpi_scan(x, comm=half)
        c = mpiad.mpi_bcast(x, size - 1)
        return anp.stack((mpiad.mpi_scan(a, comm=half), mpiad.mpi_allreduce(b, comm=parity), c))

    shapes = [(3,)] * size
    summed = reference.within(parities(size), shapes, reference.allreduce).jacobian(np.zeros(0))
    scanned = reference.within([half for half in halves if half], shapes, reference.scan).jacobian(np.zeros(0))
    parts = [scanned @ summed, summed @ scanned, reference.bcast(shapes, size - 1).jacobian(np.zeros(0))]
    program = reference.stack(*(reference.linear(shapes, shapes, part) for part in parts))
    check(fun, program, arrays(rngs, (3,)), rngs)
    half.Free()


@pytest.mark.parametrize("periodic", [False, True])
def test_line_of_ranks(rngs, rank, size, periodic):
    """`Shift` gives MPI.PROC_NULL at the ends of a line."""
    line = WORLD.Create_cart([size], [periodic])
    mpiad.mpi_init(line)
    left, right = line.Shift(0, 1)

    def fun(x):
        from_left = mpiad.mpi_exchange(x, right, left, comm=line)
        mpiad.mpi_send(x, left, comm=line)
        return anp.stack((from_left, mpiad.mpi_recv(x, right, comm=line)))

    def shift(step):
        places = [r + step for r in range(size)]
        return reference.move([(3,)] * size, [p % size if periodic or 0 <= p < size else None for p in places])

    check(fun, reference.stack(shift(-1), shift(1)), arrays(rngs, (3,)), rngs, line)
    line.Free()


def test_grid_of_ranks(rngs, rank, size):
    dims = MPI.Compute_dims(size, 2)
    grid = WORLD.Create_cart(dims, [False, True])
    mpiad.mpi_init(grid)

    def fun(x):
        for axis in range(2):
            source, dest = grid.Shift(axis, 1)
            x = x + mpiad.mpi_exchange(x, dest, source, comm=grid)
        return x

    total = np.eye(2 * size)
    for axis in range(2):
        sources = []
        for r in range(size):
            place = np.array(np.unravel_index(r, dims))
            place[axis] -= 1
            sources.append(None if place[0] < 0 else int(np.ravel_multi_index(place, dims, mode="wrap")))
        total = total + reference.move([(2,)] * size, sources).jacobian(np.zeros(0)) @ total
    program = reference.linear([(2,)] * size, [(2,)] * size, total)
    check(fun, program, arrays(rngs, (2,)), rngs, grid)
    grid.Free()


def test_the_world_is_the_default_communicator():
    assert channel(WORLD, "test") is channel(None, "test")


def test_duplicates_are_private_and_freed_with_the_communicator(rank):
    comm = WORLD.Dup()
    used = channel(comm, "test")
    assert channel(comm, "test") is used
    duplicates = used.data, used.reverse
    for mine in duplicates:
        assert MPI.Comm.Compare(getattr(mine, "bare", mine), comm) == MPI.CONGRUENT
    comm.Free()
    assert duplicates == (MPI.COMM_NULL, MPI.COMM_NULL)


@pytest.mark.limit(120)
def test_freed_communicators_leave_nothing_behind():
    """More than MPI has numbers for: MPICH ends after about 2,000."""
    for _ in range(800):
        comm = MPI.COMM_SELF.Dup()
        mpiad.mpi_exscan(1.0, comm=comm)
        comm.Free()


def test_users_own_collectives_in_between(rank, size):
    def fun(x):
        request = WORLD.Ibarrier()
        y = mpiad.mpi_allreduce(x)
        assert WORLD.allreduce(1) == size
        y = y * mpiad.mpi_allreduce(x)
        request.Wait()
        return y

    total = size * (size + 1) / 2
    assert mpiad.grad(fun)(1.0 + rank) == 2 * total


@pytest.mark.mpi(min_size=2)
def test_a_message_left_on_a_freed_communicator_is_not_received_on_the_next(rank, size):
    for value in (111.0, 222.0):
        sub = MPI.COMM_WORLD.Split(0, rank)
        mpiad.mpi_init(sub)
        mpiad.mpi_send(np.full(2, value), (rank + 1) % size, tag=3, comm=sub)
        if value == 222.0:
            np.testing.assert_array_equal(mpiad.mpi_recv(np.ones(2), (rank - 1) % size, tag=3, comm=sub), [222.0, 222.0])
        sub.Free()


@pytest.fixture
def few_numbers_left():
    """All but a hundred of MPICH's two thousand communicators, which cost little where each rank makes its own."""
    held = []
    with contextlib.suppress(MPI.Exception):
        while len(held) < 3000:
            held.append(MPI.COMM_SELF.Dup())
    for comm in held[-100:]:
        comm.Free()
    yield
    for comm in held[:-100]:
        comm.Free()


def test_freed_communicators_give_their_numbers_back(rank, few_numbers_left):
    held = [MPI.COMM_SELF.Dup() for _ in range(85)]  # each time takes a while: fewer are left
    # Each takes three; marked ones must not keep theirs either.
    for k in range(20):
        sub = MPI.COMM_WORLD.Split(0, rank)
        mpiad.mpi_init(sub)
        if k % 2:
            channel(sub, "test").mark("left unfinished by the test.")
        sub.Free()
    for comm in held:
        comm.Free()


@pytest.mark.not_on(2)
@pytest.mark.unguarded
def test_the_watch_takes_no_new_numbers_each_time(few_numbers_left, size):
    held = [MPI.COMM_SELF.Dup() for _ in range(85)]  # each time takes a while: fewer are left
    for _ in range(20):
        with mpiad.debug.checked():
            assert mpiad.mpi_wait(mpiad.mpi_iallreduce(1.0)) == size
    for comm in held:
        comm.Free()


# The second is MPICH's text if each rank has numbers left, but none in common.
_NONE_LEFT = "(Too many communicators|Cannot allocate context ID because of fragmentation)"


@pytest.mark.skipif(MPI.get_vendor()[0] != "MPICH", reason="others have millions")
@pytest.mark.parametrize("odd", [False, True], ids=["none", "one of two"])
def test_without_numbers_left_the_error_says_what_to_free(odd, few_numbers_left):
    comms = [WORLD.Dup() for _ in range(60 + odd)]
    prepared = 0
    with pytest.raises(mpiad.errors.CommunicatorError, match=_NONE_LEFT + r".*two duplicates.*comm\.Free\(\)"):
        for comm in comms:
            mpiad.mpi_init(comm)
            prepared += 1
    assert 10 < prepared < 25
    with pytest.raises(mpiad.errors.CommunicatorError, match=_NONE_LEFT):
        mpiad.reset(comms[2])  # which makes the new ones first
    for comm in comms[:2]:
        comm.Free()
    mpiad.reset(comms[2])
    assert mpiad.mpi_allreduce(1.0, comm=comms[2]) == WORLD.size
    # A call that failed holds none, and what was freed is there again: two for users, and four.
    for comm in comms[prepared : prepared + 2]:
        assert mpiad.mpi_allreduce(1.0, comm=comm) == WORLD.size
    with pytest.raises(mpiad.errors.CommunicatorError, match=_NONE_LEFT):
        mpiad.mpi_init(comms[-1])
        mpiad.mpi_init(comms[-2])
    for comm in comms[2:]:
        comm.Free()


def test_a_communicator_freed_before_the_reverse_pass(rank):
    def loss(x):
        sub = MPI.COMM_WORLD.Split(0, rank)
        y = mpiad.mpi_allreduce(x, comm=sub)
        sub.Free()
        return anp.sum(y)

    with pytest.raises(CommunicatorError, match="freed before the reverse pass"):
        mpiad.grad(loss)(np.ones(2))


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("freed", [False, True], ids=["reset", "freed"])
def test_a_sum_that_one_rank_has_started_does_not_meet_later_ones(rank, size, freed):
    comm = WORLD.Dup()
    mpiad.mpi_init(comm)

    def interrupted(x):
        if rank == 0:
            mpiad.mpi_iallreduce(x, comm=comm)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        mpiad.grad(interrupted, comm=comm)(np.full(3, 100.0))
    if freed:
        comm.Free()
    else:
        mpiad.reset(comm)
    # Without rank 0, for which the number of the old duplicate isn't free; in an order in which its partner awaits another.
    for _ in range(3):
        later = WORLD.Split(rank == 0, -rank)
        mine = np.full(3, float(rank))
        total = mpiad.mpi_wait(mpiad.mpi_iallreduce(mine, comm=later))
        np.testing.assert_array_equal(total, np.full(3, 0.0 if rank == 0 else size * (size - 1) / 2))
        later.Free()
    if not freed:
        comm.Free()


class Unsent:
    """The request of a send that takes its time."""

    def Test(self):
        return False


class SentMeanwhile(Unsent):
    """That of one which is done; while MPI is asked, another thread sends."""

    def __init__(self, comm):
        self.comm, self.other = comm, Unsent()

    def Test(self):
        self.comm.leave(self.comm.begin("send", None, lambda *_: self.other, [0], [0], [0]))
        return True


def test_what_another_thread_sends_is_held_while_this_one_looks(monkeypatch):
    comm = channel(None, "test")
    looked_at = SentMeanwhile(comm)
    requests = [looked_at]
    monkeypatch.setattr(comm, "started", {id(requests): ("background send", requests, np.ones(1))})
    monkeypatch.setattr(comm, "_next_test", 9)
    comm._drop_sent()
    assert [request for _, (request,), _ in comm.started.values()] == [looked_at.other]


@pytest.mark.skipif(MPI.Query_thread() != MPI.THREAD_MULTIPLE, reason="MPI was initialised for one thread")
def test_threads_send_on_one_communicator(rank, size):
    right, left, count = (rank + 1) % size, (rank - 1) % size, 40
    wrong = []

    def run(tag):
        for k in range(count):
            mpiad.mpi_send(np.full(20_000, 1000.0 * tag + k), right, tag=tag)  # too long to be sent at once
        for k in range(count):
            got = mpiad.mpi_recv(np.empty(20_000), left, tag=tag)
            wrong.extend(got[got != 1000 * tag + k])

    threads = [threading.Thread(target=run, args=(tag,)) for tag in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Bare:
    """Stands for MPI, which uses buffers until it is done with them, and here never is."""

    def __init__(self):
        self.given = []

    def Isend(self, message, *_):  # a parcel, or an array, its length and datatype
        self.given.append(weakref.ref(message[0] if isinstance(message, list) else message))
        return Unsent()

    Irecv = Isend


def sends(comm):
    envelope = Envelope(comm, comm.rank, 0, True)
    comm.leave(messages.post_send(np.ones(3), envelope))


def sends_blocking(comm):
    messages.send(np.ones(3), Envelope(comm, comm.rank, 0, True))


def receives(comm):
    messages.finish_receive(messages.Receipt(Spec((3,), np.dtype(float)), Envelope(comm, comm.rank, 0, False)), "test")


def posts_an_object(comm):
    Mailbox(comm.data, comm).post(comm.rank, 1, packed(np.ones(20_000)))


@pytest.mark.parametrize("program", [sends, sends_blocking, receives, posts_an_object])
def test_what_mpi_uses_is_held_at_whatever_line_an_interrupt_comes(monkeypatch, program):
    """MPI may read or write it long after the exception."""
    comm, folder = channel(None, "test"), str(Path(messages.__file__).parents[1])
    for lines, run in enumerate(interrupted_before_each_line(folder)):
        bare = Bare()
        with monkeypatch.context() as patched:
            for name, value in (("data", bare), ("started", {}), ("_next_test", 9)):
                patched.setattr(comm, name, value)
            run(lambda: program(comm))
            assert all(buffer() is not None for buffer in bare.given), lines
    assert bare.given and lines > 8


@pytest.mark.mpi(min_size=2)
def test_messages_of_a_call_that_was_left_do_not_meet_later_communicators(rank, size):
    """They are on a communicator of the call's own, whose number MPI mustn't give to others."""
    mpiad.reset()  # under watch, a reduction begun by one rank on other communicators of these ranks would be reported
    left = channel(None, "test").derive()
    sent = left.Isend(np.ones(1), (rank + 1) % size, 3)
    mpiad.reset()
    later = [WORLD.Split(0, rank) for _ in range(20)]
    WORLD.Barrier()
    assert not any(comm.Iprobe() for comm in later)
    for comm in later:
        comm.Free()
    left.Recv(np.empty(1), (rank - 1) % size, 3)
    sent.Wait()


def test_a_reset_can_be_repeated_after_an_interrupt(rank, size, monkeypatch):
    """Between the last messages of the first and their receipt."""
    mpiad.mpi_send(np.ones(3), (rank + 1) % size)
    receive, left = channels._receive_until_last, [True]

    def interrupted(*args):
        if left:
            left.pop()
            raise KeyboardInterrupt
        receive(*args)

    monkeypatch.setattr(channels, "_receive_until_last", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mpiad.reset()
    with pytest.raises(UnfinishedMessagesError, match="a reset was interrupted"):
        mpiad.mpi_barrier()
    mpiad.reset()
    mpiad.mpi_send(np.full(3, float(rank)), (rank + 1) % size)
    np.testing.assert_array_equal(mpiad.mpi_recv(np.zeros(3), (rank - 1) % size), (rank - 1) % size)


@pytest.mark.skipif(MPI.Query_thread() != MPI.THREAD_MULTIPLE, reason="MPI was initialised for one thread")
def test_ranks_that_still_answer_take_no_last_message_of_others(rank):
    """The messages between the ranks' threads end with last messages, which aren't objects."""
    comm = WORLD.Dup()
    exchange = StateExchange(comm, lambda: rank, 1e-3, "test")
    exchange.start()
    if rank == 0:
        exchange.post([other for other in range(comm.size) if other], 1, 7)  # a question whose answer nobody awaits
    else:
        time.sleep(0.1)
    exchange.stop()
    exchange.drain()
    assert not comm.Iprobe()
    comm.Free()
