"""What can't be compiled is interpreted: the right result, one warning that names the line, no communication twice."""

import collections
import contextlib
import dataclasses
import logging
import re
import signal
import sys
import threading
import types
import warnings
from pathlib import Path

import autograd.numpy as anp
import device_double
import numpy as np
import pytest
import scipy.spatial
import scipy.special
import scipy.stats
from autograd.extend import defvjp, primitive
from autograd.scipy.linalg import block_diag
from jitted import assert_same
from mpi4py import MPI
from scipy.sparse import csr_matrix

import mpiad
from mpiad import ensemble, timestepping
from mpiad.domain import Domain
from mpiad.transport import channel
from mpiad.transport.world import logs_for_others

X = np.arange(1.0, 6.0)
LINE = __file__
CALLS = []


def decides(x):
    total = mpiad.mpi_allreduce(anp.sum(x))
    if total > 0:  # decided
        return x * total
    return -x


def converts(x):
    return x * float(anp.sum(x))  # decided


def counts(x):
    return x[: int(x[0])] * 2.0  # decided


def iterates(x):
    while anp.sum(x) > 1.0:  # decided
        x = x / 2
    return x


def checks(x):
    if not np.all(x > 0):  # decided
        raise ValueError(x)
    return x * 2.0


def leaves_numpy(x):
    return anp.concatenate([x, np.histogram_bin_edges(x)[:2]])  # decided


def mutates(x):
    x = x + 0.0
    return change(x)


def change(x):
    x[1] = 5.0
    return x * 2.0


def mutates_its_argument(x):
    x += 1.0  # decided
    return x * 2.0


def sets_entries_of_its_argument(x):
    y = x[1:]
    y[0] = 7.0  # decided
    return x * 2.0


def masks(x):
    return anp.sum(x[x > 2.5] ** 2) * x  # decided


def places(x):
    return x[anp.nonzero(x > 2.5)[0]] * 2.0  # decided


def plain_array(x):
    return np.array([x[0], x[1]]) * 2.0  # decided


def buffer(x):
    kept = np.zeros(5)
    kept[1:] = x[1:] * 2.0  # decided
    return kept


def writes_out(x):
    kept = np.zeros(5)
    np.multiply(x, 2.0, out=kept)  # decided
    return kept


def formats(x):
    return x * len(f"{x[0]:.1f}")  # decided


def objects(x):
    return {"a": x * 2.0, "b": {1, 2}, "c": len(x)}


FUNCTIONS = [
    decides, converts, counts, iterates, checks, mutates_its_argument, sets_entries_of_its_argument, plain_array, buffer,
    masks, places, writes_out, formats,
]  # fmt: skip


def decided_line(fun):
    """Return the number of the line that stands in the way."""
    first = fun.__code__.co_firstlineno
    with open(LINE) as file:
        lines = file.readlines()[first - 1 :]
    return first + next(k for k, line in enumerate(lines) if "# decided" in line)


@pytest.mark.parametrize("fun", FUNCTIONS, ids=lambda fun: fun.__name__)
def test_is_interpreted_with_one_warning(fun, caplog):
    caplog.set_level(logging.WARNING, "mpiad")
    jitted, total = mpiad.jit(fun), mpiad.value_and_grad(mpiad.jit(lambda x: anp.sum(fun(x))))
    for factor in (1.0, 2.0, -1.0) if fun is decides else (1.0, 2.0):
        mine, theirs = X * factor, X * factor
        assert_same(jitted(mine), fun(theirs))
        assert_same(mine, theirs)  # what it changes, it changes
    (record,) = caplog.records
    assert f"{Path(LINE).name}:{decided_line(fun)} in " in record.getMessage() and fun.__name__ in record.getMessage()
    if fun in (decides, iterates, checks, masks):
        for x in (X, X * 2):
            assert_same(total(x), mpiad.value_and_grad(lambda x: anp.sum(fun(x)))(x))


WRITING = [
    lambda u: np.cumsum(u, out=u), lambda u: np.clip(u, 2.0, 4.0, u), lambda u: np.add.at(u, [0, 0], 1.0),
    lambda u: np.nan_to_num(u, copy=False, posinf=5.0), lambda u: np.copyto(u, 3.0), lambda u: np.put(u, [1], 3.0),
]  # fmt: skip


@pytest.mark.serial
@pytest.mark.parametrize("write", WRITING)
def test_functions_that_write_into_what_they_are_given(write):
    """Into what was computed, and into an argument: once."""

    def fun(x):
        u = 1 / x
        write(u)
        write(x)
        return u * 2.0 + x

    with pytest.raises(TypeError, match="it calls .*, which writes into an array that it is given"):
        mpiad.jit(fun, strict=True)(X.copy())
    jitted = mpiad.jit(fun)
    for x in (X, X[::-1] - 2, X):
        mine, theirs = x.copy(), x.copy()
        with np.errstate(divide="ignore"):
            assert_same((jitted(mine), mine), (fun(theirs), theirs))


@pytest.mark.serial
def test_a_function_that_returns_the_argument_that_it_changes(rank):
    """Its result stays the argument, as where it isn't compiled, in values and in all derivatives."""

    def towards(state, target):
        state["x"] += 0.5 * (target - state["x"])
        return state["x"], 2 * target

    def loss(step, x, copies):
        moved = x * 1.0 if copies else x
        for _ in range(3):
            moved, _ = step({"x": moved}, 1.0)
        return mpiad.mpi_allreduce(anp.sum((moved - x) ** 2 + anp.sin(x)))

    for copies in (False, True):
        # Where x itself is moved, it ends at 1 - (1 - x) / 8.
        ahead = 1 - (1 - (START + rank)) / 8
        start, v = START + rank, np.array([1.0, -2.0, 0.5])
        exact = np.sum((ahead - start) ** 2 + np.sin(start)) if copies else np.sum(np.sin(ahead))
        slope = -2 * (7 / 8) * (ahead - start) + np.cos(start) if copies else np.cos(ahead) / 8
        step = mpiad.jit(towards)
        for _ in range(2):
            value, gradient = mpiad.value_and_grad(lambda x, step=step, c=copies: loss(step, x, c))(start.copy())
            np.testing.assert_allclose(value, mpiad.mpi_allreduce(exact), rtol=1e-14)
            np.testing.assert_allclose(gradient, slope, rtol=1e-13)
            tangent = mpiad.jvp(lambda x, step=step, c=copies: loss(step, x, c), start.copy(), v)
            np.testing.assert_allclose(tangent, [value, mpiad.mpi_allreduce(slope @ v)], rtol=1e-13)
            np.testing.assert_allclose(loss(step, start.copy(), copies), value, rtol=1e-14)


START = np.array([0.2, 1.7, -0.4])


def test_orders_that_depend_on_memory():
    jitted = mpiad.jit(lambda a: anp.ravel(a.T * 2, "K") + anp.reshape(a.T * 2, -1, order="A"))
    for a in (np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3) ** 2):
        np.testing.assert_array_equal(jitted(a), 4 * a.ravel())


def test_of_many_ranks_a_few_warn(caplog, monkeypatch):
    assert [rank for rank in range(1000) if logs_for_others(rank, 1000)] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 999]
    monkeypatch.setattr("mpiad.transport.world.logs_for_others", lambda rank, size: False)
    caplog.set_level(logging.INFO, "mpiad")
    mpiad.jit(lambda x: float(x[0]))(X)
    assert [record.levelname for record in caplog.records if "isn't compiled" in record.getMessage()] == ["INFO"]


@pytest.mark.serial
def test_derivatives_of_a_function_that_has_warned_do_not_warn(caplog):
    jitted = mpiad.jit(checks)
    for _ in range(2):
        jitted(X)
        np.testing.assert_array_equal(mpiad.jvp(jitted, X, X)[1], 2 * X)
        np.testing.assert_array_equal(mpiad.grad(lambda x: anp.sum(jitted(x)))(X), np.full(5, 2.0))
    assert ["isn't compiled" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("fun", FUNCTIONS, ids=lambda fun: fun.__name__)
def test_strict_raises_with_the_line_and_the_reason(fun):
    with pytest.raises(TypeError, match=f"{fun.__name__} can't be compiled: .*:{decided_line(fun)} in .*: (it|control)"):
        mpiad.jit(fun, strict=True)(X.copy())


def test_the_text_of_another_error_ends_with_one_period():
    with pytest.raises(TypeError, match=r"can't be compiled: ValueError: The program is too large\.$"):
        mpiad.jit(lambda x: x, strict=True)._cache.give_up("key", ValueError("The program is too large."))


def test_a_kernel_that_fails_is_reported_by_the_users_operation_and_line(monkeypatch):
    def refuse(sources, *options):
        raise NotImplementedError("line 3 of a kernel: np.float64(a1[0])", sources[0])

    def fun(x):
        return anp.sin(x) * 2.0

    monkeypatch.setattr("mpiad.programs.replay.kernels_of", refuse)
    line = fun.__code__.co_firstlineno + 1
    with pytest.raises(TypeError, match=f"can't be compiled: .* no kernel can compute multiply at .*py:{line} in") as error:
        mpiad.jit(fun, strict=True)(X)
    assert "a1" not in str(error.value)


def test_an_array_that_is_made_and_changed_is_compiled():
    def fun(x):
        total = anp.zeros(7) + mutates(x)[0] * 0
        total[1:6] = total[1:6] + mutates(x)
        total[0] -= x[2]
        return total

    jitted = mpiad.jit(fun, strict=True)
    for x in (X, X * 2):
        np.testing.assert_array_equal(jitted(x), [-x[2], 2 * x[0], 10.0, 2 * x[2], 2 * x[3], 2 * x[4], 0.0])


def test_what_is_no_array_comes_back_as_it_is():
    jitted = mpiad.jit(objects)
    for x in (X, X * 2):
        made = jitted(x)
        assert made["b"] == {1, 2} and made["c"] == 5
        np.testing.assert_array_equal(made["a"], x * 2)


def test_communications_before_the_line_are_made_once(rank, size):
    """Else a second sum would be of messages that only this rank sends, or of messages of the next call."""

    def fun(x):
        total = mpiad.mpi_allreduce(x * (rank + 1))
        right = mpiad.mpi_exchange(x + rank, (rank + 1) % size, (rank - 1) % size)
        if total[0] > 1e6:
            return -total
        return mpiad.mpi_allreduce(total * right)

    ranks = np.arange(1.0, size + 1)
    for strict in (False, True):
        jitted = mpiad.jit(fun, strict=strict)
        gradient = mpiad.grad(mpiad.jit(lambda x: anp.sum(fun(x)), strict=strict))
        for x in (X, X * 2):
            if strict:
                with pytest.raises(TypeError, match="control flow depends on a traced value"):
                    jitted(x)
                assert mpiad.mpi_allreduce(1.0) == size
                continue
            np.testing.assert_allclose(jitted(x), x * ranks.sum() * (size * x + (ranks - 1).sum()), rtol=1e-13)
            assert_same(gradient(x), mpiad.grad(lambda x: anp.sum(fun(x)))(x))


def exchanged_by(how, domain, rank, size):
    """Return a function that exchanges a block, and a message that has the tag of one inside an operator."""
    after, before = (rank + 1) % size, (rank - 1) % size
    shifted = mpiad.extend.custom_operator(lambda u: mpiad.mpi_exchange(u, after, before, tag=5))
    mpiad.extend.defvjp(shifted, lambda ans, u: lambda g: mpiad.mpi_exchange(g, before, after, tag=5))

    def passed_on(u):
        if how == "in two halves":
            begun = domain.begin_exchange(u)
            return domain.end_exchange(begun)[1:-1, 1:-1]
        return shifted(u) if how == "in an operator" else domain.exchange(u)[2:, 1:-1]

    def waited_for(u):
        coming = mpiad.mpi_irecv(u, before, tag=5)
        mpiad.mpi_send(anp.sin(u), after, tag=5)
        return mpiad.mpi_wait(coming) + passed_on(u)

    return waited_for


@pytest.mark.parametrize("leaves", ["its trace", "its program"])
@pytest.mark.parametrize("how", ["at once", "in two halves", "in an operator"])
def test_messages_are_numbered_alike_where_a_rank_leaves(how, leaves, rank, size):
    """The messages inside of exchanges and operators, too: the addresses of adjoints have these numbers."""
    domain, last = Domain((4 * size, 3)), size - 1
    exchanged = exchanged_by(how, domain, rank, size)

    def fun(x, u):
        v = exchanged(anp.sin(u))
        # Another length ends the programs of the other ranks; on one rank, control flow depends on a value.
        y = mpiad.mpi_bcast(x * 2 if rank == last else None, root=last)
        if leaves == "its trace" and rank == 0 and anp.sum(y) > 0:
            y = y * 3
        return anp.sum(exchanged(v**2) * v) * anp.sum(y)

    jitted = mpiad.value_and_grad(mpiad.jit(fun), (0, 1))
    plain, rng = mpiad.value_and_grad(fun, (0, 1)), np.random.default_rng(rank)
    used = channel(MPI.COMM_WORLD, "test", collective=False)
    for n in (3, 3, 5, 5, 3):
        x, u = rng.uniform(1, 2, n if rank == last else 2), rng.standard_normal(domain.local_shape)
        assert_same(jitted(x, u), plain(x, u), 1e-12)
        every = MPI.COMM_WORLD.allgather(used.counts())
        sent = {(r, *to): k for r, counts in enumerate(every) for to, k in counts.sent.items()}
        received = {(peer, r, tag): k for r, counts in enumerate(every) for (peer, tag), k in counts.received.items()}
        assert sent == received and len({counts.exchanges for counts in every}) == 1


@pytest.mark.mpi(min_size=2)
def test_messages_on_a_communicator_that_is_first_used_in_the_trace(rank, size):
    """Its messages are numbered anew where the function runs once more, else adjoints wait for other numbers."""
    x = np.array([0.5 + rank, 2.0])
    comm = MPI.COMM_WORLD.Dup()

    def fun(x):
        mpiad.mpi_barrier(comm=comm)
        request = mpiad.mpi_isend(x**2, (rank + 1) % size, comm=comm)  # has the number that it took in the trace
        came = mpiad.mpi_recv(x, (rank - 1) % size, comm=comm)  # takes one where the function runs
        mpiad.mpi_wait(request)
        return anp.sum(came * x) if came[1] > 0 else 0.0

    before, after = (np.array([0.5 + (rank + by) % size, 2.0]) for by in (-1, 1))
    _, gradient = mpiad.value_and_grad(mpiad.jit(fun), objective="sum")(x)
    np.testing.assert_allclose(gradient, before**2 + 2 * x * after)
    comm.Free()


@pytest.mark.serial
def test_device_arrays_are_computed_where_they_are(caplog):
    caplog.set_level(logging.WARNING, "mpiad")
    x = device_double.on_device(X)
    jitted = mpiad.jit(lambda x: x * 2.0)
    beside = mpiad.jit(lambda y: y * x)
    for _ in range(2):
        made = jitted(x)
        assert type(made) is device_double.DeviceArray
        np.testing.assert_array_equal(device_double.on_host(made), X * 2)
    np.testing.assert_array_equal(jitted(X), X * 2)
    np.testing.assert_array_equal(device_double.on_host(beside(x)), X * X)
    gradient = mpiad.grad(mpiad.jit(lambda x: anp.sum(x * x)))(x)
    np.testing.assert_array_equal(device_double.on_host(gradient), 2 * X)


class Own(Exception):
    pass


@primitive
def doubled(x):
    return 2 * x


defvjp(doubled, lambda ans, x: lambda g: 2 * g if float(anp.sum(g)) else 0 * g)


def test_an_adjoint_with_a_branch_is_interpreted(rank, size, caplog):
    """After the adjoint of a sum, which isn't communicated again: J is size Σ (2 s)², where s adds up (r + 1) x_r."""
    caplog.set_level(logging.WARNING, "mpiad")

    def fun(x):
        total = mpiad.mpi_allreduce(x * (rank + 1))
        return anp.sum(mpiad.mpi_allreduce(doubled(total) ** 2))

    gradient = mpiad.value_and_grad(mpiad.jit(fun))
    for k in (1.0, 2.0, 3.0):
        total = k * X * size * (size + 1) / 2
        assert_same(gradient(k * X), (np.float64(4 * size * total @ total), 8 * size * (rank + 1) * total), 1e-14)
    assert [record.getMessage().count("control flow depends on a traced value") for record in caplog.records] == [1]


@pytest.mark.parametrize("where", ["before", "after", "within"])
def test_exceptions_of_the_function_come_through(where, size):
    """At the trace, and in replays of calls that aren't taken apart; the function works afterwards."""
    bad = [False]

    def check(x):
        if bad[0]:
            raise Own(x.sum())
        return x * 3.0

    def fun(x):
        if where == "before":
            check(x)
        y = mpiad.mpi_allreduce(x)
        if where == "after":
            check(y)
        return anp.sum(y) * (1 if where != "within" else anp.sum(x))

    jitted = mpiad.jit(fun)
    gradient, product = mpiad.value_and_grad(mpiad.jit(fun)), mpiad.hvp(mpiad.jit(fun))
    plain = {jitted: fun, gradient: mpiad.value_and_grad(fun), product: mpiad.hvp(fun)}
    for state in (True, False, True, False):
        bad[0] = state
        for call in plain:
            given = (X, X) if call is product else (X,)
            if state and where != "within":
                with pytest.raises(Own, match=str(int(15 * (size if where == "after" else 1)))):
                    call(*given)
                mpiad.reset()
            else:
                assert_same(call(*given), plain[call](*given))


@pytest.mark.serial
def test_an_exception_in_a_replay():
    singular = mpiad.jit(lambda a: anp.linalg.solve(a, anp.ones(2)) * 2.0, strict=True)
    good = np.array([[2.0, 0.0], [0.0, 4.0]])
    for _ in range(2):
        np.testing.assert_array_equal(singular(good), [1.0, 0.5])
        with pytest.raises(np.linalg.LinAlgError, match="Singular"):
            singular(np.zeros((2, 2)))
    np.testing.assert_array_equal(singular(good), [1.0, 0.5])


@pytest.mark.serial
def test_a_wrong_shape_raises_what_numpy_raises():
    jitted = mpiad.jit(lambda x, y: x + y)
    with pytest.raises(ValueError, match="could not be broadcast"):
        jitted(X, X[:3])
    np.testing.assert_array_equal(jitted(X, X), 2 * X)


@pytest.mark.serial
def test_two_threads_call_one_function():
    jitted = mpiad.jit(lambda x: anp.sum(anp.cumsum(anp.sin(x) * x)) + anp.roll(x, 1), strict=True)
    failures = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for n in (5, 5, 3000, 3000, 5, 3000) * 5:
                x = rng.standard_normal(n)
                np.testing.assert_allclose(jitted(x), np.sum(np.cumsum(np.sin(x) * x)) + np.roll(x, 1), rtol=1e-9)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.serial
def test_a_call_whose_result_has_another_shape_each_time():
    """One that isn't known to: it would be read beyond its end, or added to all entries alike."""

    def distinct(x):
        return x[: 2 if x[0] > 0 else 2000] * 1.0

    operator = mpiad.extend.custom_operator(distinct)
    jitted = mpiad.jit(lambda x: anp.sum(operator(x) * 2.0))
    x = np.ones(3000)
    assert (jitted(x), jitted(x * 2)) == (4.0, 8.0)
    for _ in range(2):
        assert jitted(-x) == -4000.0
    assert jitted(x) == 4.0


class Timeout(Exception):
    pass


def alarmed(signum, frame):
    raise Timeout("too long")


def passed(x):
    return x


@contextlib.contextmanager
def alarm():
    """Let a signal come, for which a handler raises `Timeout`, when `passed` is called for the first time."""

    def called(frame, event, arg):
        if frame.f_code is passed.__code__:
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, alarmed)
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, before)


def once(action):
    """Return a function of an array that does something at its first call only, and returns the array."""
    left = [action]

    def called(x):
        if left:
            left.pop()()
        return x

    return called


def raise_own():
    raise Own("of the function")


@pytest.mark.parametrize("where", ["before", "after", "within", "backwards"])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", [Timeout, Own])
def test_what_is_raised_once_in_a_trace_is_raised(kind, large, where, caplog):
    """By a signal handler, or by the function, which wouldn't raise again; the next call is compiled."""
    caplog.set_level(logging.WARNING, "mpiad")
    x = np.linspace(0.0, 1.0, 200_000) if large else X
    action = passed if kind is Timeout else once(raise_own)
    identity = primitive(lambda x: x * 1.0)
    defvjp(identity, lambda ans, x: lambda g: action(g))

    def fun(x):
        if where == "before":
            action(x)
        y = mpiad.mpi_allreduce(x)
        if where == "after":
            action(y)
        return anp.sum(identity(y) if where == "backwards" else y**2)

    # The sum of all ranks: the adjoint is called on all of them.
    evaluate = mpiad.value_and_grad(mpiad.jit(fun), objective="sum")
    if where == "within":
        evaluate = mpiad.jit(mpiad.value_and_grad(lambda x: fun(action(x)), objective="sum"))
    with alarm() if kind is Timeout else contextlib.nullcontext(), pytest.raises(kind, match="too long|of the function"):
        evaluate(x)
    mpiad.reset()
    value, gradient = evaluate(x)
    plain = mpiad.value_and_grad(fun, objective="sum")(x)
    np.testing.assert_allclose(value, plain[0], rtol=1e-13)
    np.testing.assert_allclose(gradient, plain[1], rtol=1e-13)
    assert [record.getMessage() for record in caplog.records] == []


def test_results_of_interpreted_calls_are_new_arrays():
    """As those of compiled calls: they share memory neither with arguments, nor with variables, nor with one another."""
    table = np.ones(3)

    def fun(x, y):
        rest = x[1:] if x[0] > 0 else x  # which isn't compiled
        return x, [rest, y], {"view": x[None], "table": table}

    fast, x, y = mpiad.jit(fun), np.ones(3), np.zeros(2)
    for call in range(4):
        if call < 3:
            a, (b, c), found = fast(x, y)
        else:  # on a tape
            a, (b, c), found = mpiad.make_vjp(lambda z: (fast(x, y), z)[0])(1.0)[1]
        arrays = a, b, c, found["view"], found["table"]
        for k, array in enumerate(arrays):
            assert not any(np.shares_memory(array, other) for other in (x, y, table, *arrays[:k]))
        for array in arrays:
            array[...] = 99.0
        np.testing.assert_array_equal(np.concatenate([x, y, table]), [1, 1, 1, 0, 0, 1, 1, 1])


def whole(x):
    b = np.zeros(3)
    b[:] = x
    return b


def entry(x):
    b = np.zeros(3)
    b[1] = x[0]
    return b


def halved(x):
    x *= 0.5  # decided
    return x


def caller_of_halved(x):
    return anp.sum(halved(x) ** 2)


@pytest.mark.parametrize("derivative", [lambda f: f, mpiad.grad, mpiad.value_and_grad], ids=["value", "grad", "both"])
def test_the_line_that_changes_an_argument_is_named(derivative):
    line = f"{Path(LINE).name}:{decided_line(halved)} in halved: it changes an argument in place"
    with pytest.raises(TypeError, match=line):
        derivative(mpiad.jit(caller_of_halved, strict=True))(np.ones(3))


def importing(x):
    from math import pi

    return pi * x


class Recalling:
    def total(self, x):
        self.last = 2 * x
        return anp.sum(self.last**2)


def slice_of_complex(x):
    b = np.zeros((2, 3), complex)
    b[0, 1:] = x[1:] * 1j
    return b


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        *[
            (
                fun,
                r"an array of numbers, b\[i\] = x: join the parts by np.stack or .* \(without derivatives, b may begin as",
            )
            for fun in (whole, entry, slice_of_complex)
        ],
        (lambda x: np.full((2, 3), x[0], float), "numpy.full with a traced value, .*: call autograd.numpy's"),
        (lambda x: np.full_like(np.ones(3), x[0]), "numpy.full_like with a traced value, .*: call autograd.numpy's"),
        (lambda x: x * float(x[0]), "control flow depends on a traced value"),
        (lambda x: {x[0]: x}[x[0]], "control flow depends on a traced value"),
        (lambda x: np.asarray(x), "converts traced values to a plain NumPy array"),
        *[
            (fun, "a function of SciPy that only takes plain arrays: call the function of autograd.scipy")
            for fun in (scipy.special.logsumexp, lambda x: scipy.stats.norm.logpdf(x), lambda x: block_diag(x, x))
        ],
        (
            lambda x: scipy.linalg.cholesky(anp.outer(x, x) + np.eye(3)),
            r"SciPy's cholesky .* call np\.linalg\.cholesky\(a\)",
        ),
        (lambda x: scipy.linalg.inv(anp.outer(x, x) + np.eye(3)), r"SciPy's inv .* and call np\.linalg\.inv\(a\)\."),
        (
            lambda x: scipy.spatial.cKDTree(mpiad.stop_gradient(x)[:, None]).query_pairs(1.0, output_type="ndarray"),
            r"code in C such as scipy\.spatial\.cKDTree\).* pairs of neighbors, outside of the jitted function, and pass",
        ),
        (lambda x: np.eye(3).dot(x), r"write np.dot\(a, x\), or mpiad.linalg.sparse_matmul"),
        (mpiad.grad(lambda x: anp.sum(np.eye(3).dot(x))), r"write np.dot\(a, x\), or mpiad.linalg.sparse_matmul"),
        (
            mpiad.grad(lambda x: anp.sum(np.select([x > 2], [x * x], x))),
            "select returns an array of objects .* in place of lists of traced values write np.where, .* np.select of",
        ),
        (
            lambda x: anp.dot(csr_matrix(np.eye(3)), x),
            r"dot returns an array of objects .*mpiad\.linalg\.sparse_matmul\(A, x\)",
        ),
        (importing, "an import statement in importing, which should stand outside of the function"),
        (Recalling().total, r"Recalling.total: it assigns self.last of an object from outside"),
    ],
)
def test_the_advice_against_conversions(fun, message):
    x = np.ones(3)
    with pytest.raises(TypeError, match=message):
        mpiad.jit(fun, strict=True)(x)
    stacked = lambda x: anp.sum(anp.stack([x[0], 2.0 * x[1]]) ** 2)  # noqa: E731
    grad = lambda fun: mpiad.grad(fun, objective="sum")  # noqa: E731
    for of_stacked in (grad(mpiad.jit(stacked, strict=True)), mpiad.jit(grad(stacked), strict=True)):
        np.testing.assert_allclose(of_stacked(x), [2.0, 8.0, 0.0])
    for advised in (lambda x: (b := anp.zeros_like(x)).__setitem__(1, x[0]) or b, lambda x: x * np.ones((2, 3))):
        np.testing.assert_array_equal(mpiad.jit(advised, strict=True)(x), advised(x))


@pytest.mark.serial
@pytest.mark.parametrize("fun", [lambda x: np.dstack([x, 2 * x]), lambda x: anp.r_[x, 2 * x]])
def test_large_arrays_of_objects_are_refused(fun):
    """A trace of one operation per entry would take long; the interpreted function has the same derivative."""
    total = lambda x: anp.sum(fun(x) ** 2)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x in (np.ones(3), np.arange(120.0)):
            np.testing.assert_allclose(mpiad.jit(mpiad.grad(total))(x), 10 * x)
        mpiad.jit(mpiad.grad(total), strict=True)(np.ones(3))
        with pytest.raises(
            TypeError, match="plain NumPy array .* join them by np.concatenate or np.stack of autograd.numpy"
        ):
            mpiad.jit(mpiad.grad(total), strict=True)(np.arange(120.0))


@dataclasses.dataclass
class State:
    u: np.ndarray


@dataclasses.dataclass
class Slotted:
    __slots__ = ("u",)
    u: list


def added(y):
    return lambda t, scale=1.0: y + scale * t


def with_default(y):
    return lambda t, y=y: y + t


class Line:
    def __init__(self, y):
        self.y = y

    def at(self, t):
        return self.y + t


# Objects that contain an array y, as functions of y, and what returns the array.
HOLDERS = {
    "dataclass": (State, lambda made: made.u),
    "slots": (lambda y: Slotted([{"y": y}]), lambda made: made.u[0]["y"]),
    "object in a dict": (lambda y: {"a": 1, "state": State((y, None))}, lambda made: made["state"].u[0]),
    "SimpleNamespace": (lambda y: types.SimpleNamespace(y=y), lambda made: made.y),
    "deque": (lambda y: (collections.deque([y]), 2.0), lambda made: made[0][0]),
    "deque of many": (
        lambda y: collections.deque([*[State(k) for k in range(900)], State(y)]),
        lambda made: made[-1].u,
    ),
    "closure": (added, lambda made: made(0.0)),
    "default": (with_default, lambda made: made(0.0)),
    "method": (lambda y: Line(y).at, lambda made: made(0.0)),
}


@pytest.mark.serial
@pytest.mark.parametrize("kind", HOLDERS)
def test_objects_in_results_contain_the_arrays_of_each_call(kind, caplog):
    caplog.set_level(logging.WARNING, "mpiad")
    hold, array_in = HOLDERS[kind]

    def fun(u):
        return hold(2.0 * u**2)

    jitted, of_loss, of_tangent = mpiad.jit(fun), mpiad.jit(fun), mpiad.jit(fun)
    loss = lambda u: anp.sum(array_in(of_loss(u)) ** 2)  # noqa: E731
    forward = lambda u: anp.sum(array_in(of_tangent(u)) ** 2)  # noqa: E731
    for x in (X, X + 1, X):
        np.testing.assert_array_equal(array_in(jitted(x)), 2 * x**2)
        value, gradient = mpiad.value_and_grad(loss)(x)
        np.testing.assert_allclose([value, *gradient], [4 * np.sum(x**4), *(16 * x**3)])
        np.testing.assert_allclose(mpiad.jvp(forward, x, X), [4 * np.sum(x**4), np.sum(16 * x**3 * X)])
        np.testing.assert_allclose(mpiad.hvp(loss)(x, X), 48 * x**2 * X)
        np.testing.assert_allclose(mpiad.grad(lambda x: mpiad.jvp(forward, x, X)[1])(x), 48 * x**2 * X)  # noqa: B023
    assert jitted(X) is not jitted(X) and len(caplog.records) == 1
    message = r"at the end of the jitted function: it returns an object of type \w+ that contains traced values: return a"
    assert re.search(message, caplog.records[0].getMessage())
    gradient_of = lambda f: mpiad.grad(lambda u: anp.sum(array_in(f(u))))(X)  # noqa: E731
    for called in (lambda f: f(X), gradient_of, lambda f: mpiad.jvp(f, X, X)):
        strict = mpiad.jit(fun, strict=True)
        for _ in range(2):
            with pytest.raises(TypeError, match=message):
                called(strict)
    whole = mpiad.jit(lambda u: 3.0 * array_in(mpiad.jit(fun)(u)), strict=True)  # the objects stay inside
    for x in (X, X + 1):
        np.testing.assert_array_equal(whole(x), 6 * x**2)


@pytest.mark.serial
def test_objects_without_traced_values_are_constants_of_the_program():
    points = collections.deque([X, *range(1000)])

    def fun(u):
        return points, 2.0 * u, State([State(k) for k in range(1000)]), added(X)

    jitted = mpiad.jit(fun, strict=True)
    for x in (X, X + 1):
        found, y, state, line = jitted(x)
        assert found is points and state.u[999].u == 999
        np.testing.assert_array_equal([y, line(1.0)], [2 * x, X + 1])
        np.testing.assert_array_equal(mpiad.grad(lambda u: anp.sum(jitted(u)[1]))(x), np.full(5, 2.0))
        np.testing.assert_array_equal(mpiad.jvp(lambda u: jitted(u)[1], x, X), [2 * x, 2 * X])
    assert not jitted.is_interpreted


def test_objects_in_results_of_functions_that_communicate(rank, size):
    """Messages are sent once, also if only some ranks return objects."""

    def fun(u):
        total = mpiad.mpi_allreduce(anp.sum(u**2))
        return State(total * u) if rank == 0 else (total * u,)

    array_in = lambda made: made.u if rank == 0 else made[0]  # noqa: E731
    reference = lambda u: anp.sum(mpiad.mpi_allreduce(anp.sum(u**2)) * u)  # noqa: E731
    jitted = mpiad.jit(fun)
    x = X + rank
    for _ in range(3):
        total = sum(np.sum((X + k) ** 2) for k in range(size))
        np.testing.assert_allclose(array_in(jitted(x)), total * x)
        loss = lambda u: anp.sum(array_in(jitted(u)))  # noqa: E731
        for made, expected in zip(mpiad.value_and_grad(loss)(x), mpiad.value_and_grad(reference)(x)):
            np.testing.assert_allclose(made, expected)
        np.testing.assert_allclose(mpiad.jvp(loss, x, X), mpiad.jvp(reference, x, X))


def columns(x):
    return {"first": x[0] * X, "columns": np.transpose([x, 2.0 * x])}


ARRAYS_OF_OBJECTS = {
    "sum": (lambda x: np.sum([x, 2.0 * x], axis=0), lambda y: y, lambda x: 3 * x),
    "sum of autograd": (lambda x: anp.sum([x, 2.0 * x], axis=0), lambda y: y, lambda x: 3 * x),
    "transpose": (columns, lambda y: y["columns"], lambda x: np.stack([x, 2 * x], axis=1)),
    "array": (lambda x: np.array([State(x), None]), lambda y: y[0].u, lambda x: x),
}


@pytest.mark.serial
@pytest.mark.parametrize("kind", ARRAYS_OF_OBJECTS)
def test_arrays_of_objects_in_results(kind):
    """In a derivative, NumPy makes them from lists of traced arrays without asking these."""
    fun, array_in, reference = ARRAYS_OF_OBJECTS[kind]
    jitted, of_loss, of_tangent = mpiad.jit(fun), mpiad.jit(fun), mpiad.jit(fun)
    square = float(np.sum(reference(np.ones(1)) ** 2))
    loss_of = lambda f: lambda x: np.sum(array_in(f(x)) ** 2)  # noqa: E731
    for x in (X, X + 1, X):
        np.testing.assert_array_equal(array_in(jitted(x)), reference(x))
        for made in (jitted, of_loss):
            value, gradient = mpiad.value_and_grad(loss_of(made))(x)
            np.testing.assert_allclose([value, *gradient], [square * np.sum(x**2), *(2 * square * x)])
        np.testing.assert_allclose(
            mpiad.jvp(loss_of(of_tangent), x, X), [square * np.sum(x**2), 2 * square * np.sum(x * X)]
        )
        np.testing.assert_allclose(mpiad.hvp(loss_of(of_loss))(x, X), 2 * square * X)
    strict = mpiad.jit(fun, strict=True)
    for _ in range(2):
        with pytest.raises(TypeError, match="returns an array of objects that contains traced values: in place of lists"):
            mpiad.grad(loss_of(strict))(X)
        with pytest.raises(TypeError, match=r"can't be compiled|array of objects"):
            mpiad.jvp(loss_of(strict), X, X)


def decay(u, p, t):
    return [-p[0] * u[0]]


def ends(p):
    return anp.sum(ensemble.solve(ensemble.ODEProblem(decay, [1.0], (0.0, 1.0), p), rtol=1e-10, atol=1e-12).u_end)


def rows(p):
    problem = ensemble.EnsembleProblem(ensemble.ODEProblem(decay, [1.0], (0.0, 1.0), [1.0]), p=anp.reshape(p, (1, 1)))
    return anp.sum(ensemble.solve(problem, rtol=1e-10, atol=1e-12).u_end)


def steady(p):
    problem = ensemble.ODEProblem(lambda u, p, t: [1.0 - p[0] * u[0]], [1.0], (0.0, 1.0), p)
    return anp.sum(ensemble.steady_state(problem).u)


@pytest.mark.parametrize(
    ("loss", "call", "expected"),
    [
        (ends, "solve", lambda p: np.exp(-p)),
        (rows, "solve", lambda p: np.exp(-p)),
        (lambda p: ends(p) * 2.0, "solve", lambda p: 2 * np.exp(-p)),
        (steady, "steady_state", lambda p: 1 / p),
    ],
)
def test_a_solve_of_odes_is_named(loss, call, expected, caplog):
    p = np.array([1.3])
    with caplog.at_level(logging.WARNING, logger="mpiad"):
        np.testing.assert_allclose(mpiad.jit(loss)(p), expected(p)[0], rtol=1e-7)
    assert f"it calls ensemble.{call}, whose model is compiled" in caplog.text


@pytest.mark.parametrize("kind", ["condition", "shape"])
def test_a_step_that_is_not_compiled_after_its_first_message(kind, rank, size):
    """A trace that ends there leaves no message: here the trace that estimates how many steps a program should have."""
    mpiad.mpi_barrier()
    neighbors = {"dest": (rank + 1) % size, "source": (rank - 1) % size}

    @mpiad.jit
    def step(u, k, n):
        got = mpiad.mpi_exchange(u[:1], **neighbors)
        return 0.5 * u + 0.1 * got**2 * ((1.0 if anp.sum(got) > 0 else 2.0) if kind == "condition" else np.ones(n))

    def plain(us):
        for _ in range(6):
            us = [0.5 * u + 0.1 * us[r - 1][:1] ** 2 for r, u in enumerate(us)]
        return sum((u**3).sum() for u in us)

    us = [np.linspace(1.0, 2.0, 3) + r for r in range(size)]
    expected = [plain([u + 1e-30j * e * (r == rank) for r, u in enumerate(us)]).imag / 1e-30 for e in np.eye(3)]
    loss = lambda u, n: mpiad.mpi_allreduce(anp.sum(timestepping.scan(step, u, 6, n) ** 3))  # noqa: E731
    for _ in range(3):
        value, gradient = mpiad.value_and_grad(loss)(us[rank], 3)
        np.testing.assert_allclose(value, plain(us), rtol=1e-13)
        np.testing.assert_allclose(gradient, expected, rtol=1e-12)
