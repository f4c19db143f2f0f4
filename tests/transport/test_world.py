"""The start: the import waits for nobody, and ranks that wait in their first communicating call say so."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path

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


@pytest.mark.few(1)
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
COMPILED = """
import autograd.numpy as np, mpiad
total = mpiad.jit(lambda x: mpiad.mpi_scan(np.sum(x**2)), strict=True)
print(total(np.ones(3)), total(np.ones(3)), total.refused)
"""


@pytest.mark.thorough
@pytest.mark.launches
@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_compiled_function_may_start_the_library(debug, mpirun):
    done = mpirun(2, COMPILED, env={"MPIAD_DEBUG": debug})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["3.0 3.0 False", "6.0 6.0 False"]


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


@pytest.mark.thorough
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


# Rank 0 waits; rank 1 makes its first call after another user has tried to bind and to remove names of both ranks.
OTHER_USER = """
import os, socket, subprocess, sys, time
from mpi4py import MPI
import mpiad
from mpiad.transport import world
comm = MPI.COMM_WORLD
if comm.rank == 1:
    time.sleep(0.5)  # rank 0 is in its first call
    names = [world._socket_name(rank, state) for rank in (0, 1) for state in ("starts", "ended")]
    program = '''
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
held = []
for name in eval(sys.stdin.read()):
    for action in (lambda: held[0].bind(name), lambda: held[0].connect(name), lambda: os.unlink(name)):
        try:
            held.insert(0, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            action()
            print("done:", name)
        except (OSError, ValueError) as error:
            pass
print("ready", flush=True)
sys.stdin.close()
import time
time.sleep(60)
'''
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    other.stdin.write(repr(names))
    other.stdin.close()
    while (line := other.stdout.readline()) not in ("", "ready\\n"):
        print(line, end="", flush=True)
    time.sleep(2.0)  # rank 0 looks for ranks that have ended
try:
    print(mpiad.mpi_allreduce(1.0), flush=True)
finally:
    if comm.rank == 1:
        other.kill()
"""


@pytest.mark.thorough
@pytest.mark.launches
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_end_a_starting_job(mpirun):
    done = mpirun(2, OTHER_USER, env={"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "2.0\n2.0\n"


IN_FOLDER = """
import os, sys, time
from pathlib import Path
from mpi4py import MPI
from mpiad.transport import world
world._SHARED_MEMORY = Path(sys.argv[1])
import mpiad
comm = MPI.COMM_WORLD
if comm.rank == 1:
    time.sleep(1.0)
print(mpiad.mpi_allreduce(1.0))
"""


def own(folder):
    return folder / f"mpiad-{os.getuid()}"


@pytest.fixture
def place():
    """Return a folder whose path is as short as that of the system's shared memory: those of sockets are limited."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.mark.thorough
@pytest.mark.launches
def test_sockets_of_ended_processes_are_removed(mpirun, place):
    folder = own(place)

    def start():
        done = mpirun(2, IN_FOLDER, place, env={"OMP_NUM_THREADS": "1"})
        assert (done.returncode, done.stdout) == (0, "2.0\n2.0\n"), done.stderr
        assert folder.stat().st_mode & 0o777 == 0o700

    start()
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 4  # two of each rank
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(folder / "bound"))
        for name in (*names[::2], "bound"):
            os.utime(folder / name, (0.0, time.time() - 61.0))
        start()
    left = {path.name for path in folder.iterdir()}
    assert left.isdisjoint(names[::2]) and left >= {"bound", *names[1::2]}  # those of the last minute stay
    assert len(left) == 1 + 2 + 4


@pytest.mark.thorough
@pytest.mark.launches
@pytest.mark.parametrize("kind", ["missing", "writable", "link", "of another user"])
def test_without_a_folder_of_its_own_a_job_starts(kind, mpirun, place):
    shared, env = place / "shared", {"OMP_NUM_THREADS": "1"}
    if kind != "missing":
        shared.mkdir()
    if kind == "writable":
        own(shared).mkdir()
        own(shared).chmod(0o777)
    elif kind == "link":
        own(shared).symlink_to(place)
    elif kind == "of another user":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        own(shared).mkdir()
        os.chown(own(shared), 65534, 65534)
    done = mpirun(2, IN_FOLDER, shared, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n2.0\n", "")
    assert kind == "missing" or kind == "link" or not list(own(shared).iterdir())
