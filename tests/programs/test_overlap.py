"""While messages of an exchange travel, what doesn't need them is computed; results are those of interpreted functions."""

import time

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import assert_same
from mpi4py import MPI

import mpiad
from mpiad.domain import Domain, halo
from mpiad.programs import replay
from mpiad.programs.overlap import actions_of
from mpiad.programs.replay import Replay
from mpiad.transport import channel
from mpiad.transport.core import linked_calls
from mpiad.transport.core.messages import PreparedMessages

pytestmark = pytest.mark.unguarded

SHAPE = (260, 200)  # also of six ranks each has enough to divide
BOUNDARIES = [("zero", "edge"), ("reflect", 1.5), ("edge", "reflect")]


def stepped(domain, boundaries):
    """Return a function with exchanges whose loops read neighbours, of one field and of two."""

    def fun(u):
        for first, second in boundaries:
            v = domain.exchange(u, boundary=first)
            u = u + 0.1 * anp.sin(v[2:, 1:-1] + v[:-2, 1:-1] + v[1:-1, 2:] * v[1:-1, :-2] - 4 * u)
            a, b = domain.exchange([u, u * u], boundary=second)
            u = 0.5 * (a[1:-1, 1:-1] + b[2:, 2:]) + 0.25 * a[:-2, :-2]
        return u

    return fun


@pytest.fixture
def messages_of_python(monkeypatch):
    """Let Python start and finish the messages, so that a test can come between."""
    monkeypatch.setattr(linked_calls, "_kernels", dict)


def late(monkeypatch, rank):
    """Let this rank's messages leave later than the others have computed what they can."""
    start = PreparedMessages.start

    def started_late(self):
        time.sleep(0.01 * (rank % 2))
        start(self)

    monkeypatch.setattr(PreparedMessages, "start", started_late)


def divided(jitted):
    """Return how many loops of the programs are divided."""
    found = [entry.replays for entry in jitted._cache.entries.values()]
    return [sum(x.kind == "begin" for x in actions_of(r.schedule, r.texts, True)) for r in found]


@pytest.mark.parametrize("periodic", [False, pytest.param((True, False), marks=pytest.mark.also_on(4))], ids=str)
@pytest.mark.usefixtures("messages_of_python")
def test_messages_that_are_late(periodic, rank, size, rank_rng, monkeypatch):
    domain = Domain(SHAPE, periodic=periodic)
    whole, weights = rank_rng(100).standard_normal((2, *SHAPE))
    u, mine = whole[domain.owned], weights[domain.owned]
    fun = stepped(domain, BOUNDARIES)
    loss = mpiad.value_and_grad(lambda u: anp.sum(fun(u) * mine), objective="sum")
    jitted, both = mpiad.jit(fun, strict=True), mpiad.jit(loss, strict=True)
    for factor in (1.0, 0.5):
        expected, derivatives = fun(u * factor), loss(u * factor)
        with monkeypatch.context() as during:
            late(during, rank)
            assert_same(jitted(u * factor), expected, 1e-12)
            assert_same(both(u * factor), derivatives, 1e-11)
    # Six exchanges, and as many of cotangents, but for the first one's, behind which one sum is left.
    assert divided(jitted) == [6 * (size > 1)]
    assert divided(both)[0] >= 11 * (size > 1)


@pytest.mark.usefixtures("messages_of_python")
def test_the_interior_is_computed_before_messages_are_waited_for(rank, size, monkeypatch):
    """Where what stays of the buffer is spoilt just before the wait, only what is computed afterwards shows that."""
    domain = Domain(SHAPE, periodic=True)
    u = np.random.default_rng(rank).standard_normal(domain.local_shape)

    def fun(u):
        v = domain.exchange(u)
        return v[2:, 1:-1] + v[:-2, 1:-1] - 2 * v[1:-1, 1:-1]

    made, finish, messages = [], PreparedMessages.finish, halo._messages

    def noted(values, *rest):
        made.append(values)
        return messages(values, *rest)

    monkeypatch.setattr(halo, "_messages", noted)
    jitted = mpiad.jit(fun, strict=True)
    expected = jitted(u)
    np.testing.assert_array_equal(jitted(u), expected)

    def spoilt(self, call):
        made[-1][3:-3, 3:-3] = np.nan
        finish(self, call)

    monkeypatch.setattr(PreparedMessages, "finish", spoilt)
    found = jitted(u)
    if size > 1:
        np.testing.assert_array_equal(found, expected)
    monkeypatch.undo()
    np.testing.assert_array_equal(jitted(u), expected)


def test_sides_with_given_values_wait_for_no_message(size):
    """Rows beside other ranks are computed afterwards, columns at sides beyond which u is zero with the rest."""
    domain = Domain(SHAPE, dims=(size, 1))
    jitted = mpiad.jit(lambda u: domain.exchange(u)[2:, 1:-1] + domain.exchange(u)[1:-1, :-2], strict=True)
    jitted(np.ones(domain.local_shape))
    (entry,) = jitted._cache.entries.values()
    actions = actions_of(entry.replays.schedule, entry.replays.texts, True)
    for before, action in zip(actions, actions[1:]):
        if before.kind == "begin":
            boxes = np.concatenate([rows for share in action.shares for rows in share])
            assert (boxes[:, 2].min(), boxes[:, 3].max()) == (0, 200)
    assert sum(action.kind == "begin" for action in actions) == (size > 1)


def test_divided_loops_compute_the_same_bits(rank, rank_rng):
    domain = Domain(SHAPE, periodic=True)
    weights = rank_rng(101).standard_normal(SHAPE)[domain.owned]
    loss = mpiad.value_and_grad(lambda u: anp.sum(stepped(domain, BOUNDARIES)(u) * weights), objective="sum")
    jitted, u = mpiad.jit(loss, strict=True), np.random.default_rng(rank).standard_normal(domain.local_shape)
    jitted(u)
    (entry,) = jitted._cache.entries.values()
    whole, divided = (Replay(entry.replays, prepared).first(u) for prepared in (False, True))
    for x, y in zip(whole, divided, strict=True):
        np.testing.assert_array_equal(x, y)


GRIDS = [(13,), (9, 12), (7, 5, 6)]


@pytest.mark.few(12)
@pytest.mark.parametrize("shape", GRIDS, ids=str)
@pytest.mark.parametrize("dtype", [float, np.float32, complex, int], ids=str)
@pytest.mark.parametrize("boundary, corners", [("zero", True), ("edge", True), ("reflect", True), (1.5, False)])
def test_halos_that_machine_code_exchanges(shape, dtype, boundary, corners, rank, rank_rng, monkeypatch):
    """The result and the cotangent have the bits of those that Python exchanges, for two fields and two layers."""
    domain = Domain(shape, halo=2, periodic=[False] * (len(shape) - 1) + [boundary == "edge"])
    draw = rank_rng(103).standard_normal
    values = (4 * draw((2, *shape)) + (1j * draw((2, *shape)) if dtype is complex else 0)).astype(dtype)
    boundary = 1 if dtype is int and boundary == 1.5 else boundary
    u, weights = values[(slice(None), *domain.owned)], draw((2, *domain.padded_shape))

    def fun(u):
        return domain.exchange(
            domain.exchange(u, boundary=boundary, corners=corners)[(slice(None), *domain.interior)] + u, boundary=boundary
        )

    def loss(u):
        return anp.sum(anp.tanh(anp.real(weights * fun(u)) / 10))

    texts = []
    monkeypatch.setattr(replay, "compile", lambda text, *rest: texts.append(text) or compile(text, *rest), raising=False)
    compared = (fun,) if dtype is int else (fun, mpiad.value_and_grad(loss, objective="sum"))
    for function in compared:
        by_code = mpiad.jit(function, strict=True)
        found = [by_code(u), by_code(u)]
        if function is fun and (dtype is float or dtype is np.float32) and MPI.get_vendor()[0] == "MPICH":
            assert sum(line.strip().startswith(("k", "f")) for line in texts[-1].splitlines()) == 1
        with monkeypatch.context() as during:
            during.setattr(linked_calls, "_kernels", dict)
            by_python = mpiad.jit(function, strict=True)
            expected = [by_python(u), by_python(u)]
        for x, y in zip(found, expected):
            for a, b in zip(x, y, strict=True) if isinstance(x, tuple) else [(x, y)]:
                np.testing.assert_array_equal(a, b)
        assert_same(found[1], function(u), 1e-5 if dtype is np.float32 else 1e-12)


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["loop", "wait"])
@pytest.mark.usefixtures("messages_of_python")
@pytest.mark.unguarded
def test_an_exception_while_messages_travel(where, rank, size, monkeypatch):
    """The next use of the communicator says that messages are left, and what to do; then the program runs again."""
    if size == 1:
        return
    domain = Domain(SHAPE, periodic=True)
    jitted = mpiad.jit(lambda u: domain.exchange(u)[2:, 1:-1] * 2.0, strict=True)
    u = np.ones(domain.local_shape)
    jitted(u), jitted(u)
    if where == "wait":
        monkeypatch.setattr(PreparedMessages, "finish", interrupted)
    else:
        (entry,) = jitted._cache.entries.values()
        ((replay,),) = [free for free in entry.replays.free.values() if free]
        names = replay.first.__globals__
        loop = next(name for name, line in names.items() if name[0] == "k" and line is entry.replays.kernels[-1].function)
        monkeypatch.setitem(names, loop, interrupted)
    used = channel(domain.comm, "test")
    with pytest.raises(KeyboardInterrupt):
        jitted(u)
    monkeypatch.undo()
    # The buffers of both are kept until the reset ends what is under way.
    assert {kind for kind, *_ in used.started.values()} >= {"blocking send", "blocking receive"}
    with pytest.raises(mpiad.errors.UnfinishedMessagesError, match="reset"):
        mpiad.mpi_allreduce(1.0)
    mpiad.reset()
    for _ in range(2):
        np.testing.assert_array_equal(jitted(u), 2.0)


@pytest.mark.parametrize("periodic", [False, True], ids=str)
def test_beside_ranks_that_are_interpreted(periodic, rank, size, rank_rng):
    """Even ranks run a program and odd ones the function, and then all the program: messages are counted alike."""
    domain = Domain(SHAPE, periodic=periodic)
    weights = rank_rng(102).standard_normal(SHAPE)[domain.owned]
    loss = mpiad.value_and_grad(lambda u: anp.sum(stepped(domain, BOUNDARIES)(u) * weights), objective="sum")
    jitted, u = mpiad.jit(loss, strict=True), np.random.default_rng(rank).standard_normal(domain.local_shape)
    expected = loss(u)
    for compiled in (True, rank % 2 == 0, rank % 2 == 0, True):
        assert_same((jitted if compiled else loss)(u), expected, 1e-11)
    # What users send under the same tag is answered by number.
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = mpiad.grad(lambda x: anp.sum(mpiad.mpi_exchange(x, after, before, tag=32750)), objective="sum")
    np.testing.assert_array_equal(sent(np.ones(3)), 1.0)


@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_a_message_of_another_size_raises(dtype, rank, size):
    """One rank runs its program, the other sends by hand what the exchange isn't made for."""
    domain = Domain(SHAPE, dims=(size, 1))
    jitted = mpiad.jit(lambda u: domain.exchange(u)[2:, 1:-1] * 2.0, strict=True)
    u = np.ones(domain.local_shape)
    jitted(u), jitted(u)
    if rank < 2 <= size:
        peer = 1 - rank
        if rank == 0:
            with pytest.raises(ValueError, match=rf"rank 1 sent {3 * int(dtype[1])} bytes with tag 32750.*1600 bytes"):
                jitted(u)
        else:
            request = mpiad.mpi_irecv(np.zeros(SHAPE[1]), peer, tag=32750)
            mpiad.mpi_send(np.zeros(3, dtype), peer, tag=32750)
            np.testing.assert_array_equal(mpiad.mpi_wait(request), 1.0)
    mpiad.reset()
    np.testing.assert_array_equal(jitted(u)[1:-1], 2.0)
