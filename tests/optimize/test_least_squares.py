"""`least_squares` against SciPy's own in one process."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
import scipy.optimize
from mpi4py import MPI

import mpiad
from mpiad.errors import WorkerError
from mpiad.optimize import least_squares
from mpiad.optimize.least_squares import ResidualEvaluation

TIMES = np.linspace(0.0, 3.0, 41)
DATA = 2.0 * np.exp(-1.3 * TIMES) + 0.4 + 0.05 * np.random.default_rng(3).normal(size=41)
DATA[::9] += 1.5
START = np.array([1.0, 0.5, 0.6])
BOUNDS = ([0.0, 0.0, 0.5], [1.8, 3.0, 5.0])


def decay(x: Any, times: Any = TIMES, data: Any = DATA) -> Any:
    return x[0] * anp.exp(-x[1] * times) + x[2] - data


def share(size: int, rank: int) -> slice:
    """Return this rank's part of the table: uneven, and nothing for the last of three or more."""
    parts = size - 1 if size > 2 else size
    ends = [*np.round(np.linspace(0.0, 1.0, parts + 1) ** 1.4 * 41).astype(int), 41]
    return slice(ends[rank], ends[rank + 1])


def fit(rank: int, size: int, **keywords: Any) -> scipy.optimize.OptimizeResult:
    mine = share(size, rank)
    x0 = keywords.pop("x0", START)
    return least_squares(lambda x: decay(x, TIMES[mine], DATA[mine]), x0, **keywords)


def scipys(**keywords: Any) -> scipy.optimize.OptimizeResult:
    return scipy.optimize.least_squares(decay, START, jac=autograd.jacobian(decay), **keywords)


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
@pytest.mark.parametrize("method", ["trf", "dogbox"])
@pytest.mark.parametrize("bounds", [(-np.inf, np.inf), BOUNDS])
def test_as_scipy(solver: str, method: str, bounds: tuple, rank: int, size: int) -> None:
    keywords: dict[str, Any] = {"method": method, "bounds": bounds, "ftol": 1e-13, "xtol": 1e-13, "gtol": 1e-12}
    if (solver, method) == ("lsmr", "trf"):
        keywords["tr_options"] = {"regularize": False, "atol": 1e-14, "btol": 1e-14}  # else it creeps to the end
    got, expected = (solve(tr_solver=solver, **keywords) for solve in (partial(fit, rank, size), scipys))
    np.testing.assert_allclose(got.x, expected.x, atol=1e-9)
    np.testing.assert_allclose(got.cost, expected.cost, rtol=1e-12)
    np.testing.assert_allclose(got.grad, expected.grad, atol=1e-8)
    assert got.success and np.array_equal(got.active_mask, expected.active_mask)
    if solver == "exact":
        assert abs(got.nfev - expected.nfev) <= 1 and abs(got.njev - expected.njev) <= 1
    assert "fun" not in got and "jac" not in got


@pytest.mark.parametrize("loss", ["soft_l1", "huber", "cauchy", "arctan"])
@pytest.mark.parametrize("bounds", [(-np.inf, np.inf), pytest.param(BOUNDS, marks=pytest.mark.one_rank)])
def test_robust_losses_as_in_scipy(loss: str, bounds: tuple, rank: int, size: int) -> None:
    got = fit(rank, size, loss=loss, f_scale=0.2, bounds=bounds)
    expected = scipys(loss=loss, f_scale=0.2, bounds=bounds)
    np.testing.assert_allclose(got.x, expected.x, atol=1e-6)
    np.testing.assert_allclose(got.cost, expected.cost, rtol=1e-9)
    assert got.nfev == expected.nfev and got.njev == expected.njev
    steps = fit(rank, size, loss=loss, f_scale=0.2, bounds=bounds, tr_solver="lsmr")
    np.testing.assert_allclose(steps.cost, expected.cost, rtol=1e-5)


def test_loss_of_the_user_s_own(rank: int, size: int) -> None:
    def rho(z: np.ndarray) -> Any:
        return np.array([np.log1p(z), 1.0 / (1.0 + z), -1.0 / (1.0 + z) ** 2])

    assert fit(rank, size, loss=rho, f_scale=0.3).cost == fit(rank, size, loss="cauchy", f_scale=0.3).cost
    with pytest.raises(WorkerError, match=r"loss must return shape \(3, "):
        fit(rank, size, loss=lambda z: z)


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
def test_derivatives_of_the_user_s_own(solver: str, rank: int, size: int) -> None:
    mine = share(size, rank)

    def rows(x: np.ndarray) -> np.ndarray:
        falls = np.exp(-x[1] * TIMES[mine])
        return np.stack([falls, -TIMES[mine] * x[0] * falls, np.ones_like(falls)], axis=1)

    got = fit(rank, size, jac=rows, tr_solver=solver, method="dogbox", xtol=1e-12)
    np.testing.assert_allclose(got.x, scipys(method="dogbox", xtol=1e-12).x, atol=1e-7)
    with pytest.raises(TypeError, match=r"jac must return shape .*, but got"):
        fit(rank, size, jac=lambda x: np.zeros((7, 2)))


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
@pytest.mark.parametrize("method", ["trf", "dogbox"])
def test_derivatives_in_memory_that_is_written_again(solver: str, method: str, rank: int, size: int) -> None:
    """A simulation makes residuals and derivatives together, each time in the same arrays."""
    mine = share(size, rank)
    times, data = TIMES[mine], DATA[mine]
    residuals, rows = np.empty(times.size), np.empty((times.size, 3))

    def simulate(x: Any) -> None:
        decayed = np.exp(-x[1] * times)
        residuals[:] = x[0] * decayed + x[2] - data
        rows[:] = np.stack([decayed, -x[0] * times * decayed, np.ones(times.size)], axis=1)

    def fun(x: Any) -> Any:
        simulate(x)
        return residuals

    def jac(x: Any) -> Any:
        simulate(x)
        return rows

    start, keywords = np.array([1.7, 0.05, 4.9]), {"method": method, "tr_solver": solver, "max_nfev": 40}
    got = least_squares(fun, start, jac=jac, **keywords)
    expected = least_squares(lambda x: fun(x).copy(), start, jac=lambda x: jac(x).copy(), **keywords)
    assert got.nfev > got.njev  # trial points that were refused: products at the last iterate follow
    assert np.array_equal(got.x, expected.x) and got.nfev == expected.nfev
    assert np.array_equal(got.grad, expected.grad)


def test_scales_of_the_jacobian(rank: int, size: int) -> None:
    got, expected = fit(rank, size, x_scale="jac"), scipys(x_scale="jac")
    np.testing.assert_allclose(got.x, expected.x, atol=1e-9)
    assert got.nfev == expected.nfev


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
def test_residuals_that_communicate(solver: str, rank: int, size: int) -> None:
    """Σ θ^r = 2, where the terms of all ranks arrive."""
    start = {"theta": 1.0, "shift": np.array([0.3, 0.1])}

    def fun(v: Any) -> Any:
        powers = mpiad.mpi_sum(v["theta"] ** (rank + 1), root=size - 1)
        before = mpiad.mpi_exchange(v["shift"], dest=(rank + 1) % size, source=(rank - 1) % size)
        first = [before[1] - 1.0] if rank == 0 else []
        last = [powers - 1.0, before[0] - 2.0] if rank == size - 1 else []
        return first + last or None

    result = least_squares(fun, start if rank == 0 else None, tr_solver=solver, xtol=1e-15, gtol=1e-15, ftol=1e-15)
    theta = np.roots(np.append(np.ones(size), -1.0))
    (expected,) = theta.real[(np.abs(theta.imag) < 1e-9) & (theta.real > 0.0)]
    assert result.x["theta"] == pytest.approx(expected, abs=1e-13)
    np.testing.assert_allclose(result.x["shift"], [2.0, 1.0], atol=1e-10)
    assert set(result.grad) == {"theta", "shift"}


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
def test_result_is_the_same_on_all_ranks(solver: str, rank: int, size: int) -> None:
    root = size - 1
    result = fit(rank, size, root=root, tr_solver=solver, loss="soft_l1", x0=START if rank == root else None)
    found = MPI.COMM_WORLD.allgather({name: pickle.dumps(result[name]) for name in result})
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
def test_each_point_once(solver: str, rank: int, size: int) -> None:
    calls: list[bytes] = []

    def fun(x: Any) -> Any:
        calls.append(mpiad.stop_gradient(x).tobytes())
        return decay(x, *((TIMES, DATA) if rank == size - 1 else (TIMES[:0], DATA[:0])))

    result = least_squares(fun, START, tr_solver=solver, jac=None)
    if solver == "exact":  # a value for each point, and a linearization at each iterate
        assert len(calls) == result.nfev + result.njev
    else:  # the pass that gives the value serves all products with the Jacobian and its transpose
        assert len(calls) == result.nfev < result.evaluations["product"]
    assert result.evaluations["residuals"] == result.nfev == len(set(calls))


@pytest.mark.parametrize("limit", [1, 3])
def test_limit_of_evaluations(limit: int, rank: int, size: int) -> None:
    result = fit(rank, size, max_nfev=limit)
    assert not result.success and result.status == 0 and result.nfev == limit
    assert result.cost == result.history.loss[-1] == min(result.history.loss)


def test_history_progress_and_callback(rank: int, size: int, capsys: pytest.CaptureFixture) -> None:
    seen = []
    result = fit(rank, size, callback=seen.append, progress=True)
    history = result.history
    assert len(history.loss) == result.nit + 1 == result.njev and history.evaluations[-1] == result.nfev
    assert history.loss[0] == pytest.approx(0.5 * np.sum(decay(START) ** 2)) and history.loss[-1] == result.cost
    assert history.gradient_norm[-1] == np.max(np.abs(result.grad))
    text = capsys.readouterr().err
    assert (len(seen), f"iterations: {result.nit}it [" in text) == ((result.nit, True) if rank == 0 else (0, False))
    if rank == 0:
        np.testing.assert_allclose(history.step[1:], np.linalg.norm(np.diff([START, *seen], axis=0), axis=1))
        assert np.array_equal(seen[-1], result.x)


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
def test_stop_iteration_stops_everywhere(solver: str, rank: int, size: int) -> None:
    def callback(intermediate_result: Any) -> None:
        if intermediate_result.nit == 2:
            raise StopIteration

    result = fit(rank, size, callback=callback, tr_solver=solver)
    assert result.nit == 2 and not result.success and result.status == -2
    assert result.cost == pytest.approx(0.5 * np.sum(decay(result.x) ** 2))


def test_many_variables_take_products(rank: int, size: int) -> None:
    n = 130
    target = np.linspace(-1.0, 1.0, n)
    mine = slice(rank, None, size)
    evaluations = []
    made = ResidualEvaluation.__init__

    def noted(self: ResidualEvaluation, *args: Any, **keywords: Any) -> None:
        made(self, *args, **keywords)
        evaluations.append(self.gathers)

    ResidualEvaluation.__init__ = noted  # type: ignore[method-assign]
    try:
        result = least_squares(lambda x: anp.sinh(x[mine] - target[mine]), np.zeros(n), gtol=1e-10)
    finally:
        ResidualEvaluation.__init__ = made  # type: ignore[method-assign]
    np.testing.assert_allclose(result.x, target, atol=1e-8)
    assert evaluations == [True] and result.evaluations["factor"] == 0


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
@pytest.mark.parametrize("evaluation", [1, 3, 8])
def test_exception_on_one_rank(solver: str, evaluation: int, rank: int, size: int) -> None:
    for failing in {0, size - 1}:
        count = [0]

        def fun(x: Any, failing: int = failing, count: list[int] = count) -> Any:
            count[0] += 1
            if count[0] == evaluation and rank == failing:
                raise ZeroDivisionError("no way")
            return decay(x)

        with pytest.raises(WorkerError, match="least_squares: rank .* raised ZeroDivisionError: no way") as caught:
            least_squares(fun, START, tr_solver=solver)
        assert caught.value.rank == failing and "raise ZeroDivisionError" in caught.value.traceback
        assert fit(rank, size).success


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"fun": 3.0}, TypeError, "least_squares: fun must be callable"),
        ({"jac": True}, TypeError, "jac must be a function"),
        ({"loss": "square"}, ValueError, "loss must be a function or one of linear"),
        ({"f_scale": 0.0}, ValueError, "f_scale must be one positive number"),
        ({"method": "lm"}, ValueError, "method must be 'trf' or 'dogbox'"),
        ({"tr_solver": "svd"}, ValueError, "tr_solver must be"),
        ({"fun": lambda x: x * 1j}, TypeError, "real residuals"),
        ({"fun": lambda x: "text"}, TypeError, "real residuals"),
    ],
)
def test_mistake_of_one_rank_is_raised_on_all(keywords: dict, error: type, words: str, rank: int, size: int) -> None:
    given = {"fun": decay, **(keywords if rank == size - 1 else {})}
    with pytest.raises(error, match=words):
        least_squares(given.pop("fun"), START, **given)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"bounds": ([1.0, 0.0, 0.0], [0.0, 1.0, 1.0])}, "no lower bound may exceed"),
        ({"bounds": ([1.0, 0.0, 0.0], [1.0, 1.0, 1.0])}, "strictly less"),
        ({"bounds": ([0.0, 0.0], [1.0, 1.0])}, "for each of the 3 variables, but got 2 lower and 2 upper bounds"),
        ({"bounds": [(0.0, 1.0)] * 3}, r"a pair \(low, high\) of numbers or arrays, but got \[\(0"),
        ({"bounds": ([2.0, 0.0, 0.0], [3.0, 1.0, 1.0])}, "outside of provided bounds|infeasible"),
        ({"max_nfev": 0}, "max_nfev"),
    ],
)
def test_mistakes_that_only_the_root_can_see(keywords: dict, words: str, rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=words):
        fit(rank, size, **(keywords if rank == 0 else {}))
    assert fit(rank, size).success


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_residuals_that_are_not_finite(solver: str, value: float, rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=rf"aren't finite at x0.* on rank {size - 1} \d+ of \d+ residuals\."):
        least_squares(lambda x: decay(x) * (value if rank == size - 1 else 1.0), START, tr_solver=solver)
    outside = []

    def fun(x: Any) -> Any:  # a long first step leaves the domain
        inside = bool(np.all(mpiad.stop_gradient(x) > 0.0))
        outside.append(not inside)
        return anp.log(x) + 6.0 if inside else np.full(2, value)

    with np.errstate(all="ignore"):
        result = least_squares(fun, np.full(2, 0.9), tr_solver=solver, xtol=1e-12)
    assert any(outside) and result.success
    np.testing.assert_allclose(result.x, np.exp(-6.0), rtol=1e-6)


def test_number_of_residuals_may_not_change(rank: int, size: int) -> None:
    count = [0]

    def fun(x: Any) -> Any:
        count[0] += 1
        return decay(x)[: 20 + (count[0] > 2 and rank == size - 1)]

    with pytest.raises(TypeError, match="same number of residuals each time, but got 20 and then 21"):
        least_squares(fun, START, tr_solver="lsmr")


@pytest.mark.mpi(min_size=2)
def test_scales_are_compared_as_numbers(rank: int, size: int) -> None:
    last = rank == size - 1
    fit(rank, size, loss="huber", f_scale=1 if last else 1.0, max_nfev=2)
    with pytest.raises(ValueError, match="same arguments.*f_scale=0.1, .*f_scale=0.10000000149"):
        fit(rank, size, loss="huber", f_scale=np.float32(0.1) if last else 0.1, max_nfev=2)
