"""The linear primitives by name, each as a function of x and a communicator, with its reference."""

import reference

import mpiad


def ring(x, comm):
    """Return what the rank before sends, in a send and a receive."""
    mpiad.mpi_send(x, (comm.rank + 1) % comm.size, tag=3, comm=comm)
    return mpiad.mpi_recv(x, (comm.rank - 1) % comm.size, tag=3, comm=comm)


def shifted(shapes):
    return reference.move(shapes, [(rank - 1) % len(shapes) for rank in range(len(shapes))])


def blocks(rank, length, size):
    """Return the lengths of a rank's blocks for the others: all it has for the next rank, but for one entry for itself."""
    counts = [0] * size
    counts[rank] += min(length, 1)
    counts[(rank + 1) % size] += length - min(length, 1)
    return counts


LINEAR_PRIMITIVES = {
    "bcast": (lambda x, comm: mpiad.mpi_bcast(x, comm.size - 1, comm=comm), lambda s: reference.bcast(s, len(s) - 1)),
    "sum": (lambda x, comm: mpiad.mpi_sum(x, comm.size - 1, comm=comm), lambda s: reference.sum_to_root(s, len(s) - 1)),
    "allreduce": (lambda x, comm: mpiad.mpi_allreduce(x, comm=comm), reference.allreduce),
    "gather": (lambda x, comm: mpiad.mpi_gather(x, 0, 0, comm=comm), lambda s: reference.gather(s, 0, 0)),
    "allgather": (lambda x, comm: mpiad.mpi_allgather(x, 0, comm=comm), lambda s: reference.allgather(s, 0)),
    "scatter": (lambda x, comm: mpiad.mpi_scatter(x, 0, 0, comm=comm), lambda s: reference.scatter(s, 0, 0)),
    "reduce_scatter": (lambda x, comm: mpiad.mpi_reduce_scatter(x, 0, comm=comm), lambda s: reference.reduce_scatter(s, 0)),
    "alltoall": (
        lambda x, comm: mpiad.mpi_alltoall(x, blocks(comm.rank, len(x), comm.size), comm=comm),
        lambda s: reference.alltoallv(s, [blocks(rank, shape[0], len(s)) for rank, shape in enumerate(s)]),
    ),
    "scan": (lambda x, comm: mpiad.mpi_scan(x, comm=comm), reference.scan),
    "exscan": (lambda x, comm: mpiad.mpi_exscan(x, comm=comm), reference.exscan),
    "send": (ring, shifted),
    "exchange": (
        lambda x, comm: mpiad.mpi_exchange(x, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, comm=comm),
        shifted,
    ),
    "iallreduce": (lambda x, comm: mpiad.mpi_wait(mpiad.mpi_iallreduce(x, comm=comm)), reference.allreduce),
}
