"""A user's function that raises on one rank of a collective solver: all ranks raise, and the program goes on."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.domain import Domain
from mpiad.errors import UnfinishedMessagesError
from mpiad.linalg import DistributedMatrix, Multigrid, newton, solve, solve_elliptic
from mpiad.transport import channel

D = np.arange(2.0, 7.0)


class Trap:
    """Wraps functions, one of which raises on one rank in its k-th call, before or after what it does."""

    def __init__(self, rank, last):
        self._rank, self._last, self.at, self.calls = rank, last, {}, {}

    def spring(self, name):
        self.calls[name] = self.calls.get(name, 0) + 1
        if self._rank == self._last and self.at.get(name) == self.calls[name]:
            raise FloatingPointError(f"no {name}")

    def around(self, name, fun, first=False):
        uncompiled = iter(())  # a function that reads an iterator isn't compiled, so its calls can be counted

        def called(*args):
            next(uncompiled, None)
            if first:
                self.spring(name)
            out = fun(*args)
            if not first:
                self.spring(name)
            return out

        return called


@pytest.fixture
def trap(rank, size):
    return Trap(rank, size - 1)


@pytest.fixture
def b(rank):
    return np.arange(1.0, 6.0) + rank


def on_all_ranks(fun, rank, size):
    """Run a function that raises on the last rank; return what the ranks raised."""
    try:
        fun()
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    every = MPI.COMM_WORLD.allgather(said)
    assert mpiad.mpi_allreduce(1) == size
    return every


def expect(fun, name, rank, size):
    own = f"FloatingPointError: no {name}"
    assert on_all_ranks(fun, rank, size) == [f"{own} (raised on rank {size - 1})"] * (size - 1) + [own]


def diagonal(trap, first=False):
    return trap.around("matvec", lambda u, p=1.0: p * D * u, first)


def tridiagonal(trap, size, name="matvec", first=False):
    domain = Domain((5 * size,))

    def product(u, p=1.0):
        v = domain.exchange(u)
        return p * (3.0 * u - v[:-2] - v[2:])

    return trap.around(name, product, first)


def half(trap, name="preconditioner"):
    sprung = trap.around(name, lambda r: r / 2)
    return lambda r: sprung(r)


def root(trap, b, size, first=False):
    domain = Domain((5 * size,))

    def residual(u, p=1.0):
        v = domain.exchange(u)
        return u**3 + 3.0 * u - 0.5 * (v[:-2] + v[2:]) - p * b

    return trap.around("residual", residual, first)


class Given:
    """An operator with its own transpose."""

    def __init__(self, trap):
        self.transpose = trap.around("transpose", self)

    def __call__(self, u, p=1.0):
        return p * D * u


def blocks(size):
    domain = Domain((8 * size, 8))
    return domain, np.ones(domain.local_shape)


FORWARD = {
    "cg-matvec-1": lambda t, b, n: solve(diagonal(t), b),
    "cg-matvec-3": lambda t, b, n: solve(diagonal(t), b, preconditioner=lambda r: r / 2),
    "cg-preconditioner-2": lambda t, b, n: solve(diagonal(t), b, preconditioner=half(t)),
    "cg-callback-1": lambda t, b, n: solve(diagonal(t), b, callback=t.around("callback", lambda norm: None)),
    "gmres-matvec-2": lambda t, b, n: solve(diagonal(t), b, method="gmres"),
    "gmres-preconditioner-1": lambda t, b, n: solve(diagonal(t), b, method="gmres", preconditioner=half(t), side="left"),
    "bicgstab-matvec-4": lambda t, b, n: solve(diagonal(t), b, method="bicgstab"),
    # Both are the last that such solves do: no sum follows.
    "gmres-preconditioner-2": lambda t, b, n: solve(
        lambda u: 2.0 * u, b, method="gmres", preconditioner=half(t), verify=False
    ),
    "alone-callback-1": lambda t, b, n: solve(
        lambda u: 2.0 * u, b, verify=False, callback=t.around("callback", lambda norm: None) if t.at else None
    ),
    "after-matvec-3": lambda t, b, n: solve(tridiagonal(t, n), b),
    "before-matvec-3": lambda t, b, n: solve(tridiagonal(t, n, first=True), b),
    "newton-residual-1": lambda t, b, n: newton(root(t, b, n), 0 * b),
    "newton-residual-7": lambda t, b, n: newton(root(t, b, n, first=True), 0 * b),
    "newton-callback-1": lambda t, b, n: newton(root(t, b, n), 0 * b, callback=t.around("callback", lambda norm: None)),
    "newton-preconditioner-2": lambda t, b, n: newton(root(t, b, n), 0 * b, preconditioner=half(t)),
    "from_operator-matvec-2": lambda t, b, n: DistributedMatrix.from_operator(
        tridiagonal(t, n, first=True), Domain((5 * n,))
    ),
    "multigrid-callback-1": lambda t, b, n: Multigrid(blocks(n)[0], 1.0).solve(
        blocks(n)[1], callback=t.around("callback", lambda norm: None)
    ),
    # In the last iteration, after which the solve itself would raise.
    "limited-callback-2": lambda t, b, n: Multigrid(blocks(n)[0], 1.0).solve(
        blocks(n)[1], rtol=1e-14, maxiter=2, callback=t.around("callback", lambda norm: None)
    ),
    "elliptic-callback-2": lambda t, b, n: solve_elliptic(
        blocks(n)[0], 1.0, blocks(n)[1], callback=t.around("callback", lambda norm: None)
    ),
}


@pytest.mark.parametrize("case", FORWARD)
def test_while_it_solves(case, trap, b, rank, size):
    _, name, number = case.split("-")
    trap.at[name] = int(number)
    expect(lambda: FORWARD[case](trap, b, size), name, rank, size)


def test_the_next_solve_is_right(trap, b, rank, size):
    trap.at["matvec"] = 3
    matvec = tridiagonal(trap, size, first=True)
    expect(lambda: solve(matvec, b), "matvec", rank, size)
    whole, n = np.concatenate(MPI.COMM_WORLD.allgather(b)), 5 * size
    dense = 3.0 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    own = slice(5 * rank, 5 * rank + 5)
    np.testing.assert_allclose(solve(matvec, b, rtol=1e-12), np.linalg.solve(dense, whole)[own], 1e-10)


DERIVED = {
    "cg-matvec": (diagonal, {}),
    "cg-preconditioner": (diagonal, {"preconditioner": half}),
    "gmres-matvec": (diagonal, {}),
    "gmres-transpose": (Given, {}),
    "gmres-turned": (diagonal, {"preconditioner": lambda t: lambda r: r / 2,
                                "preconditioner_transpose": lambda t: half(t, "turned")}),
    "bicgstab-matvec": (lambda t: tridiagonal(t, mpiad.mpi_size(), first=True), {}),
    "newton-residual": (None, {}),
}  # fmt: skip


def loss_of(case, trap, b, size):
    make, functions = DERIVED[case]
    method = case.split("-")[0]
    if make is None:
        return lambda p: mpiad.mpi_allreduce(anp.sum(newton(root(trap, b, size), 0 * b, p) ** 2))
    matvec, functions = make(trap), {name: made(trap) for name, made in functions.items()}
    return lambda p: mpiad.mpi_allreduce(anp.sum(solve(matvec, b, p, method=method, **functions) ** 2))


@pytest.mark.each_combination
@pytest.mark.parametrize("case", DERIVED)
@pytest.mark.parametrize("call", [1, 2, "last"])
def test_in_the_reverse_pass(case, call, trap, b, rank, size):
    loss, p, name = loss_of(case, trap, b, size), np.array(1.3), case.split("-")[1]
    pull, _ = mpiad.make_vjp(loss)(p)
    trap.calls.clear()
    pull(1.0)
    of_pull = trap.calls.pop(name)
    pull, _ = mpiad.make_vjp(loss)(p)
    trap.calls.clear()
    trap.at[name] = of_pull if call == "last" else min(of_pull, call)
    expect(lambda: pull(1.0), name, rank, size)


@pytest.mark.parametrize("case", ["cg-matvec", "gmres-matvec", "newton-residual"])
def test_in_forward_mode(case, trap, b, rank, size):
    loss, p, name = loss_of(case, trap, b, size), np.array(1.3), case.split("-")[1]
    loss(p)
    of_solve = trap.calls[name]
    for further in (1, 2):  # the product rule of the tangent, and the first call of its solve
        trap.calls.clear()
        trap.at[name] = of_solve + further
        expect(lambda: mpiad.jvp(loss, p, np.array(1.0)), name, rank, size)


def test_kinds(b, rank, size):
    class Mine(Exception):
        pass

    kinds = {np.linalg.LinAlgError: "ValueError", KeyError: "KeyError", Mine: "RuntimeError", TypeError: "TypeError"}
    for kind, elsewhere in kinds.items():

        def matvec(u):
            if rank == size - 1:
                raise kind("no")  # noqa: B023
            return 2.0 * u

        found = on_all_ranks(lambda: solve(matvec, b), rank, size)  # noqa: B023
        assert [said.split(":")[0] for said in found] == [elsewhere] * (size - 1) + [kind.__name__]


@pytest.mark.parametrize("method", ["cg", "gmres"])
def test_one_object_raised_again_is_an_error_on_all_ranks_again(b, method, rank, size):
    kept = ValueError("out of range")

    def matvec(u):
        if rank == size - 1:
            raise kept
        return 2.0 * u

    for _ in range(3):
        found = on_all_ranks(lambda: solve(matvec, b, method=method), rank, size)
        assert [said.split(":")[0] for said in found] == ["ValueError"] * size


def test_each_its_own(b, rank, size):
    def matvec(u):
        raise IndexError(f"no row {rank}")

    assert on_all_ranks(lambda: solve(matvec, b), rank, size) == [f"IndexError: no row {r}" for r in range(size)]


def test_messages_under_way_are_refused_on_all_ranks(b, rank, size):
    """The message of one rank isn't taken by a later receive, on whichever rank the exception was."""

    def residual(u):
        if rank == size - 1:
            raise FloatingPointError("no residual")
        if size > 1:
            mpiad.mpi_send(u, (rank + 1) % size, tag=3)
        return u**3 + u - b

    with pytest.raises(FloatingPointError, match="no residual"):
        newton(residual, 0 * b)
    if size > 1:
        with pytest.raises(UnfinishedMessagesError, match="mpiad.reset"):
            mpiad.mpi_allreduce(1)
        mpiad.reset()
    assert mpiad.mpi_allreduce(1) == size


# Messages of a solve with u = b/2 as its solution, and one step of Newton's, as they were before functions were watched.
# One message of the reverse pass of cg finds out whether its solve may start from the solution.
COUNTS = {
    "cg": 5, "gmres": 5, "bicgstab": 5, "preconditioner": 5, "callback": 5, "unverified": 4, "newton": 7,
    "reverse of cg": 11, "forward of gmres": 9,
}  # fmt: skip
# The same, and one that tells of what may have raised after the last sum.
FALLING_BACK = {
    "reverse of gmres": 9 + 1, "preconditioner, unverified": 4 + 1, "callback of one rank, unverified": 4 + 1,
    "newton with callback": 7 + 1,
}  # fmt: skip


class Counting:
    """A communicator that notes which of its operations were called."""

    def __init__(self, comm, calls):
        self._comm, self._calls = comm, calls

    def __getattr__(self, name):
        found = getattr(self._comm, name)
        return (lambda *args: (self._calls.append(name), found(*args))[1]) if callable(found) else found


@pytest.fixture
def messages():
    """Return a communicator, and a function that tells how many messages of all kinds a call takes on it."""
    comm = MPI.COMM_WORLD.Dup()
    used = channel(comm, "test")
    bare = used.data, used.reverse

    def count(fun):
        calls = []
        used.data, used.reverse = (Counting(found, calls) for found in bare)
        try:
            fun()
        finally:
            used.data, used.reverse = bare
        return len(calls)

    return comm, count


def test_no_message_more(messages, b, rank, size):
    comm, count = messages
    alone = size == 1  # one rank has nothing with which to compare its settings
    quiet, loud = (lambda norm: None), {"callback": (lambda norm: None) if rank == 0 else None}

    def of_solve(**settings):
        return count(lambda: solve(lambda u: 2.0 * u, b, comm=comm, **settings))

    def of_newton(**settings):
        return count(lambda: newton(lambda u: 2.0 * u - b, 0 * b, comm=comm, **settings))

    def loss(method):
        return lambda p: anp.sum(solve(lambda u, p: 2.0 * p * u, b, p, method=method, comm=comm))

    gmres = {"method": "gmres", "preconditioner": lambda r: r / 2}
    assert {name: number - alone for name, number in COUNTS.items()} == {
        "cg": of_solve(), "gmres": of_solve(method="gmres"), "bicgstab": of_solve(method="bicgstab"),
        "preconditioner": of_solve(**gmres), "callback": of_solve(callback=quiet),
        "unverified": of_solve(method="gmres", verify=False), "newton": of_newton(),
        "reverse of cg": count(lambda: mpiad.make_vjp(loss("cg"))(1.3)[0](1.0)),
        "forward of gmres": count(lambda: mpiad.jvp(loss("gmres"), 1.3, 1.0)),
    }  # fmt: skip
    assert {name: number - alone for name, number in FALLING_BACK.items()} == {
        "reverse of gmres": count(lambda: mpiad.make_vjp(loss("gmres"))(1.3)[0](1.0)),
        "preconditioner, unverified": of_solve(**gmres, verify=False),
        "callback of one rank, unverified": of_solve(verify=False, **loud),
        "newton with callback": of_newton(**loud),
    }
