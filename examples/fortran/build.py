"""Compile a Fortran library for the examples, link it to mpi4py's MPI library, and load it on all ranks."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from mpi4py import MPI

from mpiad.extend import library, mpi_library

FOLDER = Path(__file__).parent


def fortran_library(name):
    """Return the library of `name`.f90; exit without an error if it can't be compiled here."""
    comm = MPI.COMM_WORLD
    if MPI._sizeof(MPI.Comm) != 4:
        raise SystemExit("The example's declarations of MPI are those of MPICH; this MPI library has other handles.")
    compiler = shutil.which("gfortran")
    if compiler is None:
        if comm.rank == 0:
            print("This example needs gfortran, which isn't installed.")
        raise SystemExit(0)
    target = None
    if comm.rank == 0:
        target = Path(tempfile.mkdtemp()) / f"lib{name}.so"
        mpi = Path(mpi_library())
        command = [compiler, "-O2", "-shared", "-fPIC", f"-J{target.parent}", "-o", target]
        sources = [FOLDER / "mpi_of_c.f90", FOLDER / f"{name}.f90"]
        subprocess.run([*command, *sources, mpi, f"-Wl,-rpath,{mpi.parent}"], check=True)
    target = comm.bcast(target)
    loaded = library(target)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(target.parent)
    return loaded
