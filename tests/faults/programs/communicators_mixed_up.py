# Two communicators of the same ranks, used in another order on one.
# together: yes
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: 0 +mpi_allreduce [^\n]*communicator \d of ranks \[0, 1\][^\n]*{here}
# says: 1 +mpi_allreduce [^\n]*communicator \d of ranks \[0, 1\][^\n]*{here}
# says: the communicator differs

from mpi4py import MPI

import mpiad

first, second = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()
mpiad.mpi_init(first)
mpiad.mpi_init(second)
for comm in (first, second) if mpiad.mpi_rank() == 0 else (second, first):
    mpiad.mpi_allreduce(1.0, comm=comm)  # here
