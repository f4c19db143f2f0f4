"""Sums of squares go on from the last iterate that was written."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from killed_solve import killed_and_started_again
from mpi4py import MPI

import mpiad
from mpiad.errors import WorkerError
from mpiad.optimize import CheckpointFile, least_squares
from mpiad.transport.exits import signals

START = np.array([-1.2, 1.0, 0.4])
SOLVERS = ["exact", "lsmr"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that all ranks know."""
    return MPI.COMM_WORLD.bcast(tmp_path)


def residuals(x: Any) -> Any:
    """Rosenbrock's, some on each rank, none on the fifth and further."""
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    terms = [10.0 * (x[1] - x[0] ** 2), 1.0 - x[0], 10.0 * (x[2] - x[1] ** 2), 1.0 - x[1]][rank::size]
    return anp.array(terms) if terms else None


def solve(checkpoint: Any, fun: Any = residuals, **keywords: Any) -> Any:
    return least_squares(fun, START, checkpoint=checkpoint, gtol=1e-10, xtol=None, ftol=None, **keywords)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("loss", ["linear", "cauchy"])
def test_goes_on_from_the_last_iterate(solver: str, loss: str, folder: Path) -> None:
    checkpoint, kind = CheckpointFile(folder / "run.npz", every=3), {"tr_solver": solver, "loss": loss}
    first = solve(checkpoint, max_nfev=7, **kind)
    assert first.status == 0 and first.nfev == 7
    written, begun = np.load(checkpoint.file)["x"], []
    second = solve(checkpoint, lambda x: begun.append(np.array(mpiad.stop_gradient(x))) or residuals(x), **kind)
    np.testing.assert_array_equal(begun[0], written)
    np.testing.assert_array_equal(written, first.x)
    np.testing.assert_allclose(second.x, 1.0, atol=1e-6)
    rows = len(first.history.loss)
    assert second.nit == len(second.history.loss) - 1 > first.nit and second.success
    np.testing.assert_array_equal(second.history.loss[:rows], first.history.loss)
    assert second.history.evaluations[-1] <= second.nfev == second.evaluations["residuals"]
    assert np.all(np.diff(second.history.loss) <= 0.0) and second.history.step[rows] > 0.0
    whole = least_squares(residuals, START, gtol=1e-10, xtol=None, ftol=None, **kind)
    np.testing.assert_allclose(second.cost, whole.cost, atol=1e-12)


def test_limits_are_those_of_all_runs_together(folder: Path) -> None:
    first = solve(folder / "run.npz", max_nfev=4)
    second = solve(folder / "run.npz", max_nfev=9)
    called: list[int] = []
    third = solve(folder / "run.npz", lambda x: called.append(1) or residuals(x), max_nfev=9)
    assert (first.nfev, second.nfev, third.nfev) == (4, 9, 9) and third.nit > first.nit and called == []
    assert (third.status, third.success) == (0, False) and "max_nfev" in third.message
    np.testing.assert_array_equal(third.x, second.x)
    np.testing.assert_array_equal(third.grad, second.grad)
    assert third.cost == second.cost


@pytest.mark.parametrize("solver", SOLVERS)
def test_sigterm_of_one_rank_returns_on_all(solver: str, folder: Path, rank: int, size: int) -> None:
    count = [0]

    def told(x: Any) -> Any:
        count[0] += 1
        if count[0] == 12 and rank == size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return residuals(x)

    try:
        part = solve(folder / "run.npz", told, tr_solver=solver, options={"on_signal": "return"})
    finally:
        signals._requested = None
    assert part.status == 143 and not part.success and "SIGTERM" in part.message
    np.testing.assert_array_equal(np.load(folder / "run.npz")["x"], part.x)
    assert len(np.load(folder / "run.npz")["history"]) == len(part.history.loss) == part.nit + 1
    assert np.all(np.isfinite(part.grad))
    assert all(np.array_equal(x, part.x) for x in MPI.COMM_WORLD.allgather(part.x))
    np.testing.assert_allclose(solve(folder / "run.npz", tr_solver=solver).x, 1.0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("x0", {"x0": START + 1.0}),
        ("loss", {"loss": "huber"}),
        ("tr_solver", {"tr_solver": "lsmr"}),
        ("bounds", {"bounds": (-2.0, np.array([3.0, np.inf, np.inf]))}),
        ("method", {"method": "dogbox"}),
        ("f_scale", {"f_scale": 2.0}),
    ],
)
def test_another_problem_is_refused(name: str, other: dict[str, Any], folder: Path) -> None:
    least_squares(residuals, START, max_nfev=2, checkpoint=folder / "run.npz")
    with pytest.raises(ValueError, match=rf"least_squares: .*belongs to another problem: .*{name}"):
        least_squares(residuals, **{"x0": START, **other}, checkpoint=folder / "run.npz")
    # The same bounds in other words are the same problem.
    least_squares(residuals, START, max_nfev=3, bounds=(np.full(3, -np.inf), np.inf), checkpoint=folder / "run.npz")


def test_one_of_minimize_is_refused(folder: Path) -> None:
    mpiad.minimize(lambda x: anp.sum(x**2), START, checkpoint=folder / "run.npz")
    with pytest.raises(ValueError, match="belongs to another problem"):
        solve(folder / "run.npz")


def test_wrong_arguments(folder: Path, rank: int, size: int) -> None:
    with pytest.raises(TypeError, match="checkpoint must be a path"):
        solve(3.5)
    if size > 1:
        with pytest.raises(ValueError, match="checkpoint every"):
            solve(CheckpointFile(folder / "run.npz", every=1 + rank))


def test_an_exception_leaves_what_was_written(folder: Path, rank: int, size: int) -> None:
    count = [0]

    def fails(x: Any) -> Any:
        count[0] += 1
        if count[0] == 30 and rank == size - 1:
            raise ZeroDivisionError("no way")
        return residuals(x)

    checkpoint = CheckpointFile(folder / "run.npz", every=2)
    with pytest.raises(WorkerError, match="no way"):
        solve(checkpoint, fails)
    written = len(np.load(checkpoint.file)["history"])
    assert written % 2 == 1 and written > 1
    assert solve(checkpoint).nit >= written


KILLED = """
def fun(x):
    counted(x)
    return np.array([10.0 * (x[rank + 1] - x[rank] ** 2), 1.0 - x[rank]])

start = np.array([-1.2, 1.0, 0.4])
result = least_squares(fun, start, checkpoint=CheckpointFile(path, every=2))
"""


@pytest.mark.launches
def test_killed_and_started_again(tmp_path: Path, mpirun: Callable[..., CompletedProcess]) -> None:
    written, whole = killed_and_started_again(mpirun, tmp_path, KILLED, 40)
    assert 1 < written < whole
