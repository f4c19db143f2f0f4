"""What ranks on hosts that are apart run: `host_programs.py NAME`."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import autograd.numpy as np
from mpi4py import MPI

import mpiad

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
COMPUTATION = 0.03  # seconds of a step without messages, spent asleep: others may use the cores


def places():
    """Host names, local ranks, and a gradient."""
    found = COMM.gather((socket.gethostname(), mpiad.mpi_local_rank()))
    x = np.arange(1000.0) + RANK
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    value, gradient = mpiad.value_and_grad(lambda x: mpiad.mpi_sum(np.sum(x * mpiad.mpi_exchange(x, after, before))))(x)
    expected = np.arange(1000.0) * 2 + before + after
    assert np.array_equal(gradient, expected)
    if RANK == 0:
        print(found, flush=True)


def overlap():
    """Seconds of a step whose halo travels before, and during, the computation."""
    domain = mpiad.Domain((4 * SIZE,), halo=1, periodic=True)
    u = np.ones(domain.local_shape)

    def one_after_the_other():
        domain.exchange(u)
        time.sleep(COMPUTATION)

    def at_once():
        begun = domain.begin_exchange(u)
        time.sleep(COMPUTATION)
        domain.end_exchange(begun)

    times = []
    for step in (one_after_the_other, at_once):
        step()
        COMM.Barrier()
        start = time.perf_counter()
        for _ in range(10):
            step()
        times.append((time.perf_counter() - start) / 10)
    if RANK == 0:
        print(*times, flush=True)


def kernels():
    """A compiled gradient, from a folder that all hosts share."""
    x = np.linspace(0.0, 1.0, 50)
    gradient = mpiad.grad(mpiad.jit(lambda x: mpiad.mpi_sum(np.sum(np.sin(x) * np.exp(x) / (1.0 + x * x)))))(x)
    d = 1.0 + x * x
    expected = np.exp(x) * ((np.cos(x) + np.sin(x)) / d - 2 * x * np.sin(x) / d**2)
    assert np.allclose(gradient, expected, rtol=1e-12, atol=0.0)
    COMM.Barrier()
    if RANK == 0:
        files = [path for path in Path(os.environ["MPIAD_CACHE"]).rglob("*") if path.is_file()]
        print(len(files), sum("part" in path.name or "tmp" in path.name for path in files), flush=True)


def exception():
    """The last rank, on another host, raises; the others wait for it."""
    if RANK == SIZE - 1:
        raise ArithmeticError("on the last host")
    mpiad.mpi_allreduce(1.0)


def deadlock():
    """The last rank takes no part in a sum."""
    if RANK < SIZE - 1:
        mpiad.mpi_allreduce(1.0)
    else:
        mpiad.mpi_recv(np.zeros(1), 0)


def endless():
    """Sums until something breaks; rank 0 says when they go on."""
    for k in range(10**9):
        mpiad.mpi_allreduce(1.0)
        if k == 5 and RANK == 0:
            print("going on", flush=True)


if __name__ == "__main__":
    signal.alarm(150)  # nothing outlives its test
    {fun.__name__: fun for fun in (places, overlap, kernels, exception, deadlock, endless)}[sys.argv[1]]()
