# A rank probes for a message that isn't sent.
# arguments: -m mpiad.watch
# thorough: yes
# says: waits [0-9.]+ s +Probe\(from any rank with tag 9\) +{here} +rank 1
from mpi4py import MPI

comm = MPI.COMM_WORLD
if comm.rank == 0:
    comm.Probe(MPI.ANY_SOURCE, 9)  # here
comm.Barrier()
