"""The differentiable primitives, one file each."""

from mpiad.primitives.allgather import mpi_allgather
from mpiad.primitives.allreduce import mpi_allreduce
from mpiad.primitives.alltoall import mpi_alltoall
from mpiad.primitives.barrier import mpi_barrier
from mpiad.primitives.bcast import mpi_bcast
from mpiad.primitives.exchange import mpi_exchange
from mpiad.primitives.gather import mpi_gather
from mpiad.primitives.iallreduce import mpi_iallreduce
from mpiad.primitives.irecv import mpi_irecv
from mpiad.primitives.isend import mpi_isend
from mpiad.primitives.neighbor import mpi_neighbor_allgather, mpi_neighbor_alltoall
from mpiad.primitives.recv import mpi_recv
from mpiad.primitives.reduce import mpi_reduce
from mpiad.primitives.reduce_scatter import mpi_reduce_scatter
from mpiad.primitives.scan import mpi_exscan, mpi_scan
from mpiad.primitives.scatter import mpi_scatter
from mpiad.primitives.send import mpi_send
from mpiad.primitives.sendrecv import mpi_sendrecv
from mpiad.primitives.session import (
    mpi_finalize,
    mpi_finalized,
    mpi_init,
    mpi_initialized,
    mpi_local_rank,
    mpi_print,
    mpi_rank,
    mpi_size,
    reset,
    stop_gradient,
)
from mpiad.primitives.sum import mpi_sum
from mpiad.primitives.wait import mpi_wait, mpi_waitall

__all__ = ["mpi_allgather", "mpi_allreduce", "mpi_alltoall", "mpi_barrier", "mpi_bcast", "mpi_exscan", "mpi_gather"]
__all__ += ["mpi_neighbor_allgather", "mpi_neighbor_alltoall"]
__all__ += ["mpi_iallreduce", "mpi_reduce", "mpi_reduce_scatter", "mpi_scan", "mpi_scatter", "mpi_sum"]
__all__ += ["mpi_exchange", "mpi_irecv", "mpi_isend", "mpi_recv", "mpi_send", "mpi_sendrecv", "mpi_wait", "mpi_waitall"]
__all__ += ["mpi_finalize", "mpi_finalized", "mpi_init", "mpi_initialized", "mpi_local_rank", "mpi_print", "mpi_rank"]
__all__ += ["mpi_size", "reset", "stop_gradient"]
