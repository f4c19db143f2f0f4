# Neighbours of each rank's own, where all ranks must name one pair.
# together: yes
# raises: ValueError
# says: {here}.*ValueError: mpi_sendrecv: all ranks must name the same pair.*rank 0: \(1, 1\), rank 1: \(0, 0\)

import numpy as np

import mpiad

other = 1 - mpiad.mpi_rank()
mpiad.mpi_sendrecv(np.ones(3), dest=other, source=other)  # here
