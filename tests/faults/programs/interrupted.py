# One rank is interrupted in Python's own code.
# raises: KeyboardInterrupt
# says: rank 1 ended the job by an exception that nobody caught.*{here}.*KeyboardInterrupt
# thorough: yes

import os
import subprocess
import time

import mpiad

if mpiad.mpi_rank() == 1:
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -INT {os.getpid()}"])
    time.sleep(30)  # here
mpiad.mpi_recv(0.0, source=1)
