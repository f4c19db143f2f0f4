"""Compiled ranks among interpreted ones under debug mode, a time-out and a trace: they see every communication."""

import json

import pytest

pytestmark = pytest.mark.launches

PROGRAM = """
import os, sys
import autograd.numpy as np
import numpy, mpiad

mpiad.mpi_init()
rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
domain = mpiad.Domain((12, 9), halo=1, periodic=True)
def step(u):
    v = domain.exchange(u)
    return u + 0.1 * (v[2:, 1:-1] + v[:-2, 1:-1] - 2 * u) + mpiad.mpi_allreduce(np.sum(u)) * 1e-3
def loss(u):
    w = mpiad.mpi_exchange(np.sum(step(step(u))), (rank + 1) % size, (rank - 1) % size)
    return domain.sum(u * u) * w
compiled = mpiad.jit(loss) if rank % 2 == 0 else loss
u = numpy.random.default_rng(rank).standard_normal(domain.local_shape)
for k in range(3):
    mine = compiled(u), mpiad.value_and_grad(compiled)(u)
    theirs = loss(u), mpiad.value_and_grad(loss)(u)
    assert abs(mine[0] - theirs[0]) < 1e-12 * abs(theirs[0])
    assert numpy.allclose(mine[1][1], theirs[1][1], rtol=1e-11, atol=1e-12), (mine, theirs)
if rank == 0:
    assert all(entry is not None for entry in compiled._entries.values()), compiled._reasons
"""
EXCHANGE, ALLREDUCE, SWAP = 9, 10, 12  # lines of its calls


def run(mpirun, text=PROGRAM, ranks=3, **env):
    return mpirun(ranks, text, env={name: str(value) for name, value in env.items()})


def test_in_debug_mode(mpirun):
    made = run(mpirun, MPIAD_DEBUG=1, MPIAD_TIMEOUT=20)
    assert (made.returncode, made.stdout) == (0, ""), made.stderr
    assert "isn't compiled" not in made.stderr


def test_a_timeline_has_the_calls_of_all_ranks(mpirun, tmp_path):
    path = tmp_path / "trace.json"
    made = run(mpirun, MPIAD_TRACE=path)
    assert made.returncode == 0, made.stderr
    with open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    found = [
        sorted((event["name"], str(event["args"].get("where", event["args"]))) for event in events if event["pid"] == rank)
        for rank in range(3)
    ]
    calls = [[event for event in mine if "mpi_" in event[0] or "exchange" in event[0]] for mine in found]
    assert len(calls[0]) >= 3 * 2 * 8
    # Ranks 0 and 2 are compiled, rank 1 isn't; each calls the same, from the same lines.
    assert [name for name, _ in calls[0]] == [name for name, _ in calls[1]] == [name for name, _ in calls[2]]


MISTAKEN = """
import autograd.numpy as np
import numpy, mpiad

mpiad.mpi_init()
rank = mpiad.mpi_rank()
def loss(x, other):
    y = np.sin(x) * 2
    return mpiad.mpi_allreduce(y) if not other else mpiad.mpi_scan(y)
compiled = mpiad.jit(loss)
x = numpy.ones(3)
for turn in range(3):
    compiled(x, turn == 2 and rank == 1)
"""


def test_a_replay_that_meets_another_call_is_named_by_its_line(mpirun):
    """The third call is a replay on two ranks, and another communication on the third."""
    made = run(mpirun, MISTAKEN, MPIAD_DEBUG=1, MPIAD_TIMEOUT=20)
    assert made.returncode != 0
    assert "mpi_allreduce" in made.stderr and "mpi_scan" in made.stderr
    assert ":9 in loss" in made.stderr


LATE = """
import time
import numpy, mpiad

mpiad.mpi_init()
rank = mpiad.mpi_rank()
compiled = mpiad.jit(lambda x: mpiad.mpi_recv(x, 1, tag=4) * 2 if rank == 0 else mpiad.mpi_send(x * 3, 0, tag=4))
x = numpy.ones(3)
compiled(x)
if rank == 0:
    compiled(x)
mpiad.mpi_barrier()
"""


def test_a_wait_of_a_replay_ends(mpirun):
    made = run(mpirun, LATE, ranks=2, MPIAD_TIMEOUT=3)
    assert made.returncode != 0
    assert "mpi_recv" in made.stderr and ":7 in <lambda>" in made.stderr
