# A message of another size than the receiver's array.
# raises: ValueError
# says: {here}.*ValueError: mpi_recv: .*32 bytes|{here}.*ValueError: mpi_recv: .*4
# thorough: yes

import numpy as np

import mpiad

if mpiad.mpi_rank() == 0:
    mpiad.mpi_send(np.ones(4), dest=1)
else:
    mpiad.mpi_recv(np.ones(3), source=0)  # here
