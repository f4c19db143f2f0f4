"""The method of moving asymptotes with variables in pieces, against published numbers, SciPy and closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
import scipy.optimize
from beam import Beam
from device_double import on_device, on_host
from mpi4py import MPI
from scipy.optimize import LinearConstraint, NonlinearConstraint

import mpiad
import mpiad.device.numpy as dnp
from mpiad.optimize.constraints import Box
from mpiad.optimize.sharded.mma import Approximation, MMAPoint, dual_ascent

METHOD = "MMA-sharded"


def piece_of(whole: Any, rank: int, size: int) -> np.ndarray:
    return np.array_split(np.asarray(whole, float), size)[rank].copy()


def joined(x: np.ndarray) -> np.ndarray:
    return np.concatenate(MPI.COMM_WORLD.allgather(x))


def gathered(fun: Any) -> Any:
    return lambda x: fun(mpiad.mpi_allgather(x, axis=0))


def solve(fun: Any, start: Any, low: Any, high: Any, rank: int, size: int, **keywords: Any) -> Any:
    ends = [piece_of(np.broadcast_to(end, np.shape(start)), rank, size) for end in (low, high)]
    options = {"xtol": 0.0, **keywords.pop("options", {})}
    return mpiad.minimize(
        gathered(fun),
        piece_of(start, rank, size),
        method=METHOD,
        bounds=scipy.optimize.Bounds(*ends),
        options=options,
        **keywords,
    )


@pytest.mark.thorough
@pytest.mark.limit(240)
def test_the_beam_of_the_88_line_code_after_50_iterations(rank: int, size: int) -> None:
    """The compliance is that of mmapy 0.3.1 in one process.

    mmapy.mmasub with its default parameters, a0 = 1, a = d = 0, c = 1e5, a subproblem tolerance of 1e-11 in place of 1e-7,
    and variables within 1e-7 of a bound set to the bound, so that the asymptotes of variables at bounds don't depend on the
    rounding errors of its interior-point method: 233.48882185597904. Without these two changes mmapy gives 233.48974763.
    """
    beam = Beam(60, 20, radius=2.4)

    def density(x: Any) -> Any:
        return anp.dot(beam.filter, mpiad.mpi_allgather(x, axis=0))

    start = piece_of(np.full(beam.size, 0.5), rank, size)
    volume = {"type": "ineq", "fun": lambda x: 1.0 - anp.mean(density(x)) / 0.5}
    result = mpiad.minimize(
        lambda x: beam.compliance(density(x)), start, method=METHOD, bounds=[(0.0, 1.0)] * len(start), constraints=volume,
        options={"maxiter": 50, "xtol": 0.0},
    )  # fmt: skip
    assert result.history.loss[0] == pytest.approx(1007.0221, abs=1e-4)  # the published program's first line
    assert result.nit == 50 and result.nfev == 51
    assert result.fun == pytest.approx(233.48882185597904, rel=1e-6)
    assert 0.0 <= result.constr[0][0] < 1e-6 and result.constr_violation == 0.0
    assert result.v[0][0] == pytest.approx(-289.41520645, rel=1e-4)


CANTILEVER = np.array([61.0, 37.0, 19.0, 7.0, 1.0])


@pytest.mark.parametrize("start, of_weight, of_bend", [(5.0, 1.0, 1.0), (1.0, 1e6, 1e-3), (9.9, 1e-3, 1e4)])
def test_svanbergs_cantilever(start: float, of_weight: float, of_bend: float, rank: int, size: int) -> None:
    """Section 6 of the paper of 1987: weight 1.340 for heights 6.016, 5.309, 4.494, 3.502 and 2.153; in any units."""

    def bend(x: Any) -> Any:
        return of_bend * (1.0 - anp.sum(CANTILEVER / x**3))

    options = {"gtol": 1e-8 * of_weight, "catol": 1e-8 * of_bend}
    result = solve(lambda x: of_weight * 0.0624 * anp.sum(x), np.full(5, start), 1.0, 10.0, rank, size,
                   constraints={"type": "ineq", "fun": gathered(bend)}, options=options)  # fmt: skip
    assert result.success and result.nit < 60 and "optimality" in result.message
    assert result.fun / of_weight == pytest.approx(1.340, abs=1e-3)
    np.testing.assert_allclose(joined(result.x), [6.016, 5.309, 4.494, 3.502, 2.153], atol=1e-3)
    # In closed form: x_j is proportional to the fourth root of the coefficient.
    shape = CANTILEVER**0.25
    np.testing.assert_allclose(joined(result.x), shape * np.sum(CANTILEVER / shape**3) ** (1 / 3), rtol=1e-6)


def mixed_problem(put: Any = np.asarray) -> tuple[Any, Any, Any, np.ndarray]:
    rng = np.random.default_rng(8)
    weights, rows, curve = put(1.0 + rng.random(12)), rng.standard_normal((2, 12)), put(rng.random(12))

    def fun(x: Any) -> Any:
        return anp.sum(weights * (x - 2.0) ** 2) + anp.sum(anp.sin(x)) + 0.1 * anp.sum(x) ** 2

    def two(x: Any) -> Any:
        return dnp.stack([anp.sum(curve * x**2), anp.sum(anp.exp(0.3 * x))])

    return fun, two, rows, np.full(12, 0.3)


@pytest.mark.each_value
@pytest.mark.parametrize("put", [np.asarray, on_device], ids=["host", "device"])
@pytest.mark.parametrize("objective", ["root", "sum", "mean"])
def test_constraints_of_all_types(objective: str, put: Any, rank: int, size: int) -> None:
    """Linear with this rank's columns, two-sided nonlinear, and a dict with the user's Jacobian; against SLSQP."""
    fun, two, rows, start = mixed_problem()
    on_put, two_on_put = mixed_problem(put)[:2]
    share = {"root": 1.0, "sum": 1.0 / size, "mean": 1.0}[objective]
    mine = np.array_split(np.arange(12), size)[rank]

    def cap(x: Any) -> Any:
        return 1.5 - anp.sum(x[3:6] ** 2)

    def slope(x: Any) -> Any:  # of the whole constraint, with respect to this rank's variables
        whole = np.zeros(12)
        whole[3:6] = -2.0 * joined(on_host(x))[3:6]
        return put(whole[mine])

    own = [
        LinearConstraint(rows[:, mine], [-1.0, -np.inf], [0.5, 1.0]),
        NonlinearConstraint(lambda x: share * gathered(two_on_put)(x), [2.0, -np.inf], [4.0, 16.5]),
        {"type": "ineq", "fun": lambda x, s: s * gathered(cap)(x), "jac": lambda x, s: slope(x), "args": (share,)},
    ]
    bounds = [(0.0, 1.4)] * len(mine)
    result = mpiad.minimize(
        lambda x: share * gathered(on_put)(x), put(start[mine]), method=METHOD, bounds=bounds, constraints=own,
        objective=objective, options={"xtol": 0.0, "gtol": 1e-8, "maxiter": 400},
    )  # fmt: skip
    theirs: Any = [
        LinearConstraint(rows, [-1.0, -np.inf], [0.5, 1.0]),
        NonlinearConstraint(two, [2.0, -np.inf], [4.0, 16.5], jac=autograd.jacobian(two)),
        {"type": "ineq", "fun": cap, "jac": autograd.grad(cap)},
    ]
    known = scipy.optimize.minimize(
        autograd.value_and_grad(fun), start, jac=True, method="SLSQP", bounds=[(0.0, 1.4)] * 12, constraints=theirs,
        options={"ftol": 1e-15, "maxiter": 500},
    )  # fmt: skip
    x = joined(on_host(result.x))
    assert result.success and result.constr_violation <= 1e-6
    np.testing.assert_allclose(x, known.x, atol=1e-5)
    np.testing.assert_allclose(result.fun, known.fun, rtol=1e-8)
    for got, expected in zip(result.constr, (rows @ x, two(x), [cap(x)])):
        np.testing.assert_allclose(got, expected, rtol=1e-12)
    # The multipliers: the gradient of f + Σ v · c vanishes for variables between their bounds.
    jac = np.vstack([rows, autograd.jacobian(two)(x), autograd.grad(cap)(x)])
    inside = (x > 1e-3) & (x < 1.4 - 1e-3)
    multipliers = np.concatenate(result.v)
    np.testing.assert_allclose((autograd.grad(fun)(x) + multipliers @ jac)[inside], 0.0, atol=1e-6)
    assert inside.sum() >= 4 and np.max(multipliers) > 1e-3 and np.min(multipliers) < -1e-3


def in_two_balls(x: Any) -> Any:
    return anp.array(
        [9.0 - anp.sum((x - center) ** 2) for center in (np.array([5.0, 2.0, 1.0]), np.array([3.0, 4.0, 3.0]))]
    )


@pytest.mark.parametrize("name, losses, evaluations", [
    ("Svanberg's example", [29.0, 11.261620338817739, 8.937618747345983, 8.773025272076326], 5),
    ("not convex", [2.496130069042396, 0.10382338341542818, -0.12665669637351995, -0.13048941928729862], 11),
])  # fmt: skip
def test_conservative_approximations(name: str, losses: list[float], evaluations: int, rank: int, size: int) -> None:
    """The objective in each iteration, and the number of evaluations, are those of mmapy.gcmmasub (0.3.1).

    With concheck, raaupdate and asymp of mmapy, a subproblem tolerance of 1e-9, a0 = 1, a = 0, c = 1000, d = 1, and 1e-6
    for the least curvatures. Without conservative approximations, the second objective rises in the first iteration.
    """
    waves = 0.0 if name == "Svanberg's example" else 1.0
    fun = lambda x: anp.sum(waves * anp.sin(3.0 * x) + (1.0 - 0.9 * waves) * x**2)  # noqa: E731
    constraints = {"type": "ineq", "fun": gathered(in_two_balls)}
    found = [
        solve(fun, [4.0, 3.0, 2.0], 0.0, 5.0, rank, size, constraints=constraints,
              options={"maxiter": 3, "gtol": 0.0, "move": 1.0, "conservative": conservative})
        for conservative in (True, False)
    ]  # fmt: skip
    np.testing.assert_allclose(found[0].history.loss, losses, rtol=1e-8)
    assert found[0].nfev == evaluations and found[0].constr_violation == 0.0
    assert waves == 0.0 or found[1].history.loss[1] > found[1].history.loss[0]


def test_an_unknown_kind_of_approximations(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"option conservative must be one of \(False, True\), but got 'yes'"):
        solve(lambda x: anp.sum(x**2), np.ones(4), 0.0, 2.0, rank, size, options={"conservative": "yes"})


def approximations(rng: np.random.Generator, n: int, m: int, spread: float) -> tuple[Approximation, np.ndarray, Box]:
    """Return random approximations of m constraints, their scaled values, and the limits."""
    x, slopes = rng.random(n), [rng.standard_normal(n) * spread ** rng.random() for _ in range(m + 1)]
    scales = np.array([np.sum(np.abs(slope)) for slope in slopes])
    limits = Box(np.maximum(x - 0.4, 0.0), np.minimum(x + 0.4, 1.0))
    return (
        Approximation(MMAPoint(x, slopes), scales, Box(x - 0.5, x + 0.5), limits, np.ones(n), np.full(m + 1, 1e-5)),
        rng.uniform(-0.2, 0.05, m),
        limits,
    )


@pytest.mark.serial
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_the_dual_is_maximized(m: int, twice: bool) -> None:
    """The primal problem's conditions hold, with constraints that are given twice, whose dual is singular, too."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        approximation, values, _ = approximations(rng, 40, m, 100.0)
        if twice:
            approximation._coefficients.append(approximation._coefficients[-1])
            values = np.append(values, values[-1])
        ascent, multipliers, count = dual_ascent(values, np.zeros(len(values))), np.zeros(len(values)), 0
        next(ascent)
        while True:
            *multipliers, done = ascent.send(approximation.sums(np.array(multipliers)))
            if done:
                break
            count += 1
        y = np.array(multipliers)
        functions = values + approximation.sums(y)[1 : len(y) + 1] - np.maximum(y - 1e3, 0.0) / 1e3
        assert count < 100 and np.all(y >= 0.0)
        assert np.max(functions) <= 1e-9 and np.max(np.abs(functions * np.minimum(y, 1.0))) <= 1e-9


@pytest.mark.serial
def test_the_approximations_and_their_minimizer() -> None:
    """Values and slopes agree with the functions at the current point; the minimizer is the one that SciPy finds."""
    rng = np.random.default_rng(2)
    approximation, _, limits = approximations(rng, 6, 2, 1.0)
    x, slopes = approximation._x, approximation._coefficients
    scale, y = 0.5, np.array([0.7, 1.9])

    def lagrangian(z: Any) -> Any:
        terms = [anp.sum(p / (x + scale - z) + q / (z - x + scale)) for p, q in slopes]
        return terms[0] + y[0] * terms[1] + y[1] * terms[2]

    known = scipy.optimize.minimize(
        autograd.value_and_grad(lagrangian),
        x,
        jac=True,
        bounds=np.transpose(limits),
        options={"ftol": 1e-16, "gtol": 1e-12},
    )
    np.testing.assert_allclose(approximation.minimizer(y)[0], known.x, atol=1e-7)
    changes = approximation.sums(y)[:3]
    assert changes[0] + y @ changes[1:] == pytest.approx(known.fun - lagrangian(x), abs=1e-12)
    # The negative Hessian of the dual by differences of its gradient.
    found, step = approximation.sums(y)[3:].reshape(2, 2), 1e-6
    for k, unit in enumerate(np.eye(2)):
        change = approximation.sums(y + step * unit)[1:3] - approximation.sums(y - step * unit)[1:3]
        np.testing.assert_allclose(-change / (2 * step), found[k], rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("kind", ["linear", "curved", "contrary"])
def test_constraints_that_cannot_be_met_are_one_error_on_all_ranks(kind: str, rank: int, size: int) -> None:
    given: dict[str, Any] = {
        "linear": LinearConstraint(np.ones((1, len(piece_of(np.ones(8), rank, size)))), 9.0, np.inf),
        "curved": {"type": "ineq", "fun": gathered(lambda x: -1.0 - anp.sum(x**2))},
        "contrary": NonlinearConstraint(
            gathered(lambda x: anp.stack([anp.sum(x), anp.sum(x)])), [-np.inf, 5.0], [3.0, 20.0]
        ),
    }
    with pytest.raises(
        ValueError, match=r"constraints can't be met. After \d+ iterations value \d of constraint 0 is violated"
    ):
        solve(lambda x: anp.sum((x - 0.3) ** 2), np.full(8, 0.5), 0.0, 1.0, rank, size, constraints=given[kind])
    # A start far from the constraint isn't mistaken for it.
    full = {"type": "ineq", "fun": gathered(lambda x: anp.sum(x) - 7.9)}
    result = solve(
        lambda x: anp.sum((x - 0.3) ** 2), np.zeros(8), 0.0, 1.0, rank, size, constraints=full, options={"gtol": 1e-7}
    )
    assert result.success
    np.testing.assert_allclose(joined(result.x), 7.9 / 8, atol=1e-6)


@pytest.mark.thorough
def test_constraints_that_short_conservative_steps_approach_can_be_met(rank: int, size: int) -> None:
    """The curvature of the first term shortens the steps of both variables, far from the constraint."""
    given = {"type": "ineq", "fun": gathered(lambda x: 0.5 - 100.0 * x[0] ** 2 - x[1])}
    result = solve(lambda x: (x[0] - 1.0) ** 2 + (x[1] - 0.9) ** 2, [0.1, 1.0], [-5.0, 0.0], [5.0, 2.0], rank, size,
                   constraints=given, options={"conservative": True, "gtol": 1e-4})  # fmt: skip
    assert result.success
    np.testing.assert_allclose(joined(result.x), [0.0119246, 0.4857804], atol=1e-5)


def test_without_constraints_and_with_fixed_variables(rank: int, size: int) -> None:
    low, high = np.array([0.0, 0.0, 0.5, 0.0, -4.0]), np.array([1.0, 1.0, 0.5, 1.0, -3.0])
    result = solve(lambda x: anp.sum((x - 0.8) ** 4) + anp.sum(x), low, low, high, rank, size,
                   options={"gtol": 1e-7, "asymin": 1e-6})  # fmt: skip
    expected = np.clip(0.8 - 0.25 ** (1 / 3), low, high)
    assert result.success and result.constr == [] and result.v == []
    np.testing.assert_allclose(joined(result.x), expected, atol=1e-5)


def test_ranks_without_variables(rank: int, size: int) -> None:
    """Variables on the first two ranks only."""
    given = {"type": "ineq", "fun": gathered(lambda x: 1.0 - x[0] * x[1])}
    result = solve(
        lambda x: -2.0 * x[0] - x[1], np.ones(2), 0.1, 4.0, rank, size, constraints=given, options={"gtol": 1e-7}
    )
    assert result.success
    np.testing.assert_allclose(joined(result.x), [4.0, 0.25], atol=1e-6)


@pytest.mark.parametrize("bad", ["value", "constraint", "solver"])
def test_trial_points_that_are_not_finite(bad: str, rank: int, size: int) -> None:
    """Below 0.2 there is nothing on the last rank; the step is made shorter on all ranks."""
    beyond = []

    def broken(x: Any, name: str) -> Any:
        low = bool(np.min(mpiad.stop_gradient(x)) < 0.2) and bad == name
        beyond.append(low)
        if low and name == "solver":
            mpiad.linalg.solve(lambda u: u * np.arange(1.0, 4.0), np.ones(3), maxiter=1, comm=MPI.COMM_SELF)
        return np.nan if low else 1.0

    def fun(x: Any) -> Any:
        return anp.sum((x - 0.21) ** 2 + 0.5 * x) * broken(x, "value") * broken(x, "solver")

    def enough(x: Any) -> Any:
        return (anp.sum(x) - 0.25 * 6) * broken(x, "constraint")

    result = solve(fun, np.full(6, 1.0), 0.0, 1.0, rank, size, constraints={"type": "ineq", "fun": gathered(enough)},
                   options={"asyinit": 1.0, "move": 1.0, "gtol": 1e-7})  # fmt: skip
    assert result.success
    np.testing.assert_allclose(joined(result.x), 0.25, atol=1e-6)


def test_limits_callback_and_checkpoint(tmp_path: Path, rank: int, size: int) -> None:
    fun, two, rows, start = mixed_problem()
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    given = NonlinearConstraint(gathered(two), -np.inf, [4.0, 16.5])

    def run(**keywords: Any) -> Any:
        return solve(fun, start, 0.0, 1.4, rank, size, constraints=given, **keywords)

    whole = run(options={"maxiter": 12})
    assert whole.nit == 12 and whole.status == 1
    assert run(options={"maxfun": 3}).nfev == 3
    for limit in (1, 5):
        assert run(options={"maxiter": limit}, checkpoint=folder / "run.npz").nit == limit
    resumed = run(options={"maxiter": 12}, checkpoint=folder / "run.npz")
    np.testing.assert_array_equal(resumed.x, whole.x)
    for field in ("loss", "gradient_norm", "step", "evaluations"):
        np.testing.assert_array_equal(getattr(resumed.history, field), getattr(whole.history, field))
    np.testing.assert_array_equal(resumed.v[0], whole.v[0])
    with pytest.raises(ValueError, match="limits of constraints"):
        solve(fun, start, 0.0, 1.4, rank, size, checkpoint=folder / "run.npz",
              constraints=NonlinearConstraint(gathered(two), -np.inf, [4.0, 16.6]))  # fmt: skip
    with pytest.raises(ValueError, match="move"):
        run(options={"move": 0.1}, checkpoint=folder / "run.npz")

    seen: list[np.ndarray] = []

    def stop(x: np.ndarray) -> None:
        seen.append(x)
        if len(seen) == 2:
            raise StopIteration

    ended = run(callback=stop if rank == size - 1 else None)
    assert ended.status == 99 and ended.nit == 2
    far = run(options={"maxiter": 0})
    assert far.nit == 0 and far.status == 1


@pytest.mark.mpi(min_size=2)
def test_a_solve_on_blocks_goes_on_with_another_number_of_ranks(tmp_path: Path, rank: int, size: int) -> None:
    folder = MPI.COMM_WORLD.bcast(tmp_path)

    def run(limit: int, checkpoint: Any, comm: Any) -> tuple[Any, np.ndarray]:
        domain = mpiad.Domain((9, 7), comm=comm)
        y, x = domain.coordinates(0.3)
        result = domain.minimize(
            lambda u: domain.sum((u - anp.sin(x + y)) ** 4), np.full(domain.local_shape, 0.5), method=METHOD,
            bounds=scipy.optimize.Bounds(0.0, 1.0), checkpoint=checkpoint,
            options={"maxiter": limit, "xtol": 0.0, "gtol": 0.0},
            constraints={"type": "ineq", "fun": lambda u: 0.3 - domain.mean(u)},
        )  # fmt: skip
        return result, mpiad.mpi_bcast(domain.gather(result.x), comm=comm)

    expected, whole = run(11, None, MPI.COMM_WORLD)
    run(4, folder / "run.npz", MPI.COMM_WORLD)
    fewer = MPI.COMM_WORLD.Split(rank == size - 1)
    if rank < size - 1:
        assert run(8, folder / "run.npz", fewer)[0].nit == 8
    MPI.COMM_WORLD.Barrier()
    found, again = run(11, folder / "run.npz", MPI.COMM_WORLD)
    assert found.nit == expected.nit == 11
    np.testing.assert_allclose(again, whole, rtol=1e-8, atol=1e-10)
    fewer.Free()


def test_wrong_arguments_are_refused_on_all_ranks(rank: int, size: int) -> None:
    last, fine = rank == size - 1, {"type": "ineq", "fun": lambda x: 1.0}
    n = len(piece_of(np.ones(6), rank, size))

    def refused(kind: type[Exception], match: str, **keywords: Any) -> None:
        arguments: dict[str, Any] = {"method": METHOD, "bounds": [(0.0, 1.0)] * n, "constraints": fine, **keywords}
        with pytest.raises(kind, match=match):
            mpiad.minimize(gathered(lambda x: anp.sum(x)), np.zeros(n), **arguments)

    refused(ValueError, "needs a finite lower and upper bound", bounds=None if last else [(0.0, 1.0)] * n)
    refused(ValueError, "needs a finite lower and upper bound", bounds=[(0.0, None if last else 1.0)] * n)
    refused(ValueError, "supports inequality constraints only", constraints={"type": "eq", "fun": lambda x: 0.0})
    refused(ValueError, "must have a type, 'eq' or 'ineq'", constraints={"fun": 3} if last else fine)
    refused(TypeError, "a constraint must be a dict", constraints=3 if last else fine)
    refused(ValueError, "must have a column for each", constraints=LinearConstraint(np.ones((1, n + last)), 0.0, 9.0))
    refused(ValueError, "supports no constraints .use 'MMA-sharded'", method="Newton-CG-sharded")
    refused(ValueError, "linear equality constraints only", method="L-BFGS-sharded")
    refused(ValueError, "has the options move, .* but got 'm'", options={"m": 3})
    refused(ValueError, "move must be positive and at most 1", options={"move": 2.0 if last else 0.5})
    refused(ValueError, r"constraint 0 has 3 values, but 2 limits. Pass one or 3",
            constraints=NonlinearConstraint(lambda x: np.zeros(3), -1.0, [1.0, 2.0]))  # fmt: skip
    broken = solve(lambda x: anp.sum(x), np.zeros(6), 0.0, 1.0, rank, size,
                   constraints={"type": "ineq", "fun": lambda x: np.nan * anp.sum(x)})  # fmt: skip
    assert broken.status == 3 and "A constraint isn't finite" in broken.message
    if size > 1:
        refused(ValueError, "all ranks must give the same arguments", constraints=[fine] if last else [fine, fine])
        refused(ValueError, "the same numbers of values on all ranks",
                constraints=NonlinearConstraint(lambda x: np.zeros(1 + last), -1.0, 1.0))  # fmt: skip
    with pytest.raises(mpiad.errors.WorkerError, match="it failed here"):
        solve(lambda x: anp.sum(x), np.zeros(6), 0.0, 1.0, rank, size, constraints={"type": "ineq", "fun": failing(last)})


def failing(here: bool) -> Any:
    def fun(x: Any) -> Any:
        if here:
            raise ArithmeticError("it failed here")
        return 1.0

    return fun


@pytest.mark.parametrize("put", [np.asarray, on_device], ids=["host", "device"])
def test_linear_equality_constraints_in_lbfgs(put: Any, rank: int, size: int) -> None:
    """A fixed volume and a second row, against the dense system of the optimality conditions, and SLSQP."""
    rng = np.random.default_rng(6)
    matrix, target = np.vstack([np.ones(14), rng.standard_normal(14)]), np.array([7.0, 1.5])
    mine = np.array_split(np.arange(14), size)[rank]
    weights, center = np.geomspace(1.0, 30.0, 14), rng.standard_normal(14)

    def solved(fun: Any, given: Any) -> Any:
        return mpiad.minimize(
            gathered(fun), put(np.zeros(len(mine))), method="L-BFGS-sharded", constraints=given,
            options={"gtol": 1e-9, "ftol": 0.0},
        )  # fmt: skip

    own = LinearConstraint(matrix[:, mine], target, target)
    quadratic = solved(lambda x: 0.5 * anp.sum(put(weights) * (x - put(center)) ** 2), own)
    system = np.block([[np.diag(weights), matrix.T], [matrix, np.zeros((2, 2))]])
    expected = np.linalg.solve(system, np.append(weights * center, target))[:14]
    x = joined(on_host(quadratic.x))
    assert quadratic.success
    np.testing.assert_allclose(x, expected, atol=1e-8)
    np.testing.assert_allclose(matrix @ x, target, atol=1e-12)
    np.testing.assert_allclose(matrix @ joined(on_host(quadratic.jac)), 0.0, atol=1e-9)

    def quartic(x: Any) -> Any:
        return anp.sum(x**4) + anp.sum(anp.cos(x))

    separate = [LinearConstraint(row[None, mine], value, value) for row, value in zip(matrix, target)]
    known = scipy.optimize.minimize(
        autograd.value_and_grad(quartic), x, jac=True, method="SLSQP", options={"ftol": 1e-14, "maxiter": 500},
        constraints=LinearConstraint(matrix, target, target),
    )  # fmt: skip
    found = solved(quartic, separate)
    assert found.success and found.fun == pytest.approx(known.fun, rel=1e-9)
    np.testing.assert_allclose(joined(on_host(found.x)), known.x, atol=1e-4)


def test_linear_equality_constraints_that_are_refused(rank: int, size: int) -> None:
    n = len(piece_of(np.ones(6), rank, size))
    ones, options = np.ones((1, n)), {"method": "L-BFGS-sharded"}
    contrary = LinearConstraint(np.ones((2, n)), [1.0, 2.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="can't be met: no x meets all linear equality constraints"):
        mpiad.minimize(gathered(lambda x: anp.sum(x**2)), np.zeros(n), constraints=contrary, **options)
    same = LinearConstraint(np.ones((2, n)), [1.0, 1.0], [1.0, 1.0])
    result = mpiad.minimize(gathered(lambda x: anp.sum(x**2)), np.zeros(n), constraints=same, **options)
    np.testing.assert_allclose(result.x, 1.0 / 6.0, atol=1e-8)
    with pytest.raises(ValueError, match="either bounds or constraints"):
        mpiad.minimize(gathered(lambda x: anp.sum(x**2)), np.zeros(n), constraints=LinearConstraint(ones, 1.0, 1.0),
                       bounds=[(0.0, 1.0)] * n if rank == 0 else None, **options)  # fmt: skip
