# One rank alone imports the library, and the others end.
# environment: MPIAD_TIMEOUT=2
# within: 45
# thorough: yes
# raises: mpiad.errors.DeadlockError
# says: import mpiad: rank 0 has waited for 2\d seconds for other ranks

from mpi4py import MPI

if MPI.COMM_WORLD.rank == 0:
    import mpiad  # noqa: F401
