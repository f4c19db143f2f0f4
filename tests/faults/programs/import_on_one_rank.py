# One rank alone imports the library and communicates, and the others end.
# environment: MPIAD_TIMEOUT=2
# within: 45
# thorough: yes
# raises: mpiad.errors.DeadlockError
# says: mpi_sum: rank 0 has waited for 2\d seconds until all ranks make their first communicating call of mpiad.

from mpi4py import MPI

if MPI.COMM_WORLD.rank == 0:
    import mpiad

    mpiad.mpi_sum(1.0)
