"""Jobs whose MPI can revoke a communicator: Open MPI 5, started by ``mpiexec --with-ft ulfm`` (the fixture `ft_run`)."""

import pytest
from mpi4py import MPI

VENDOR, VERSION = MPI.get_vendor()

with_ulfm = [
    pytest.mark.launches,
    pytest.mark.skipif(
        VENDOR != "Open MPI" or VERSION < (5,),
        reason=f"only Open MPI 5 can revoke a communicator, and this is {VENDOR}: make test MPI=openmpi",
    ),
]
