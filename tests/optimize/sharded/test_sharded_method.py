"""Sharded solves that are broken off go on as if they never were, bit for bit."""

from __future__ import annotations

import os
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.optimize import CheckpointFile
from mpiad.optimize.sharded.limited_memory import LimitedMemory
from mpiad.transport.exits import signals

METHOD = "L-BFGS-sharded"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that all ranks know."""
    return MPI.COMM_WORLD.bcast(tmp_path)


def valley(x: Any) -> Any:
    whole = mpiad.mpi_allgather(x, axis=0)
    return anp.sum(100.0 * (whole[1:] - whole[:-1] ** 2) ** 2 + (1.0 - whole[:-1]) ** 2)


def solve(checkpoint: Any = None, fun: Any = valley, **keywords: Any) -> Any:
    start = np.tile([-1.2, 1.0], 2 + mpiad.mpi_rank())
    options = {"gtol": 1e-8, "ftol": 0.0, "m": 4, **keywords.pop("options", {})}
    return mpiad.minimize(fun, start, method=METHOD, checkpoint=checkpoint, options=options, **keywords)


def assert_same(got: Any, expected: Any) -> None:
    """Compare all that a result says, but for the times, bit for bit."""
    for name in ("x", "jac", "fun", "nit", "nfev", "njev", "status", "message"):
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)
    for name in ("loss", "gradient_norm", "step", "evaluations"):
        np.testing.assert_array_equal(getattr(got.history, name), getattr(expected.history, name), err_msg=name)


@pytest.fixture(scope="module")
def unbroken() -> Any:
    """The solve that is never broken off."""
    return solve()


def bounds_of(bounded: bool) -> Any:
    return [(-2.0, 0.7)] * (4 + 2 * mpiad.mpi_rank()) if bounded else None


@pytest.mark.thorough
@pytest.mark.parametrize("bounded", [False, True])
def test_limits_that_are_raised_change_nothing_else(bounded: bool, folder: Path, unbroken: Any) -> None:
    bounds = bounds_of(bounded)
    expected = solve(bounds=bounds) if bounded else unbroken
    parts = []
    for limit in (1, 3, 17, 18, 15000):
        parts.append(solve(folder / "run.npz", bounds=bounds, options={"maxiter": limit}))
        assert np.all(np.diff(parts[-1].history.seconds) >= 0.0)
    assert [part.nit for part in parts[:4]] == [1, 3, 17, 18] and parts[0].status == 1
    assert_same(parts[-1], expected)


def test_a_solve_that_has_ended_returns_at_once(folder: Path) -> None:
    def fails(x: Any) -> Any:
        raise AssertionError("evaluated")

    expected = solve(folder / "run.npz")
    assert_same(solve(folder / "run.npz", fails), expected)


def test_a_failed_solve_goes_on(folder: Path, rank: int, size: int, unbroken: Any) -> None:
    count = [0]

    def fails(x: Any) -> Any:
        count[0] += 1
        value = valley(x)
        if count[0] == 25 and rank == size - 1:
            raise ZeroDivisionError("no way")
        return value

    checkpoint = CheckpointFile(folder / "run.npz", every=4)
    with pytest.raises(mpiad.errors.WorkerError, match="no way"):
        solve(checkpoint, fails)
    assert_same(solve(checkpoint), unbroken)


def test_the_newest_iteration_that_all_ranks_have(folder: Path, rank: int, size: int, unbroken: Any) -> None:
    checkpoint = CheckpointFile(folder / "run.npz", every=5)
    solve(checkpoint, options={"maxiter": 10})
    # The last rank's newest file is gone, as if it had been killed before it was renamed.
    files = sorted(folder.glob(f"run.rank{size - 1}of{size}.*.npz"))
    MPI.COMM_WORLD.Barrier()
    if rank == size - 1:
        max(files, key=lambda file: file.stat().st_mtime_ns).unlink()
    MPI.COMM_WORLD.Barrier()
    evaluated: list[int] = []
    resumed = solve(checkpoint, lambda x: evaluated.append(1) or valley(x))
    assert_same(resumed, unbroken)
    assert len(evaluated) == unbroken.nfev - unbroken.history.evaluations[5]


@pytest.mark.parametrize("of_all", [False, True])
def test_sigterm(of_all: bool, folder: Path, rank: int, size: int, unbroken: Any) -> None:
    count = [0]

    def told(x: Any) -> Any:
        count[0] += 1
        if count[0] == 12 and (of_all or rank == size - 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return valley(x)

    try:
        part = solve(folder / "run.npz", told, options={"on_signal": "return"})
        assert part.status == 143 and not part.success and part.message.startswith("INTERRUPTED")
        assert 5 < part.nit < 12
        again = solve(
            folder / "run.npz", told, options={"on_signal": "return"}
        )  # a program that goes on after its warning is stopped again
        assert again.status == (143 if count[0] > 12 else 0)
    finally:
        signals._requested = None
    assert_same(solve(folder / "run.npz"), unbroken)


def other_call(name: str) -> dict[str, Any]:
    """Return keywords and start of a call that isn't the one that the checkpoint belongs to."""
    rank = mpiad.mpi_rank()
    start = np.tile([-1.2, 1.0], 2 + rank)
    return {
        "objective": {"x0": start, "objective": "mean"},
        "m": {"x0": start, "options": {"m": 5}},
        "bounds": {"x0": start, "bounds": [(0.0, 9.0)] * len(start)},
        "variables": {"x0": {"a": start[:3], "b": start[3:]}},
        "x0": {"x0": start + (rank == 0)},
        "root": {"x0": start, "root": mpiad.mpi_size() - 1},
    }[name]


@pytest.mark.parametrize("name", ["objective", "m", "bounds", "variables", "x0", "root"])
def test_another_problem_is_refused(name: str, folder: Path, size: int) -> None:
    solve(folder / "run.npz", options={"maxiter": 2})
    keywords = {"options": {}, **other_call(name)}
    keywords["options"] = {"m": 4, **keywords["options"]}
    if name != "root" or size > 1:
        with pytest.raises(ValueError, match=rf"belongs to another problem: .*{name}.* in the file, but .* in this call"):
            mpiad.minimize(lambda x: 0.0, method=METHOD, checkpoint=folder / "run.npz", **keywords)


def test_the_layout_of_another_version_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = LimitedMemory.state
    with monkeypatch.context() as patch:
        patch.setattr(LimitedMemory, "state", lambda self: {**state(self), "rows": state(self)["rows"][1:]})
        solve(folder / "run.npz", options={"maxiter": 2})
    with pytest.raises(ValueError, match=r"vectors have shape \(.*\) instead of \(.*another version of mpiad. Delete"):
        solve(folder / "run.npz")


def test_another_method_is_refused(folder: Path) -> None:
    solve(folder / "run.npz", options={"maxiter": 2})
    with pytest.raises(ValueError, match="written by a sharded method"):
        mpiad.minimize(lambda x: anp.sum(x**2), np.ones(3), checkpoint=folder / "run.npz")
    mpiad.minimize(lambda x: anp.sum(x**2), np.ones(3), checkpoint=folder / "other.npz")
    with pytest.raises(ValueError, match="a method that runs on the root"):
        solve(folder / "other.npz")


@pytest.mark.mpi(min_size=2)
def in_pieces(method: str, limit: int, checkpoint: Any, comm: Any, slope: float = 1.0) -> tuple[Any, np.ndarray]:
    """Minimise over consecutive parts of one vector; return the result, and its variables one behind the other."""
    ends = [20 * rank // comm.size for rank in range(comm.size + 1)]
    start = np.tile([-1.2, slope], 10)[ends[comm.rank] : ends[comm.rank + 1]]

    def fun(x: Any) -> Any:
        whole = mpiad.mpi_allgather(x, axis=0, comm=comm)
        return anp.sum(10.0 * (whole[1:] - whole[:-1] ** 2) ** 2 + (1.0 - whole[:-1]) ** 2)

    result = mpiad.minimize(fun, start, method=method, comm=comm, checkpoint=checkpoint, options={"maxiter": limit})
    return result, np.concatenate(comm.allgather(result.x))


def on_blocks(method: str, limit: int, checkpoint: Any, comm: Any, slope: float = 1.0) -> tuple[Any, np.ndarray]:
    """Minimise over a nest of blocks with leading axes, real and complex, of several tiles of the memory."""
    domain = mpiad.Domain((44, 401), comm=comm)
    y, x = domain.coordinates(slope)

    def fun(u: Any) -> Any:
        v, real = domain.exchange(u["real"]), u["real"]
        steps = sum((real - part) ** 2 for part in (v[:-2, 1:-1], v[2:, 1:-1], v[1:-1, :-2], v[1:-1, 2:]))
        apart = domain.sum(anp.abs(u["complex"] - 1j * real) ** 2)
        return domain.sum(steps + (real**2 - 1.0) ** 2 + 0.1 * real * anp.sin(x + y)) + anp.sum(apart)

    start = {"real": np.sin(3.0 * y + x) + 0.1, "complex": np.zeros((2, *domain.local_shape), complex)}
    result = domain.minimize(fun, start, method=method, checkpoint=checkpoint, options={"maxiter": limit})
    return result, mpiad.mpi_bcast(domain.gather(result.x["real"]), comm=comm)


@pytest.mark.each_value
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("method", [METHOD, "Newton-CG-sharded"])
@pytest.mark.parametrize("run", [in_pieces, on_blocks])
def test_a_solve_goes_on_with_another_number_of_ranks(run: Any, method: str, folder: Path, rank: int, size: int) -> None:
    """On all ranks, on one less, and on all again: as if it had never been broken off, but for rounding."""
    fewer = MPI.COMM_WORLD.Split(rank == size - 1)
    expected, whole = run(method, 11, None, MPI.COMM_WORLD)
    run(method, 4, folder / "run.npz", MPI.COMM_WORLD)
    if rank < size - 1:
        part, _ = run(method, 8, folder / "run.npz", fewer)
        assert part.nit == 8
        np.testing.assert_allclose(part.history.loss, expected.history.loss[:9], rtol=1e-9)
    MPI.COMM_WORLD.Barrier()
    assert not list(folder.glob(f"*of{size}.*")) or size == 1
    found, again = run(method, 11, folder / "run.npz", MPI.COMM_WORLD)
    assert (found.nit, found.nfev) == (expected.nit, expected.nfev)
    np.testing.assert_allclose(again, whole, rtol=1e-6, atol=1e-9)
    fewer.Free()


@pytest.mark.mpi(min_size=2)
def test_what_cannot_go_on_with_another_number_of_ranks_is_refused(folder: Path, rank: int, size: int) -> None:
    alone = MPI.COMM_WORLD.Split(rank)
    in_pieces(METHOD, 2, folder / "run.npz", MPI.COMM_WORLD)
    with pytest.raises(ValueError, match=r"another problem: x0 of all ranks \(checksum\) is"):
        in_pieces(METHOD, 2, folder / "run.npz", alone, slope=1.1)
    with pytest.raises(ValueError, match=r"another problem: whole arrays is \[\[\[20\]\].* in the file, but \[\[\[3\]\]"):
        mpiad.minimize(valley, np.ones(3), method=METHOD, comm=alone, checkpoint=folder / "run.npz")
    with pytest.raises(ValueError, match=r"another number of ranks .* the positions of their variables aren't known"):
        mpiad.minimize(valley, np.ones((3, 2)), method=METHOD, comm=alone, checkpoint=folder / "run.npz")
    alone.Free()


def test_a_damaged_file_of_one_rank_is_refused_on_all(folder: Path, rank: int, size: int) -> None:
    solve(CheckpointFile(folder / "run.npz", every=2), options={"maxiter": 4})
    MPI.COMM_WORLD.Barrier()
    if rank == size - 1:
        file = folder / f"run.rank{rank}of{size}.b.npz"
        file.write_bytes(file.read_bytes()[:-100])
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(ValueError, match=rf"rank{size - 1}of{size}\.b\.npz is damaged.*Delete it"):
        solve(CheckpointFile(folder / "run.npz", every=2))


@pytest.mark.mpi(min_size=2)
def test_lost_files_of_one_rank_are_missed(folder: Path, rank: int, size: int) -> None:
    solve(CheckpointFile(folder / "run.npz", every=2), options={"maxiter": 4})
    MPI.COMM_WORLD.Barrier()
    if rank == size - 1:
        for file in folder.glob(f"run.rank{rank}of{size}.*"):
            file.unlink()
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(ValueError, match=f"rank {size - 1} has no file of the iterations"):
        solve(folder / "run.npz")


def test_a_full_disk_of_one_rank(folder: Path, rank: int, size: int, unbroken: Any) -> None:
    checkpoint = CheckpointFile(folder / "run.npz", every=3)
    solve(checkpoint, options={"maxiter": 6})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            got = solve(checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_same(got, unbroken)
    (text,) = [str(warning.message) for warning in said if warning.category is RuntimeWarning]
    assert f"can't be written; the older one is kept (rank {size - 1}:" in text and "ulimit -f" in text
    evaluated: list[int] = []
    assert_same(solve(checkpoint, lambda x: evaluated.append(1) or valley(x)), unbroken)
    assert len(evaluated) == unbroken.nfev - unbroken.history.evaluations[6]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (3, TypeError, "checkpoint must be a path"),
        ("no/such/run.npz", ValueError, "the folder of checkpoint .* doesn't exist"),
        (CheckpointFile("run.npz", every=0), ValueError, "every must be an integer above zero, but got 0"),
    ],
)
def test_wrong_checkpoint_of_one_rank(given: Any, error: type, words: str, folder: Path, rank: int, size: int) -> None:
    with pytest.raises(error, match=words):
        solve(given if rank == size - 1 else folder / "run.npz")


KILLED = """
import os, random, signal, sys, threading, time
import numpy as np
import mpiad
from mpiad.optimize import CheckpointFile

path, out, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank, size, chance = mpiad.mpi_rank(), mpiad.mpi_size(), random.Random(seed)
victim, kind, moment = chance.randrange(size), chance.randrange(4), chance.randrange(1, 12)
replace, count = os.replace, [0, 0]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def replaced(old, new):
    count[0] += 1
    if seed and rank == victim and count[0] == moment and kind == 0:
        die()
    replace(old, new)
    if seed and rank == victim and count[0] == moment and kind == 1:
        die()

def fun(x):
    count[1] += 1
    if seed and rank == victim and count[1] == 2 * moment and kind == 2:
        die()
    whole = mpiad.mpi_allgather(x, axis=0)
    return mpiad.mpi_allreduce(np.sum((x - 1.0) ** 4)) + np.sum(100.0 * (whole[1:] - whole[:-1] ** 2) ** 2)

os.replace = replaced
if seed and rank == victim and kind == 3:
    threading.Timer(chance.uniform(0.0, 0.2), die).start()
result = mpiad.minimize(
    fun, np.tile([-1.2, 1.0], 2 + rank), method="L-BFGS-sharded", options={"gtol": 1e-8, "ftol": 0.0, "m": 4},
    checkpoint=CheckpointFile(path, every=2) if path != "none" else None,
)
history = np.array([result.history.loss, result.history.gradient_norm, result.history.step, result.history.evaluations])
np.savez(f"{out}.{rank}.npz", x=result.x, jac=result.jac, counts=[result.nit, result.nfev], fun=result.fun, history=history)
"""


@pytest.mark.thorough
@pytest.mark.launches
@pytest.mark.limit(120)
@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (2, [14]),
        pytest.param(3, [20], marks=pytest.mark.thorough),
        pytest.param(3, [21, 22], marks=pytest.mark.thorough),
    ],
)
def test_killed_at_random_moments(
    ranks: int, seeds: list[int], tmp_path: Path, mpirun: Callable[..., CompletedProcess]
) -> None:
    assert mpirun(ranks, KILLED, "none", tmp_path / "whole", 0).returncode == 0
    killed = 0
    for seed in [*seeds, 0]:
        done = mpirun(ranks, KILLED, tmp_path / "run.npz", tmp_path / "parts", seed)
        killed += done.returncode != 0
        if done.returncode == 0:
            break
    assert done.returncode == 0 and killed
    for rank in range(ranks):
        whole, parts = (np.load(f"{tmp_path / name}.{rank}.npz") for name in ("whole", "parts"))
        for name in whole.files:
            np.testing.assert_array_equal(parts[name], whole[name], err_msg=name)
