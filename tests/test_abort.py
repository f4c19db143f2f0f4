"""An exception that nobody catches on one rank ends the whole job, with that rank's traceback."""

import re
import time

import pytest
from machine_load import takes_at_most

pytestmark = pytest.mark.launches

START = """
import sys, time
import autograd.numpy as anp
import numpy as np
from autograd.extend import defvjp, primitive
import mpiad

rank, size = mpiad.mpi_rank(), mpiad.mpi_size()

def fail():
    print(f"raised at {time.time()}", flush=True)
    raise ArithmeticError("step 7 of rank 1")
"""

# Rank 1 fails there just as it does in the others.
ALIKE = ("after a collective", "before a collective of the others", "in a reverse pass")
PROGRAMS = {
    "before a collective of the others": """
if rank == 1:
    fail()
mpiad.mpi_allreduce(1.0)
""",
    "in a collective": """
class Text(str):
    def __repr__(self):
        fail()  # while the argument's error is made
mpiad.mpi_allreduce(Text("x") if rank == 1 else 1.0)
""",
    "after a collective": """
mpiad.mpi_allreduce(1.0)
if rank == 1:
    fail()
mpiad.mpi_barrier()
""",
    "while the others receive": """
if rank == 1:
    fail()
mpiad.mpi_recv(0.0, source=1)
""",
    "in a trace": """
def loss(x):
    mpiad.mpi_send(x, (rank + 1) % size)
    if rank == 1:
        fail()
    return mpiad.mpi_allreduce(anp.sum(mpiad.mpi_recv(x, (rank - 1) % size)))
mpiad.grad(loss)(np.ones(10))
""",
    "in a reverse pass": """
identity = primitive(lambda x: x * 1.0)
defvjp(identity, lambda ans, x: lambda g: fail() if rank == 1 else g)
mpiad.grad(lambda x: mpiad.mpi_allreduce(anp.sum(identity(mpiad.mpi_allreduce(x)) ** 2)))(np.ones(10))
""",
}


@pytest.mark.parametrize(
    "place",
    [pytest.param(place, marks=[pytest.mark.thorough] if place in ALIKE else []) for place in PROGRAMS],
)
def test_the_job_ends_within_two_seconds(place, mpirun):
    def seconds():
        done = mpirun(2, START + PROGRAMS[place], timeout=30)
        ended = time.time()
        raised = re.search(r"raised at ([\d.]+)", done.stdout)
        assert raised, done.stdout + done.stderr
        assert done.returncode != 0
        assert "ArithmeticError: step 7 of rank 1" in done.stderr
        assert "in fail" in done.stderr and "Traceback (most recent call last)" in done.stderr
        assert "rank 1" in done.stderr
        assert done.stderr.count("Traceback (most recent call last)") == 1
        return ended - float(raised[1])

    assert takes_at_most(2, seconds)


@pytest.mark.thorough
def test_the_environment_leaves_it_out(mpirun):
    """All ranks fail alike, so that none waits for another; each writes its own traceback."""
    program = """
import sys
import mpiad
mpiad.mpi_print("left alone" if sys.excepthook is sys.__excepthook__ else "installed")
raise ArithmeticError("as Python does it")
"""
    done = mpirun(2, program, env={"MPIAD_ABORT": "0"})
    assert done.stdout.split("\n")[:2] == ["left alone", "left alone"]
    assert done.returncode != 0
    assert "ArithmeticError: as Python does it" in done.stderr
    assert "mpiad: rank" not in done.stderr


def test_one_rank_keeps_the_users_own_hook(mpirun):
    program = """
import sys
sys.excepthook = lambda kind, error, trace: print("mine:", error)
import mpiad
raise ArithmeticError("seen")
"""
    done = mpirun(1, program)
    assert done.stdout == "mine: seen\n"
    assert done.returncode != 0


def test_an_exception_in_a_second_thread_ends_the_job(mpirun):
    done = mpirun(
        2,
        """
import threading
import mpiad

if mpiad.mpi_rank() == 1:
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
mpiad.mpi_allreduce(mpiad.mpi_recv(1.0, 1 - mpiad.mpi_rank()))
""",
    )
    assert done.returncode != 0
    assert "rank 1 ended the job" in done.stderr and "ZeroDivisionError" in done.stderr


HOOKS = {
    "before and after the import": ("""
import sys
sys.excepthook = lambda kind, error, trace: print("first:", error)
import mpiad
if mpiad.mpi_rank() == 1:
    def hook(*args, before=sys.excepthook):
        before(*args)
        print("second:", args[1])
    sys.excepthook = hook
    assert sys.excepthook is hook
    raise ArithmeticError("seen")
mpiad.mpi_recv(0.0, 1)
""", 1, "first: seen\nsecond: seen\n", "nobody caught:\nArithmeticError: seen\n"),
    "of threads": ("""
import threading
import mpiad
if mpiad.mpi_rank() == 1:
    threading.excepthook = lambda args: print("mine:", args.exc_value)
    threading.Thread(target=lambda: 1 / 0).start()
mpiad.mpi_recv(0.0, 1 - mpiad.mpi_rank())
""", 1, "mine: division by zero\n", "nobody caught:\nZeroDivisionError: division by zero\n"),
    "that exits": ("""
import os, sys
import mpiad
if mpiad.mpi_rank() == 1:
    sys.excepthook = lambda *args: print("mine", flush=True) or os._exit(7)
    raise ArithmeticError("seen")
mpiad.mpi_recv(0.0, 1)
""", 7, "mine\n", "in the hook for an exception that nobody caught"),
    "that fails": ("""
import sys
import mpiad
if mpiad.mpi_rank() == 1:
    sys.excepthook = lambda kind: 0
    raise ArithmeticError("seen")
mpiad.mpi_recv(0.0, 1)
""", 1, "", "ArithmeticError: seen\nand its hook failed:\nTraceback (most recent call last):"),
}  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_the_users_is_called_and_the_job_ends(hook, mpirun):
    program, code, prints, says = HOOKS[hook]
    done = mpirun(2, program)
    assert (done.returncode, done.stdout) == (code, prints), done.stderr
    assert says in done.stderr
