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
    with pytest.raises(TypeError, match="Domain.save: expected numbers, but got an array of Python's objects"):
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
    refused(r"holds shape \(8, 6\), but the grid has \(6, 8\)")
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
import mpiad.transport.array_files as files

domain = mpiad.Domain((64, 64))
whole = files._viewed

def dies(*args):
    whole(*args)
    if mpiad.mpi_rank() == 0:
        os.kill(os.getpid(), {signal})

files._viewed = dies
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
