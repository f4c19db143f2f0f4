# One rank's C code crashes.
# says: Segmentation fault.*{here} in read
# prints on MPICH: signal 11
# says on Open MPI: signal 11

import ctypes

import mpiad


def read():
    ctypes.string_at(0)  # here


if mpiad.mpi_rank() == 1:
    read()
mpiad.mpi_allreduce(1.0)
