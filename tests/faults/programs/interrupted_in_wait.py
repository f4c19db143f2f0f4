# One rank is interrupted while it waits inside MPI, where Python can't raise.
# says: mpiad: rank 1 was interrupted by SIGINT while it waited inside MPI at {here}, in mpi_allreduce. The job ends
# thorough: yes

import os
import subprocess

import mpiad

if mpiad.mpi_rank() == 1:
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -INT {os.getpid()}"])
    mpiad.mpi_allreduce(1.0)  # here
mpiad.mpi_recv(0.0, source=1)
