"""The test harness itself: what fails on one rank fails the run, quickly, and says why.

Each test here runs a small suite of its own, on 2 ranks, under this folder's conftest.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import launch
import pytest
from machine_load import slowdown
from mpi4py import MPI

HERE = Path(__file__).parent
HEADER = "import os, time\nimport pytest\nfrom mpi4py import MPI\nWORLD = MPI.COMM_WORLD\n"
STUCK = """
@pytest.mark.limit(float(os.environ.get("SECONDS", 60)))
def test_stuck(rank):
    if rank == 0:
        WORLD.recv(source=1)    # line 9
    else:
        WORLD.barrier()         # line 11
"""
# The same without MPI, whose ranks keep a core each while they wait.
ASLEEP = STUCK.replace("WORLD.recv(source=1)", "time.sleep(60)").replace("WORLD.barrier()", "time.sleep(60)")


@pytest.fixture
def suite(tmp_path):
    """`suite(text)` runs the tests of a text on 2 ranks; further keywords are environment variables."""
    shutil.copy(HERE / "conftest.py", tmp_path)

    def start(text, ranks=2, limit=40, mpiexec=None, flags=(), **environment):
        (tmp_path / "test_suite.py").write_text(HEADER + text)
        flags = [*flags, "--with-mpi", "-p", "no:cacheprovider", "-q", "-c", str(HERE.parent / "pyproject.toml")]
        arguments = ["-m", "pytest", *flags, str(tmp_path)]
        # On a CI machine pytest says the whole message a second time, in its summary.
        environment = {"CI": None, "BUILD_NUMBER": None, **environment}
        return launch.run_captured(ranks, arguments, limit=limit, mpiexec=mpiexec, env=environment)

    return start


def test_rng_is_each_rank_s_own(rng, rank_rng, rank, size):
    draws = [rank_rng(r).normal() for r in range(size)]
    assert rng.normal() == draws[rank]
    assert len(set(draws)) == size


@pytest.mark.parametrize("case", ["a", "b"])
def test_rng_is_each_test_s_own(case, rank_rng, drawn=[]):  # noqa: B006 - remembers the other case's draw
    draws = MPI.COMM_WORLD.allgather(rank_rng(0).normal())
    assert len(set(draws)) == 1, "ranks disagree on rank 0's draw"
    assert draws[0] not in drawn
    drawn.append(draws[0])


WAITING = """
import resource, time
import numpy as np
from mpi4py import MPI
def sleeps():
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
world, word = MPI.COMM_WORLD, np.zeros(1)
world.Barrier()
if world.rank == 0:
    time.sleep(0.5)
    world.Send(word, 1)
else:
    before = sleeps()
    world.Recv(word, 0)
    print(sleeps() - before)
"""


@pytest.mark.launches
@pytest.mark.skipif(
    MPI.get_vendor()[1] < {"MPICH": (4,), "Open MPI": (5,)}.get(MPI.get_vendor()[0], (99,)),
    reason="this MPI can't sleep while it waits",
)
def test_a_started_rank_sleeps_while_it_waits():
    """Some thousand times in half a second, on a busy machine fewer; without the settings, never."""
    job = launch.run_captured(2, ["-c", WAITING], limit=40)
    assert int(job.stdout) >= 50, job.stderr


@pytest.mark.launches
def test_failures_are_shown_by_rank_and_leave_no_messages_behind(suite):
    job = suite(
        """
import mpiad

def test_fails_with_a_message_under_way(rank):
    if rank == 1:
        mpiad.mpi_send(1.0, 0)
    assert rank == 1

def test_next(rank):
    if rank == 1:
        mpiad.mpi_send(2.0, 0)
    else:
        assert mpiad.mpi_recv(0.0, 1) == 2.0

def test_all(rank):
    print("here too:", rank)
    assert rank == 2

def test_last_rank(rank):
    print("printed by", rank)
    assert rank == 0, "only here"

@pytest.fixture
def broken(rank):
    assert rank == 0
    yield

def test_set_up(broken): pass

@pytest.fixture
def torn(rank):
    yield
    assert rank == 0

def test_torn_down(torn): pass

def test_skipped(rank):
    if rank == 1:
        pytest.skip("a rank may not decide this alone")

def test_after():
    assert WORLD.allreduce(1) == 2
"""
    )
    assert job.returncode == 1
    assert "4 failed, 3 passed, 2 errors" in job.stdout, job.stdout + job.stderr
    assert job.stdout.count("rank 0 passed, rank 1 failed\n---- rank 1 ----") == 3
    assert "AssertionError: only here" in job.stdout and "printed by 1" in job.stdout
    assert "rank 0 passed, rank 1 skipped\n---- rank 1 ----" in job.stdout
    # What fails everywhere shows its source once.
    assert job.stdout.count("rank 0 failed, rank 1 failed") >= 1
    assert job.stdout.count(">       assert rank == 2") == 1
    assert "E       assert 0 == 2" in job.stdout and "E       assert 1 == 2" in job.stdout
    assert "here too: 0" in job.stdout and "here too: 1" in job.stdout


@pytest.mark.thorough
@pytest.mark.launches
def test_a_failure_that_leaves_others_waiting_ends_the_job(suite):
    text = "def test_uneven(rank):\n    assert rank == 0, 'only here'\n    WORLD.barrier()\n"
    job = suite(text, MPIAD_TEST_PATIENCE="1")
    assert job.returncode == launch.EXPIRED and job.seconds < 20 * slowdown()
    rank_0, rank_1 = job.reports.split("---- rank 1")
    assert "line 7 in test_uneven" in rank_0
    assert "AssertionError: only here" in rank_1


@pytest.mark.launches
def test_a_hang_shows_each_rank(suite):
    job = suite(STUCK, SECONDS="1")
    assert job.returncode == launch.EXPIRED and job.seconds < 20 * slowdown()
    rank_0, rank_1 = job.reports.split("---- rank 1")
    assert "line 9 in test_stuck" in rank_0 and "test_suite.py::test_stuck" in rank_0
    assert "line 11 in test_stuck" in rank_1


@pytest.mark.launches
@pytest.mark.thorough
def test_a_hang_of_one_of_two_processes_shows_both(suite, tmp_path):
    (tmp_path / "test_other.py").write_text("import time\ndef test_slow():\n    time.sleep(50)\n")
    text = "import time\ndef test_fails(): assert 1 == 2\n@pytest.mark.limit(1.5)\ndef test_stuck(): time.sleep(50)\n"
    job = suite(text, ranks=1, flags=["-n", "2", "--dist", "loadfile"])
    assert job.returncode == launch.EXPIRED
    for told in ("assert 1 == 2", "broke off in", "test_suite.py::test_stuck", "test_other.py::test_slow", "in test_stuck"):
        assert told in job.reports


@pytest.mark.launches
@pytest.mark.thorough
def test_one_rank_s_files_are_divided_among_processes_and_several_ranks_are_not(suite):
    text = """
def test_one(size, worker_id): assert (size, worker_id == 'master') in {(1, False), (2, True)}
@pytest.mark.launches
def test_two(): pass
"""
    cores = os.sched_getaffinity(0)
    for ranks in (1, 2):
        os.sched_setaffinity(0, {min(cores)} if ranks == 1 else cores)  # as many processes as for one core
        try:
            job = suite(text, ranks=ranks, flags=["-n", "auto", "--dist", "loadfile"])
        finally:
            os.sched_setaffinity(0, cores)
        # Rank 0 speaks for all.
        assert job.returncode == 0 and job.stdout.count(" passed") == 1, job.stdout
        assert ("2 passed" if ranks == 1 else "1 passed, 1 deselected") in job.stdout
        assert job.reports == job.stderr == ""


@pytest.mark.launches
@pytest.mark.thorough
def test_the_whole_run_has_a_limit(suite):
    job = suite(ASLEEP, limit=4)
    assert job.returncode == launch.EXPIRED
    rank_0, rank_1 = job.reports.split("---- rank 1")
    assert "no end after 4 s" in rank_0 and "line 9 in test_stuck" in rank_0
    assert "line 11 in test_stuck" in rank_1


@pytest.mark.launches
@pytest.mark.thorough
def test_a_hang_without_the_launcher_ends_too(tmp_path):
    shutil.copy(HERE / "conftest.py", tmp_path)
    # The limit is this test's own: MPIAD_TEST_TIMEOUT would also be that of the start, which takes long on a busy machine.
    stuck = "import pytest, time\n@pytest.mark.limit(1)\ndef test_stuck(): time.sleep(60)"
    (tmp_path / "test_suite.py").write_text(stuck)
    drop = "import os, sys; del os.environ['MPIAD_LAUNCH_FOLDER']; os.execv(sys.executable, sys.argv[1:])"
    flags = ["--with-mpi", "-c", str(HERE.parent / "pyproject.toml"), str(tmp_path)]
    arguments = ["-c", drop, sys.executable, "-m", "pytest", *flags]
    job = launch.run_captured(2, arguments, limit=50)
    assert job.returncode not in (0, launch.EXPIRED)
    assert "in test_stuck" in job.stderr


@pytest.mark.thorough
@pytest.mark.launches
def test_a_rank_that_ends_without_a_word_is_noticed(suite):
    job = suite(
        """
def test_before(rank):
    assert rank == 0, "a failure before"

def test_gone(rank):
    if rank == 1:
        os._exit(3)
    WORLD.barrier()
"""
    )
    assert job.returncode != 0
    assert "AssertionError: a failure before" in job.reports
    assert "test_suite.py::test_gone" in job.reports


@pytest.mark.thorough
@pytest.mark.launches
@pytest.mark.parametrize(
    "text, message",
    [
        ("if WORLD.rank == 1:\n    def test_x(): pass", "collected different tests"),
        pytest.param(
            "if WORLD.rank == 1: import no_such_module\ndef test_x(): pass",
            "No module named 'no_such_module'",
            marks=pytest.mark.thorough,
        ),
        pytest.param("", "no tests ran", marks=pytest.mark.thorough),
    ],
    ids=["different", "broken", "none"],
)
def test_ranks_collect_the_same_tests(suite, text, message):
    job = suite(text)
    assert job.returncode != 0
    assert message in job.stdout


@pytest.mark.thorough
@pytest.mark.launches
def test_worlds_of_one_are_refused(suite, tmp_path, monkeypatch):
    foreign = tmp_path / "mpiexec"
    foreign.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    foreign.chmod(0o755)
    monkeypatch.setenv("MPIEXEC", str(foreign))
    job = suite("def test_x(): pass")
    assert job.returncode != 0
    assert "2 ranks were started, and MPI's world has 1" in job.stderr


@pytest.mark.thorough
@pytest.mark.launches
@pytest.mark.parametrize("mpiexec", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_test_starts_its_own_ranks(suite, mpiexec):
    text = """
@pytest.mark.launches
def test_nested(mpirun):
    program = '''
import sys
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.rank)
if world.rank == 0:
    print(total, *sys.argv[1:])
    print("to stderr", file=sys.stderr)
sys.exit(4 * (world.rank == 0))
'''
    job = mpirun(3, program, "one", 2)
    assert (job.returncode, job.stdout) == (4, "3 one 2\\n") and "to stderr" in job.stderr
"""
    job = suite(text, ranks=1, mpiexec=mpiexec)
    assert job.returncode == 0, job.stdout + job.stderr


@pytest.mark.launches
@pytest.mark.thorough
def test_a_started_program_that_hangs_fails_its_test(suite):
    text = """
@pytest.mark.launches
def test_nested(mpirun):
    program = '''
import time
from mpi4py import MPI
print("printed", flush=True)
if MPI.COMM_WORLD.rank == 0:
    time.sleep(60)
time.sleep(60)
'''
    mpirun(2, program, timeout=1.5)
"""
    job = suite(text, ranks=1)
    assert job.returncode == 1 and "1 failed" in job.stdout
    rank_0, rank_1 = job.stdout.split("---- rank 1")
    assert "no end after 1.5 s" in rank_0 and "line 6 in <module>" in rank_0
    assert "line 7 in <module>" in rank_1 and "printed" in rank_1


def ends(process):
    """Return whether a process is gone within five seconds: what was killed is there until it is reaped."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.launches
def test_no_rank_outlives_a_launcher_that_is_ended(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        f"import os, pathlib, time\npathlib.Path({str(tmp_path)!r}, str(os.getpid()) + '.pid').touch()\ntime.sleep(60)\n"
    )
    command = [sys.executable, str(HERE / "launch.py"), "--ranks", "2", "--", str(program)]
    launcher = subprocess.Popen(command)
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20 * slowdown()) != 0
    ranks = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert len(ranks) == 2
    assert all(ends(rank) for rank in ranks)
