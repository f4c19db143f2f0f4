# One rank's function calls itself without end.
# raises: RecursionError
# says: rank 1 ended the job.*{here}.*repeated \d+ more times.*RecursionError
# thorough: yes

import mpiad


def level(n):
    return level(n + 1) if mpiad.mpi_rank() == 1 else n  # here


mpiad.mpi_allreduce(float(level(0)))
