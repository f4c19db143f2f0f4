"""The launcher of this process, recognized by its environment variables."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_log = logging.getLogger("mpiad")
_ANSWER_SECONDS = 3


class Launcher(NamedTuple):
    """A launcher; `size`, `rank`: the number of processes that it started, and the index of this one."""

    name: str = ""  # empty if no launcher is recognized
    family: str = ""  # the MPI that it belongs to: "mpich", "openmpi", or "" for launchers of any MPI
    size: int = 1
    rank: int = 0


# Name, family, and the variables for recognition, size and rank. Launchers that may run inside a job of another one come
# before that one.
_KNOWN = (
    ("Open MPI's mpiexec", "openmpi", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("Hydra, the mpiexec of MPICH and its derivatives", "mpich", "HYDI_CONTROL_FD", "PMI_SIZE", "PMI_RANK"),
    ("Hydra, the mpiexec of MPICH and its derivatives", "mpich", "MPI_LOCALNRANKS", "PMI_SIZE", "PMI_RANK"),
    ("Slurm's srun", "", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("PALS, Cray's mpiexec", "mpich", "PALS_RANKID", "PMI_SIZE", "PALS_RANKID"),
    ("Flux", "", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("jsrun", "openmpi", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("a launcher that speaks PMI", "", "PMI_SIZE", "PMI_SIZE", "PMI_RANK"),
)
_FAMILIES = {"Open MPI": "openmpi", "Spectrum MPI": "openmpi", "MPICH": "mpich", "Intel MPI": "mpich", "MVAPICH": "mpich"}


def launcher(environment: Mapping[str, str] = os.environ) -> Launcher:
    """Return the launcher of this process."""
    for name, family, mark, size, rank in _KNOWN:
        if mark in environment and environment.get(size, "").isdigit():
            number = environment.get(rank, "0")
            return Launcher(name, family, int(environment[size]), int(number) if number.isdigit() else 0)
    return Launcher()


def family_of(vendor: str) -> str:
    """Return the family of a library, "" if it is unknown."""
    return next((family for name, family in _FAMILIES.items() if vendor.startswith(name)), "")


def mpiexec_of_library(library: str) -> str:
    """Return the path of the mpiexec that was installed with a library, "" if there is none."""
    candidate = Path(library).parent.parent / "bin" / "mpiexec"
    return str(candidate) if library and candidate.exists() else ""


def output_of(*command: str) -> str:
    """Return what a program writes; "" if it can't be run, fails or doesn't end soon."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=_ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


def warn_of_separate_worlds(size: int) -> None:
    """Log, on the first process, that the launcher started several processes, but each is a world of its own."""
    found = launcher()
    if size == 1 and found.size > 1 and found.rank == 0:
        _log.warning(
            f"mpiad: {found.name} started {found.size} processes, but each of them is a world of one rank: the launcher "
            "belongs to another MPI than the library. `python -m mpiad` under the same launcher shows how to fix it."
        )


def in_pool() -> bool:
    """Return whether `python -m mpi4py.futures` runs the program: on rank 0 alone, while the others wait for tasks."""
    return getattr(sys.modules.get("mpi4py.futures._core"), "SharedPool", None) is not None
