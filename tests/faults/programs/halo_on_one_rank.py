# One rank skips a halo exchange.
# thorough: yes
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: {here}
# says: 1 +left

import numpy as np

import mpiad

domain = mpiad.Domain((8, 8))
block = domain.scatter(np.ones((8, 8)))
if mpiad.mpi_rank() == 0:
    domain.exchange(block)  # here
