# An array is scattered that can't be divided by the ranks: all ranks raise.
# together: yes
# raises: ValueError
# says: {here}.*ValueError: mpi_scatter: .*3

import numpy as np

import mpiad

mpiad.mpi_scatter(np.ones((3, 2)))  # here
