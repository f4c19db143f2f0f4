"""An exception that leaves a trace or a reverse pass: what is refused, how it is mended, what is as before."""

from collections.abc import Iterator

import autograd.numpy as anp
import numpy as np
import pytest
from _pytest.mark import ParameterSet
from autograd.extend import defvjp, primitive
from autograd.tracer import trace_stack
from mpi4py import MPI
from one_process import assert_close, gradients, inputs

import mpiad
from mpiad.errors import UnfinishedMessagesError


class InterruptedStep(Exception):
    """What the programs here raise."""


@pytest.fixture(autouse=True)
def renewed():
    """Whatever a fault leaves under way ends with its test."""
    yield
    mpiad.reset()


def program(x, rank, size, interrupted=False):
    """Send two messages round the ring; the interruption comes between a send and its receive."""
    right, left = (rank + 1) % size, (rank - 1) % size
    mpiad.mpi_send(anp.sin(x), right)
    if interrupted:
        raise InterruptedStep(rank)
    return mpiad.mpi_allreduce(anp.sum(mpiad.mpi_recv(x, left) ** 2) * (rank + 1.0))


def check_program(rank, size, rank_rng):
    """The gradient is right: no old message is taken for a new one."""
    xs = [5 + x for x in inputs(rank_rng, size, lambda r: (2,))]
    expected = gradients(lambda zs: sum(anp.sum(anp.sin(zs[r - 1]) ** 2) * (r + 1.0) for r in range(size)), xs)
    assert_close(mpiad.grad(program)(xs[rank], rank, size), expected[rank])


CALLS = {
    "value_and_grad": lambda f, x: mpiad.value_and_grad(f)(x),
    "make_vjp": lambda f, x: mpiad.make_vjp(f)(x),
    "jvp": lambda f, x: mpiad.jvp(f, x, np.ones_like(x)),
    "hvp": lambda f, x: mpiad.hvp(f)(x, np.ones_like(x)),
    "jacobian": lambda f, x: mpiad.jacobian(f)(x),
    "nested": lambda f, x: mpiad.grad(lambda y: anp.sum(mpiad.grad(f)(y)))(x),
}


@pytest.mark.interpreted  # the trace of a compiled program sends nothing
@pytest.mark.parametrize("call", CALLS)
def test_an_exception_between_a_send_and_its_receive(call, rank, size, rank_rng):
    with pytest.raises(InterruptedStep):
        CALLS[call](lambda x: program(x, rank, size, interrupted=True), np.ones(2))
    for use in (lambda: mpiad.mpi_allreduce(1.0), lambda: mpiad.mpi_send(1.0, rank), lambda: mpiad.mpi_barrier()):
        with pytest.raises(UnfinishedMessagesError, match=r"InterruptedStep.*mpiad\.reset"):
            use()
    with pytest.raises(UnfinishedMessagesError):
        CALLS[call](lambda x: program(x, rank, size), np.ones(2))
    mpiad.reset()
    check_program(rank, size, rank_rng)


@pytest.mark.parametrize("length", [2, 100_000], ids=["short", "long"])
def test_no_message_of_an_earlier_fault_is_received_after_a_later_one(length, rank, size):
    """MPI gives the numbers of freed communicators to new ones; what was left on them must be gone."""
    right, left = (rank + 1) % size, (rank - 1) % size

    def interrupted(x):
        mpiad.mpi_send(np.full(length, -1.0) * x, right)
        mpiad.mpi_isend(np.full(length, -2.0) * x, right)
        mpiad.mpi_irecv(np.zeros(length), right, tag=8)  # from the other neighbour: never sent
        raise InterruptedStep

    for k in range(4):
        with pytest.raises(InterruptedStep):
            mpiad.grad(interrupted)(1.0)
        mpiad.reset()
        comm = MPI.COMM_WORLD.Dup()
        mpiad.mpi_init(comm)
        for used in (None, comm):
            mpiad.mpi_send(np.full(length, 10.0 * k + rank), right, comm=used)
            assert_close(mpiad.mpi_recv(np.zeros(length), left, comm=used), np.full(length, 10.0 * k + left))
        comm.Free()


@pytest.mark.launches
def test_a_program_that_never_resets_ends(mpirun):
    program = """
import numpy as np, mpiad
def interrupted(x):
    for length in (10, 1_000_000):
        mpiad.mpi_send(np.ones(length) * x, 1 - mpiad.mpi_rank())
    mpiad.mpi_irecv(x, 1 - mpiad.mpi_rank(), tag=5)
    raise ValueError
try:
    mpiad.grad(interrupted)(1.0)
except ValueError:
    pass
"""
    assert mpirun(2, program, timeout=20).returncode == 0


@pytest.mark.mpi(min_size=2)
def test_an_exception_on_one_rank_that_the_others_learn_of(rank, size, rank_rng):
    """The rank that failed tells the others through the user's own communicator; all leave and reset."""

    def guarded(x):
        mpiad.mpi_send(anp.sin(x), (rank + 1) % size)
        if MPI.COMM_WORLD.allreduce(rank == size - 1, op=MPI.LOR):
            raise InterruptedStep(rank)
        return anp.sum(mpiad.mpi_recv(x, (rank - 1) % size))

    with pytest.raises(InterruptedStep):
        mpiad.grad(guarded)(np.ones(2))
    mpiad.reset()
    check_program(rank, size, rank_rng)


@primitive
def fragile(x):
    """The identity, whose adjoint fails."""
    return x * 1.0


def _failing_adjoint(ans, x):
    def vjp(g):
        raise InterruptedStep("adjoint")

    return vjp


defvjp(fragile, _failing_adjoint)


@pytest.mark.interpreted  # the trace of a compiled program sends nothing
def test_an_exception_in_a_reverse_pass(rank, size, rank_rng):
    """It comes after the adjoint of the receive has sent, and before that of the send receives."""

    def breaks(x):
        return program(fragile(x), rank, size) + mpiad.mpi_allreduce(anp.sum(fragile(anp.sin(x))))

    with pytest.raises(InterruptedStep, match="adjoint"):
        mpiad.grad(breaks)(np.ones(2))
    with pytest.raises(UnfinishedMessagesError, match="InterruptedStep left a reverse pass"):
        mpiad.mpi_allreduce(1.0)
    mpiad.reset()
    check_program(rank, size, rank_rng)


@pytest.mark.interpreted  # the trace of a compiled program sends nothing
def test_an_exception_in_the_reverse_pass_of_an_inner_trace(rank, size, rank_rng):
    def outer(x):
        return anp.sum(mpiad.grad(lambda y: program(fragile(y), rank, size))(x))

    with pytest.raises(InterruptedStep):
        mpiad.grad(outer)(np.ones(2))
    with pytest.raises(UnfinishedMessagesError):
        mpiad.mpi_barrier()
    mpiad.reset()
    check_program(rank, size, rank_rng)


@pytest.mark.interpreted  # the trace of a compiled program sends nothing
def test_only_the_communicators_that_were_used_are_refused(rank, size, rank_rng):
    comm = MPI.COMM_WORLD.Dup()
    mpiad.mpi_init(comm)

    def interrupted(x):
        mpiad.mpi_send(x, (rank + 1) % size, comm=comm)
        raise InterruptedStep

    with pytest.raises(InterruptedStep):
        mpiad.grad(interrupted)(np.ones(2))
    check_program(rank, size, rank_rng)
    with pytest.raises(UnfinishedMessagesError):
        mpiad.mpi_allreduce(1.0, comm=comm)
    mpiad.reset(comm)
    came = mpiad.mpi_exchange(float(rank), (rank + 1) % size, (rank - 1) % size, comm=comm)
    assert came == (rank - 1) % size
    comm.Free()


ring = mpiad.Domain(2 * MPI.COMM_WORLD.size, periodic=True)
bare = mpiad.extend.custom_operator(lambda x: mpiad.mpi_allreduce(x))
mpiad.extend.defadjoint(bare, bare)
COMMUNICATE = {
    "reduction": lambda x: mpiad.mpi_allreduce(x),
    "broadcast": lambda x: mpiad.mpi_bcast(x),
    "barrier": lambda x: mpiad.mpi_barrier(),
    "gather": lambda x: mpiad.mpi_allgather(x),
    "halo": lambda x: ring.exchange(x),
    "jitted halo": mpiad.jit(lambda x: anp.sum(ring.exchange(x))),
    "jitted": mpiad.jit(lambda x: mpiad.mpi_allreduce(x)),
    "stencil": ring.stencil([1.0, -2.0, 1.0]),
    "jitted stencil": mpiad.jit(ring.stencil([1.0, -2.0, 1.0])),
    "operator": lambda x: bare(x),
    "gradient": lambda x: mpiad.grad(lambda y: anp.sum(y**2))(x),
    "loop": lambda x: mpiad.timestepping.scan(lambda u, k: mpiad.mpi_allreduce(u), x, 2, checkpoints=1),
    "solve": lambda x: mpiad.linalg.solve(lambda u: 2 * u, x),
    "eigenpairs": lambda x: mpiad.linalg.eigsh(lambda u: 2 * u, np.ones(2), 1),
    "agreement": lambda x: mpiad.Domain(2 * MPI.COMM_WORLD.size),
}


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize("call", ["value_and_grad", "jvp", "hvp", "make_vjp"])
@pytest.mark.parametrize("kind", COMMUNICATE)
def test_an_exception_after_any_communication(kind, call, rank, size, rank_rng):
    """The other ranks may wait in the next one, which this rank's next call mustn't meet; one rank alone waits for none."""

    def interrupted(x):
        COMMUNICATE[kind](x)
        raise InterruptedStep

    for _ in range(2):
        with pytest.raises(InterruptedStep):
            CALLS[call](interrupted, np.ones(2))
        if size > 1:
            with pytest.raises(UnfinishedMessagesError, match=r"InterruptedStep.*mpiad\.reset"):
                mpiad.mpi_allreduce(1.0)
        mpiad.reset()
    check_program(rank, size, rank_rng)


BEFORE = [
    "mpi_allreduce(x)", "domain.exchange(x)", "mpiad.mpi_sendrecv(x, 1, 0)", "mpiad.linalg.solve(lambda u: 2 * u, x)",
    "mpiad.linalg.eigsh(lambda u: 2 * u, x, 1)", "inner(x)",
]  # fmt: skip


def befores() -> Iterator[ParameterSet]:
    """Yield calls without and with a timeout, which changes how ranks wait, whatever they wait in."""
    for before in BEFORE:
        marks = [] if before in ("mpi_allreduce(x)", "mpiad.linalg.solve(lambda u: 2 * u, x)") else [pytest.mark.thorough]
        yield pytest.param(before, "", marks=marks, id=before)
        marks = [] if before == "mpi_allreduce(x)" else [pytest.mark.thorough]
        yield pytest.param(before, "5", marks=marks, id=f"{before}-5")


@pytest.mark.launches
@pytest.mark.parametrize(("before", "timeout"), list(befores()))
def test_no_wrong_number_where_one_rank_catches(before, timeout, mpirun):
    """Rank 0 waits in the sum of the loss, and rank 1's next sum is refused: no rank prints one."""
    program = f"""
import autograd.numpy as np, os, mpiad
from mpiad import mpi_allreduce, mpi_rank
domain = mpiad.Domain(4, periodic=True)
inner = mpiad.extend.custom_operator(lambda x: mpi_allreduce(x))
mpiad.extend.defadjoint(inner, inner)
def loss(x):
    {before}
    if mpi_rank() == 1:
        raise ValueError("on one rank")
    return mpi_allreduce(np.sum(x) * 8)
try:
    mpiad.value_and_grad(loss)(np.ones(2))
except ValueError:
    print("caught", flush=True)
print("number", mpi_allreduce(1.0), flush=True)
"""
    done = mpirun(2, program, timeout=20, env={"MPIAD_TIMEOUT": timeout} if timeout else {})
    assert done.returncode != 0 and "caught" in done.stdout and "number" not in done.stdout
    assert "UnfinishedMessagesError: mpi_allreduce: ValueError left a trace" in done.stderr


@pytest.mark.few(1)
@pytest.mark.launches
@pytest.mark.parametrize("traced, timeout", [
    (False, "5"), (True, ""), *(pytest.param(*pair, marks=pytest.mark.thorough) for pair in ((False, ""), (True, "5"))),
])  # fmt: skip
def test_a_product_of_eigsh_raises_on_one_rank(traced, timeout, mpirun):
    """The other rank doesn't wait in eigsh's next sum, which that of the program would meet."""
    program = f"""
import autograd.numpy as np, mpiad
from mpiad import mpi_allreduce, mpi_rank
calls = []
def product(v):
    calls.append(v)
    total = mpi_allreduce(v) * 8
    if mpi_rank() == 1 and len(calls) > 1:
        raise ValueError("on one rank")
    return total
def loss(x):
    mpi_allreduce(x)
    return np.sum(mpiad.linalg.eigsh(product, x, 2).values) + mpi_allreduce(np.sum(x))
try:
    mpiad.value_and_grad(loss)(np.ones(2)) if {traced} else loss(np.ones(2))
except ValueError:
    print("caught", flush=True)
print("number", mpi_allreduce(1.0), flush=True)
"""
    done = mpirun(2, program, timeout=20, env={"MPIAD_TIMEOUT": timeout} if timeout else {})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("caught") == done.stdout.count("number 2.0") == 2


def test_requests_under_way_when_an_exception_comes(rank, size, rank_rng):
    def interrupted(x):
        mpiad.mpi_irecv(x, (rank - 1) % size)
        mpiad.mpi_isend(x, (rank + 1) % size)
        mpiad.mpi_iallreduce(x)
        raise InterruptedStep

    with pytest.raises(InterruptedStep):
        mpiad.grad(interrupted)(np.ones(2))
    mpiad.reset()
    check_program(rank, size, rank_rng)


@pytest.mark.parametrize("call", CALLS)
def test_the_trace_counter_is_restored(call, rank, size):
    """Autograd's own is left raised by an exception; every later trace would count from there."""
    before = trace_stack.top

    def interrupted(x):
        raise InterruptedStep

    for _ in range(3):
        with pytest.raises(InterruptedStep):
            CALLS[call](interrupted, np.ones(2))
        assert trace_stack.top == before

    def caught_inside(x):
        here = trace_stack.top
        with pytest.raises(InterruptedStep):
            mpiad.grad(interrupted)(x)
        assert trace_stack.top == here
        return anp.sum(x**2)

    CALLS[call](caught_inside, np.ones(2))
    assert trace_stack.top == before


@pytest.mark.also_jitted
def test_an_inner_exception_that_is_caught_on_all_ranks(rank, size, rank_rng):
    """A step that fails and is done otherwise, in the middle of a trace, whose earlier sums have their adjoints."""
    xs = inputs(rank_rng, size)

    def interrupted(y):
        mpiad.mpi_allreduce(anp.sum(y))
        raise InterruptedStep

    def robust(x):
        total = mpiad.mpi_allreduce(anp.sum(x))
        try:
            step = mpiad.grad(interrupted)(x)
        except InterruptedStep:
            mpiad.reset()
            step = mpiad.grad(lambda y: mpiad.mpi_allreduce(anp.sum(y**3)))(x)
        return mpiad.mpi_allreduce(anp.sum(step * x)) * total

    def whole(zs):
        return 3 * sum(anp.sum(z**3) for z in zs) * sum(anp.sum(z) for z in zs)

    assert_close(mpiad.grad(robust)(xs[rank]), gradients(whole, xs)[rank])


@pytest.mark.interpreted  # a trace that is interrupted has sent nothing
def test_a_keyboard_interrupt_leaves_like_any_other(rank, size, rank_rng):
    before = trace_stack.top

    def interrupted(x):
        mpiad.mpi_send(x, rank)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mpiad.grad(interrupted)(np.ones(2))
    assert trace_stack.top == before
    with pytest.raises(UnfinishedMessagesError, match="KeyboardInterrupt"):
        mpiad.mpi_barrier()
    mpiad.reset()
    check_program(rank, size, rank_rng)
