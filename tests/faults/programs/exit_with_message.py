# One rank leaves with a message, and the others wait for it.
# thorough: yes
# says: no file 'a.nc'\n
# says: mpiad: rank 0 left the program by sys.exit\("no file 'a.nc'"\) at {here}, 5 s ago

import sys

import mpiad

mpiad.mpi_init()

if mpiad.mpi_rank() == 0:
    sys.exit("no file 'a.nc'")  # here
mpiad.mpi_recv(0.0, source=0)
