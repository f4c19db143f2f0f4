"""Send an array from one rank to another: gradients by the values before and after the transfer.

    mpiexec -n 4 python examples/send_receive.py

a = ones times the rank; rank 2 (the last one, where there are fewer) sends its a to rank 0, which then holds that
instead of its own. L = the sum of squares of what each rank holds, and J the sum of all L.
"""

import autograd.numpy as np

import mpiad

rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
source, dest = min(2, size - 1), 0


def loss(a, change):
    """Add `change` to what this rank holds after the transfer: its gradient is that by these values."""
    b = mpiad.mpi_sendrecv(a, dest, source) + change
    return np.sum(b**2)


a = np.ones(10) * rank
value, (before, after) = mpiad.value_and_grad(loss, argnum=(0, 1), objective="sum")(a, np.zeros(10))
mpiad.mpi_print(f"rank {rank}: J = {value}, gradient before {before}, after {after}")

held = source if rank == dest else rank
copies = 1 + (rank == source) - (rank == dest) if source != dest else 1
assert value == 10 * (sum(r**2 for r in range(size)) - dest**2 + source**2), value
assert np.array_equal(after, np.full(10, 2.0 * held)), after
assert np.array_equal(before, np.full(10, 2.0 * rank * copies)), before
