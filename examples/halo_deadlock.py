"""A ring of ranks that all send before they receive: 8 bytes and 64 MiB, forward and backward.

    mpiexec -n 4 python examples/halo_deadlock.py

With MPI's own blocking calls this hangs as soon as a message is too long to be buffered. Here a send doesn't wait for
its receiver, in neither direction. `--mebibytes 1` makes the long message shorter.
"""

import argparse
import time

import autograd.numpy as np

import mpiad

parser = argparse.ArgumentParser()
parser.add_argument("--mebibytes", type=int, default=64)
rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
after, before = (rank + 1) % size, (rank - 1) % size


def loss(x):
    mpiad.mpi_send(x, after)
    received = mpiad.mpi_recv(x, before)
    return np.sum(received * received) / 2


for count in (1, parser.parse_args().mebibytes * 2**17):
    x = np.full(count, 1.0 + rank)
    start = time.perf_counter()
    value, gradient = mpiad.value_and_grad(loss, objective="sum")(x)
    seconds = time.perf_counter() - start
    if rank == 0:
        print(f"{8 * count:9d} bytes to each neighbour: J = {value:g}, {seconds:.2f} s")
    # What a rank sent is what its neighbour squared: the gradient comes back around the ring.
    assert np.array_equal(gradient, x), gradient
    assert value == count * sum((1.0 + r) ** 2 for r in range(size)) / 2, value
