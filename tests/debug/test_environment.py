"""`environment`: the same on all ranks, and true; `python -m mpiad`: one report, one exit code, an end."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
import threadpoolctl
from machine_load import slowdown
from mpi4py import MPI
from other_launcher import OTHER, run_under

import mpiad
from mpiad.debug import environment
from mpiad.debug.environment import _closed_form, run_selftest
from mpiad.primitives import allreduce

WORLD = MPI.COMM_WORLD
REPORT = "import sys; sys.argv = ['mpiad']\nimport runpy; runpy.run_module('mpiad', run_name='__main__')\n"


def test_the_same_on_all_ranks(size):
    found = environment()
    texts = WORLD.allgather(str(found))
    assert texts == [texts[0]] * size
    assert found.ok and found.selftest.passed


def test_what_it_finds_is_so(rank, size):
    found = environment()
    assert found.library.vendor == MPI.get_vendor()[0]
    assert (found.speed is None) == (size == 1)
    assert [place.rank for place in found.places] == list(range(size))
    mine = found.places[rank]
    assert (mine.local_rank, mine.python) == (mpiad.mpi_local_rank(), sys.executable)
    assert mine.cores == tuple(sorted(os.sched_getaffinity(0)))
    assert mine.versions["numpy"] == np.__version__
    if size > 1:
        assert 1e-8 < found.speed.latency < 1 and 1e6 < found.speed.bandwidth < 1e12


def test_threads_are_those_that_blas_was_given(rank):
    for number in (2, 1):
        with threadpoolctl.threadpool_limits(number, user_api="blas"):
            assert number in environment().places[rank].threads.values()


def test_on_part_of_the_ranks(rank):
    comm = WORLD.Split(rank % 2)
    mpiad.mpi_init(comm)
    assert len(environment(comm).places) == comm.size
    comm.Free()


def test_inside_a_trace():
    assert mpiad.grad(lambda x: environment().selftest.passed * x)(2.0) in (0.0, 1.0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("wrong", [1 + 1e-9, np.nan])
def test_a_wrong_adjoint_is_seen_on_all_ranks(wrong, rank, monkeypatch):
    right = allreduce._adjoint
    spoilt = lambda ans, x, p: lambda g: right(ans, x, p)(g) * (wrong if rank == 1 else 1)  # noqa: E731
    monkeypatch.setattr(allreduce.ALLREDUCE, "adjoint", spoilt)
    found = run_selftest()
    assert not found.passed and found.rank == 1 and "WRONG on rank 1" in str(found)


def test_the_closed_form_is_that_of_the_program(size):
    """Its own check: central differences of the formula for the value."""
    xs = [0.5 + np.cos(2.0 + rank * np.arange(4) ** 2) / 3 for rank in range(size)]
    for rank in range(size):
        gradient = _closed_form(xs, rank)[1]
        for k in range(len(gradient)):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [x.copy() for x in xs]
                moved[rank][k] += step
                ends.append(_closed_form(moved, 0)[0])
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(gradient[k], rel=1e-6)


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [*(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2)), 3])
def test_one_report_for_all_ranks(ranks, mpirun):
    start = time.monotonic()
    done = mpirun(ranks, REPORT)
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gradient  right") == 1
    assert done.stdout.startswith(f"mpiad {mpiad.__version__} on {ranks} rank")
    assert MPI.get_vendor()[0] in done.stdout
    assert seconds < 15 * slowdown()  # five on a machine that does nothing else


@pytest.mark.launches
def test_a_wrong_gradient_is_exit_code_1(mpirun):
    spoilt = "import sys, mpiad.debug\nmodule = sys.modules['mpiad.debug.environment']\nform = module._closed_form\n"
    spoilt += "module._closed_form = lambda xs, rank: (form(xs, rank)[0], form(xs, rank)[1] + (rank == 1))\n"
    done = mpirun(2, spoilt + REPORT)
    assert done.returncode == 1
    assert "something is wrong" in done.stdout and "gradient  WRONG on rank 1" in done.stdout


@pytest.mark.launches
def test_separate_worlds_are_exit_code_1_and_one_report():
    done = [run_under(OTHER, rank, REPORT) for rank in range(2)]
    assert [job.returncode for job in done] == [1, 1]
    assert "3 processes, but each of them is a world of one rank" in done[0].stdout
    assert done[1].stdout == ""


@pytest.mark.thorough
@pytest.mark.launches
def test_ranks_that_do_not_answer_are_not_waited_for(mpirun):
    program = "import sys, time, mpiad\nmpiad.mpi_init()\nfrom mpiad.debug.environment import main\n"
    program += "sys.exit(main(1.0)) if mpiad.mpi_rank() else time.sleep(600)\n"
    start = time.monotonic()
    done = mpirun(2, program)
    assert done.returncode != 0 and time.monotonic() - start < 20 * slowdown()
    assert "not finished after 1 s: process 1 of 2 waits for others while exchanging host names and cores" in done.stderr


@pytest.mark.launches
def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "mpiad"], capture_output=True, text=True, timeout=50 * slowdown())
    assert done.returncode == 0, done.stderr
    assert "none: a single process" in done.stdout
