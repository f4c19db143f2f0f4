# A first axis that isn't the number of ranks.
# together: yes
# raises: ValueError
# says: {here}.*ValueError: mpi_alltoall: .*\(3, 2\)

import numpy as np

import mpiad

mpiad.mpi_alltoall(np.ones((3, 2)))  # here
