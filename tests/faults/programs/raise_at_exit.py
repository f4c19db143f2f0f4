# A callback at exit raises on one rank. Python alone would end with 0.
# raises: OSError
# says: rank 1 ended the job by an exception that nobody caught.*{here}.*OSError: the file is gone
# thorough: yes

import atexit

import mpiad


def save():
    if mpiad.mpi_rank() == 1:
        raise OSError("the file is gone")  # here


atexit.register(save)
mpiad.mpi_barrier()
