# One rank calls a collective, and the other one leaves the program.
# arguments: -m mpiad.watch
# thorough: yes
# says: rank 0 has waited for [0-9.]+ seconds in Barrier at {here}, for rank 1, which left the program
# says: 1 +left [0-9.]+ s ago +the end of the program
from mpi4py import MPI

comm = MPI.COMM_WORLD
if comm.rank == 0:
    comm.Barrier()  # here
