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
            told = str(error).replace(chr(10), "")
        mpiad.mpi_print(rank, drift, take.__name__, told)
mpiad.mpi_print("a reduction whose bits differ between ranks, as some MPIs' do over unlike machines")
from mpiad.differentiation import objective
reduced = objective.OBJECTIVE.forward
objective.OBJECTIVE.forward = lambda x, p: reduced(x, p) * (1 + 2.0**-52 * (mpiad.mpi_rank() == 1))
try:
    mpiad.mpi_print(mpiad.value_and_grad(lambda x: x)(1.0)[0])
except mpiad.errors.ReplicationError as error:
    mpiad.mpi_print(error.ranks, error.path, error.absolute == 2.0**-52)
"""


def outcomes(mpirun, debug):
    """Return the lines about copies, and those about an objective."""
    done = mpirun(3, PROGRAM, env={"MPIAD_DEBUG": debug})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 24
    return lines[:18], lines[21:]


def test_what_differs_raises_on_all_ranks(mpirun):
    copies, objectives = outcomes(mpirun, "1")
    assert all(line.endswith("fine") for line in copies[:9])
    for line in copies[9:]:
        assert "rank(s) [2] of 3 differ from rank 0." in line
        assert "rank 2: x['w'] (shape (3,), dtype float64) first at [1] is 1.000000000000001 instead of" in line
    assert objectives == ["[1] J True"] * 3


@pytest.mark.thorough
def test_without_it_nothing_is_compared(mpirun):
    copies, objectives = outcomes(mpirun, None)
    assert all(line.endswith("fine") for line in copies)
    assert objectives == ["1.0", "1.0000000000000002", "1.0"]
