"""What ends a solve ends it on all ranks, and the next one works."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.optimize
from autograd.extend import defvjp, primitive
from mpi4py import MPI

import mpiad
from mpiad.errors import WorkerError
from mpiad.optimize import minimize
from mpiad.optimize.root_driven import RootDriven
from mpiad.transport.exits import user_failures


def bowl(x: Any) -> Any:
    return anp.sum((x - 3.0) ** 2 * np.arange(1, 4))


def fails_at(evaluation: int, failing: int, rank: int, error: BaseException) -> Callable[[Any], Any]:
    """Return an objective that raises on one rank."""
    count = [0]

    def fun(x: Any) -> Any:
        count[0] += 1
        if count[0] == evaluation and rank == failing:
            raise error
        return bowl(x)

    return fun


def expect_worker_error(failing: int, words: str, *args: Any, **keywords: Any) -> WorkerError:
    """Solve, and check the error on this rank and on all others; then solve again."""
    with pytest.raises(WorkerError) as caught:
        minimize(*args, **keywords)
    error = caught.value
    assert error.rank == failing and words in str(error) and words in error.traceback
    assert "Traceback" in str(error) and f"rank {failing}" in str(error)
    assert all(other == str(error) for other in MPI.COMM_WORLD.allgather(str(error)))
    again = minimize(lambda x: mpiad.mpi_allreduce(bowl(x)), np.zeros(3))
    np.testing.assert_allclose(again.x, 3.0, atol=1e-4)
    return error


@pytest.mark.parametrize("evaluation", [1, 3])
@pytest.mark.parametrize("method", ["L-BFGS", "TNC", "SLSQP", "trust-constr"])
def test_exception_in_the_function(evaluation: int, method: str, rank: int, size: int) -> None:
    for failing in {0, size - 1}:
        fun = fails_at(evaluation, failing, rank, ZeroDivisionError("no way"))
        error = expect_worker_error(failing, "ZeroDivisionError: no way", fun, np.zeros(3), method=method, objective="mean")
        assert "test_failures.py" in error.traceback and "raise error" in error.traceback
        assert (type(error.__cause__) is ZeroDivisionError) == (rank == failing)


def test_exception_on_several_ranks(rank: int, size: int) -> None:
    def fun(x: Any) -> Any:
        raise KeyError(f"mine is {rank}")

    error = expect_worker_error(0, "mine is 0", fun, np.zeros(3))
    assert (f"and {size - 1} more" in str(error)) == (size > 1)


def test_exit_in_the_function(rank: int, size: int) -> None:
    error = expect_worker_error(
        size - 1, "SystemExit: 4", fails_at(2, size - 1, rank, SystemExit(4)), np.zeros(3), objective="mean"
    )
    assert error.exit_code == 4


def test_exception_in_the_backward_pass(rank: int, size: int) -> None:
    broken = primitive(lambda x: x)

    def adjoint(ans: Any, x: Any) -> Any:
        def vjp(g: Any) -> Any:
            raise ArithmeticError("in the adjoint")

        return vjp

    defvjp(broken, adjoint)
    for method in ("L-BFGS", "SLSQP"):
        expect_worker_error(
            size - 1, "in the adjoint", lambda x: bowl(broken(x) if rank == size - 1 else x), np.zeros(3),
            objective="sum", method=method,
        )  # fmt: skip


@pytest.mark.parametrize("source", ["jac", "hessp"])
def test_exception_in_derivatives_of_the_user_s_own(source: str, rank: int, size: int) -> None:
    def broken(x: Any, *rest: Any) -> Any:
        if rank == size - 1:
            raise LookupError("no derivative")
        return np.zeros(3)

    expect_worker_error(
        size - 1, "no derivative", bowl, np.ones(3), method="Newton-CG", objective="mean", **{source: broken}
    )


@pytest.mark.mpi(min_size=2)
def test_exception_between_a_send_and_its_receive(rank: int, size: int) -> None:
    def fun(x: Any) -> Any:
        if rank == 0:
            mpiad.mpi_send(x, 1, tag=7)
            raise RuntimeError("after the send")
        return bowl(x)  # rank 1 doesn't receive

    expect_worker_error(0, "after the send", fun, np.zeros(3), objective="mean")
    if rank == 0:  # the old message isn't taken for this one
        mpiad.mpi_send(np.full(3, 5.0), 1, tag=7)
    elif rank == 1:
        assert np.array_equal(mpiad.mpi_recv(np.zeros(3), 0, tag=7), np.full(3, 5.0))


@pytest.mark.thorough
@pytest.mark.mpi(min_size=2)
def test_others_may_compute_for_long(rank: int, size: int) -> None:
    def fun(x: Any) -> Any:
        if rank == size - 1:
            raise ValueError("at once")
        time.sleep(2.0)  # longer than its patience
        return bowl(x)

    expect_worker_error(size - 1, "at once", fun, np.zeros(3), objective="mean")


def expect_error_beside_messages(rank: int, size: int, part: Callable[[Any], None]) -> None:
    """Solve with a function that raises on the last rank at once; the others run `part` on their own communicator."""
    comm = MPI.COMM_WORLD.Split(int(rank == size - 1), rank)
    mpiad.mpi_init(comm)

    def fun(x: Any) -> Any:
        if rank == size - 1:
            raise ValueError("at once")
        part(comm)
        return bowl(x)

    expect_worker_error(size - 1, "at once", fun, np.zeros(3), objective="mean")
    comm.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.thorough
def test_others_may_communicate_among_themselves(rank: int, size: int) -> None:
    def part(comm: Any) -> None:
        if rank == 0:
            time.sleep(2.0)  # the ranks between wait for this one, and not for the one that failed
        for _ in range(20):
            mpiad.mpi_allreduce(1.0, comm=comm)

    expect_error_beside_messages(rank, size, part)


@pytest.mark.mpi(min_size=3)
@pytest.mark.thorough
def test_others_may_compute_after_a_wait(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has waited computes, and its notice of that comes after the notices that the others have arrived."""
    monkeypatch.setattr(user_failures, "_TICK", 0.9 if rank == 1 else 0.05)

    def part(comm: Any) -> None:
        if rank == 0:
            time.sleep(2.9)
        mpiad.mpi_allreduce(1.0, comm=comm)
        if rank == 1:
            time.sleep(1.5)

    expect_error_beside_messages(rank, size, part)


def test_exception_in_the_callback(rank: int) -> None:
    def callback(x: Any) -> None:
        raise KeyError("in the callback")

    expect_worker_error(0, "in the callback", bowl, np.zeros(3), callback=callback)


@pytest.mark.parametrize("value", ["array", "none", "text", "pair"])
def test_wrong_value_on_one_rank(value: str, rank: int, size: int) -> None:
    wrong = {"array": np.ones(2), "none": None, "text": "3.0", "pair": (1.0, 2.0)}[value]
    with pytest.raises(TypeError, match=rf"one real number.*rank {size - 1}"):
        minimize(lambda x: wrong if rank == size - 1 else bowl(x), np.zeros(3), objective="sum")
    assert minimize(bowl, np.zeros(3)).success


def test_wrong_gradient_on_one_rank(rank: int, size: int) -> None:
    with pytest.raises(TypeError, match=r"expected shape \(3,\).*got \(2,\).*jac"):
        minimize(lambda x: 0.0, np.zeros(3), jac=lambda x: np.zeros(2 if rank == size - 1 else 3), objective="sum")
    with pytest.raises(TypeError, match="jac=True fun must return"):
        minimize(lambda x: 0.0, np.zeros(3), jac=True)


def test_mistakes_that_only_the_root_can_see() -> None:
    with pytest.raises(ValueError, match="lower bound 1.0 and upper bound 0.0"):
        minimize(bowl, np.zeros(3), bounds=[(1, 0)] * 3)
    with pytest.raises(ValueError, match="one pair of bounds for each of the 3 variables"):
        minimize(bowl, np.zeros(3), bounds=[(0, 1)] * 2)
    with pytest.raises(ValueError, match=r"bounds must be pairs \(low, high\) of real numbers, but got \[\(0, 1, 2\)"):
        minimize(bowl, np.zeros(3), bounds=[(0, 1, 2)] * 3)
    assert minimize(bowl, np.zeros(3)).success


@pytest.mark.parametrize("method", ["L-BFGS", "L-BFGS-sharded"])
@pytest.mark.parametrize("bounds", [[3, 4, 5], 3, ("a", 1), [("a", 1)] * 3, ["ab"] * 3, [None] * 3], ids=repr)
def test_bounds_that_are_no_pairs_are_refused(method: str, bounds: object) -> None:
    with pytest.raises(
        ValueError, match=rf"bounds must be pairs \(low, high\) of real numbers, but got {re.escape(repr(bounds))}\. Pass"
    ):
        minimize(bowl, np.zeros(3), method=method, bounds=bounds)


@pytest.mark.parametrize("method", ["L-BFGS", "TNC", "SLSQP", "trust-constr"])
def test_bounds_that_cross_are_refused_by_every_method(method: str, rank: int) -> None:
    crossed = scipy.optimize.Bounds([0.0, 0.0, 2.0], [1.0, 1.0, 1.0])
    for bounds in (crossed, [(0.0, 1.0), (0.0, 1.0), (2.0, 1.0)]):
        with pytest.raises(ValueError, match="variable 2 has lower bound 2.0 and upper bound 1.0"):
            minimize(bowl, np.zeros(3), method=method, objective="mean", bounds=bounds if rank == 0 else None)
    assert minimize(bowl, np.zeros(3), method=method, objective="mean").fun < 1e-4


@pytest.mark.parametrize("limit", ["ten", -1, 2.5, np.nan])
def test_limits_that_are_no_limits(limit: Any, rank: int) -> None:
    with pytest.raises(ValueError, match="maxfun must be an integer of at least 0, but got"):
        minimize(bowl, np.zeros(3), method="BFGS", options={"maxfun": limit} if rank == 0 else None)


def test_mistakes_on_one_rank_are_raised_on_all(rank: int, size: int) -> None:
    last = rank == size - 1
    with pytest.raises(ValueError, match="'Nelder-Mead'"):
        minimize(bowl, np.zeros(3), method="Nelder-Mead" if last else "CG")
    with pytest.raises(ValueError, match="objective"):
        minimize(bowl, np.zeros(3), objective="total" if last else "sum")
    with pytest.raises(TypeError, match="fun must be callable, but got float 3.0"):
        minimize(3.0 if last else bowl, np.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="jac must be callable, but got str"):
        minimize(bowl, np.zeros(3), jac="2-point" if last else None)  # type: ignore[arg-type]
    for wrong in (np.array(["a"]), None, {"n": "text"}, []):
        with pytest.raises(TypeError, match="x0 must hold"):
            minimize(bowl, wrong)
    with pytest.raises(ValueError, match="root"):
        minimize(bowl, np.zeros(3), root=size)
    if size > 1:
        with pytest.raises(ValueError, match="same"):
            minimize(bowl, np.zeros(3), method="CG" if last else "BFGS")
    assert minimize(bowl, np.zeros(3)).success


def test_traced_start_is_refused() -> None:
    def outer(a: Any) -> Any:
        return bowl(minimize(bowl, a).x)

    with pytest.raises(TypeError, match="mpiad.stop_gradient"):
        mpiad.grad(outer)(np.zeros(3))


WAITING = """
import sys, time
import autograd.numpy as np
import mpiad

rank, count = mpiad.mpi_rank(), [0]

def fun(x):
    count[0] += 1
    if rank == 1 and count[0] == 2:
        print("raised", time.time(), flush=True)
        raise ZeroDivisionError("on one rank only")
    return mpiad.mpi_allreduce(np.sum((x - 3.0) ** 2))

try:
    mpiad.minimize(fun, np.zeros(3))
finally:
    print("left", rank, flush=True)
"""


@pytest.mark.thorough
@pytest.mark.launches
def test_job_ends_where_others_wait_in_a_communication(mpirun: Callable[..., CompletedProcess]) -> None:
    done = mpirun(3, WAITING, timeout=30)
    ended = time.time()
    raised = float(done.stdout.split("raised ", 1)[1].split()[0])
    assert done.returncode != 0
    assert "ZeroDivisionError: on one rank only" in done.stderr and "in fun" in done.stderr
    assert "waits in a communication" in done.stderr
    assert "left" not in done.stdout
    assert ended - raised < 10.0  # two seconds, on cores that other processes don't need


LONG = """
import sys, time
import numpy as np
import mpiad
from mpi4py import MPI
from mpiad.errors import WorkerError

rank, count, bare = mpiad.mpi_rank(), [0], sys.argv[1] == "bare"

def fun(x):
    count[0] += 1
    if rank == 1 and count[0] == 2:
        raise ZeroDivisionError("on one rank only")
    if count[0] == 2 and bare:
        MPI.COMM_WORLD.Barrier()
    elif count[0] == 2:
        time.sleep(6.0)
    return float(np.sum((x - 3.0) ** 2)), 2.0 * (x - 3.0)

try:
    mpiad.minimize(fun, np.zeros(3), jac=True)
except WorkerError as error:
    mpiad.mpi_print("raised", rank, error.rank)
"""


@pytest.mark.launches
@pytest.mark.thorough
def test_one_long_call_is_no_wait(mpirun: Callable[..., CompletedProcess]) -> None:
    done = mpirun(2, LONG, "long", timeout=60)
    assert done.returncode == 0
    assert sorted(line for line in done.stdout.splitlines() if "raised" in line) == ["raised 0 1", "raised 1 1"]


@pytest.mark.thorough
@pytest.mark.launches
def test_bare_communication_ends_the_job_after_the_timeout(
    mpirun: Callable[..., CompletedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIAD_TIMEOUT", "2")
    done = mpirun(2, LONG, "bare", timeout=60)
    assert done.returncode != 0 and "raised" not in done.stdout
    assert "ZeroDivisionError: on one rank only" in done.stderr


SLOW = """
import sys, time
import numpy as np
import mpiad

rank, count, slow = mpiad.mpi_rank(), [0], sys.argv[1]

def fun(x):
    count[0] += 1
    time.sleep(4.0 * (slow == "evaluation" and rank == 1 and count[0] == 2))
    return float(np.sum((x - 3.0) ** 2)), 2.0 * (x - 3.0)

try:
    mpiad.minimize(fun, np.zeros(3), jac=True, callback=lambda x: time.sleep(4.0 * (slow == "callback")))
except mpiad.errors.DeadlockError as error:
    sys.stdout.write(f"waited {rank}\\n")
"""


@pytest.mark.launches
@pytest.mark.parametrize("slow", ["evaluation", pytest.param("callback", marks=pytest.mark.thorough)])
def test_all_raise_after_a_wait_beyond_the_timeout(
    slow: str, mpirun: Callable[..., CompletedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIAD_TIMEOUT", "2")
    done = mpirun(2, SLOW, slow, timeout=60)
    assert sorted(line for line in done.stdout.splitlines() if "waited" in line) == ["waited 0", "waited 1"]


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    solves = []

    def kept(self: RootDriven, *args: Any, **keywords: Any) -> None:
        made(self, *args, **keywords)
        solves.append(self)

    made = RootDriven.__init__
    monkeypatch.setattr(RootDriven, "__init__", kept)
    before = threading.active_count()
    minimize(bowl, np.zeros(3))
    with pytest.raises(WorkerError):
        minimize(lambda x: sys.exit(1), np.zeros(3))
    with pytest.raises(ValueError, match="no lower bound may exceed"):
        minimize(bowl, np.zeros(3), bounds=[(1, 0)] * 3)
    assert len(solves) == 3 and all(solve._comm == MPI.COMM_NULL for solve in solves)
    assert threading.active_count() == before
