# A partner that doesn't exist.
# raises: ValueError
# says: {here}.*ValueError: mpi_send: dest must be .*2.*got 2
# together: yes

import numpy as np

import mpiad

mpiad.mpi_send(np.ones(3), dest=mpiad.mpi_size())  # here
