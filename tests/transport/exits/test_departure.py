"""A rank that leaves with an error doesn't leave the others waiting, and one that leaves in good order is let go."""

import re

import pytest

START = """
import atexit, os, sys, threading, time, warnings
import mpiad
warnings.filterwarnings("ignore", message=".*use of fork")  # since Python 3.12, in a process with threads
rank = mpiad.mpi_rank()
mpiad.mpi_barrier()
"""


@pytest.mark.thorough
@pytest.mark.launches
def test_all_may_leave_with_a_code_of_their_own(mpirun):
    done = mpirun(2, START + "time.sleep(0.5 * rank)\nsys.exit(3 * rank)")
    assert done.returncode == 3 and "mpiad" not in done.stderr


@pytest.mark.launches
def test_all_may_leave_at_once(mpirun):
    done = mpirun(2, START + "print('done', flush=True)\ntime.sleep(0.5 * rank)\nos._exit(5)")
    assert done.returncode == 5 and "mpiad" not in done.stderr
    assert done.stdout.count("done") == 2


@pytest.mark.launches
def test_leaving_at_once_isn_t_leaving_in_good_order(mpirun):
    done = mpirun(2, START + "if rank == 1:\n    os._exit(0)")
    assert done.returncode != 0
    assert (
        "mpiad: rank 1 left the program by os._exit(0) at program_0.py:8, while other ranks call MPI_Finalize"
        in done.stderr
    )


ABANDONED = """
if rank == 0:
    try:
        mpiad.mpi_recv(1.0, source=1)
    except mpiad.errors.DeadlockError:
        sys.exit(0)
time.sleep(600)
"""


@pytest.mark.thorough
@pytest.mark.launches
def test_after_abandoned_communication_the_job_ends_whatever_the_code(mpirun):
    done = mpirun(2, START + ABANDONED, env={"MPIAD_TIMEOUT": "0.5"})
    assert done.returncode == 1
    assert re.search(r"rank 0 left the program by sys.exit\(0\).* 0.5 s ago, and other ranks have not left", done.stderr)


NOT_LEFT = """
departure = sys.modules["mpiad.transport.exits.departure"]
departure._GRACE = 0.3
if rank == 1:
    try:
        sys.exit(3)
    except SystemExit as error:
        assert type(error).__name__ == "SystemExit" and error.code == 3
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()
else:
    time.sleep(1)
"""


@pytest.mark.thorough
@pytest.mark.launches
def test_what_is_caught_and_what_ends_a_thread_is_no_exit(mpirun):
    done = mpirun(2, START + NOT_LEFT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.launches
@pytest.mark.parametrize("leave", ["sys.exit('no input file')", "os._exit(1)"])
def test_the_job_ends_where_others_stay(leave, mpirun):
    patient = "sys.modules['mpiad.transport.exits.departure']._GRACE = 0.5\n"
    done = mpirun(2, START + patient + f"if rank == 1:\n    {leave}\nmpiad.mpi_recv(0.0, 1)")
    assert done.returncode != 0
    assert f"mpiad: rank 1 left the program by {leave} at program_0.py:9, 0.5 s ago, and other ranks" in done.stderr


@pytest.mark.launches
def test_one_that_leaves_in_good_order_waits(mpirun):
    patient = "sys.modules['mpiad.transport.exits.departure']._GRACE = 0.3\n"
    done = mpirun(2, START + patient + "if rank == 0:\n    time.sleep(1)\n    sys.exit(4)\nsys.exit()")
    assert done.returncode == 4 and "mpiad" not in done.stderr


@pytest.mark.launches
def test_a_fork_leaves_alone(mpirun):
    forks = "if os.fork() == 0:\n    os._exit(0)\nprint(os.wait()[1], flush=True)\n"
    done = mpirun(2, START + forks + "mpiad.mpi_barrier()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n0\n", "")


IN_A_CALL = """
import autograd.numpy as anp
import numpy as np

sys.modules["mpiad.transport.exits.departure"]._GRACE = 0.5

def leave(u, *args):
    if rank == 1:
        sys.exit(int(sys.argv[2]))
    return -u

def loss(u):
    leave(u)
    return mpiad.mpi_allreduce(anp.sum(u**2))

def step():
    training = mpiad.parallel.DistributedOptimizer(mpiad.parallel.SGD(0.1))
    training.step(training.setup(np.ones(2)), np.ones(2), lambda w, x: anp.mean(leave(w * x)), np.ones((3, 2)))

def ensemble():
    from mpiad.ensemble import EnsembleMPI, EnsembleProblem, ODEProblem, solve
    problem = EnsembleProblem(ODEProblem(leave, np.ones(1), (0.0, 1.0)))
    solve(problem, ensemblealg=EnsembleMPI(), trajectories=4, compile=False)

calls = {  # each loads the packages that it needs, which takes longer than the call
    "scan": lambda: mpiad.value_and_grad(lambda u: loss(mpiad.timestepping.scan(leave, u, 3)))(np.ones(2)),
    "value_and_grad": lambda: mpiad.value_and_grad(loss)(np.ones(2)),
    "jvp": lambda: mpiad.jvp(loss, np.ones(2), np.ones(2)),
    "jit": lambda: mpiad.jit(loss)(np.ones(2)),
    "operator": lambda: mpiad.extend.custom_operator(loss)(np.ones(2)),
    "value": lambda: mpiad.parallel.value(lambda w, x: anp.mean(leave(w * x)))(1.0, np.ones(3)),
    "step": step,
    "newton": lambda: mpiad.linalg.newton(lambda u: u**3 + leave(u), np.ones(3)),
    "ensemble": ensemble,
    "minimize": lambda: mpiad.minimize(lambda x: anp.sum(leave(x)**2), np.ones(3), objective="sum"),
}
with mpiad.debug.checked(timeout=20) if sys.argv[1] == "newton" else np.errstate():
    calls[sys.argv[1]]()
mpiad.mpi_barrier()
"""


@pytest.mark.launches
@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("value_and_grad", 0),
        ("minimize", 3),
        *[
            pytest.param(call, code, marks=pytest.mark.thorough)
            for call in ("scan", "jit", "jvp", "value", "step", "operator", "newton", "ensemble", "minimize")
            for code in (0, 3)
        ],
    ],
)
def test_an_exit_in_a_call_ends_the_job(call, code, mpirun):
    program = START + IN_A_CALL
    done, line = mpirun(2, program, call, str(code)), program[: program.index("sys.exit")].count("\n") + 1
    assert done.returncode == (code or 1), done.stderr
    all_raise = call in ("newton", "ensemble", "minimize")
    left = f"rank 1 left the program by sys.exit({code}) at program_0.py:{line} in leave, in "
    assert (f"SystemExit: {code}" if all_raise else left) in done.stderr
    assert re.search(rf"program_0.py(\", line |:){line}\b", done.stderr)


ALL_EXIT = """
def loss(x):
    time.sleep(0.5 * rank)
    mpiad.mpi_barrier()
    sys.exit(int(sys.argv[1]))

mpiad.value_and_grad(loss)(1.0)
"""


@pytest.mark.thorough
@pytest.mark.launches
def test_all_may_exit_in_a_call(mpirun):
    done = mpirun(2, START + ALL_EXIT, "0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


WAITING_THREAD = """
from concurrent.futures import ThreadPoolExecutor

sys.modules["mpiad.transport.exits.departure"]._GRACE = 0.5
if rank == 1:
    ThreadPoolExecutor(thread_name_prefix="work").submit(mpiad.mpi_recv, 1.0, 0)
    exit(3)
mpiad.mpi_recv(1.0, 1)
"""


@pytest.mark.thorough
@pytest.mark.launches
def test_a_thread_that_python_joins_may_wait_for_others_only_so_long(mpirun):
    done = mpirun(2, START + WAITING_THREAD)
    assert done.returncode == 3
    assert "by sys.exit(3) at program_0.py:13, 0.5 s ago, but its thread work_0 waits in a communication" in done.stderr
