# One rank gets SIGTERM, from outside, while it waits inside MPI.
# says: mpiad: rank 1 received SIGTERM at {here}, in mpi_allreduce. The job ends
# thorough: yes

import os
import subprocess

import mpiad

if mpiad.mpi_rank() == 1:
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill {os.getpid()}"])
    mpiad.mpi_allreduce(1.0)  # here
mpiad.mpi_recv(0.0, source=1)
