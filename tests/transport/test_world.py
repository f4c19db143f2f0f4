"""The start: the import waits for nobody, and ranks that wait in their first communicating call say so."""

from __future__ import annotations

import logging

import pytest
from mpi4py import MPI

from mpiad.transport import world


class _Messenger(logging.Handler):
    """Sends the text of each record to a rank."""

    def __init__(self, dest):
        super().__init__()
        self.dest = dest

    def emit(self, record):
        MPI.COMM_WORLD.send(record.getMessage(), self.dest)


@pytest.mark.mpi(min_size=2)
def test_a_long_wait_at_the_start_is_told(rank, size, monkeypatch, caplog):
    last = size - 1
    logger, messenger = logging.getLogger("mpiad"), _Messenger(last)
    with caplog.at_level(logging.WARNING, "mpiad"):
        if rank == last:  # comes when all others have said that they wait; ends at the time limit if one doesn't
            texts = [MPI.COMM_WORLD.recv(source=source) for source in range(last)]
        else:
            monkeypatch.setattr(world, "_WARNING_AFTER", 0.1)
            logger.addHandler(messenger)
        world.await_all_ranks("import mpiad")
        logger.removeHandler(messenger)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (rank < last)
    assert all(f"import mpiad: rank {rank} has waited" in text for text in told)
    if rank == last:
        for source, text in enumerate(texts):
            assert f"import mpiad: rank {source} has waited" in text


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
