# An array of Python objects, on one rank.
# raises: TypeError
# says: rank 1 ended the job.*{here}.*TypeError: mpi_allreduce: .*dtype\('O'\) with shape \(2,\)
# thorough: yes

import numpy as np

import mpiad

x = np.array([1.0, None]) if mpiad.mpi_rank() == 1 else np.ones(2)
mpiad.mpi_allreduce(x)  # here
