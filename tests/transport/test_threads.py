"""Each rank's BLAS is limited to its share of the cores, unless the user has decided otherwise."""

import os

import pytest

pytestmark = pytest.mark.launches

PROGRAM = """
import os
import numpy as np
import threadpoolctl
before = max((pool["num_threads"] for pool in threadpoolctl.threadpool_info()), default=1)
import mpiad
after = max((pool["num_threads"] for pool in threadpoolctl.threadpool_info()), default=1)
mpiad.mpi_print(before, after, os.environ.get("OPENBLAS_NUM_THREADS"))
"""
NONE_SET = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"))
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
several_cores = pytest.mark.skipif(CORES < 2, reason="one core: BLAS starts one thread anyway")


@several_cores
def test_ranks_share_the_cores_and_say_so_once(mpirun, tmp_path):
    ranks = CORES if CORES <= 4 else 4
    environment = {**NONE_SET, "MPIAD_CACHE": str(tmp_path / "cache"), "MPIAD_THREADS": "1"}  # as if it were unset
    done = mpirun(ranks, PROGRAM, env=environment)
    share = CORES // ranks
    for line in done.stdout.splitlines():
        before, after, later = line.split()
        assert int(before) > share or int(before) == 1
        assert int(after) <= share and later == str(share)
    assert done.stderr.count(f"{ranks} ranks share {CORES} cores") == 1
    # The next job of this user isn't told again; where nothing can be kept, each is.
    for again, told in ((environment, 0), ({**NONE_SET, "MPIAD_CACHE": "0"}, 1)):
        done = mpirun(ranks, PROGRAM, env=again)
        assert done.stderr.count("ranks share") == told and len(done.stdout.splitlines()) == ranks


# Rank 0 finds so many cores as if it had a node of its own, where no rank needs a limit.
ROOMY_ROOT = """
import os
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 0:
    os.sched_getaffinity = lambda pid: range(1000)
""" + PROGRAM  # fmt: skip


@several_cores
def test_one_rank_says_so_where_only_other_nodes_are_crowded(mpirun):
    done = mpirun(3, ROOMY_ROOT, env={**NONE_SET, "MPIAD_CACHE": "0"})
    limits = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert limits[0] > 1 and limits[1:] == [max(1, CORES // 3)] * 2
    assert done.stderr.count("ranks share") == done.stderr.count(f"3 ranks share {CORES} cores") == 1


@several_cores
@pytest.mark.parametrize("decided", [{"OMP_NUM_THREADS": "2"}, {"MPIAD_THREADS": "0"}])
def test_the_user_decides(mpirun, decided):
    done = mpirun(2, PROGRAM, env={**NONE_SET, **decided})
    assert len(done.stdout.splitlines()) == 2
    for line in done.stdout.splitlines():
        before, after, _ = line.split()
        assert before == after
    assert "ranks share" not in done.stderr


def test_one_rank_keeps_all_cores(mpirun):
    before, after, _ = mpirun(1, PROGRAM, env=NONE_SET).stdout.split()
    assert before == after
