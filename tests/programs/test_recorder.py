"""Traces are abstract: they send no message, and what only a run can tell is read from the notes of the first call."""

import logging

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.extend import defvjp, primitive
from jitted import assert_same, check_jit
from mpi4py import MPI

import mpiad
from mpiad.domain import Domain
from mpiad.programs import function, recorder
from mpiad.transport import Spec
from mpiad.transport.core.channels import live_channels


@pytest.fixture
def traces(monkeypatch):
    """Let all arrays be large, and return the traces that are made."""
    made, arguments = [], recorder.Recorder.arguments

    def noted(self, given):
        made.append(given)
        return arguments(self, given)

    monkeypatch.setattr(recorder.Recorder, "arguments", noted)
    monkeypatch.setattr(recorder, "_LARGE", 0)
    return made


def messages():
    """Return the numbers of messages and communications that this rank has counted."""
    return [sum(channel.counts().sent.values()) for channel in live_channels()]


def joined(x):
    return anp.concatenate((x[1:], x[:2] * x[0]), axis=0)[:, ::-1], anp.stack([x, x * x], axis=-1)


def chosen(x):
    return anp.where(x > 0.5, anp.exp(x), -x) + anp.roll(x, 1, axis=1)


def put_together(x):
    total = anp.pad(x, 1)
    return anp.sum(total[2:, 1:-1] * x, axis=0), anp.reshape(anp.transpose(x), (-1,)) * 2.0


def of_another_precision(x):
    return anp.mean(x.astype(np.float32) * np.float32(3.0)), x * np.float32(0.5), anp.max(x)


@pytest.mark.parametrize("fun", [joined, chosen, put_together, of_another_precision])
def test_operations(fun, traces):
    check_jit(
        fun, np.random.default_rng(1).standard_normal((4, 5)), rounding=1e-6 if fun is of_another_precision else 1e-12
    )
    assert traces


def test_writing_into_an_array_of_its_own(traces):
    def fun(x):
        y = np.zeros((4, 5)) * x
        y[1:3] = x[:2] + 1.0
        y += x[0]
        return y

    check_jit(fun, np.random.default_rng(2).standard_normal((4, 5)), derivatives=False)
    assert traces


def resident_pages():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def test_large_arrays_take_no_memory():
    """Neither those that operations return, nor those into which the function writes."""
    n = 4_000_000  # 32 MB

    def fun(x):
        y = anp.concatenate([x, 2.0 * x, x[:5]])
        y += 1.0
        y[2:-3] = anp.concatenate([x, x])
        y[:n] = 3.0
        z = anp.concatenate((anp.reshape(y[:n], (1000, -1)), anp.reshape(x, (1000, -1))), 1)
        return anp.stack([z, z]), anp.concatenate((y, y), None), x.astype(np.float32)

    trace = recorder.Recorder()
    with trace:
        x, before = trace.input(recorder.like(Spec((n,), np.dtype(float)))), resident_pages()
        stacked, flat, single = fun(x)
        assert resident_pages() - before < 1000
    assert stacked.shape == (2, 1000, 8000) and flat.shape == (4 * n + 10,) and single.dtype == np.float32


def test_parts_that_do_not_fit_raise_the_error_of_numpy(traces):
    def fun(x):
        y = np.zeros((4, 5)) * x
        y[1:3] = x[:3]
        return y

    for f in (fun, lambda x: anp.concatenate([x, x[:, :2]])):
        with pytest.raises(ValueError, match=r"broadcast|dimension"):
            mpiad.jit(f)(np.ones((4, 5)))


def test_messages(traces, rank, size):
    domain = Domain((3 * size, 7), dims=(size, 1), periodic=(True, False))
    u = np.random.default_rng(rank).standard_normal(domain.local_shape)

    def fun(u):
        padded = domain.exchange(u, boundary="edge")
        v = u + 0.1 * (padded[2:, 1:-1] - padded[1:-1, :-2])
        return mpiad.mpi_allreduce(anp.sum(v**2)) * mpiad.mpi_exchange(v, (rank + 1) % size, (rank - 1) % size, like=v * 0)

    check_jit(fun, u)
    assert traces


def test_messages_whose_results_are_like_what_is_sent(traces, rank, size):
    """Gradients and second derivatives, too, in which a sum on the root is a copy to all."""
    domain = Domain((3 * size, 7), dims=(size, 1), periodic=(True, False))
    flat, edged = domain.laplacian(1.0), domain.laplacian(1.0, boundary="edge")
    u = np.random.default_rng(rank).standard_normal(domain.local_shape)

    def fun(u):
        mpiad.mpi_barrier()
        parts = mpiad.mpi_scan(u**2) * mpiad.mpi_exscan(anp.sin(u)) * mpiad.mpi_alltoall(anp.stack([u] * size))
        block = mpiad.mpi_alltoall(u, [0] * (size - 1) + [len(u)], received=[3 * (rank == size - 1)] * size)
        return mpiad.mpi_sum(anp.sum(parts)) + domain.sum(u * flat(u**2) + edged(u) ** 3) / size + anp.sum(block**3)

    gradient, product = (form(mpiad.jit(fun, strict=True), objective="sum") for form in (mpiad.grad, mpiad.hvp))
    for x in (u, 2 * u):
        assert_same(gradient(x), mpiad.grad(fun, objective="sum")(x), 1e-11)
        assert_same(product(x, u), mpiad.hvp(fun, objective="sum")(x, u), 1e-11)
    assert len(traces) == 1


def test_receives_with_a_template(traces, rank, size):
    """Shapes differ between ranks; a chain from rank 0 to the last rank."""
    n = [5, 3, 4][rank % 3]

    def fun(x):
        before = mpiad.mpi_recv(np.zeros([5, 3, 4][(rank - 1) % 3]), rank - 1, tag=7) if rank else anp.zeros(2)
        y = anp.sin(x) * (1.0 + anp.sum(before**2))
        if rank + 1 < size:
            mpiad.mpi_send(y, rank + 1, tag=7)
        return anp.sum(y**2)

    x, v = np.random.default_rng(rank).random((2, n))
    for form in (mpiad.grad, mpiad.hvp):
        compiled, interpreted = (form(f, objective="sum") for f in (mpiad.jit(fun, strict=True), fun))
        given = (x, v) if form is mpiad.hvp else (x,)
        for _ in range(2):
            assert_same(compiled(*given), interpreted(*given), 1e-12)
    assert len(traces) == 1


def test_a_trace_that_is_given_up_has_sent_and_counted_nothing(traces, rank, size):
    """The first call is interpreted, since the shape of a gather is known in a run only, and traced again afterwards."""

    def fun(x):
        first = mpiad.mpi_exchange(x, (rank + 1) % size, (rank - 1) % size)
        return anp.sum(mpiad.mpi_allgather(anp.sum(first) * np.ones(2))) * x

    before = messages()
    expected = fun(np.ones(3))
    once = [later - earlier for earlier, later in zip(before, messages(), strict=True)]
    jitted, before = mpiad.jit(fun, strict=True), messages()
    assert_same(jitted(np.ones(3)), expected)
    assert [later - earlier for earlier, later in zip(before, messages(), strict=True)] == once
    assert len(traces) == 2
    assert_same(jitted(np.ones(3)), expected)
    assert len(traces) == 2
    gradient = mpiad.grad(lambda x: anp.sum(jitted(x)), objective="sum")
    for _ in range(2):
        assert_same(gradient(np.ones(3)), mpiad.grad(lambda x: anp.sum(fun(x)), objective="sum")(np.ones(3)))


def test_all_steps_of_a_first_gradient_are_compiled(traces):
    jitted = mpiad.jit(lambda x: anp.sin(x) + x[::-1], strict=True)

    def loss(x, step):
        for _ in range(4):
            x = step(x)
        return anp.sum(x)

    x = np.arange(5.0)
    assert_same(mpiad.grad(loss)(x, jitted), mpiad.grad(loss)(x, jitted.fun))
    assert len(traces) == 1


def test_an_error_is_that_of_numpy(traces):
    with pytest.raises(ValueError, match="broadcast"):
        mpiad.jit(lambda x: x + x[1:])(np.ones(3))
    assert function.jit(lambda x: x)(np.ones(3)).shape == (3,)


def shapes_that_arrive(x):
    """On every rank but the root a broadcast array is known in a run only; then an agreement, and an operator's result."""
    rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    y = mpiad.mpi_bcast(x[: size + 1] * 2 if rank == 0 else None)
    z = mpiad.mpi_scatter(anp.stack([x + k for k in range(size)]) if rank == 0 else None)
    return anp.sum(y**2) * z + anp.sum(mpiad.mpi_gather(z, axis=0) ** 2), halved(x) * y.shape[0]


@mpiad.extend.custom_operator
def halved(x):
    return x[::2] * 1.0


@mpiad.extend.custom_operator
def spread(g, n):
    made = np.zeros(n)
    made[::2] = g
    return made


mpiad.extend.defvjp(halved, lambda ans, x: lambda g: spread(g, len(x)))
mpiad.extend.defvjp(spread, lambda ans, g, n: lambda h: halved(h))
mpiad.extend.defjvp(halved, lambda g, ans, x: halved(g))


@pytest.mark.parametrize("compiled", [lambda rank: True, lambda rank: rank == 0, lambda rank: rank > 0])
def test_shapes_that_arrive(compiled, rank, size):
    """Also in the reverse pass, whose operator's result is known in a run only."""
    x, v = np.linspace(0.5, 1.5, 2 * size + 3) + rank, np.cos(np.arange(2.0 * size + 3))
    jitted = mpiad.jit(shapes_that_arrive, strict=True) if compiled(rank) else shapes_that_arrive

    def loss(fun):
        return lambda x: sum(anp.sum(anp.sin(part)) for part in fun(x))

    gradient, expected = (mpiad.grad(loss(fun), objective="sum") for fun in (jitted, shapes_that_arrive))
    for given in (x, 2 * x, x):
        assert_same(jitted(given), shapes_that_arrive(given))
        assert_same(gradient(given), expected(given), 1e-11)
        assert_same(mpiad.jvp(loss(jitted), given, v), mpiad.jvp(loss(shapes_that_arrive), given, v), 1e-11)
    if compiled(rank):
        assert None not in jitted._cache.entries.values() and len(jitted._cache.entries) == 2


def test_messages_from_any_rank_and_requests_are_traced_at_the_first_call(traces, rank, size):
    """Derivatives of all orders call only programs."""

    def fun(x):
        coming = mpiad.mpi_irecv(x, (rank - 1) % size, tag=2)
        going = mpiad.mpi_isend(x**3, (rank + 1) % size, tag=2)
        total = mpiad.mpi_iallreduce(anp.sum(anp.sin(x)))
        y = mpiad.mpi_wait(coming) * x
        return anp.sum(y * mpiad.mpi_wait(going)) * mpiad.mpi_wait(total)

    def from_any(x):
        mpiad.mpi_send(anp.sin(x), (rank + 1) % size, tag=3)
        return anp.sum(mpiad.mpi_recv(x, MPI.ANY_SOURCE, tag=3) * x)

    def third(fun):
        def twice(x):
            return anp.sum(mpiad.grad(fun, objective="sum")(x) ** 2)

        return mpiad.hvp(twice, objective="sum")

    x, v = np.linspace(0.2, 0.9, 5) + rank, np.cos(np.arange(5.0))
    derivatives = [
        (lambda f: mpiad.grad(f, objective="sum"), (x,)),
        (lambda f: mpiad.hvp(f, objective="sum"), (x, v)),
        (third, (x, v)),
    ]
    for form, args in derivatives:
        assert_same(form(mpiad.jit(fun, strict=True))(*args), form(fun)(*args), 1e-10)
    jitted = mpiad.jit(fun, strict=True)
    compiled = [(form(jitted), form, args) for form, args in derivatives]
    for derivative, _, args in compiled:
        derivative(*args)
    traces.clear()
    for derivative, form, args in compiled:
        assert_same(derivative(*args), form(fun)(*args), 1e-10)
    assert not traces
    jitted = mpiad.jit(from_any, strict=True)
    for _ in range(2):
        assert_same(mpiad.grad(jitted, objective="sum")(x), mpiad.grad(from_any, objective="sum")(x))


@pytest.mark.parametrize("large", [False, True])
def test_functions_of_linear_algebra_get_matrices_that_they_accept(large, rank, size):
    """The entries of a received matrix are unknown in a trace: functions must not fail since those there are singular."""
    n = 100 if large else 3

    def fun(a):
        b = mpiad.mpi_exchange(a, (rank + 1) % size, (rank - 1) % size)
        root, inverse = np.linalg.cholesky(b @ b.T), anp.linalg.inv(b)
        return root, inverse, anp.linalg.solve(b, a), anp.linalg.det(b / 2), np.linalg.eigvalsh(b + b.T)

    a = np.eye(n) * 2 + 0.1 * np.random.default_rng(rank).random((n, n))
    check_jit(fun, a, rounding=1e-9, derivatives=False)


class Own(Exception):
    pass


def test_an_exception_after_messages_is_raised_after_they_are_sent(rank, size):
    """Otherwise ranks that are interpreted would wait for them."""
    times = []

    def fun(x):
        y = mpiad.mpi_exchange(x, (rank + 1) % size, (rank - 1) % size)
        total = mpiad.mpi_allreduce(anp.sum(y))
        times.append(1)
        if len(times) == 1:  # not again in the run after the trace
            raise Own
        return total

    first = mpiad.jit(fun) if rank % 2 == 0 else fun
    for call in (first, mpiad.grad(first, objective="sum")):
        times.clear()
        with pytest.raises(Own):
            call(np.ones(3))
        mpiad.reset()
        assert mpiad.mpi_allreduce(1.0) == size
        assert mpiad.mpi_exchange(1.0 + rank, (rank + 1) % size, (rank - 1) % size) == 1.0 + (rank - 1) % size


@primitive
def weighed(x):
    return x * 2.0


defvjp(weighed, lambda ans, x: lambda g: 2.0 * g * len(mpiad.mpi_allgather(g)))


def test_an_adjoint_whose_shapes_arrive(rank, size, caplog):
    """The trace of the reverse pass reads the notes of the first reverse pass."""
    caplog.set_level(logging.WARNING, "mpiad")
    jitted = mpiad.jit(lambda x: anp.sum(weighed(x) * x), strict=True)
    gradient = mpiad.grad(lambda x: jitted(x) + jitted(2 * x), objective="sum")
    x = np.arange(3.0) + rank
    for factor in (1.0, 2.0, 3.0):
        np.testing.assert_allclose(gradient(factor * x), 5 * (2 + 2 * size) * factor * x, rtol=1e-14)
    assert not caplog.records and None not in jitted._cache.entries.values()


def test_effects_of_python_happen_in_traces_and_interpreted_calls(capsys, rank):
    """Once if the first call is a trace, and before and in a run if the trace needs something that only the run tells."""

    def fun(x, gathers):
        print("begin")
        total = anp.sum(mpiad.mpi_allgather(x)) if gathers else anp.sum(x)
        print("end")
        return x * total

    jitted = mpiad.jit(fun, strict=True)
    for gathers, printed in ((False, "begin end"), (True, "begin begin end begin end")):
        expected = fun(np.ones(3), gathers)
        capsys.readouterr()
        for call in range(3):
            np.testing.assert_array_equal(jitted(np.ones(3), gathers), expected)
            assert capsys.readouterr().out.split() == (printed.split() if call == 0 else [])


def test_integers_that_ranks_exchange_in_derivatives_of_all_orders(rank, size):
    """Programs of derivatives repeat communications whose results have no derivatives."""

    def fun(x):
        count = mpiad.mpi_allreduce(np.ones(3, int) * x.shape[0])
        others = mpiad.mpi_exchange(count * (rank + 1), (rank + 1) % size, (rank - 1) % size)
        coming = mpiad.mpi_irecv(count, (rank - 1) % size, tag=4)
        mpiad.mpi_send(others, (rank + 1) % size, tag=4)
        return anp.sum(anp.sin(x) ** 2 * others) * mpiad.mpi_wait(coming)[0]

    x, v = np.linspace(0.2, 0.9, 3) + rank, np.cos(np.arange(3.0))
    jitted = mpiad.jit(fun, strict=True)
    nested = [lambda f: mpiad.grad(lambda x: anp.sum(mpiad.grad(f, objective="sum")(x) ** 2), objective="sum")]
    for form in (
        lambda f: mpiad.grad(f, objective="sum"),
        lambda f: lambda x: mpiad.hvp(f, objective="sum")(x, v),
        *nested,
    ):
        for _ in range(3):
            assert_same(form(jitted)(x), form(fun)(x), 1e-11)


def test_extrema_over_ranks_in_derivatives_of_all_orders(rank, size):
    """The adjoint of a maximum counts the ranks that have it, in a sum that no derivative differentiates."""

    def fun(x):
        y = anp.sin(x)
        return anp.sum(mpiad.mpi_allreduce(y**2, MPI.MAX) * y) + anp.sum(mpiad.mpi_allreduce(y, MPI.MIN) ** 3)

    x, v = np.linspace(0.2, 0.9, 3) + rank / 3, np.cos(np.arange(3.0))

    def product(f):
        return lambda x: mpiad.hvp(f, objective="sum")(x, v)

    def third(f):
        return mpiad.grad(lambda x: anp.sum(mpiad.grad(f, objective="sum")(x) ** 2), objective="sum")

    jitted = mpiad.jit(fun, strict=True)
    for form in (product, third, lambda f: product(lambda x: anp.sum(mpiad.grad(f, objective="sum")(x) ** 2))):
        for _ in range(2):
            assert_same(form(jitted)(x), form(fun)(x), 1e-10)


def test_sums_of_a_constant_cotangent_and_others(rank, size):
    """Only the first rank's objective depends on the variables; the others' cotangents begin with zeros of a message."""

    def fun(x):
        y = anp.tanh(x)
        total = mpiad.mpi_allreduce(y)
        for k in range(3):
            mpiad.mpi_send(y[k] * 2, None)
        return anp.sum(total**3) if rank == 0 else 0.75

    jitted = mpiad.jit(fun, strict=True)
    for x in (np.linspace(0.2, 0.9, 4) + rank / 3, np.ones(4)):
        v = np.cos(x)
        assert_same(mpiad.hvp(jitted, objective="sum")(x, v), mpiad.hvp(fun, objective="sum")(x, v), 1e-11)
        products = [mpiad.make_hvp(f, objective="sum")(x)[2](v) for f in (jitted, fun)]
        assert_same(*products, 1e-11)
