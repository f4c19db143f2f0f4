"""`BatchSum`: sums over batches, their derivatives, and that one batch at a time is in memory."""

from __future__ import annotations

import gc
import logging
import tracemalloc

import autograd.numpy as anp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import mpiad
from mpiad.ensemble import (
    RK4,
    RK45,
    BatchSum,
    EnsembleMPI,
    EnsembleProblem,
    EnsembleSerial,
    EnsembleThreads,
    EnsembleVectorized,
    ODEProblem,
    fit,
    remake,
    solve,
)
from mpiad.errors import IntegrationError

N = 11
RATES, START, WEIGHT = np.linspace(0.5, 2.0, N)[:, None], np.array([1.3]), np.float64(0.7)
NUMBERS = np.arange(1.0, N + 1)
DECAY = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), [1.0])
TIGHT = {"rtol": 1e-10, "atol": 1e-12}
POINT = RATES, START, WEIGHT


def weighted(sol, numbers, w):
    return w * anp.sum(sol.u_end[:, 0] ** 2 * np.array(numbers))


def loss(rates, start, w, backend=EnsembleVectorized(), batch_size=4, **options):  # noqa: B008
    ensemble = EnsembleProblem(remake(DECAY, u0=start), p=rates, reduction=BatchSum(weighted, w))
    return solve(ensemble, RK45(), backend, batch_size=batch_size, **TIGHT, **options).u


def exact(rates, start, w):
    return w * anp.sum((start[0] * anp.exp(-rates[:, 0])) ** 2 * NUMBERS[: len(rates)])


def exact_gradient(rates, start, w):
    terms = (start[0] * np.exp(-rates[:, 0])) ** 2 * NUMBERS[: len(rates)]
    return -2 * w * terms[:, None], np.array([2 * w * terms.sum() / start[0]]), terms.sum()


def close(found, expected, rtol=1e-8):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


@pytest.mark.serial
@pytest.mark.each_value
@pytest.mark.parametrize("batch_size", [None, 1, 4, 100])
@pytest.mark.parametrize("backend", [EnsembleVectorized(), EnsembleSerial(), EnsembleThreads(2)], ids=repr)
@pytest.mark.parametrize("compile", [False, True])
def test_values_and_gradients(backend, batch_size, compile):
    options = {"backend": backend, "batch_size": batch_size, "compile": compile}
    J, gradient = mpiad.value_and_grad(lambda *x: loss(*x, **options), (0, 1, 2))(*POINT)
    np.testing.assert_allclose(J, exact(*POINT), rtol=1e-8)
    close(gradient, exact_gradient(*POINT))
    assert loss(*POINT, **options) == pytest.approx(J, rel=1e-12)


@pytest.mark.serial
@pytest.mark.parametrize("gradient", ["tangent", "adjoint"])
def test_a_shared_parameter_of_a_nonlinear_system(gradient):
    # The reference integrates the states with their derivatives with respect to p by another method.
    starts = np.random.default_rng(0).uniform(0.5, 1.5, (7, 2))

    def with_tangent(t, y, p):
        u, v, du, dv = y
        return [p * u - u * v, u * v - v, u + p * du - du * v - u * dv, du * v + u * dv - dv]

    ends = [
        solve_ivp(with_tangent, (0, 2), [*u, 0, 0], "DOP853", args=(1.5,), rtol=1e-12, atol=1e-13).y[:, -1] for u in starts
    ]
    u, du = np.array(ends)[:, :2], np.array(ends)[:, 2:]
    ode = ODEProblem(lambda u, p, t: [p[0] * u[0] - u[0] * u[1], u[0] * u[1] - u[1]], [1.0, 1.0], (0.0, 2.0), [1.0])

    def cubes(p):
        total = BatchSum(lambda sol, I: anp.sum(sol.u[:, -1] ** 3))
        ensemble = EnsembleProblem(remake(ode, p=p), u0=starts, reduction=total)
        return solve(ensemble, batch_size=3, saveat=0.5, gradient=gradient, **TIGHT).u

    J, slope = mpiad.value_and_grad(cubes)(np.array([1.5]))
    np.testing.assert_allclose(J, np.sum(u**3), rtol=1e-8)
    np.testing.assert_allclose(slope, [np.sum(3 * u**2 * du)], rtol=1e-7)


@pytest.mark.serial
def test_derivatives_in_other_modes_and_of_second_order():
    rng = np.random.default_rng(1)
    along = tuple(rng.standard_normal(np.shape(x)) for x in POINT)

    def by_batches(x):
        ensemble = EnsembleProblem(remake(DECAY, u0=x[1]), p=x[0], reduction=BatchSum(weighted, x[2]))
        return solve(ensemble, RK4(), batch_size=4, dt=0.02).u

    value, tangent = mpiad.jvp(lambda x: loss(*x), POINT, along)
    np.testing.assert_allclose(value, exact(*POINT), rtol=1e-8)
    np.testing.assert_allclose(tangent, sum(np.sum(g * v) for g, v in zip(exact_gradient(*POINT), along)), rtol=1e-8)
    linear = mpiad.linearize(lambda x: loss(*x))(POINT)
    np.testing.assert_allclose(linear.jvp(along), tangent, rtol=1e-12)
    for _ in range(2):
        close([3.0 * g for g in exact_gradient(*POINT)], linear.vjp(np.float64(3.0)))
    # Second derivatives of the closed form, which RK4 with fixed steps approximates to fourth order.
    found, expected = (mpiad.make_hvp(fun)(POINT)[2](along) for fun in (by_batches, lambda x: exact(*x)))
    close(found, expected, rtol=1e-6)


@pytest.mark.serial
def test_a_pytree_is_summed():
    def moments(rates):
        total = BatchSum(
            lambda sol, I: {"sums": anp.sum(sol.u_end, axis=0), "others": [anp.sum(sol.u_end**2), 1.0 * len(sol)]}
        )
        return solve(EnsembleProblem(DECAY, p=rates, reduction=total), batch_size=3, **TIGHT).u

    ends = np.exp(-RATES)
    found = moments(RATES)
    np.testing.assert_allclose(found["sums"], ends.sum(axis=0), rtol=1e-8)
    np.testing.assert_allclose(found["others"], [np.sum(ends**2), N], rtol=1e-8)
    both = mpiad.jacobian(lambda p: anp.stack([moments(p)["sums"][0], moments(p)["others"][0]]))(RATES)
    np.testing.assert_allclose(both[:, :, 0], [-ends[:, 0], -2 * ends[:, 0] ** 2], rtol=1e-7)


@pytest.mark.serial
@pytest.mark.parametrize("outputs", [1, 2])
def test_random_members_are_those_of_one_batch(outputs):
    def prob_func(prob, i, repeat, rng):
        return remake(prob, p=prob.p * rng.uniform(0.5, 2.0))

    def summed(p, batch_size):
        total = BatchSum(lambda sol, I: [anp.sum(sol.u_end**2), anp.sum(sol.u_end)][:outputs])
        ensemble = EnsembleProblem(remake(DECAY, p=p), prob_func, reduction=total, rng=3)
        return sum(solve(ensemble, trajectories=10, batch_size=batch_size, **TIGHT).u)

    def kept(p):
        ends = solve(EnsembleProblem(remake(DECAY, p=p), prob_func, rng=3), trajectories=10, **TIGHT).u_end
        return anp.sum(ends**2) + (anp.sum(ends) if outputs == 2 else 0.0)

    p = np.array([1.2])
    expected = mpiad.value_and_grad(kept)(p)
    for size in (None, 3):
        close(mpiad.value_and_grad(lambda p, size=size: summed(p, size))(p), expected, rtol=1e-12)


@pytest.mark.serial
def test_rows_of_saved_times_and_of_spans():
    times, spans = np.linspace(0.1, 0.9, 2 * N).reshape(N, 2), np.column_stack([np.zeros(N), np.linspace(1, 2, N)])

    def summed(rates, spans):
        total = BatchSum(lambda sol, I: anp.sum(sol.u**2) + anp.sum(sol.u_end))
        return solve(EnsembleProblem(DECAY, p=rates, tspan=spans, reduction=total), saveat=times, batch_size=4, **TIGHT).u

    k, ends = RATES, np.exp(-RATES[:, 0] * spans[:, 1])
    J, (by_rate, by_span) = mpiad.value_and_grad(summed, (0, 1))(RATES, spans)
    squares = np.exp(-2 * k * times)
    np.testing.assert_allclose(J, squares.sum() + ends.sum(), rtol=1e-7)
    np.testing.assert_allclose(by_rate[:, 0], np.sum(-2 * times * squares, axis=1) - spans[:, 1] * ends, rtol=1e-6)
    np.testing.assert_allclose(by_span[:, 1], -k[:, 0] * ends, rtol=1e-6)


@pytest.mark.serial
@pytest.mark.parametrize("outputs, calls", [(1, 5), (2, 10)])
def test_batches_are_solved_once_for_the_gradient_of_one_number(outputs, calls):
    seen = []

    def summed(p):
        total = BatchSum(lambda sol, I: seen.append(I) or [anp.sum(sol.u_end)] * outputs)
        return sum(solve(EnsembleProblem(remake(DECAY, p=p), reduction=total), trajectories=9, batch_size=2).u)

    mpiad.grad(summed)(np.array([1.0]))
    # The first batch finds out that there are two numbers, and is the only one that is recorded before.
    assert len(seen) == calls and seen[:5] == [range(i, min(i + 2, 10)) for i in range(1, 10, 2)]


@pytest.mark.serial
@pytest.mark.parametrize("outputs, compile", [(1, True), (2, False)])
def test_memory_does_not_grow_with_the_number_of_batches(outputs, compile):
    size, peaks = 1000, []

    def fun(sol, numbers):
        gc.collect()  # traces of f leave cycles of small objects
        return [anp.sum(sol.u_end**2), anp.sum(sol.u_end)][:outputs]

    def summed(p, batches):
        ensemble = EnsembleProblem(remake(DECAY, p=p), reduction=BatchSum(fun))
        return sum(solve(ensemble, trajectories=batches * size, batch_size=size, compile=compile, gradient="adjoint").u)

    for batches in (8, 32):
        gc.collect()
        tracemalloc.start()
        mpiad.value_and_grad(lambda p, n=batches: summed(p, n))(np.array([1.0]))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # A kept array of one number per trajectory would add 24,000 * 8 bytes.
    assert 8 * size < peaks[1] < peaks[0] + 50_000


@pytest.mark.parametrize("count", [0, 1, 2, N])
def test_ranks_sum_their_shares(count):
    point = RATES[:count], START, WEIGHT
    J, gradient = mpiad.value_and_grad(lambda *x: loss(*x, backend=EnsembleMPI()), (0, 1, 2), shared=True)(*point)
    np.testing.assert_allclose(J, exact(*point), rtol=1e-8)
    close(gradient, exact_gradient(*point))


def test_shares_that_are_not_gathered(rank, size):
    rows = slice(N * rank // size, N * (rank + 1) // size)
    found = loss(*POINT, backend=EnsembleMPI(gather=False), batch_size=2)
    np.testing.assert_allclose(found, 0.7 * np.sum((1.3 * np.exp(-RATES[rows, 0])) ** 2 * NUMBERS[rows]), rtol=1e-8)


@pytest.mark.parametrize("backend", [EnsembleVectorized(), EnsembleMPI()], ids=repr)
def test_failures(backend, rank, caplog):
    rates = RATES.copy()
    rates[[7, 9]] = np.nan
    ensemble = EnsembleProblem(DECAY, p=rates, reduction=BatchSum(lambda sol, I: anp.sum(sol.u_end[sol.survivors])))
    with caplog.at_level(logging.WARNING, logger="mpiad"):
        sol = solve(ensemble, RK45(), backend, batch_size=2, **TIGHT)
    assert sol.failed == 2 and sol.problem.p is rates and sol.execution
    np.testing.assert_allclose(sol.u, np.exp(-np.delete(RATES, [7, 9])).sum(), rtol=1e-8)
    text = (
        "2 of 11 trajectories failed (2 Unstable); the first is number 8: Unstable at t = 0 after 0 steps. For trajectory 8"
    )
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (rank == 0 or not isinstance(backend, EnsembleMPI)) and all(text in one for one in told)
    with pytest.raises(IntegrationError, match="2 of 11 trajectories failed"):
        solve(ensemble, RK45(), backend, batch_size=2, throw=True)


@pytest.mark.serial
def test_forward_mode_counts_failures_and_progress_once(capsys):
    rates, failed = RATES.copy(), []
    rates[[7, 9]] = np.nan

    def surviving(start):
        total = BatchSum(lambda sol, I: anp.sum(sol.u_end[sol.survivors]))
        ensemble = EnsembleProblem(remake(DECAY, u0=start), p=rates, reduction=total)
        sol = solve(ensemble, batch_size=2, progress=True, **TIGHT)
        failed.append(sol.failed)
        return sol.u

    value, tangent = mpiad.jvp(surviving, START, np.ones(1))
    np.testing.assert_allclose([value, tangent], np.exp(-np.delete(RATES, [7, 9])).sum() * np.array([1.3, 1.0]), rtol=1e-8)
    assert failed == [2] and "| 11/11 [" in capsys.readouterr().err.splitlines()[-1]


def test_errors_of_one_rank_are_raised_on_all(rank, size):
    def fails(sol, numbers):
        if N in numbers:
            raise ZeroDivisionError("of the last trajectory")
        return 1.0

    def solved(fun):
        return solve(EnsembleProblem(DECAY, p=RATES, reduction=BatchSum(fun)), RK45(), EnsembleMPI(), batch_size=2).u

    with pytest.raises(ZeroDivisionError, match="of the last trajectory"):
        solved(fails)
    if size > 1:
        with pytest.raises(ValueError, match="a BatchSum in which the sum has shape"):
            solved(lambda sol, numbers: np.ones(2 + (rank == 1)))
    assert solved(lambda sol, numbers: 1.0 * len(numbers)) == N


WRONG = {
    "fun": (lambda: BatchSum(3.0), TypeError, "fun must be a function"),
    "integers": (lambda: BatchSum(lambda sol, I: len(I)), TypeError, "must return floats.* but returned int 4"),
    "shapes": (
        lambda: BatchSum(lambda sol, I: sol.u_end),
        ValueError,
        "same shapes for all batches.*returned .*4.* then .*3",
    ),
    "structure": (lambda: BatchSum(lambda sol, I: [1.0] * I.start), ValueError, "same shapes for all batches"),
}


@pytest.mark.serial
@pytest.mark.parametrize("name", WRONG)
def test_wrong_functions(name):
    make, kind, text = WRONG[name]
    with pytest.raises(kind, match=f"BatchSum: .*{text}"):
        solve(EnsembleProblem(DECAY, p=RATES, reduction=make()), batch_size=4)


@pytest.mark.serial
def test_what_is_refused():
    total = BatchSum(lambda sol, I: anp.sum(sol.u_end))
    for changes in ({"output_func": lambda sol, i: (sol, False)}, {"u_init": 0.0}):
        with pytest.raises(ValueError, match="BatchSum calls no output_func, and has no u_init"):
            solve(EnsembleProblem(DECAY, p=RATES, reduction=total, **changes))
    with pytest.raises(ValueError, match="output_func or a reduction"):
        fit(EnsembleProblem(DECAY, p=RATES, reduction=total), lambda sol, i: sol.u_end[0], np.ones((N, 1)))

    def hidden(w):
        outside = BatchSum(lambda sol, I: anp.sum(w * sol.u_end))
        return solve(EnsembleProblem(DECAY, p=RATES, reduction=outside), batch_size=4).u

    for differentiated in (mpiad.grad(hidden), mpiad.grad(lambda w: hidden(w) + loss(RATES, w, WEIGHT))):
        with pytest.raises(TypeError, match=r"uses a traced variable from outside.* BatchSum\(fun, x\)"):
            differentiated(START)


@pytest.mark.serial
def test_progress(capsys):
    ensemble = EnsembleProblem(DECAY, reduction=BatchSum(lambda sol, I: anp.sum(sol.u_end)))
    solve(ensemble, trajectories=50, progress=True, batch_size=20)
    assert "| 50/50 [" in capsys.readouterr().err.splitlines()[-1]
