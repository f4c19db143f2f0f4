# Rows of different lengths are gathered: all ranks raise.
# together: yes
# raises: ValueError
# says: {here}.*ValueError: mpi_allgather: .*\(2, 3\).*\(2, 4\)

import numpy as np

import mpiad

mpiad.mpi_allgather(np.ones((2, 3 + mpiad.mpi_rank())), axis=0)  # here
