# One rank leaves without any clearing up. One launcher would end the others, and return 0.
# says: mpiad: rank 1 left the program by os._exit\(0\) at {here}, 5 s ago, and other ranks have not left
# thorough: yes

import os

import mpiad

mpiad.mpi_init()

if mpiad.mpi_rank() == 1:
    os._exit(0)  # here
mpiad.mpi_allreduce(1.0)
