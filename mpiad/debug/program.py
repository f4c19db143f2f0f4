"""The watch of a whole program: hangs in its own calls of mpi4py end with a table of the calls of all ranks."""

from __future__ import annotations

import os
import runpy
import sys

from mpiad._typing import Comm
from mpiad.transport.core import lookup
from mpiad.transport.exits.abort import end_job
from mpiad.transport.watch import switch
from mpiad.transport.world import start

_USAGE = "usage: mpiexec -n RANKS python -m mpiad.watch (PROGRAM.py | -m MODULE) [ARGUMENTS]"


def watch(comm: Comm = None) -> Comm:
    """Watch the program's own calls of mpi4py: end the job, with a table of all ranks' calls, if they wait forever.

    The watch lasts until the end of the program. Under ``MPIAD_DEBUG=1`` the ranks also compare their blocking collectives,
    and raise a CommunicationMismatchError if name, root, reduction, count or type differ.

    Parameters
    ----------
    comm : mpi4py intracommunicator, optional
        By default MPI.COMM_WORLD.

    Returns
    -------
    mpi4py intracommunicator
        A communicator with the same ranks and contexts, on which calls are watched. So are calls on communicators that are
        made from it, and on its requests. It also replaces MPI.COMM_WORLD if `comm` is this communicator.

    Ranks
    -----
    All ranks of the world.

    Notes
    -----
    If a wait can't end, the table comes within two seconds; otherwise after ``MPIAD_TIMEOUT``, 300 seconds by default.

    Examples
    --------
    >>> comm = mpiad.debug.watch()
    >>> comm.Barrier()  # ends the job if another rank doesn't take part
    """
    start("watch")
    return switch.watch_program(lookup.member(comm, "watch"), lambda text: end_job(f"mpiad.watch: {text}\n", 1))


def main(arguments: list[str]) -> None:
    """Run a program or a module under the watch."""
    is_module = arguments[:1] == ["-m"]
    if len(arguments) <= is_module:
        sys.exit(_USAGE)
    watch()
    sys.argv = arguments[is_module:]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
