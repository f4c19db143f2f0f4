# A rank computes forever.
# environment: MPIAD_TIMEOUT=2
# arguments: -m mpiad.watch
# thorough: yes
# says: 1 +computes +- +endless_loop.py:(11|12)
# says: waits [0-9.]+ s +Barrier\(\) +{here} +rank 1
from mpi4py import MPI

comm = MPI.COMM_WORLD
x = 1.0
if comm.rank == 1:
    while x > 0:
        x = 1 / x
comm.Barrier()  # here
