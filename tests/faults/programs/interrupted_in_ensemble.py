# One rank is interrupted while kernels solve its share of an ensemble, which would take months.
# raises: KeyboardInterrupt
# says: rank 1 ended the job by an exception that nobody caught.*{here}.*KeyboardInterrupt
# within: 60
# thorough: yes

import os
import subprocess

import numpy as np

from mpiad import mpi_rank
from mpiad.ensemble import RK4, EnsembleMPI, EnsembleProblem, ODEProblem, solve

decay = EnsembleProblem(ODEProblem(lambda u, p, t: -p * u, [1.0], (0.0, 1.0)), p=np.linspace(1.0, 2.0, 2000)[:, None])
solve(decay, RK4(), EnsembleMPI(), dt=0.1, compile=True)
if mpi_rank() == 1:
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -INT {os.getpid()}"])
solve(decay, RK4(), EnsembleMPI(), dt=1e-14, max_steps=10**15, compile=True, progress=True)  # here
