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
# Reverse passes of loops and solves run forward calls again, and trace the user's functions.
LOOPS = """
import autograd.numpy as np
import numpy, mpiad
from mpiad.compiling import cache
from mpiad.linalg import newton, solve
from mpiad.timestepping import scan

cache.optimization_level = 0

mpiad.mpi_init()
rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
compiled = mpiad.jit if rank % 2 == 0 else lambda f: f

@compiled
def step(u, k, a):
    v = mpiad.mpi_exchange(np.sin(a * u), (rank + 1) % size, (rank - 1) % size)
    return u + 0.1 * v * mpiad.mpi_allreduce(np.sum(v)) / size

@compiled
def residual(u, a):
    return u + 0.1 * step(u, 0, a) - a

@compiled
def matvec(u, a):
    return 3.0 * u + 0.1 * a * mpiad.mpi_allreduce(u)

def looped(a, **options):
    return mpiad.mpi_allreduce(np.sum(scan(step, np.linspace(1.0, 2.0, 4) + rank, 10, a, **options) ** 2))

def solved(a):
    u = newton(residual, np.ones(4), a, atol=1e-12)
    return mpiad.mpi_allreduce(np.sum(solve(matvec, np.cos(u), a) ** 2))

def slope(f, a, h=1e-3):
    weights = (45, 1), (-9, 2), (1, 3)
    return sum(w * (f(a + k * h) - f(a - k * h)) for w, k in weights) / (60 * h)

for loss in looped, lambda a: looped(a, checkpoints=3), solved:
    gradient, product = mpiad.grad(loss, shared=True), mpiad.hvp(loss, shared=True)
    for turn in range(2):
        along = slope(loss, 0.3)
        assert numpy.isclose(gradient(0.3), along, rtol=1e-8)
        assert numpy.isclose(mpiad.linearize(loss)(0.3).jvp(1.0), along, rtol=1e-8)
        assert numpy.isclose(product(0.3, 1.0), slope(gradient, 0.3), rtol=1e-7)
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


@pytest.mark.thorough
def test_loops_and_solves_under_watch(mpirun):
    """Rules and operators name the same calls on ranks that compile and on ranks that interpret."""
    made = mpirun(2, LOOPS, env={"MPIAD_DEBUG": "1"})
    assert (made.returncode, made.stdout) == (0, ""), made.stderr
