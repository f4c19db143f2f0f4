# Two sums of the same kind in another order: every number would be wrong, and nothing hang.
# together: yes
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: the call site differs
# says: 0 +mpi_allreduce [^\n]*{mass}
# says: 1 +mpi_allreduce [^\n]*{energy}

import mpiad


def mass():
    return mpiad.mpi_allreduce(1.0)  # mass


def energy():
    return mpiad.mpi_allreduce(2.0)  # energy


for total in (mass, energy) if mpiad.mpi_rank() == 0 else (energy, mass):
    total()
