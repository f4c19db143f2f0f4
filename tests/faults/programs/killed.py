# One rank is killed: nothing can be said by it, and the launcher ends the job.
# prints on MPICH: signal 9
# says on Open MPI: signal 9

import os
import signal

import mpiad

if mpiad.mpi_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
mpiad.mpi_allreduce(1.0)
