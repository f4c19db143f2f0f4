"""Fields in files: NumPy reads what the ranks write, and they read what NumPy and other numbers of ranks have written."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from machine_load import slowdown
from mpi4py import MPI

import mpiad
from mpiad import checkpoint_files
from mpiad.transport.core import array_files
from mpiad.transport.watch import switch
from mpiad.transport.watch.watch_settings import Settings, present


@pytest.fixture
def folder(tmp_path):
    return MPI.COMM_WORLD.bcast(tmp_path)


def field(shape, dtype=float):
    return (np.arange(np.prod(shape)).reshape(shape) * (1 + 2j if np.dtype(dtype).kind == "c" else 1)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.complex128, np.int16, np.bool_])
@pytest.mark.parametrize(("shape", "lead"), [((13,), ()), ((7, 9), (2,)), ((5, 6, 7), (2, 3))])
def test_files_are_numpys(shape, lead, dtype, folder, rank):
    domain, whole = mpiad.Domain(shape), field((*lead, *shape), dtype)
    block = whole[(..., *domain.owned)]
    domain.save(folder / "u.npy", block)
    found = np.load(folder / "u.npy", mmap_mode="r")
    assert found.dtype == whole.dtype and np.array_equal(found, whole) and not (folder / "u.npy.part").exists()
    again = domain.load(str(folder / "u.npy"))
    assert again.dtype == block.dtype and again.flags.writeable and np.array_equal(again, block)
    alone = mpiad.Domain(shape, comm=MPI.COMM_SELF)  # written by all, read by one
    assert np.array_equal(alone.load(folder / "u.npy"), whole)
    if rank == 0:
        alone.save(folder / "one.npy", whole)
    MPI.COMM_WORLD.Barrier()
    assert np.array_equal(domain.load(folder / "one.npy"), block)


def test_wrong_files_are_refused_on_all_ranks(folder, rank, size):
    domain = mpiad.Domain((6, 8))
    block, path = np.ones(domain.local_shape), folder / "u.npy"
    with pytest.raises(OSError, match="No such file"):
        domain.load(folder / "none.npy")
    with pytest.raises(OSError, match=r"(?i)gone.*No such file|No such file.*gone|File does not exist"):
        domain.save(folder / "gone" / "u.npy", block)
    with pytest.raises(ValueError, match="expected an array of shape"):
        domain.save(path, block[:1] if rank == size - 1 else block)
    with pytest.raises(TypeError, match="Domain.save: expected numbers, but got an array of Python objects"):
        domain.save(path, block.astype(object) if rank == size - 1 else block)
    if size > 1:
        with pytest.raises(ValueError, match="same arguments"):
            domain.save(path, block.astype(np.float32) if rank == size - 1 else block)
    domain.save(path, block)

    def refused(match):
        MPI.COMM_WORLD.Barrier()
        with pytest.raises(ValueError, match=match):
            domain.load(path)
        MPI.COMM_WORLD.Barrier()

    if rank == 0:
        path.write_bytes(path.read_bytes()[:-5])
    refused("truncated")
    if rank == 0:
        np.save(path, np.ones((8, 6)))
    refused(r"contains an array of shape \(8, 6\), but the grid has shape \(6, 8\)")
    if rank == 0:
        path.write_text("not an array, but long enough to be looked at")
    refused("can't be read")
    if rank == 0:
        np.save(path, np.asfortranarray(np.ones((6, 8))))
    refused("Fortran")


KILLED = """
import os, sys
import numpy as np
import mpiad
import mpiad.transport.core.array_files as files

domain = mpiad.Domain((64, 64))
whole = files._transfer

def dies(*args):
    whole(*args)
    if mpiad.mpi_rank() == 0:
        os.kill(os.getpid(), {signal})

files._transfer = dies
domain.save(sys.argv[1], np.full(domain.local_shape, 2.0))
"""


@pytest.mark.launches
def test_a_killed_job_leaves_the_old_file(tmp_path: Path) -> None:
    path, program = tmp_path / "u.npy", tmp_path / "killed.py"
    np.save(path, np.ones((64, 64)))
    program.write_text(KILLED.format(signal=int(signal.SIGKILL)))
    done = subprocess.run([sys.executable, str(program), str(path)], env=os.environ, timeout=60 * slowdown(), check=False)
    assert done.returncode != 0
    assert np.array_equal(np.load(path), np.ones((64, 64)))
    domain = mpiad.Domain((64, 64), comm=MPI.COMM_SELF)
    domain.save(path, np.full((64, 64), 3.0))  # what is left behind is no obstacle
    assert np.array_equal(np.load(path), np.full((64, 64), 3.0)) and len(list(tmp_path.glob("u.npy*"))) == 1


@pytest.mark.parametrize("debug", [False, True])
def test_fields_are_saved_and_loaded_under_watch(debug, folder):
    """As MPIAD_TIMEOUT and MPIAD_DEBUG switch it on: MPI-IO takes no communicator of ours."""
    before = present()
    switch.apply(Settings(debug, 20.0))
    try:
        domain = mpiad.Domain((7, 9))
        block = field((7, 9))[domain.owned]
        domain.save(folder / "u.npy", block)
        assert np.array_equal(domain.load(folder / "u.npy"), block)
        with pytest.raises(OSError, match="No such file"):
            domain.load(folder / "none.npy")
        mpiad.mpi_barrier()
    finally:
        switch.restore(before)
    assert np.array_equal(np.load(folder / "u.npy"), field((7, 9)))


WRITER = """
import sys
import numpy as np
import mpiad

domain = mpiad.Domain((64, 64))
for k in range(int(sys.argv[2])):
    domain.save(sys.argv[1], np.full((64, 64), float(k)))
"""


@pytest.mark.not_on(4)
@pytest.mark.limit(120)
def test_two_writers_and_readers_never_meet_in_one_file(folder, rank, size):
    """A load is of one save, on all ranks the same, whatever other jobs save meanwhile."""
    path, domain, alone = folder / "u.npy", mpiad.Domain((64, 64)), mpiad.Domain((64, 64), comm=MPI.COMM_SELF)
    if rank == 0:
        alone.save(path, np.zeros((64, 64)))
    MPI.COMM_WORLD.Barrier()
    hidden = {
        name: text for name, text in os.environ.items() if not name.startswith(("PMI", "PMIX", "OMPI", "MPI", "HYDRA"))
    }
    command = [sys.executable, "-c", WRITER, str(path), "60"]
    writers = [subprocess.Popen(command, env=hidden) for _ in range(2)] if rank == 0 else []
    running, seen = True, set()
    while running:
        running = mpiad.mpi_allreduce(any(writer.poll() is None for writer in writers), op=MPI.LOR)
        block = domain.load(path)
        found = MPI.COMM_WORLD.allgather((block.min(), block.max()))
        assert len(set(found)) == 1 and found[0][0] == found[0][1]
        seen.add(found[0][0])
    assert [writer.returncode for writer in writers] == [0] * len(writers)
    assert len(seen) > 3 and 59.0 in seen
    assert [file.name for file in folder.iterdir()] == ["u.npy"]


def test_links_that_others_have_planted_are_not_followed(folder, rank, monkeypatch):
    domain, victim = mpiad.Domain((6,)), folder / "victim"
    domain.save(folder / "u.npy", np.zeros(domain.local_shape))
    if rank == 0:
        victim.write_text("mine")
        for name in ("u.npy.part", "u.npy.00000000.part", "u.npy.11111111.part.data"):
            (folder / name).symlink_to(victim)
    MPI.COMM_WORLD.Barrier()
    domain.save(folder / "u.npy", np.ones(domain.local_shape))
    for token in ("00000000", "11111111"):
        monkeypatch.setattr(checkpoint_files.secrets, "token_hex", lambda count, token=token: token)
        with pytest.raises(OSError, match="Domain.save: .*File exists"):
            domain.save(folder / "u.npy", np.zeros(domain.local_shape))
    assert victim.read_text() == "mine" and np.array_equal(np.load(folder / "u.npy"), np.ones(6))


def test_what_is_no_regular_file_is_neither_replaced_nor_waited_for(folder, rank):
    domain, pipe = mpiad.Domain((6,)), folder / "pipe"
    if rank == 0:
        os.mkfifo(pipe)
    MPI.COMM_WORLD.Barrier()
    for path, text in ((pipe, "It isn't a regular file"), (folder, "Is a directory")):
        with pytest.raises(OSError, match=text):
            domain.save(path, np.ones(domain.local_shape))
        with pytest.raises(OSError, match=text):
            domain.load(path)
    MPI.COMM_WORLD.Barrier()
    assert pipe.is_fifo() and [file.name for file in folder.iterdir()] == ["pipe"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError("Unable to allocate")])
def test_what_one_rank_runs_into_is_raised_on_all(error, folder, rank, size, monkeypatch):
    """In the middle of a file, where the others would wait in the next step."""
    domain, path, transfer = mpiad.Domain((6, 8)), folder / "u.npy", array_files._transfer
    domain.save(path, np.ones(domain.local_shape))

    def fails(*args):
        transfer(*args)
        if rank == size - 1:
            raise error

    monkeypatch.setattr(array_files, "_transfer", fails)
    with pytest.raises(type(error), match=str(error.args[-1])):
        domain.save(path, np.zeros(domain.local_shape))
    with pytest.raises(type(error), match=str(error.args[-1])):
        domain.load(path)
    monkeypatch.undo()
    assert np.array_equal(domain.load(path), np.ones(domain.local_shape))
    assert [file.name for file in folder.iterdir()] == ["u.npy"]
    for call in (lambda: domain.save("a\0b", np.ones(domain.local_shape)), lambda: domain.load("a\0b")):
        with pytest.raises(ValueError, match="null"):
            call()
    with pytest.raises(TypeError, match="not '?int'?"):
        domain.load(7 if rank == size - 1 else path)  # type: ignore[arg-type]


def test_structures_are_refused(folder, rank):
    domain, pairs = mpiad.Domain((6,)), [("a", float), ("b", np.int32)]
    with pytest.raises(TypeError, match=r"Domain.save: expected numbers, but got an array of structures, \[\('a'"):
        domain.save(folder / "u.npy", np.zeros(domain.local_shape, pairs))
    if rank == 0:
        np.save(folder / "u.npy", np.zeros(6, pairs))
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(ValueError, match="holds Python's objects or structures"):
        domain.load(folder / "u.npy")


LIMITED = """
import resource, signal, sys
import numpy as np
from mpi4py import MPI
import mpiad

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
domain = mpiad.Domain((200, 101))
if rank == size - 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (130_000, 130_000))
try:
    domain.save(sys.argv[1], np.full(domain.local_shape, 1.0 + rank))
except OSError:
    print(f"refused on {rank} of {size}, {mpiad.mpi_allreduce(1.0)}")
"""


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_a_write_that_fails_on_one_rank_is_an_error_on_all(ranks, mpirun, tmp_path):
    done = mpirun(ranks, LIMITED, tmp_path / "u.npy")
    assert sorted(done.stdout.splitlines()) == [f"refused on {k} of {ranks}, {float(ranks)}" for k in range(ranks)], done
    assert not list(tmp_path.glob("u.npy*"))
