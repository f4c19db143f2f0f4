# One rank catches its exception, and skips a message.
# arguments: -m mpiad.watch
# thorough: yes
# says: waits [0-9.]+ s +recv\(from rank 1 with any tag\) +{here} +rank 1
import contextlib

from mpi4py import MPI

comm = MPI.COMM_WORLD
with contextlib.suppress(ZeroDivisionError):
    if comm.rank == 1:
        comm.send(1 / 0, 0)
    else:
        comm.recv(source=1)  # here
comm.Barrier()
