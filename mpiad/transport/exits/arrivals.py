"""The ranks of this node that have begun to start the library, or have ended without it, as other ranks see them.

MPI can't report this without a message or a collective call, which the program's own ones could match. So each rank binds
a socket without a file (an abstract one, as Linux has them) whose name contains the job, its rank and its state. Other
ranks of the node only check which names exist; the system removes them with the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from functools import cache

from mpi4py import MPI

from mpiad._typing import Rank

STARTS, ENDED = "starts", "ended"

# A launcher's process that is the ancestor of all ranks of a job on a node, and variables that differ between its jobs.
_LAUNCHERS = ("hydra_pmi_proxy", "prted", "prterun", "orted", "mpirun", "mpiexec", "slurmstepd", "flux-shell", "palsd")
_OF_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "SLURM_STEP_ID", "FLUX_JOB_ID", "PALS_APID")
_announced: set[str] = set()


def announce(state: str) -> None:
    """Make the state of this rank visible to the other ranks of its node."""
    if state not in _announced and MPI.COMM_WORLD.size > 1 and _job():
        _announced.add(state)
        found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):
            found.bind(_name(MPI.COMM_WORLD.rank, state))
        found.detach()  # so that it stays open in MPI's end, after that of Python


def seen(state: str) -> list[Rank]:
    """Return the ranks of this node in a state; none on systems without such sockets."""
    return [rank for rank in range(MPI.COMM_WORLD.size) if _exists(_name(rank, state))] if _job() else []


def _name(rank: Rank, state: str) -> str:
    return f"\0mpiad-{_job()}-{rank}-{state}"


def _exists(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asks:
        try:
            asks.connect(name)
        except OSError:
            return False
    return True


@cache
def _job() -> str:
    """Return a name that the ranks of this job on this node share, and no other job has; "" if there is none."""
    number = os.getpid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while number > 1:
            with open(f"/proc/{number}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            fields = rest.split()
            if name in _LAUNCHERS:
                variables = [os.environ.get(variable, "") for variable in _OF_JOB]
                text = repr((os.getuid(), number, fields[19], MPI.COMM_WORLD.size, variables))
                return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()  # names of sockets have 107 characters
            number = int(fields[1])
    return ""
