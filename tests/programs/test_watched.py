"""Compiled ranks among interpreted ones under debug mode, a time-out and a trace: they see every communication."""

import json

import pytest
from machine_load import slowdown

pytestmark = pytest.mark.launches

# All in one start: what follows a mistake begins anew on renewed communicators.
PROGRAM = """
import autograd.numpy as np
import numpy, mpiad
from mpiad.compiling import cache

cache.optimization_level = 0

mpiad.mpi_init()
rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
domain = mpiad.Domain((12, 9), halo=1, periodic=True)
def step(u):
    v = domain.exchange(u)
    return u + 0.1 * (v[2:, 1:-1] + v[:-2, 1:-1] - 2 * u) + mpiad.mpi_allreduce(np.sum(u)) * 1e-3
def loss(u):
    w = mpiad.mpi_exchange(np.sum(step(step(u))), (rank + 1) % size, (rank - 1) % size)
    request = mpiad.mpi_iallreduce(np.sum(u))
    parts = mpiad.mpi_allgather(w + u[:1, 0], axis=0)
    return domain.sum(u * u) * w + np.sum(parts**2) * mpiad.mpi_wait(request)
here = rank % 2 == 0
compiled = mpiad.jit(loss) if here else loss
both = mpiad.jit(mpiad.value_and_grad(loss)) if here else mpiad.value_and_grad(loss)
u = numpy.random.default_rng(rank).standard_normal(domain.local_shape)
for k in range(3):
    theirs = loss(u), *mpiad.value_and_grad(loss)(u)
    for mine in ((compiled(u), *mpiad.value_and_grad(compiled)(u)), (theirs[0], *both(u))):
        assert all(numpy.allclose(a, b, rtol=1e-11, atol=1e-11) for a, b in zip(mine, theirs)), (mine, theirs)
for jitted in (compiled, both) if here else ():
    assert jitted._cache.entries and None not in jitted._cache.entries.values(), jitted._cache.reasons
# The third call is a replay on two ranks, and another communication on the third.
def mistaken(x, other):
    y = np.sin(x) * 2
    return mpiad.mpi_allreduce(y) if not other else mpiad.mpi_scan(y)
compiled = mpiad.jit(mistaken)
try:
    for turn in range(3):
        compiled(numpy.ones(3), turn == 2 and rank == 1)
    raise SystemExit("a mistake wasn't seen")
except mpiad.errors.CommunicationMismatchError as error:
    for part in ("mpi_allreduce", "mpi_scan", ":LINE in mistaken"):
        assert part in str(error), error
mpiad.reset()
# A replay waits for what nobody sends.
if size > 1:
    waits = mpiad.jit(lambda x: mpiad.mpi_recv(x, 1, tag=4) * 2 if rank == 0 else x)
    if rank == 1:
        mpiad.mpi_send(numpy.ones(3), 0, tag=4)
    waits(numpy.ones(3))
    try:
        waits(numpy.ones(3))
        mpiad.mpi_barrier()
        raise SystemExit("a wait didn't end")
    except mpiad.errors.DeadlockError as error:
        assert "mpi_recv" in str(error) and ":WAITS in <lambda>" in str(error), error
    mpiad.reset()
"""
LINES = PROGRAM.split("\n")
MISTAKEN = next(k for k, line in enumerate(LINES, 1) if "mpi_scan(y)" in line)
WAITS = next(k for k, line in enumerate(LINES, 1) if "mpiad.mpi_recv(" in line)


@pytest.mark.thorough
def test_a_program_under_watch(mpirun, tmp_path):
    """Right results on all ranks, mistakes named by their lines, and a timeline with the calls of all ranks."""
    path = tmp_path / "trace.json"
    text = PROGRAM.replace("LINE", str(MISTAKEN)).replace("WAITS", str(WAITS))
    made = mpirun(3, text, env={"MPIAD_DEBUG": "1", "MPIAD_TIMEOUT": str(2 * slowdown()), "MPIAD_TRACE": str(path)})
    assert (made.returncode, made.stdout) == (0, ""), made.stderr
    assert "isn't compiled" not in made.stderr
    with open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    found = [[], [], []]
    for event in events:
        where = event["args"].get("forward site", event["args"].get("site", ""))
        # Of a sum that is waited for nothing travels back, so that a program has no call there.
        if event["name"] != "adjoint of mpi_wait" and ("mpi_" in event["name"] or "halo" in event["name"]):
            found[event["pid"]] += [(event["name"], where)] * (" in step" in where or " in loss" in where)
    # Ranks 0 and 2 are compiled, rank 1 isn't; each calls the same, from the same lines.
    assert len(found[0]) >= 3 * 2 * 8
    assert sorted(found[0]) == sorted(found[1]) == sorted(found[2])
