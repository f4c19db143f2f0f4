"""An exception on one rank reaches all ranks of a composite, also those that wait in a communication; then all go on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fault_tolerant import with_ulfm
from mpi4py import MPI
from shown_programs import programs_of

from mpiad.transport.core.fault_tolerance import FAULT_TOLERANT, _can_revoke
from mpiad.transport.exits.recovery import interruptible, recoverable

START = """
import os, random, signal, time
import autograd.numpy as anp
import numpy as np
from autograd.extend import defvjp, primitive
from mpi4py import MPI
import mpiad
from mpiad.errors import CommunicatorError, RemoteError, WorkerError

rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
right, left = (rank + 1) % size, (rank - 1) % size
failing = {}  # place -> ranks

def perhaps(place):
    if rank in failing.get(place, ()):
        raise ZeroDivisionError(f"on rank {rank} {place}")

early, late = primitive(lambda x: x * 1.0), primitive(lambda x: x * 1.0)
defvjp(early, lambda ans, x: lambda g: (perhaps("at the end of the reverse pass"), g)[1])
defvjp(late, lambda ans, x: lambda g: (perhaps("in the reverse pass"), g)[1])

def program(x):
    perhaps("at the start")
    y = mpiad.mpi_allreduce(early(x))
    perhaps("after a reduction")
    request = mpiad.mpi_irecv(x, left, tag=3)
    mpiad.mpi_send(y, right)
    perhaps("after a send")
    z = late(mpiad.mpi_recv(x, left))
    mpiad.mpi_wait(mpiad.mpi_isend(y, right, tag=3))
    perhaps("before a wait")
    total = mpiad.mpi_allreduce(anp.sum(y * z) + anp.sum(mpiad.mpi_wait(request)))
    perhaps("at the end")
    return total

PLACES = ("at the start", "after a reduction", "after a send", "before a wait", "at the end", "in the reverse pass",
          "at the end of the reverse pass")
solve = mpiad.value_and_grad(program)

def check(comm=None):
    "The right value and gradient: nothing old is taken for new."
    failing.clear()
    x = np.arange(3.0) + rank
    total = sum(np.arange(3.0) + r for r in range(size))
    value, gradient = solve(x)
    assert np.isclose(value, size * np.sum(total**2 + total)), value
    assert np.allclose(gradient, size * (2 * total + 1)), gradient
"""


def run(ft_run, ranks, text, **keywords):
    done = ft_run(ranks, START + text + '\nprint("done", flush=True)\n', timeout=50, **keywords)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == ranks, done.stdout + done.stderr
    return done


@pytest.mark.serial
@pytest.mark.skipif(FAULT_TOLERANT, reason="this job's MPI can revoke")
def test_nothing_is_paid_where_the_mpi_cannot_revoke():
    def fun():
        pass

    assert recoverable("minimize")(fun) is fun
    assert interruptible("mpi_send", fun) is fun


@pytest.mark.serial
@pytest.mark.parametrize("vendor", ["Open MPI", "MPICH"])
@pytest.mark.parametrize("asked", ["1", "True", "0", "", None])
def test_only_an_mpi_that_was_asked_to_can_revoke(asked, vendor, monkeypatch):
    """Open MPI's launcher tells its ranks by this variable that they outlive one another."""
    for name in ("MPIAD_RECOVERY", "MPIAD_DEBUG", "OMPI_MCA_mpi_ft_enable"):
        monkeypatch.delenv(name, raising=False)
    if asked is not None:
        monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", asked)
    monkeypatch.setattr(MPI, "get_vendor", lambda: (vendor, (5, 0, 0)))
    assert _can_revoke() == (vendor == "Open MPI" and asked in ("1", "True"))


class TestRecovery:
    pytestmark = with_ulfm

    def test_it_can_be_left_out(self, ft_run):
        run(ft_run, 1, "from mpiad.transport.exits.recovery import FAULT_TOLERANT as on; assert not on",
            env={"MPIAD_RECOVERY": "0"})  # fmt: skip

    def test_an_exception_at_each_place(self, ft_run):
        """The rank that failed raises its own; the others wait in a reduction, a receive, a wait, a reverse pass."""
        run(ft_run, 3, """
for place in PLACES * 2:
    failing[place] = {1}
    try:
        solve(np.arange(3.0) + rank)
    except ZeroDivisionError as error:
        assert rank == 1 and place in str(error)
    except RemoteError as error:
        assert rank != 1 and error.rank == 1 and not isinstance(error, WorkerError)
        assert f"rank 1 raised ZeroDivisionError: on rank 1 {place}" in str(error), error
        assert "in perhaps" in error.traceback and error.traceback.rstrip() in str(error)
    else:
        raise AssertionError(f"nothing was raised on rank {rank} {place}")
    check()
""")  # fmt: skip

    def test_ranks_that_fail_at_once_and_at_any_time(self, ft_run):
        run(ft_run, 3, """
draw = random.Random(5)
for trial in range(40):
    failing.update({place: {r for r in range(size) if draw.random() < 0.15} for place in PLACES})
    expected = set().union(*failing.values())
    time.sleep(random.random() * 0.02)  # differs from rank to rank
    raised = 0
    try:
        solve(np.arange(3.0) + rank)
    except ZeroDivisionError as error:
        raised = 2
    except RemoteError as error:
        raised = 1
        assert error.rank in expected and error.rank != rank
    raised = MPI.COMM_WORLD.allgather(raised)
    assert set(raised) == {0} if not expected else 2 in raised and 0 not in raised, (raised, failing)
    check()
""")  # fmt: skip

    def test_ranks_that_fail_alike_raise_their_own(self, ft_run):
        run(ft_run, 3, """
for place in PLACES:
    failing[place] = {0, 1, 2}
    try:
        solve(np.arange(3.0))
    except ZeroDivisionError as error:
        assert f"rank {rank}" in str(error)
    else:
        raise AssertionError
    check()
try:
    mpiad.value_and_grad(lambda x: (mpiad.mpi_allreduce(x), "text")[rank == 1], objective="sum")(1.0)
except TypeError as error:
    assert "one real number" in str(error)
else:
    raise AssertionError
check()
""")  # fmt: skip

    def test_nested_composites(self, ft_run):
        run(ft_run, 3, """
def outer(x):
    mpiad.mpi_send(x, right, tag=9)
    inner = mpiad.grad(program)(x)
    return mpiad.mpi_allreduce(anp.sum(inner * mpiad.mpi_recv(x, left, tag=9)))

for place in PLACES:
    failing[place] = {2}
    try:
        mpiad.value_and_grad(outer)(np.ones(3))
    except (ZeroDivisionError, RemoteError) as error:
        assert isinstance(error, RemoteError) == (rank != 2)
    else:
        raise AssertionError
    check()
""")  # fmt: skip

    def test_a_wait_on_a_smaller_communicator(self, ft_run):
        """It is renewed with that of the composite."""
        run(ft_run, 4, """
row = MPI.COMM_WORLD.Split(rank // 2, rank)
mpiad.mpi_init(row)
for trial in range(3):
    def loss(x):
        if rank == 3 and trial < 2:
            raise ZeroDivisionError("in the row")
        return mpiad.mpi_allreduce(mpiad.mpi_allreduce(x, comm=row))
    try:
        value, gradient = mpiad.value_and_grad(loss)(1.0 + rank)
        assert trial == 2 and value == 20 and gradient == 2, (value, gradient)
    except (ZeroDivisionError, RemoteError) as error:
        assert trial < 2 and isinstance(error, RemoteError) == (rank != 3)
row.Free()
check()
""")  # fmt: skip

    def test_another_group_is_left_alone(self, ft_run):
        run(ft_run, 4, """
group = MPI.COMM_WORLD.Split(rank // 2, rank)
mpiad.mpi_init(group)
loss = mpiad.value_and_grad(lambda x: mpiad.mpi_allreduce(x**2, comm=group), comm=group)

def broken(x):
    if rank == 0:
        raise ZeroDivisionError("in the first group")
    return mpiad.mpi_allreduce(x, comm=group)

for trial in range(5):
    if rank < 2:
        try:
            mpiad.value_and_grad(broken, comm=group)(1.0)
        except (ZeroDivisionError, RemoteError) as error:
            assert isinstance(error, RemoteError) == (rank == 1)
        else:
            raise AssertionError
    for _ in range(20):
        assert loss(2.0) == (8.0, 4.0)
group.Free()
check()
""")  # fmt: skip

    def test_minimize(self, ft_run):
        """All ranks raise the same; the root waits in a method, the others for its instruction."""
        run(ft_run, 3, """
def bowl(x):
    perhaps("at the start")
    return mpiad.mpi_allreduce(anp.sum((x - 3.0) ** 2))

for bad in (0, 2, 1):
    for method in ("L-BFGS", "trust-constr"):
        failing["at the start"] = {bad}
        try:
            mpiad.minimize(bowl, np.zeros(3), method=method)
        except WorkerError as error:
            assert error.rank == bad and f"ZeroDivisionError: on rank {bad}" in str(error)
            texts = MPI.COMM_WORLD.allgather(str(error))
            assert len(set(texts)) == 1
            assert (type(error.__cause__) is ZeroDivisionError) == (rank == bad)
        failing.clear()
        assert np.allclose(mpiad.minimize(bowl, np.zeros(3), method=method).x, 3.0, atol=1e-4)
check()
""")  # fmt: skip

    def test_linear_solve(self, ft_run):
        run(ft_run, 3, """
def matvec(u):
    perhaps("at the start")
    return (2.0 + rank) * u + 0.01 * mpiad.mpi_allreduce(anp.sum(u))

failing["at the start"] = {1}
try:
    mpiad.linalg.solve(matvec, np.ones(4))
except (ZeroDivisionError, RemoteError) as error:
    assert isinstance(error, RemoteError) == (rank != 1)
else:
    raise AssertionError
failing.clear()
u = mpiad.linalg.solve(matvec, np.ones(4), rtol=1e-12)
assert np.allclose(matvec(u), 1.0)
""")  # fmt: skip

    def test_a_rank_that_has_not_come_yet(self, ft_run):
        """It is interrupted in the communication before."""
        run(ft_run, 3, """
if rank == 1:
    failing["at the start"] = {1}
    try:
        solve(np.ones(3))
    except ZeroDivisionError:
        pass
else:
    try:
        mpiad.mpi_recv(1.0, source=1)
    except RemoteError as error:
        assert error.rank == 1 and "ZeroDivisionError" in str(error)
    else:
        raise AssertionError
check()
""")  # fmt: skip

    def test_a_rank_that_dies(self, ft_run):
        """The others are told, and can go on among themselves."""
        done = ft_run(4, START + """
def loss(x):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return mpiad.mpi_allreduce(x)

try:
    mpiad.value_and_grad(loss)(1.0)
except RemoteError as error:
    assert error.rank == 2 and "rank 2 of 4 has died" in str(error) and error.traceback == ""
try:
    mpiad.mpi_allreduce(1.0)
except CommunicatorError as error:
    assert "rank 2 of 4 has died" in str(error) and "comm.Shrink()" in str(error)
left = MPI.COMM_WORLD.Shrink()
assert mpiad.value_and_grad(lambda x: mpiad.mpi_allreduce(x**2, comm=left), comm=left)(2.0) == (12.0, 4.0)
print("done", flush=True)
""")  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("done") == 3

    def test_an_exception_that_nobody_catches_ends_the_job(self, ft_run):
        done = ft_run(3, START + """
failing["after a send"] = {1}
solve(np.ones(3))
""")  # fmt: skip
        assert done.returncode != 0
        assert re.search(r"ZeroDivisionError: on rank 1 after a send", done.stderr)

    def test_the_program_of_the_page(self, ft_run):
        page = Path(__file__).parents[3] / "docs" / "recovery.md"
        (program,) = programs_of(page.read_text(), page.name)[1]
        done = ft_run(4, program)
        assert done.returncode == 0, done.stderr
        steps = [["step 0: 12.0"] * 4, ["step 1: left out: " + "RemoteError"] * 4, ["step 2: 12.0"] * 4]
        steps[1][2] = "step 1: left out: ArithmeticError"
        assert done.stdout.splitlines() == sum(steps, [])

    def test_a_rank_that_has_left_the_program(self, ft_run):
        """It can't raise any more: the job ends, with the traceback of the rank that failed."""
        done = ft_run(2, START + """
mpiad.mpi_barrier()
if rank == 1:
    failing["at the start"] = {1}
    try:
        solve(np.ones(3))
    except ZeroDivisionError:
        pass
    time.sleep(1)
""", timeout=20)  # fmt: skip
        assert done.returncode != 0
        assert "ZeroDivisionError: on rank 1 at the start" in done.stderr
