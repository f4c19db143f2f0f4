# One rank raises after a collective, and the others are in the next one.
# thorough: yes
# ranks: 3
# raises: ArithmeticError
# says: mpiad: rank 2 ended the job by an exception that nobody caught.*{here}

import mpiad

mpiad.mpi_allreduce(1.0)
if mpiad.mpi_rank() == 2:
    raise ArithmeticError("no such step")  # here
mpiad.mpi_barrier()
