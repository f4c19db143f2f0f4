"""An exception that nobody catches on one rank ends the job on all."""

import re
import time

import pytest
from fault_tolerant import with_ulfm
from machine_load import slowdown, takes_at_most

pytestmark = pytest.mark.launches

PROGRAM = """
import time
import numpy as np
import mpiad

def work(x):
    if mpiad.mpi_rank() == 1:
        print(time.time(), flush=True)
        mpiad.mpi_bcast(x, 7)
    return np.sum(mpiad.mpi_allreduce(x))  # the other ranks wait here

mpiad.grad(work)(np.ones(3))
print("not reached")
"""


@pytest.mark.thorough
def test_ends_all_ranks_within_two_seconds_with_the_traceback(mpirun):
    def seconds():
        done = mpirun(3, PROGRAM)
        ended = time.time()
        assert done.returncode != 0
        assert "rank 1 ended the job by an exception that nobody caught" in done.stderr
        assert re.search(r"Traceback .* in work\n.*ValueError: mpi_bcast: root must be .* got 7", done.stderr, re.S)
        return ended - float(done.stdout)

    assert takes_at_most(2, seconds)


SWITCHED_OFF = """
import sys
import mpiad
assert sys.excepthook is sys.__excepthook__
"""


def test_can_be_switched_off(mpirun):
    assert mpirun(2, SWITCHED_OFF, env={"MPIAD_ABORT": "0"}).returncode == 0


def test_is_not_there_on_one_rank(mpirun):
    assert mpirun(1, SWITCHED_OFF).returncode == 0


PLAIN_MODULES = """
import sys
import types
import mpiad
import colorsys
assert type(sys) is not types.ModuleType and sys.excepthook is sys.__excepthook__
assert type(colorsys) is types.ModuleType, type(colorsys).__mro__
assert not hasattr(colorsys, "excepthook")
"""


def test_modules_imported_afterwards_have_no_hooks(mpirun):
    done = mpirun(2, PLAIN_MODULES)
    assert done.returncode == 0, done.stderr


class TestOfAWorldThatOutlivesARank:
    pytestmark = with_ulfm

    @pytest.mark.parametrize(("end", "ender"), [("os.kill(os.getpid(), 9)", 0), ("raise ArithmeticError", 1)])
    def test_it_doesn_t_end_with_0(self, end, ender, ft_run):
        """Neither where the rank that raises meets a dead one, nor where others are far from any communication."""
        program = f"""
import os, time
import mpiad
mpiad.mpi_barrier()
if mpiad.mpi_rank() == 1:
    {end}
if mpiad.mpi_rank() == 2:
    time.sleep(600)
mpiad.mpi_recv(0.0, 1)
"""
        start = time.monotonic()
        done = ft_run(3, program)
        assert done.returncode == 1 and f"rank {ender} ended the job by an exception" in done.stderr
        assert time.monotonic() - start < 15 * slowdown()
