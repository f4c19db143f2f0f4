"""The library on some ranks of a job, while the others run another program: `mpi_init(world=comm)`."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest
from fault_tolerant import with_ulfm
from mpi4py import MPI

import mpiad
from mpiad.errors import CommunicatorError

Start = Callable[..., CompletedProcess]

# Another program without the library. Its collectives and its receive from any source begin before the library's start.
BARE = """
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
buffer = np.empty(2)
message, part, barrier = comm.Irecv(buffer), comm.Split(0), comm.Ibarrier()
message.Wait()
barrier.Wait()
print("bare", buffer, comm.allreduce(1.0), part.size, flush=True)
"""

# The library on two ranks. The ranks number those of the world, which is in another order than COMM_WORLD.
MODEL = """
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
part = comm.Split(1, -comm.rank)
import mpiad
mpiad.mpi_init(world=part)
mpiad.mpi_init(world=part)
assert (mpiad.mpi_rank(), mpiad.mpi_size()) == (part.rank, 2)
padded = mpiad.Domain(4).exchange(np.ones(2), "edge")
items = mpiad.mpi_map(lambda k: k * k, range(3))
fit = mpiad.minimize(lambda x: mpiad.mpi_allreduce(np.sum((x - comm.rank) ** 2)), np.zeros(2), tol=1e-12)
received = mpiad.mpi_recv(0.0, 0) if part.rank else mpiad.mpi_send(4.0, 1)
barrier = comm.Ibarrier()
if part.rank == 0:
    comm.Send(fit.x, 0)
    print("model", items, received, flush=True)
barrier.Wait()
comm.allreduce(1.0)
rank = part.rank
part.Free()  # the library has another communicator of these ranks
assert (mpiad.mpi_rank(), mpiad.mpi_allreduce(1.0)) == (rank, 2.0)
"""


def bare_and(program: str, ranks: int, start: Start, tmp_path: Any, **options: Any) -> CompletedProcess:
    """Run BARE on rank 0, and a program on the next ranks of the same job."""
    (tmp_path / "bare.py").write_text(BARE)
    (tmp_path / "model.py").write_text(program)
    second = [":", "-n", ranks, sys.executable, tmp_path / "model.py"]
    return start(1, tmp_path / "bare.py", *second, **options)


@pytest.mark.launches
@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, marks=pytest.mark.thorough, id="plain"),
        pytest.param({"MPIAD_DEBUG": "1", "MPIAD_TIMEOUT": "20", "MPIAD_TRACE": "trace.json"}, id="watched"),
    ],
)
def test_two_programs_in_one_job(env: dict[str, str], mpirun: Start, tmp_path: Any) -> None:
    done = bare_and(MODEL, 2, mpirun, tmp_path, env={"OMP_NUM_THREADS": "1", **env}, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert sorted(done.stdout.splitlines()) == ["bare [1.5 1.5] 3.0 1", "model [0, 1, 4] 4.0"]
    if env:
        ranks = {event["pid"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
        assert ranks == {0, 1}


BEGIN = """
import os, sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
part = comm.Split(1)
import mpiad
mpiad.mpi_init(world=part)
"""
FAULTS = {
    "exception": ("if part.rank:\n    raise ArithmeticError('seven')\nmpiad.mpi_barrier()", 1, "ArithmeticError: seven"),
    "exit": ("if part.rank:\n    sys.exit(3)\nmpiad.mpi_barrier()", 3, r"rank 2 left the program by sys.exit(3)"),
    "SIGTERM": ("if part.rank:\n    os.kill(os.getpid(), 15)\nmpiad.mpi_barrier()", 143, "rank 2 received SIGTERM"),
    "time-out": ("mpiad.mpi_recv(0.0, 0) if part.rank else comm.recv()", 1, "rank 1 has waited for 1 seconds in mpi_recv"),
    "mismatch": ("mpiad.mpi_sum(1.0) if part.rank else mpiad.mpi_barrier()", 1, "the ranks were about to communicate"),
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.launches
@pytest.mark.unguarded
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ("SIGTERM", "time-out") else [pytest.mark.thorough]) for kind in FAULTS]
)
def test_a_fault_in_a_part_ends_the_whole_job(kind: str, mpirun: Start, tmp_path: Any) -> None:
    text, code, says = FAULTS[kind]
    env = {"MPIAD_TIMEOUT": "1"} if kind == "time-out" else {"MPIAD_DEBUG": "1"} if kind == "mismatch" else {}
    begun = f"{BEGIN}open({str(tmp_path)!r} + f'/begun{{part.rank}}', 'w').close()\n"
    done = bare_and(begun + text, 2, mpirun, tmp_path, env={"OMP_NUM_THREADS": "1", "MPIAD_TIMEOUT": None, **env})
    seconds = time.time() - (tmp_path / "begun1").stat().st_mtime
    assert done.returncode == code and says in done.stderr, done.stderr
    assert seconds < (4.0 if kind in ("exception", "SIGTERM") else 12.0)


@pytest.mark.thorough
@pytest.mark.launches
@pytest.mark.unguarded
@pytest.mark.parametrize("after", [0.5, pytest.param(8.0, marks=pytest.mark.thorough)])
def test_ranks_of_another_program_are_named(after: float, mpirun: Start, tmp_path: Any) -> None:
    program = f"""
import time
from mpi4py import MPI
from mpiad.transport import world
import mpiad
world._WARNING_AFTER = min({after}, world._WARNING_AFTER)
comm = MPI.COMM_WORLD
comm.Split(1)
from threading import Timer
Timer({after} + 1.5, lambda: comm.Abort(7)).start()  # within ten seconds, if `_WARNING_AFTER` isn't changed
mpiad.mpi_allreduce(1.0)
"""
    done = bare_and(program, 2, mpirun, tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 7 and "bare" not in done.stdout
    for rank in (1, 2):
        assert f"mpi_allreduce: rank {rank} has waited for" in done.stderr
    assert "Rank 0 made none so far" in done.stderr and "mpiad.mpi_init(world=comm)" in done.stderr


IMPORTED = """
from mpi4py import MPI
import mpiad
comm = MPI.COMM_WORLD
part = comm.Split(comm.rank > 0)
if comm.rank > 0:
    mpiad.mpi_init(world=part)
    assert mpiad.mpi_allreduce(1.0) == 2.0
print(comm.rank, flush=True)
"""


class TestWithRecovery:
    pytestmark = with_ulfm

    def test_a_rank_that_only_imports_the_library_ends_with_the_others(self, ft_run: Start) -> None:
        done = ft_run(3, IMPORTED)
        assert done.returncode == 0 and sorted(done.stdout.split()) == ["0", "1", "2"], done.stderr


OTHER_WORLDS = """
from mpi4py import MPI
import mpiad
comm = MPI.COMM_WORLD
part = comm.Split(comm.rank // 2)
try:
    mpiad.mpi_init(world=None if comm.rank == 1 else part)
    print(comm.rank, "started")
    mpiad.mpi_init(world=comm)
except mpiad.errors.CommunicatorError as error:
    print(comm.rank, str(error).split(".")[0 if "already" in str(error) else 1])
comm.Barrier()
"""


@pytest.mark.launches
def test_different_worlds_are_refused_on_all_ranks(mpirun: Start) -> None:
    done = mpirun(3, OTHER_WORLDS, env={"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        "0  Rank 1 started it for other ranks", "1  Ranks 0, 2 started it for other ranks",
        "2 mpi_init: the library is already started on another communicator, of 1 ranks", "2 started",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["null", "between", "number", "other", "freed"])
def test_what_cannot_be_the_world(name: str, rank: int, size: int) -> None:
    whole = MPI.COMM_WORLD.Dup()
    half: Any = whole.Split(rank % 2, rank)
    comm: Any = {"null": MPI.COMM_NULL, "number": 3, "other": whole, "freed": half}.get(name)
    if name == "between":
        comm = half.Create_intercomm(0, whole, 1 - rank % 2) if size > 1 else MPI.COMM_NULL
    elif name == "freed":
        half.Free()
    error, text = {
        "null": (CommunicatorError, "null communicator"), "number": (TypeError, "must be an mpi4py intracommunicator"),
        "between": (CommunicatorError, "intercommunicator" if size > 1 else "null"),
        "other": (CommunicatorError, rf"already started on another communicator, of {size} ranks"),
        "freed": (CommunicatorError, "it was freed"),
    }[name]  # fmt: skip
    with pytest.raises(error, match=text):
        mpiad.mpi_init(world=comm)
    mpiad.mpi_init(world=MPI.COMM_WORLD)
    assert mpiad.mpi_allreduce(1.0) == size
    whole.Free()


# Every rank's group and kind are drawn; a world communicates, and all ranks exchange messages of their own.
MIXED = """
import sys, time, json
from mpi4py import MPI
import numpy as np
plan = json.loads(sys.argv[1])
comm = MPI.COMM_WORLD
mine = plan["ranks"][comm.rank]
term, total = np.array([comm.rank + 1.0]), np.zeros(1)
messages = [comm.irecv() for rank in range(comm.size)]
part = comm.Split(mine["group"], mine["key"])
pending = [comm.Iallreduce(term, total)] if mine["early"] else []
time.sleep(mine["sleep"])
for rank in range(comm.size):
    comm.isend(comm.rank, rank, tag=5)
if mine["kind"] != "bare":
    import mpiad
    if mine["kind"] == "world":
        mpiad.mpi_init(world=part)
    expected = sum(rank for rank, other in enumerate(plan["ranks"]) if other["group"] == mine["group"])
    for _ in range(3):
        assert mpiad.mpi_allreduce(float(comm.rank)) == expected
    gradient = mpiad.grad(lambda x: mpiad.mpi_sum(x * x), argnum=0)(1.0 + comm.rank)
    assert gradient == 2.0 * (1.0 + comm.rank)
    assert mpiad.mpi_size() == part.size
if not pending:
    pending = [comm.Iallreduce(term, total)]
MPI.Request.Waitall(pending)
assert total[0] == comm.size * (comm.size + 1) / 2
assert sorted(message.wait() for message in messages) == list(range(comm.size))
print("right", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.launches
@pytest.mark.limit(600)
@pytest.mark.parametrize("seed", [0, pytest.param(None, marks=pytest.mark.thorough, id="all")])
def test_mixed_jobs_start(seed: int | None, mpirun: Start) -> None:
    for number in [seed] if seed is not None else range(1, 60):
        drawn = random.Random(number)
        size = drawn.choice([3, 5]) if seed is not None else 1 + number % 5
        groups = drawn.randint(1, size)
        kinds = [drawn.choice(["bare", "world", "world"]) for _ in range(groups)]
        if groups == 1:
            kinds = [drawn.choice(["world", "default"])]
        ranks: list[dict[str, Any]] = []
        for _ in range(size):
            group = drawn.randrange(groups)
            early, key, sleep = drawn.random() < 0.5, drawn.randint(0, 9), drawn.choice([0.0, 0.0, 0.3])
            ranks.append({"group": group, "key": key, "kind": kinds[group], "early": early, "sleep": sleep})
        env = {"OMP_NUM_THREADS": "1", "MPIAD_DEBUG": drawn.choice(["0", "1"]), "MPIAD_TIMEOUT": "0"}
        done = mpirun(size, MIXED, json.dumps({"ranks": ranks}), env=env)
        assert (done.returncode, done.stderr) == (0, ""), (number, ranks, done.stderr)
        assert done.stdout == "right\n" * size
