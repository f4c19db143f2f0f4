# A request is waited for twice.
# together: yes
# raises: mpiad.errors.RequestError
# says: {here}.*RequestError: .*twice|already

import numpy as np

import mpiad

other = 1 - mpiad.mpi_rank()
request = mpiad.mpi_isend(np.ones(3), dest=other)
mpiad.mpi_recv(np.ones(3), source=other)
mpiad.mpi_wait(request)
mpiad.mpi_wait(request)  # here
