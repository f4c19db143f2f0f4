"""A process as the launcher of another MPI than its library's starts it."""

from __future__ import annotations

import os
import subprocess
import sys

from launch import OF_THE_LAUNCHER
from machine_load import slowdown
from mpi4py import MPI

OTHER = "openmpi" if MPI.get_vendor()[0] == "MPICH" else "mpich"
# What the launchers leave for their processes, less the addresses at which a library would look for them.
LEFT = {
    "mpich": {"PMI_SIZE": "3", "PMI_RANK": "{}", "MPI_LOCALNRANKS": "3", "MPI_LOCALRANKID": "{}"},
    "openmpi": {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "{}", "OMPI_UNIVERSE_SIZE": "3"},
}


def run_under(family: str, rank: int, program: str) -> subprocess.CompletedProcess:
    """Run the text of a program as one process of three that a launcher of that family started."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(OF_THE_LAUNCHER)}
    left = {name: value.format(rank) for name, value in LEFT[family].items()}
    return subprocess.run(
        [sys.executable, "-c", program], env=bare | left, capture_output=True, text=True, timeout=50 * slowdown()
    )
