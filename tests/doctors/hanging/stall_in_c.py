# A rank spends its time in a function in C, which keeps Python's lock.
# environment: MPIAD_TIMEOUT=2
# arguments: -m mpiad.watch
# thorough: yes
# says: 1 +computes +a function that keeps Python's lock +{stalls}
# says: waits [0-9.]+ s +Barrier\(\) +{here} +rank 1
import re

from mpi4py import MPI

comm = MPI.COMM_WORLD
if comm.rank == 1:
    re.match("(a+)+b", "a" * 40)  # stalls
comm.Barrier()  # here
