"""Copies of a shared variable that differ are an error under MPIAD_DEBUG=1, on all ranks, and only there."""

import pytest

pytestmark = pytest.mark.launches

PROGRAM = """
import numpy as np, autograd.numpy as anp, mpiad
rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
loss = lambda p: mpiad.mpi_sum(anp.sum(p["w"] ** 2) * p["b"])
for drift in (0.0, 1e-15):
    p = {"b": 2.0, "w": np.ones(3)}
    if rank == size - 1:
        p["w"][1] += drift
    for take in (mpiad.grad, mpiad.hvp, mpiad.jacobian):
        try:
            derivative = take(loss, shared=True)
            derivative(p, p) if take is mpiad.hvp else derivative(p)
            told = "fine"
        except ValueError as error:
            told = str(error)
        mpiad.mpi_print(rank, drift, take.__name__, told)
"""


def test_copies_that_differ_raise_on_all_ranks(mpirun):
    done = mpirun(3, PROGRAM, env={"MPIAD_DEBUG": "1"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 18
    assert all(line.endswith("fine") for line in lines[:9])
    for line in lines[9:]:
        assert "leaf 1 of it (shape (3,), dtype float64 on rank 0) differs from rank 0's on rank(s) [2]" in line


def test_without_it_nothing_is_compared(mpirun):
    done = mpirun(3, PROGRAM, env={"MPIAD_DEBUG": None})
    assert done.returncode == 0, done.stderr
    assert all(line.endswith("fine") for line in done.stdout.splitlines())
