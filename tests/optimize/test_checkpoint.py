"""Solves that the root drives, and sums of squares, go on from the last iterate that was written."""

from __future__ import annotations

import errno
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
import scipy
from killed_solve import killed_and_started_again
from mpi4py import MPI

import mpiad
from mpiad.checkpoint_files import read, write
from mpiad.errors import WorkerError
from mpiad.optimize import CheckpointFile, least_squares
from mpiad.transport.exits import signals

START = np.array([0.3, 0.5, -0.2, 0.1])
METHODS = ["L-BFGS", "BFGS", "CG", "TNC", "SLSQP", "Newton-CG", "trust-ncg", "trust-constr"]
ON_ALL_RANKS = "L-BFGS", "Newton-CG"


def mostly_on_one_rank(*names: str) -> list[Any]:
    """What a method's iterates are, and what is written of them, is the root's matter; two show that all ranks follow."""
    return [name if name in ON_ALL_RANKS else pytest.param(name, marks=pytest.mark.one_rank) for name in names]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that all ranks know."""
    return MPI.COMM_WORLD.bcast(tmp_path)


def valley(x: Any) -> Any:
    return anp.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2)


def solve(checkpoint: Any, fun: Any = valley, **keywords: Any) -> Any:
    return mpiad.minimize(fun, START, objective="mean", checkpoint=checkpoint, **{"tol": 1e-9, **keywords})


def residuals(x: Any) -> Any:
    """Rosenbrock's, some on each rank, none on the fifth and further."""
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    terms = [10.0 * (x[1] - x[0] ** 2), 1.0 - x[0], 10.0 * (x[2] - x[1] ** 2), 1.0 - x[1]][rank::size]
    return anp.array(terms) if terms else None


SQUARES_START = np.array([-1.2, 1.0, 0.4])


def solve_squares(checkpoint: Any, fun: Any = residuals, **keywords: Any) -> Any:
    tolerances: dict[str, Any] = {"gtol": 1e-10, "xtol": None, "ftol": None}
    return least_squares(fun, **{"x0": SQUARES_START, **tolerances, **keywords}, checkpoint=checkpoint)


@dataclass(frozen=True)
class Solver:
    """A solver with checkpoints, and a problem whose solution is 1 in each component."""

    name: str
    solve: Callable[..., Any]
    fun: Callable[[Any], Any]
    accuracy: float  # of the solution

    def __repr__(self) -> str:
        return self.name


MINIMIZE = Solver("minimize", solve, valley, 1e-3)
SQUARES = Solver("least_squares", solve_squares, residuals, 1e-6)
SOLVERS = pytest.mark.parametrize("solver", [MINIMIZE, SQUARES], ids=repr)


def settings_and_limits() -> list[Any]:
    """Return solvers with settings, and with a limit that ends a solve before it converges."""
    methods = [
        pytest.param(MINIMIZE, {"method": name}, {"options": {"maxfun": 40} if name == "TNC" else {"maxiter": 7}},
                     id=name, marks=[] if name in ON_ALL_RANKS else pytest.mark.one_rank)
        for name in METHODS
    ]  # fmt: skip
    squares = [
        pytest.param(SQUARES, {"tr_solver": solver, "loss": loss}, {"max_nfev": 7}, id=f"{solver}-{loss}")
        for solver in ("exact", "lsmr")
        for loss in ("linear", "cauchy")
    ]
    return methods + squares


@pytest.mark.parametrize(("solver", "settings", "limit"), settings_and_limits())
def test_goes_on_from_the_last_iterate(
    solver: Solver, settings: dict[str, Any], limit: dict[str, Any], folder: Path
) -> None:
    checkpoint = CheckpointFile(folder / "run.npz", every=3)
    first = solver.solve(checkpoint, **settings, **limit)
    written = np.load(checkpoint.file)["x"]
    begun: list[np.ndarray] = []

    def recorded(x: Any) -> Any:
        begun.append(np.array(mpiad.stop_gradient(x)))
        return solver.fun(x)

    second = solver.solve(checkpoint, recorded, **settings)
    np.testing.assert_array_equal(begun[0], written)
    np.testing.assert_allclose(second.x, 1.0, atol=solver.accuracy)
    rows = len(first.history.loss)
    assert second.nit == len(second.history.loss) - 1 > first.nit
    np.testing.assert_array_equal(second.history.loss[:rows], first.history.loss)
    assert second.history.evaluations[-1] <= second.nfev and np.all(np.diff(second.history.evaluations) >= 0)
    assert np.all(np.diff(second.history.seconds) >= 0.0)
    if solver is SQUARES:
        assert (first.status, first.nfev) == (0, 7) and second.success
        np.testing.assert_array_equal(written, first.x)
        assert second.nfev == second.evaluations["residuals"]
        assert np.all(np.diff(second.history.loss) <= 0.0) and second.history.step[rows] > 0.0
        np.testing.assert_allclose(second.cost, solver.solve(None, **settings).cost, atol=1e-12)


@SOLVERS
def test_limits_are_those_of_all_runs_together(solver: Solver, folder: Path) -> None:
    called: list[int] = []

    def counted(x: Any) -> Any:
        called.append(1)
        return solver.fun(x)

    if solver is SQUARES:
        first, second = (solver.solve(folder / "run.npz", max_nfev=limit) for limit in (4, 9))
        third = solver.solve(folder / "run.npz", counted, max_nfev=9)
        assert (first.nfev, second.nfev, third.nfev) == (4, 9, 9) and third.nit > first.nit and called == []
        assert third.status == 0 and "max_nfev" in third.message
        np.testing.assert_array_equal(third.x, second.x)
        np.testing.assert_array_equal(third.grad, second.grad)
        assert third.cost == second.cost
    else:
        first, second = (solver.solve(folder / "run.npz", options={"maxiter": limit}) for limit in (4, 9))
        third = solver.solve(folder / "run.npz", options={"maxfun": second.nfev + 5})
        assert (first.nit, second.nit) == (4, 9) and third.nfev <= second.nfev + 5 and third.nit > 9
    assert not second.success and not third.success


@pytest.mark.parametrize("method", mostly_on_one_rank(*METHODS))
def test_no_evaluation_beyond_those_of_all_runs(method: str, folder: Path) -> None:
    first = solve(folder / "run.npz", method=method, options={"maxfun": 6})
    assert first.nfev == 6 and not first.success
    called: list[int] = []
    again = solve(folder / "run.npz", lambda x: called.append(1) or valley(x), method=method, options={"maxfun": 6})
    assert (again.nfev, again.status, again.success, called) == (6, 1, False, [])
    assert again.fun == first.fun and np.array_equal(again.x, first.x)
    np.testing.assert_array_equal(again.x, np.load(folder / "run.npz")["x"])
    np.testing.assert_array_equal(again.history.loss, first.history.loss)


def test_objective_and_gradient_apart(folder: Path) -> None:
    gradient = mpiad.grad(valley, objective="mean", shared=True)
    call = {"objective": "mean", "tol": 1e-9, "checkpoint": folder / "run.npz"}
    first = mpiad.mpi_optimize(valley, gradient, START, options={"maxiter": 5}, **call)
    begun: list[np.ndarray] = []
    second = mpiad.mpi_optimize(lambda x: begun.append(x.copy()) or valley(x), gradient, START, **call)
    np.testing.assert_array_equal(begun[0], first.x)
    assert second.success and second.nit > first.nit == 5
    np.testing.assert_array_equal(second.history.loss[:6], first.history.loss)
    with pytest.raises(ValueError, match=r"belongs to another problem: .*method"):
        mpiad.mpi_optimize(valley, gradient, START, "BFGS", **call)


@pytest.mark.parametrize(("solver", "at", "every"), [(MINIMIZE, 15, 4), (SQUARES, 30, 2)], ids=repr)
def test_an_exception_leaves_what_was_written(
    solver: Solver, at: int, every: int, folder: Path, rank: int, size: int
) -> None:
    count = [0]

    def fails(x: Any) -> Any:
        count[0] += 1
        if count[0] == at and rank == size - 1:
            raise ZeroDivisionError("no way")
        return solver.fun(x)

    checkpoint = CheckpointFile(folder / "run.npz", every=every)
    with pytest.raises(WorkerError, match="no way"):
        solver.solve(checkpoint, fails)
    written = len(np.load(checkpoint.file)["history"])
    assert written % every == 1 and 1 < written < at
    result = solver.solve(checkpoint)
    assert result.success and result.nit >= written
    assert solver is SQUARES or result.nit > 13


KILLED = {
    "minimize": """
def fun(x):
    counted(x)
    return mpiad.mpi_sum(sum(100.0 * (x[k + 1] - x[k] ** 2) ** 2 + (1.0 - x[k]) ** 2 for k in range(rank, 3, 2)))

start = np.array([0.3, 0.5, -0.2, 0.1])
result = mpiad.minimize(fun, start, tol=1e-9, checkpoint=CheckpointFile(path, every=3))
""",
    "least_squares": """
def fun(x):
    counted(x)
    return np.array([10.0 * (x[rank + 1] - x[rank] ** 2), 1.0 - x[rank]])

start = np.array([-1.2, 1.0, 0.4])
result = least_squares(fun, start, checkpoint=CheckpointFile(path, every=2))
""",
}


@pytest.mark.few(1)
@pytest.mark.launches
@pytest.mark.parametrize(("name", "at"), [("minimize", 14), ("least_squares", 20)])
def test_killed_and_started_again(name: str, at: int, tmp_path: Path, mpirun: Callable[..., CompletedProcess]) -> None:
    written, whole = killed_and_started_again(mpirun, tmp_path, KILLED[name], at)
    assert 1 < written < whole


@pytest.mark.parametrize(
    ("solver", "settings"),
    [(MINIMIZE, {}), (SQUARES, {"tr_solver": "exact"}), (SQUARES, {"tr_solver": "lsmr"})],
    ids=["minimize", "exact", "lsmr"],
)
def test_sigterm_of_one_rank_returns_on_all(
    solver: Solver, settings: dict[str, Any], folder: Path, rank: int, size: int
) -> None:
    count = [0]

    def told(x: Any) -> Any:
        count[0] += 1
        if count[0] == 12 and rank == size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return solver.fun(x)

    try:
        part = solver.solve(folder / "run.npz", told, **settings, options={"on_signal": "return"})
    finally:
        signals._requested = None
    assert part.status == 143 and not part.success and "SIGTERM" in part.message
    assert solver is SQUARES or part.nfev == 12
    np.testing.assert_array_equal(np.load(folder / "run.npz")["x"], part.x)
    assert len(np.load(folder / "run.npz")["history"]) == len(part.history.loss) == part.nit + 1
    assert solver is MINIMIZE or np.all(np.isfinite(part.grad))
    assert all(np.array_equal(x, part.x) for x in MPI.COMM_WORLD.allgather(part.x))
    np.testing.assert_allclose(solver.solve(folder / "run.npz", **settings).x, 1.0, atol=min(1e-5, solver.accuracy))


SOLVES: dict[str, Callable[..., Any]] = {
    "L-BFGS": lambda fun, path, **options: mpiad.minimize(fun, START, checkpoint=path, **options),
    "L-BFGS-sharded": lambda fun, path, **options: mpiad.minimize(
        fun, START, method="L-BFGS-sharded", checkpoint=path, **options
    ),
    "mpi_optimize": lambda fun, path, **options: mpiad.mpi_optimize(
        fun, mpiad.grad(fun, shared=True), START, checkpoint=path, **options
    ),
    "least_squares": lambda fun, path, **options: mpiad.optimize.least_squares(
        lambda x: (fun(x), x - 1.0)[1], START, checkpoint=path, **options
    ),
}


CASES = [(name, signal.SIGTERM, 3) for name in SOLVES] + [("L-BFGS", signal.SIGUSR2, 3)]


@pytest.mark.parametrize(
    "name, number, at", [*CASES, ("L-BFGS", signal.SIGTERM, -1), ("L-BFGS-sharded", signal.SIGTERM, -1)]
)
def test_a_signal_ends_the_job_on_all_ranks(name: str, number: int, at: int, folder: Path, rank: int, size: int) -> None:
    """After the state is written; also if the solve has converged in the same iteration."""
    path, calls = folder / "run.npz", list[int]()
    checkpoint = CheckpointFile(path, signals=(signal.SIGUSR2,))

    def told(x: Any) -> Any:
        calls.append(1)
        if len(calls) == at and rank == size - 1:
            os.kill(os.getpid(), number)
        return mpiad.mpi_allreduce(anp.sum((x - 1.0) ** 2)) / size

    try:
        if at < 0:
            SOLVES[name](told, checkpoint)
            at = len(calls)
            calls.clear()
            MPI.COMM_WORLD.Barrier()
            for file in folder.iterdir() if rank == 0 else ():
                file.unlink()
            MPI.COMM_WORLD.Barrier()
        with pytest.raises(SystemExit) as ended:
            SOLVES[name](told, checkpoint)
        assert ended.value.code == 128 + number
    finally:
        signals._requested = None
    assert any(file.stat().st_size for file in folder.iterdir())
    at = -1
    np.testing.assert_allclose(SOLVES[name](told, checkpoint).x, 1.0, atol=1e-4)


@pytest.mark.parametrize("name", SOLVES)
def test_an_option_of_another_name_or_value_is_refused(name: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="on_signal must be 'exit' or 'return', but got 'ignore'"):
        SOLVES[name](valley, folder / "run.npz", options={"on_signal": "ignore"})


JOB = """
import os, signal, sys
import autograd.numpy as np
import mpiad
calls = []

def loss(x):
    calls.append(1)
    if len(calls) == int(sys.argv[2]) and mpiad.mpi_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return mpiad.mpi_allreduce((1.0 - x[0]) ** 2 + 100.0 * (x[1] - x[0] ** 2) ** 2)

print("x", mpiad.minimize(loss, np.array([-1.2, 1.0]), method=sys.argv[3], checkpoint=sys.argv[1], tol=1e-10).x.round(4))
"""


@pytest.mark.thorough
@pytest.mark.launches
@pytest.mark.parametrize("method", ["BFGS", "L-BFGS-sharded"])
def test_a_batch_chain_sees_the_signal(method: str, tmp_path: Path, mpirun: Callable[..., CompletedProcess]) -> None:
    stopped = mpirun(2, JOB, tmp_path / "run.npz", 9, method)
    assert stopped.returncode == 143 and stopped.stdout == "" and "the same program continues" in stopped.stderr
    continued = mpirun(2, JOB, tmp_path / "run.npz", -1, method)
    assert continued.returncode == 0 and "x [1. 1.]" in continued.stdout


OTHERS: list[tuple[Solver, str, dict[str, Any]]] = [
    (MINIMIZE, "x0", {"x0": START + 1.0}),
    (MINIMIZE, "variables", {"x0": START[:3]}),
    (MINIMIZE, "method", {"method": "BFGS"}),
    (MINIMIZE, "bounds", {"bounds": [(-2.0, 3.0)] * 4}),
    (SQUARES, "x0", {"x0": SQUARES_START + 1.0}),
    (SQUARES, "loss", {"loss": "huber"}),
    (SQUARES, "tr_solver", {"tr_solver": "lsmr"}),
    (SQUARES, "bounds", {"bounds": (-2.0, np.array([3.0, np.inf, np.inf]))}),
    (SQUARES, "method", {"method": "dogbox"}),
    (SQUARES, "f_scale", {"f_scale": 2.0}),
]


@pytest.mark.parametrize(("solver", "name", "other"), OTHERS, ids=[f"{solver}-{name}" for solver, name, _ in OTHERS])
def test_another_problem_is_refused(solver: Solver, name: str, other: dict[str, Any], folder: Path) -> None:
    path = folder / "run.npz"
    if solver is SQUARES:
        call, arguments = least_squares, {"fun": residuals, "x0": SQUARES_START, "max_nfev": 2}
    else:
        call, arguments = mpiad.minimize, {"fun": valley, "x0": START, "objective": "mean", "options": {"maxiter": 2}}
    call(**arguments, checkpoint=path)
    with pytest.raises(ValueError, match=rf"{solver}: .*belongs to another problem: .*{name}"):
        call(**{**arguments, **other}, checkpoint=path)
    if solver is SQUARES:  # the same bounds in other words are the same problem
        call(**{**arguments, "max_nfev": 3, "bounds": (np.full(3, -np.inf), np.inf)}, checkpoint=path)


def test_a_file_of_another_solver_is_refused(folder: Path) -> None:
    mpiad.minimize(lambda x: anp.sum(x**2), SQUARES_START, checkpoint=folder / "run.npz")
    with pytest.raises(ValueError, match="belongs to another problem"):
        solve_squares(folder / "run.npz")


def test_a_damaged_file_is_refused_on_all_ranks(folder: Path, rank: int) -> None:
    solve(folder / "run.npz", options={"maxiter": 2})
    if rank == 0:
        (folder / "run.npz").write_bytes((folder / "run.npz").read_bytes()[:-50])
    with pytest.raises(ValueError, match="is damaged"):
        solve(folder / "run.npz")


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "Free space on the disk"), (errno.EACCES, "writable for this user")]
)
def test_a_disk_that_takes_nothing_does_not_end_the_solve(
    number: int, remedy: str, folder: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve(folder / "run.npz", options={"maxiter": 3})

    def refused(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refused)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = solve(CheckpointFile(folder / "run.npz", every=3))
    assert result.success and result.nit > 10
    texts = [str(warning.message) for warning in said if "can't be written" in str(warning.message)]
    assert len(texts) == (rank == 0) and all(os.strerror(number) in text and remedy in text for text in texts)
    MPI.COMM_WORLD.Barrier()
    assert len(np.load(folder / "run.npz")["history"]) == 4


@SOLVERS
def test_wrong_arguments(solver: Solver, folder: Path, rank: int, size: int) -> None:
    with pytest.raises(TypeError, match="checkpoint must be a path"):
        solver.solve(3.5)
    if size > 1:
        with pytest.raises(ValueError, match="checkpoint every"):
            solver.solve(CheckpointFile(folder / "run.npz", every=1 + rank))


@pytest.mark.few(4)
@pytest.mark.parametrize("method", mostly_on_one_rank(*METHODS))
def test_goes_on_no_worse_than_it_ended(method: str, folder: Path) -> None:
    # Some methods' iterates are trial points, at which SLSQP's first steps here are 1e40 and more.
    start = np.array([-1.2, 1.0, 0.5, 0.7])
    ended: list[float] = []
    for limit in (5, 5, 12, 12, 14):
        result = mpiad.minimize(
            valley, start, method=method, objective="mean", checkpoint=CheckpointFile(folder / "run.npz", every=1),
            options={"maxfun": limit},
        )  # fmt: skip
        ended.append(result.fun)
    assert ended == sorted(ended, reverse=True) and ended[-1] < 8.0


@pytest.mark.parametrize("method", mostly_on_one_rank(*(name for name in METHODS if name != "TNC")))
def test_no_iteration_beyond_those_of_all_runs(method: str, folder: Path) -> None:
    first = solve(folder / "run.npz", method=method, options={"maxiter": 4})
    again = solve(folder / "run.npz", method=method, options={"maxiter": 4})
    assert (again.nit, again.success) == (4, False) and "maxiter" in again.message and again.status == 1
    np.testing.assert_array_equal(again.x, first.x)
    np.testing.assert_array_equal(again.history.loss, first.history.loss)
    assert np.isfinite(again.jac).all() and again.nfev <= first.nfev + 1


@pytest.mark.few(4)
@pytest.mark.parametrize("method", mostly_on_one_rank(*METHODS))
def test_evaluations_of_all_runs_are_counted(method: str, folder: Path) -> None:
    called: list[int] = []

    def value(x: np.ndarray) -> float:
        called.append(1)
        return valley(x)

    gradient = mpiad.grad(valley, objective="mean", shared=True)
    hessp = mpiad.hvp(valley, objective="mean")
    for limit in (1, 2, 3, 7, 7, 12):
        found = mpiad.minimize(
            value, START, jac=gradient, hessp=hessp if method in ("Newton-CG", "trust-ncg", "trust-constr") else None,
            method=method, objective="mean", checkpoint=CheckpointFile(folder / "run.npz", every=1),
            options={"maxfun": limit},
        )  # fmt: skip
        assert found.nfev == len(called) <= limit


def test_evaluations_at_a_start_without_iterations_are_counted(folder: Path) -> None:
    solve(folder / "run.npz", method="BFGS", options={"maxiter": 0})
    second = solve(folder / "run.npz", method="BFGS", options={"maxiter": 1})
    assert second.nit == 1 and second.nfev == second.evaluations["both"] > 2


def test_names_with_brackets_hide_no_other_method_s_files(folder: Path) -> None:
    checkpoint = folder / "run[1].npz"
    solve(checkpoint, method="L-BFGS-sharded", options={"maxiter": 3})
    with pytest.raises(ValueError, match="was written by a sharded method"):
        solve(checkpoint)


def test_only_who_writes_needs_the_folder(folder: Path, rank: int, size: int) -> None:
    root = size - 1
    given = folder / "run.npz" if rank == root else folder / "elsewhere" / "run.npz"
    mpiad.minimize(valley, START, root=root, checkpoint=given, options={"maxiter": 3})
    assert mpiad.minimize(valley, START, root=root, checkpoint=given).success
    assert [file.name for file in folder.iterdir()] == ["run.npz"]
    given = folder / "elsewhere" / "run.npz" if rank == root else folder / "run.npz"
    with pytest.raises(ValueError, match=f"doesn't exist: {folder / 'elsewhere'}. Create it"):
        mpiad.minimize(valley, START, root=root, checkpoint=given)


def converging() -> list[Any]:
    methods = [
        pytest.param(MINIMIZE, {"method": name}, id=name, marks=[] if name in ON_ALL_RANKS else pytest.mark.one_rank)
        for name in (*METHODS, "trust-krylov")
    ]
    scales = {"linear": np.array([1.0, 1.5, 2.0]), "cauchy": 1.0}
    squares = [
        pytest.param(SQUARES, {"tr_solver": solver, "loss": loss, "x_scale": scales[loss]}, id=f"{solver}-{loss}")
        for solver in ("exact", "lsmr")
        for loss in scales
    ]
    return methods + squares


def assert_same(again: Any, first: Any) -> None:
    assert set(again) == set(first)
    for name in set(first) - {"history", "hess_inv"}:
        assert type(again[name]) is type(first[name]), name
        np.testing.assert_equal(again[name], first[name], err_msg=name)
    for column, expected in zip(again.history, first.history):
        np.testing.assert_array_equal(column, expected)
    if "hess_inv" in first:
        np.testing.assert_array_equal(again.hess_inv @ np.eye(4), first.hess_inv @ np.eye(4))


@pytest.mark.parametrize(("solver", "settings"), converging())
def test_a_converged_solve_returns_the_same_result_at_once(solver: Solver, settings: dict[str, Any], folder: Path) -> None:
    """Also if it converged in its last evaluation, and then with any limit."""
    called: list[int] = []

    def counted(x: Any) -> Any:
        called.append(1)
        return solver.fun(x)

    counts = solver.solve(None, **settings).evaluations
    limit: dict[str, Any] = {"max_nfev": counts["residuals"]} if solver is SQUARES else {}
    limit = limit or {"options": {"maxfun": counts["value"] + counts["both"]}}
    first = solver.solve(folder / "run.npz", **settings, **limit)
    np.testing.assert_allclose(first.x, 1.0, atol=solver.accuracy)
    assert first.success
    for keywords in (limit, limit, {}):
        assert_same(solver.solve(folder / "run.npz", counted, **settings, **keywords), first)
    assert len(called) == 3  # once in each call, which shows that the function is still the same


@SOLVERS
def test_a_converged_solve_of_another_function_goes_on(solver: Solver, folder: Path) -> None:
    first = solver.solve(folder / "run.npz")
    shifted = solver.solve(folder / "run.npz", lambda x: solver.fun(x - 0.5))
    assert first.success and shifted.success and shifted.nit > first.nit
    np.testing.assert_allclose(shifted.x, 1.5, atol=solver.accuracy)


@pytest.mark.parametrize("method", ["SLSQP", "trust-ncg"])
def test_a_solve_that_converges_in_the_last_iteration_remains_a_success(method: str, folder: Path) -> None:
    options = {"maxiter": solve(None, method=method).nit}
    first, again = (solve(folder / "run.npz", method=method, options=options) for _ in range(2))
    # Before SciPy 1.16, SLSQP ended at the limit before it tested for convergence.
    converges = method != "SLSQP" or tuple(map(int, scipy.__version__.split(".")[:2])) >= (1, 16)
    assert (bool(first.success), again.success) == (converges, converges)
    assert again.nit == options["maxiter"]
    if converges:
        assert (again.status, again.message) == (first.status, first.message)


@pytest.mark.filterwarnings("ignore:Unknown solver options")
def test_tnc_has_no_limit_of_iterations(folder: Path) -> None:
    first = solve(folder / "run.npz", method="TNC", options={"maxfun": 40, "maxiter": 2})
    second = solve(folder / "run.npz", method="TNC", options={"maxfun": 1000, "maxiter": 2})
    assert first.nit > 2 and not first.success
    assert second.success and second.nit > first.nit
    np.testing.assert_allclose(second.x, 1.0, atol=1e-3)


@SOLVERS
def test_goes_on_with_other_tolerances(solver: Solver, folder: Path) -> None:
    rough, fine = ({"tol": 1e-2}, {"tol": 1e-9}) if solver is MINIMIZE else ({"gtol": 1.0}, {"gtol": 1e-10})
    first = solver.solve(folder / "run.npz", **rough)
    second = solver.solve(folder / "run.npz", **fine)
    assert first.success and second.success and second.nit > first.nit
    np.testing.assert_allclose(second.x, 1.0, atol=solver.accuracy)
    assert np.abs(first.x - 1.0).max() > np.abs(second.x - 1.0).max()
    assert_same(solver.solve(folder / "run.npz", **fine), second)


@SOLVERS
def test_goes_on_after_a_callback_that_ended_the_solve(solver: Solver, folder: Path) -> None:
    def stops(x: Any) -> None:
        raise StopIteration

    first = solver.solve(folder / "run.npz", callback=stops)
    second = solver.solve(folder / "run.npz", callback=None)
    assert (first.nit, first.success, second.success) == (1, False, True) and second.nit > 1


@SOLVERS
def test_a_file_of_an_earlier_version_is_read(solver: Solver, folder: Path, rank: int) -> None:
    """It contains the state, but not the result."""
    first = solver.solve(folder / "run.npz")
    if rank == 0:
        description, arrays = read(folder / "run.npz")
        for name in ("options", "result"):
            del description[name]
        state = [(name, array) for name, array in arrays.items() if "/" not in name]
        write(folder / "run.npz", description, state)
    MPI.COMM_WORLD.Barrier()
    again = solver.solve(folder / "run.npz")
    assert again.nfev > first.nfev and again.nit >= first.nit
    np.testing.assert_allclose(again.x, 1.0, atol=solver.accuracy)


ROW = np.array([[1.0, 1.0, 1.0, 1.0]])
LIMITED: dict[str, Callable[[float], Any]] = {  # sum(x) <= limit, the last one with a matrix that depends on the limit
    "dict": lambda limit: {"type": "ineq", "fun": lambda x, limit: limit - anp.sum(x), "args": (limit,)},
    "function": lambda limit: scipy.optimize.NonlinearConstraint(lambda x: anp.sum(x) - limit, -np.inf, 0.0),
    "limits": lambda limit: scipy.optimize.NonlinearConstraint(anp.sum, -np.inf, limit),
    "linear": lambda limit: scipy.optimize.LinearConstraint(ROW, -np.inf, limit),
    "matrix": lambda limit: scipy.optimize.LinearConstraint(scipy.sparse.csr_array(ROW / limit), -np.inf, 1.0),
}


@pytest.mark.parametrize(
    ("method", "kind"), [*(("SLSQP", kind) for kind in LIMITED), ("trust-constr", "function"), ("trust-constr", "matrix")]
)
@pytest.mark.filterwarnings("ignore:delta_grad == 0.0")
def test_goes_on_with_other_constraints(method: str, kind: str, folder: Path) -> None:
    """The minimizer of the distance from 1 is a quarter of the limit in each component."""
    called: list[int] = []

    def distance(x: Any) -> Any:
        called.append(1)
        return anp.sum((x - 1.0) ** 2)

    results = []
    for limit in (2.0, 2.0, 1.0):
        called.clear()
        settings: dict[str, Any] = {"method": method, "constraints": LIMITED[kind](limit), "objective": "mean"}
        results.append(mpiad.minimize(distance, np.zeros(4), checkpoint=folder / "run.npz", **settings))
        assert results[-1].success and (len(called) == 1) == (len(results) == 2)
        np.testing.assert_allclose(results[-1].x, limit / 4, atol=1e-3)
    if method == "SLSQP":
        assert_same(results[1], results[0])
    else:
        np.testing.assert_equal(results[1].v, results[0].v)
