"""A right program whose messages arrive three seconds after their sends, which have returned: the watch must not end it."""

import sys
import threading
from typing import Any

from mpi4py import MPI

import mpiad

SECONDS = 3.0  # the watch proves within two that a program hangs


class Late(MPI.Intracomm):
    """A communicator that buffers messages, and delivers them late."""

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Return at once, and send later."""
        timer = threading.Timer(SECONDS, super().send, (obj, dest, tag))
        timer.name = "mpiad-delivery"  # isn't a thread of the program
        timer.start()


comm = mpiad.debug.watch(Late(MPI.COMM_WORLD.Dup()))
source = MPI.ANY_SOURCE if sys.argv[1] == "any" else 1 - comm.rank
comm.send(comm.rank, 1 - comm.rank, 5)
received = comm.recv(source=source, tag=5)
comm.Barrier()
if comm.rank == 0:
    print("received", received)
