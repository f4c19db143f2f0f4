"""The start: the import waits for nobody, and ranks that wait in their first communicating call say so."""

from __future__ import annotations

import pytest

# The last rank makes its first call after the others have said that they wait, in messages on the program's communicator.
WAITING = """
import logging, os, sys
from mpi4py import MPI
if sys.argv[1] == "other nodes":  # as the launcher says
    os.environ["MPI_LOCALNRANKS"] = os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1"
import mpiad
from mpiad.transport import world

class Messenger(logging.Handler):
    def emit(self, record):
        MPI.COMM_WORLD.send(record.getMessage(), 2)

world._WARNING_AFTER = 0.1
if MPI.COMM_WORLD.rank == 2:
    print(*[MPI.COMM_WORLD.recv() for _ in range(2)], sep="\\n")
else:
    logging.getLogger("mpiad").addHandler(Messenger())
mpiad.mpi_barrier()
"""


@pytest.mark.launches
@pytest.mark.parametrize("where", ["this node", "other nodes"])
def test_a_long_wait_at_the_start_is_told(where, mpirun):
    done = mpirun(3, WAITING, where, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    told = sorted(done.stdout.splitlines())
    assert [line.split(" until")[0] for line in told] == [f"mpi_barrier: rank {k} has waited for 1 seconds" for k in (0, 1)]
    for line in told:
        assert "Rank 2 made none so far" in line and "mpiad.mpi_init(world=comm)" in line


ON_ONE_RANK = """
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
if rank == 1:
    import mpiad
    print(mpiad.mpi_rank(), mpiad.mpi_size(), mpiad.mpi_initialized())
    print(mpiad.jit(lambda x: 2 * x)(3.0))
"""


@pytest.mark.launches
def test_one_rank_may_import_the_library_alone(mpirun):
    done = mpirun(3, ON_ONE_RANK)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1 3 True\n6.0\n"


# Communication by bare mpi4py before the first call, which ranks make at different times.
STAGGERED = """
import time
from mpi4py import MPI
import mpiad
comm = MPI.COMM_WORLD
if comm.rank == 2:
    time.sleep(0.5)
comm.Barrier()
got = comm.sendrecv(comm.rank, (comm.rank + 1) % 3, recvbuf=None, source=MPI.ANY_SOURCE)
time.sleep(0.2 * comm.rank)
total = mpiad.mpi_allreduce(float(comm.rank + 1))
mpiad.mpi_print(got, total)
"""


@pytest.mark.launches
def test_the_first_call_starts_the_library_on_all_ranks(mpirun):
    done = mpirun(3, STAGGERED, env={"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "2 6.0\n0 6.0\n1 6.0\n"


REFUSED = """
import os
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    os.environ["MPIAD_TIMEOUT"] = "soon"
import mpiad
for _ in range(2):
    try:
        mpiad.mpi_barrier()
    except ValueError as error:
        print("refused")
if MPI.COMM_WORLD.rank == 1:
    os.environ["MPIAD_TIMEOUT"] = "60"
print(mpiad.mpi_allreduce(1.0))
"""


@pytest.mark.launches
def test_a_start_that_was_refused_can_be_repeated(mpirun):
    done = mpirun(2, REFUSED, env={"MPIAD_TIMEOUT": None})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["2.0"] * 2 + ["refused"] * 4
