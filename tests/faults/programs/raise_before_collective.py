# One rank raises before a collective that the others are in.
# raises: ArithmeticError
# says: mpiad: rank 1 ended the job by an exception that nobody caught.*{here}.*ArithmeticError: no such step
# thorough: yes

import mpiad

if mpiad.mpi_rank() == 1:
    raise ArithmeticError("no such step")  # here
mpiad.mpi_allreduce(1.0)
