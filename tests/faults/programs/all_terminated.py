# All ranks get SIGTERM, as from a queue whose time is over.
# thorough: yes
# says: mpiad: rank 0 received SIGTERM at {here} in step
# says: mpiad: rank 1 received SIGTERM at {here} in step

import os
import subprocess
import time

import mpiad


def step():
    time.sleep(30)  # here


mpiad.mpi_barrier()
subprocess.Popen(["sh", "-c", f"sleep 0.3; kill {os.getpid()}"])
step()
