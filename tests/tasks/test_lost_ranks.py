"""Ranks whose process is killed in a map: the others finish its items, where the MPI survives it."""

from __future__ import annotations

from fault_tolerant import with_ulfm

pytestmark = with_ulfm

START = """
import os, signal, time
import numpy as np
from mpi4py import MPI
import mpiad
from mpiad import mpi_map
from mpiad.errors import CommunicatorError, RemoteError, WorkerError

rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
count = [0]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def done():
    print(f"rank {rank} done", flush=True)
"""


def test_the_others_finish_all_items(ft_run):
    """A rank dies with items in hand; each item's result is there once, in order; a second map goes on without it."""
    done = ft_run(4, START + """
def square(item):
    count[0] += 1
    time.sleep(0.002)
    if rank == 2 and count[0] == 5:
        die()
    return np.full(20000, item) ** 2

results = mpi_map(square, iter(range(60)))
if rank == 0:
    assert [int(r[-1]) for r in results] == [k**2 for k in range(60)]
again = mpi_map(lambda item: (item, rank), range(30), everywhere=True)
assert [item for item, _ in again] == list(range(30)) and {who for _, who in again} <= {0, 1, 3}
try:
    mpiad.mpi_allreduce(1.0)
except CommunicatorError as error:
    assert "rank 2 of 4 has died" in str(error)
else:
    raise AssertionError
done()
""")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:3]) == ["rank 0 done", "rank 1 done", "rank 3 done"]
    assert "mpi_map: the process of rank 2 has died" in done.stderr


def test_the_root_works_when_nobody_else_is_left(ft_run):
    done = ft_run(3, START + """
def cube(item):
    count[0] += 1
    if rank > 0 and count[0] == 3:
        die()
    return item**3

assert mpi_map(cube, range(40), batch=2) == [k**3 for k in range(40)]
done()
""")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "rank 0 done"
    assert "process of rank 1 has died" in done.stderr and "process of rank 2 has died" in done.stderr


def test_a_rank_that_dies_before_its_first_item_and_one_that_raises(ft_run):
    done = ft_run(4, START + """
mpiad.mpi_barrier()
if rank == 3:
    die()
try:
    mpi_map(lambda item: 1 // (item - 7), range(20))
except WorkerError as error:
    assert error.index == 7 and error.rank in (0, 1, 2)
else:
    raise AssertionError
try:
    mpiad.mpi_allreduce(1.0)
except CommunicatorError as error:
    assert "rank 3 of 4 has died" in str(error)
else:
    raise AssertionError
done()
""")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 3


def test_a_rank_that_dies_before_the_library_has_started(ft_run):
    """The others can't start it: no hang, but an error on each."""
    done = ft_run(3, START + """
if rank == 1:
    die()
try:
    mpi_map(abs, range(5))
except CommunicatorError as error:
    assert "The process of rank 1 has died" in str(error)
else:
    raise AssertionError
done()
time.sleep(2)
os._exit(0)
""")  # fmt: skip
    assert sorted(done.stdout.split("\n")[:2]) == ["rank 0 done", "rank 2 done"]


def test_the_root_dies(ft_run):
    """Nobody knows the items any more: the others are told."""
    done = ft_run(3, START + """
def items():
    yield from range(5)
    die()

try:
    mpi_map(abs, items())
except RemoteError as error:
    assert error.rank == 0 and "rank 0 of 3 has died" in str(error)
else:
    raise AssertionError
done()
""")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:2]) == ["rank 1 done", "rank 2 done"]


def test_a_failure_elsewhere_interrupts_the_map(ft_run):
    """A rank that failed in a composite before it never comes to the map."""
    done = ft_run(3, START + """
def broken(x):
    raise ZeroDivisionError("on the way")

try:
    if rank == 1:
        mpiad.value_and_grad(broken)(1.0)
    else:
        mpi_map(abs, range(5))
except (ZeroDivisionError, RemoteError) as error:
    assert isinstance(error, RemoteError) == (rank != 1) and "on the way" in str(error)
else:
    raise AssertionError
results = mpi_map(abs, range(5))
assert rank or results == list(range(5))
done()
""")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 3
