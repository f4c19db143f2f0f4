"""Loops that are stopped and continued: the same states, bit for bit, as in a loop that was never stopped."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.errors import WorkerError
from mpiad.optimize import CheckpointFile
from mpiad.timestepping import restart, restartable
from mpiad.transport.exits import signals

STEPS = 20


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A path that all ranks know, and no request of an end before and after the test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield MPI.COMM_WORLD.bcast(tmp_path) / "run.npz"
    signals._requested = None
    for number, handler in handlers.items():
        signal.signal(number, handler)


def start(rank: int) -> dict[str, Any]:
    return {
        "u": np.linspace(0.1, 1.0, 5) + rank,
        "log": [],
        "random": np.random.default_rng(rank),
        "t": 0.1,
        "z": (1j, None),
    }


def advance(state: dict[str, Any], step: int) -> None:
    """One step of a state whose parts are replaced, overwritten and extended."""
    state["u"] += 0.01 * np.sin(state["u"]) + 1e-3 * state["random"].normal(size=5)
    state["t"] += 0.1
    state["log"].append(float(mpiad.mpi_allreduce(state["u"][0])))
    state["z"] = (state["z"][0] * 1.1j, step)


def run(path: Path, rank: int, n_steps: int = STEPS, at: int = -1, number: int = signal.SIGTERM, **options: Any) -> Any:
    """Run the loop from its start; a signal comes to the last rank in step `at`. Return state and steps."""
    state, steps = start(rank), []
    for step in restartable(n_steps, state, path, **options):
        steps.append(step)
        if step == at and rank == MPI.COMM_WORLD.size - 1:
            os.kill(os.getpid(), number)
        advance(state, step)
    return state, steps


def assert_same(state: dict[str, Any], other: dict[str, Any]) -> None:
    assert state["u"].tobytes() == other["u"].tobytes()
    assert (state["log"], state["t"], state["z"]) == (other["log"], other["t"], other["z"])
    assert state["random"].bit_generator.state == other["random"].bit_generator.state


def whole(rank: int) -> dict[str, Any]:
    state = start(rank)
    for step in range(STEPS):
        advance(state, step)
    return state


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_stopped_by_a_signal_of_one_rank(number: int, path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "_PERIOD", 0.0)  # agree after each step
    with pytest.raises(SystemExit) as ended:
        run(path, rank, at=6, number=number, signals=[signal.SIGUSR2])
    assert ended.value.code == 128 + number
    signals._requested = None
    state, steps = run(path, rank)
    assert steps == list(range(7, STEPS))
    assert_same(state, whole(rank))
    again, none = run(path, rank)
    assert none == []
    assert_same(again, state)


@pytest.mark.parametrize("every", [1, 3, 7])
def test_left_early(every: int, path: Path, rank: int) -> None:
    state = start(rank)
    for step in restartable(STEPS, state, path, every=every):
        advance(state, step)
        if step == 11:
            break
    state, steps = run(path, rank)
    assert steps == list(range(11 // every * every, STEPS))
    assert_same(state, whole(rank))


def test_another_number_of_steps(path: Path, rank: int) -> None:
    run(path, rank, n_steps=8)
    state, steps = run(path, rank)
    assert steps == list(range(8, STEPS))
    assert_same(state, whole(rank))
    with pytest.raises(ValueError, match=f"holds the state after {STEPS} steps, but n_steps is 8"):
        run(path, rank, n_steps=8)


@pytest.mark.mpi(min_size=2)
def test_arguments_that_differ_between_ranks(path: Path, rank: int) -> None:
    for n_steps, every in ((10 + (rank > 0), 2), (10, 2 + (rank > 0))):
        with pytest.raises(ValueError, match="rank 0 gave n_steps=10, every=2 and rank 1 gave"):
            restartable(n_steps, {"u": 1.0}, path, every=every)


def test_few_agreements(path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, before = [], restart.requested
    monkeypatch.setattr(restart, "requested", lambda: made.append(1) or before())
    monkeypatch.setattr(restart, "_PERIOD", 1e6)
    for _ in restartable(1000, {}, path, every=1000):
        pass
    assert len(made) == 10  # after steps 1, 3, 7, ... 511, and the last one


def test_a_handler_of_the_program_stays(path: Path, rank: int, caplog: pytest.LogCaptureFixture) -> None:
    received = []
    signal.signal(signal.SIGUSR2, lambda *_: received.append(1))
    run(path, rank, at=3, number=signal.SIGUSR2, signals=[signal.SIGUSR2])
    assert received == [1] * (rank == MPI.COMM_WORLD.size - 1)
    assert "SIGUSR2 doesn't request an end: the program or MPI has another handler" in caplog.text


@pytest.mark.serial
def test_the_handler_of_faulthandler_stays(caplog: pytest.LogCaptureFixture) -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    with open(os.devnull, "w") as file:
        faulthandler.register(signal.SIGUSR2, file)
        try:
            with signals.postponed(1.0, (signal.SIGUSR2,)):
                os.kill(os.getpid(), signal.SIGUSR2)
                assert signals.requested() is None
        finally:
            faulthandler.unregister(signal.SIGUSR2)
    assert "SIGUSR2 doesn't request an end" in caplog.text


def test_a_warning_ends_minimize(path: Path, rank: int, size: int) -> None:
    def loss(x: Any) -> Any:
        if calls.append(1) is None and len(calls) == 8 and rank == size - 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        return mpiad.mpi_allreduce((1.0 - x[0]) ** 2 + 100.0 * (x[1] - x[0] ** 2) ** 2) / size

    calls: list[int] = []
    checkpoint = CheckpointFile(path, signals=(signal.SIGUSR2,))
    part = mpiad.minimize(loss, np.zeros(2), checkpoint=checkpoint, options={"on_signal": "return"})
    assert part.status == 143 and len(calls) == 8
    signals._requested = None
    np.testing.assert_allclose(mpiad.minimize(loss, np.zeros(2), checkpoint=checkpoint, tol=1e-9).x, 1.0, atol=1e-4)


BAD = {
    "n_steps": ((2.0, {}), {}, ValueError, "n_steps must be an integer"),
    "negative": ((-1, {}), {}, ValueError, "n_steps must be an integer, zero or more"),
    "every": ((2, {}), {"every": 0}, ValueError, "every must be an integer above zero"),
    "state": ((2, [1.0]), {}, TypeError, "state must be a dict with names as keys"),
    "object": ((2, {"u": {1, 2}}), {}, TypeError, r"restartable: state/u is set \{1, 2\}"),
    "signal": ((2, {}), {"signals": [signal.SIGKILL]}, ValueError, "signals may contain .* not <Signals.SIGKILL: 9>"),
    "signal's name": ((2, {}), {"signals": ["SIGUSR1"]}, ValueError, "not 'SIGUSR1'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_of_one_rank(name: str, path: Path, rank: int, size: int) -> None:
    (n_steps, state), options, error, text = BAD[name]
    if rank < size - 1:
        n_steps, state, options = 2, {}, {}
    with pytest.raises((error, WorkerError), match=text):
        restartable(n_steps, state, path, **options)


def test_bad_files(path: Path, rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="the folder of .* doesn't exist"):
        restartable(2, {}, path / "missing" / "run.npz")
    run(path, rank, n_steps=3)
    with pytest.raises(ValueError, match="belongs to another problem: state is"):
        restartable(3, {"v": 1.0}, path)
    own = sorted(path.parent.glob(f"run.rank{rank}of*"))
    if rank == 0:
        own[0].write_bytes(own[0].read_bytes()[:-50])
    with pytest.raises(ValueError, match="is damaged"):
        restartable(3, start(rank), path)
    MPI.COMM_WORLD.Barrier()
    if rank == 0:
        for file in path.parent.glob("run.rank*"):
            file.rename(file.with_name(file.name.replace(f"of{size}", f"of{size + 1}")))
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(ValueError, match=f"was written by another number of ranks than the {size} of this call"):
        restartable(3, start(rank), path)


@pytest.mark.parametrize("u", [np.zeros(7), np.zeros(5, np.float32)], ids=["shape", "dtype"])
def test_a_state_of_another_shape_or_dtype(u: np.ndarray, path: Path, rank: int, size: int) -> None:
    state: dict[str, Any] = {"u": np.zeros(5), "found": np.zeros(0)}
    for step in restartable(3, state, path):
        state["found"] = np.append(state["found"], step)
    # An array that grows continues from its initial shape, and from its present one.
    for found in (np.zeros(0), np.zeros(3)):
        again: dict[str, Any] = {"u": np.zeros(5), "found": found}
        assert list(restartable(3, again, path)) == [] and again["found"].tolist() == [0.0, 1.0, 2.0]
    other = {"u": u if rank == size - 1 else np.zeros(5), "found": np.zeros(0)}
    text = rf"holds state/u with dtype float64 and shape \(5,\), .* was passed has dtype {u.dtype} and shape \({len(u)},\)"
    with pytest.raises((ValueError, WorkerError), match=text):
        restartable(3, other, path)


JOB = """
import os, signal, sys, time
import numpy as np
import mpiad
path, at = sys.argv[1], int(sys.argv[2])
rank = mpiad.mpi_rank()
state = {"u": np.linspace(0.0, 1.0, 4) + rank}
for step in mpiad.timestepping.restartable(40, state, path):
    state["u"] = np.cos(state["u"]) + 0.1 * mpiad.mpi_allreduce(state["u"].sum())
    if step == at and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.002)
mpiad.mpi_print(state["u"].tobytes().hex())
"""


@pytest.mark.launches
@pytest.mark.unguarded
def test_a_series_of_jobs(tmp_path: Path, mpirun: Callable[..., CompletedProcess]) -> None:
    env = {"OMP_NUM_THREADS": "1"}
    never = mpirun(2, JOB, tmp_path / "never.npz", -1, env=env)
    stopped = mpirun(2, JOB, tmp_path / "stopped.npz", 12, env=env)
    assert stopped.returncode == 143 and stopped.stdout == "" and "steps; the same program continues" in stopped.stderr
    continued = mpirun(2, JOB, tmp_path / "stopped.npz", -1, env=env)
    assert continued.returncode == 0 and continued.stdout == never.stdout != ""
