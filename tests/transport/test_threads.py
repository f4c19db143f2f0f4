"""Each rank's BLAS is limited to its share of the cores, unless the user has decided otherwise."""

import json
import os

import pytest

pytestmark = pytest.mark.launches

PROGRAM = """
import os
import numpy as np
import threadpoolctl
before = max((pool["num_threads"] for pool in threadpoolctl.threadpool_info()), default=1)
import mpiad
mpiad.mpi_init()
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


@pytest.mark.thorough
@several_cores
def test_one_rank_says_so_where_only_other_nodes_are_crowded(mpirun):
    done = mpirun(3, ROOMY_ROOT, env={**NONE_SET, "MPIAD_CACHE": "0"})
    limits = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert limits[0] > 1 and limits[1:] == [max(1, CORES // 3)] * 2
    assert done.stderr.count("ranks share") == done.stderr.count(f"3 ranks share {CORES} cores") == 1


@pytest.mark.few(1)
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


# Prints, for each call, the libraries whose pools had threads running meanwhile: by the time that the system counts for
# each thread. A pool's threads start when its library is loaded, and sleep when they have had no work for long.
POOLS = """
import json, os, time
def threads():
    return {int(name) for name in os.listdir("/proc/self/task")}
def times(which):
    return {thread: int(open(f"/proc/self/task/{thread}/schedstat").read().split()[0]) for thread in which}
def asleep(which):
    before, now = None, times(which)
    while now != before:
        time.sleep(0.2)
        before, now = now, times(which)
    return now
first = threads()
import numpy as np
second = threads()
from scipy.linalg.blas import daxpy
third = threads()
pools = {"numpy": second - first, "scipy": third - second}
import autograd.numpy as anp
import mpiad
from mpiad import linalg

def touched(fun):
    fun()
    before = asleep(second - first | third - second)
    fun()
    time.sleep(0.05)
    after = times(before)
    return [name for name, pool in pools.items() if any(after[thread] != before[thread] for thread in pool)]

n = 256
domain, x, weights = mpiad.Domain((n, n)), np.linspace(0.0, 1.0, n * n), np.linspace(1.0, 2.0, n * n)
kappa, f = np.ones((n, n)) + x.reshape(n, n), np.sin(40.0 * x).reshape(n, n)
cell = {"spacing": 1.0 / n, "centred": True}
operator, levels = linalg.Elliptic(domain, **cell), linalg.Multigrid(domain, kappa, **cell)
solve = lambda b, **options: linalg.solve(lambda u: u * kappa, b, **options)
step = lambda method, **options: mpiad.minimize(
    lambda u: 0.25 * anp.sum((weights * u) ** 4) - anp.sum(u * x), np.ones(n * n), method=method, **options)
calls = {
    "np.vdot": lambda: np.vdot(x, weights),
    "daxpy": lambda: daxpy(x, weights.copy()),
    "multigrid": lambda: linalg.solve(operator, f, kappa, preconditioner=levels),
    "cg": lambda: solve(f),
    "cg, complex": lambda: solve(f + 1j * kappa),
    "cg, single": lambda: solve(f.astype(np.float32), rtol=1e-4),
    "bicgstab": lambda: solve(f, method="bicgstab"),
    "gmres": lambda: solve(f, method="gmres"),
    "gmres, complex": lambda: solve(f + 1j * kappa, method="gmres"),
    "L-BFGS-sharded": lambda: step("L-BFGS-sharded", options={"maxiter": 3}),
    "L-BFGS-sharded, bounds": lambda: step("L-BFGS-sharded", bounds=[(0.0, 0.9)] * n**2, options={"maxiter": 3}),
    "Newton-CG-sharded": lambda: step("Newton-CG-sharded", options={"maxiter": 3}),
}
print(json.dumps({name: touched(call) for name, call in calls.items()}))
"""


@pytest.mark.thorough
@several_cores
@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="times of threads are read from /proc")
def test_solves_and_sharded_steps_use_one_library(mpirun):
    """Vectors of 65,536 numbers: two libraries whose threads poll in turn would take a hundred times as long."""
    found = json.loads(mpirun(1, POOLS, env={**NONE_SET, "OPENBLAS_NUM_THREADS": "2"}).stdout)
    # They would be seen.
    assert found.pop("np.vdot") == ["numpy"] and found.pop("daxpy") == ["scipy"]
    # All runs on the calling thread, products of matrices with vectors too.
    assert len(found) == 10 and not any(found.values()), found
