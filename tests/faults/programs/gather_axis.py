# An axis that one rank's array doesn't have.
# raises: ValueError
# says: {here}.*ValueError: mpi_gather: .*axis.*1
# thorough: yes

import numpy as np

import mpiad

mpiad.mpi_gather(np.ones(3) if mpiad.mpi_rank() == 1 else np.ones((3, 3)), axis=1)  # here
