"""Shared libraries that tests compile: C with this machine's compiler, and Fortran with gfortran, if they are installed."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import pytest
from mpi4py import MPI

from mpiad import extend
from mpiad.transport.shared_library import _mpi_of_mpi4py

FLAGS = ["-O2", "-shared", "-fPIC"]


@functools.cache
def mpi_library() -> Path:
    """Return the file of mpi4py's MPI library."""
    try:
        return Path(extend.mpi_library()).resolve()
    except OSError as error:
        pytest.skip(str(error))


def compiled(source: str, suffix: str, folder: Path, *more: str, mpi: bool = True) -> Path:
    """Compile a source on rank 0; return the library's path on all ranks, or skip the test where there is no compiler."""
    compiler = shutil.which("gfortran" if suffix == ".f90" else "cc")
    if compiler is None:
        pytest.skip("gfortran isn't installed" if suffix == ".f90" else "there is no C compiler")
    include = next((each for each in mpi_library().parents if (each / "include" / "mpi.h").exists()), None)
    if mpi and suffix == ".c" and include is None:
        pytest.skip("mpi.h isn't installed")
    comm, path, problem = MPI.COMM_WORLD, None, None
    if comm.rank == 0:
        text, target = folder / f"library{suffix}", folder / "library.so"
        text.write_text(source)
        link = [f"-I{include}/include", str(mpi_library()), f"-Wl,-rpath,{mpi_library().parent}"] if mpi else []
        done = subprocess.run([compiler, *FLAGS, "-o", target, text, *more, *link], capture_output=True, text=True)
        path, problem = target, done.stderr if done.returncode else None
    path, problem = comm.bcast((path, problem))
    assert problem is None, problem
    return path


def same_mpi(path: Path) -> bool:
    """Return whether a library resolves MPI to mpi4py's library."""
    return ctypes.cast(ctypes.CDLL(str(path)).MPI_Comm_rank, ctypes.c_void_p).value == _mpi_of_mpi4py()
