"""Functions of large arrays are traced by shapes alone; here all arrays count as large."""

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import assert_same, check_jit

import mpiad
from mpiad.domain import Domain
from mpiad.programs import function, recorder
from mpiad.programs.trace_run import TraceRun
from mpiad.transport.core.channels import live_channels

pytestmark = pytest.mark.unguarded  # under watch nothing is traced by shapes


@pytest.fixture
def traces(monkeypatch):
    """Let all arrays be large, and return the kinds of the recorders that are made."""
    kinds, init = [], TraceRun.__init__

    def noted(self, given, *recorder):
        kinds.append("shapes" if recorder else "values")
        init(self, given, *recorder)

    monkeypatch.setattr(TraceRun, "__init__", noted)
    monkeypatch.setattr(recorder, "_LARGE", 0)
    return kinds


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
    assert set(traces) == {"shapes"}


def test_writing_into_an_array_of_its_own(traces):
    def fun(x):
        y = np.zeros((4, 5)) * x
        y[1:3] = x[:2] + 1.0
        y += x[0]
        return y

    check_jit(fun, np.random.default_rng(2).standard_normal((4, 5)), derivatives=False)
    assert set(traces) == {"shapes"}


def test_messages(traces, rank, size):
    domain = Domain((3 * size, 7), dims=(size, 1), periodic=(True, False))
    u = np.random.default_rng(rank).standard_normal(domain.local_shape)

    def fun(u):
        padded = domain.exchange(u, boundary="edge")
        v = u + 0.1 * (padded[2:, 1:-1] - padded[1:-1, :-2])
        return mpiad.mpi_allreduce(anp.sum(v**2)) * mpiad.mpi_exchange(v, (rank + 1) % size, (rank - 1) % size, like=v * 0)

    check_jit(fun, u)
    assert set(traces) == {"shapes"}


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
    assert traces == ["shapes"] * 2


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
    assert traces == ["shapes"] * 2


def test_a_trace_that_is_given_up_has_sent_and_counted_nothing(traces, rank, size):
    """Numbers of messages are those of the interpreted function, also where rank 0 alone meets large arrays."""

    def fun(x):
        first = mpiad.mpi_exchange(x, (rank + 1) % size, (rank - 1) % size)
        return anp.sum(mpiad.mpi_allgather(anp.sum(first) * np.ones(2))) * x

    counts = [channel.sent for channel in live_channels()]
    before = [dict(sent) for sent in counts]
    expected = fun(np.ones(3))
    once = [sum(sent.values()) - sum(old.values()) for sent, old in zip(counts, before)]
    if rank:
        recorder._LARGE = 100  # the fixture puts back what was there
    jitted = mpiad.jit(fun, strict=True)
    assert_same(jitted(np.ones(3)), expected)
    assert [sum(sent.values()) - sum(old.values()) for sent, old in zip(counts, before)] == [2 * n for n in once]
    assert traces == ([] if rank else ["shapes"]) + ["values"]
    gradient = mpiad.grad(lambda x: anp.sum(jitted(x)), objective="sum")
    assert_same(gradient(np.ones(3)), mpiad.grad(lambda x: anp.sum(fun(x)), objective="sum")(np.ones(3)))


def test_all_steps_of_a_first_gradient_are_compiled(traces):
    jitted = mpiad.jit(lambda x: anp.sin(x) + x[::-1], strict=True)

    def loss(x, step):
        for _ in range(4):
            x = step(x)
        return anp.sum(x)

    x = np.arange(5.0)
    assert_same(mpiad.grad(loss)(x, jitted), mpiad.grad(loss)(x, jitted.fun))
    assert traces == ["shapes"]


def test_what_the_trace_changes_is_traced_once(traces):
    kept = []

    @mpiad.jit
    def fun(x):
        kept.append(x * 2.0)
        return x + 1.0

    np.testing.assert_array_equal(fun(np.ones(3)), 2.0)
    assert traces == ["shapes"]
    with pytest.raises(RuntimeError, match="Return the value"):
        kept[0] + 1.0


def test_where_calls_are_shown_the_function_is_run(traces, monkeypatch):
    monkeypatch.setattr("mpiad.programs.program_cache.is_watched", lambda: True)
    np.testing.assert_array_equal(mpiad.jit(lambda x: x + 1.0)(np.ones(3)), 2.0)
    assert traces == ["values"]


def test_an_error_is_that_of_numpy(traces):
    with pytest.raises(ValueError, match="broadcast"):
        mpiad.jit(lambda x: x + x[1:])(np.ones(3))
    assert function.jit(lambda x: x)(np.ones(3)).shape == (3,)
