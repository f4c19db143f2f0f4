"""A forked process computes and doesn't communicate, and its parent goes on."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.errors import CommunicatorError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")

WORLD = MPI.COMM_WORLD
X = np.arange(4.0)
SAYS = "this process was forked from a rank"


def in_child(function: Callable[[], Any]) -> Any:
    """Return a function's result, or its exception, in a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001
            result = error
        os.write(writing, pickle.dumps(result))
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        result = pickle.loads(file.read())
    assert os.waitpid(child, 0)[1] == 0
    return result


def calls(rank: int, size: int) -> dict[str, Callable[[], Any]]:
    """Return calls of the library that communicate, prepared before the fork where they can be."""
    after, before, x = (rank + 1) % size, (rank - 1) % size, np.ones((size, 3))
    domain = mpiad.Domain((4 * size,))
    ghosts = mpiad.GhostExchange(np.array([4 * after]), 4 * rank + np.arange(4))
    comm, unused = WORLD.Dup(), WORLD.Dup()
    mpiad.mpi_init(comm)
    mpiad.mpi_send(X, after)
    received = mpiad.mpi_irecv(X, before)
    summed = mpiad.mpi_iallreduce(X)
    compiled = mpiad.jit(lambda x: mpiad.mpi_allreduce(x * 2.0) + 1.0)
    for _ in range(3):
        compiled(X)
    gradient = mpiad.value_and_grad(lambda x: mpiad.mpi_allreduce(anp.sum(x**2)))
    vjp, _ = mpiad.make_vjp(lambda x: mpiad.mpi_allreduce(x))(X)
    return {
        "mpi_bcast": lambda: mpiad.mpi_bcast(X), "mpi_sum": lambda: mpiad.mpi_sum(X),
        "mpi_reduce": lambda: mpiad.mpi_reduce(X, MPI.MAX), "mpi_allreduce": lambda: mpiad.mpi_allreduce(X),
        "mpi_gather": lambda: mpiad.mpi_gather(X), "mpi_allgather": lambda: mpiad.mpi_allgather(X),
        "mpi_scatter": lambda: mpiad.mpi_scatter(x), "mpi_reduce_scatter": lambda: mpiad.mpi_reduce_scatter(x),
        "mpi_alltoall": lambda: mpiad.mpi_alltoall(x), "mpi_scan": lambda: mpiad.mpi_scan(X),
        "mpi_exscan": lambda: mpiad.mpi_exscan(X), "mpi_send": lambda: mpiad.mpi_send(X, after, tag=9),
        "mpi_recv": lambda: mpiad.mpi_recv(X, before, tag=9), "mpi_sendrecv": lambda: mpiad.mpi_sendrecv(X, 0, size - 1),
        "mpi_exchange": lambda: mpiad.mpi_exchange(X, after, before), "mpi_isend": lambda: mpiad.mpi_isend(X, after, tag=9),
        "mpi_irecv": lambda: mpiad.mpi_irecv(X, before, tag=9), "mpi_iallreduce": lambda: mpiad.mpi_iallreduce(X),
        "mpi_wait of a receive": lambda: mpiad.mpi_wait(received), "mpi_wait of a sum": lambda: mpiad.mpi_wait(summed),
        "mpi_barrier": mpiad.mpi_barrier,
        "mpi_print": lambda: mpiad.mpi_print("no"), "mpi_init": mpiad.mpi_init, "reset": mpiad.reset,
        "mpi_finalize": mpiad.mpi_finalize, "comm": lambda: mpiad.mpi_allreduce(X, comm=comm),
        "unprepared comm": lambda: mpiad.mpi_allreduce(X, comm=unused), "mpi_init(comm)": lambda: mpiad.mpi_init(unused),
        "COMM_SELF": lambda: mpiad.mpi_allreduce(X, comm=MPI.COMM_SELF), "Domain": lambda: mpiad.Domain((4 * size,)),
        "Domain.exchange": lambda: domain.exchange(X), "GhostExchange": lambda: ghosts.fetch(X),
        "jit": lambda: compiled(X), "gradient": lambda: gradient(X), "adjoint": lambda: vjp(X),
        "minimize": lambda: mpiad.minimize(lambda x: anp.sum(x**2), X), "mpi_map": lambda: mpiad.mpi_map(abs, range(3)),
        "drive": lambda: mpiad.drive(lambda f: f(1.0), lambda x: x),
    }  # fmt: skip


def test_every_call_raises_in_a_forked_process_and_the_parent_goes_on(rank: int, size: int) -> None:
    prepared = calls(rank, size)

    def outcomes() -> dict[str, str]:
        found = {}
        for name, call in prepared.items():
            try:
                found[name] = f"returned {call()!r}"
            except Exception as error:  # noqa: BLE001
                found[name] = f"{type(error).__name__}: {error}"
        return found

    in_the_child = in_child(outcomes)
    assert list(in_the_child) == list(prepared)
    for name, text in in_the_child.items():
        if name == "Domain.exchange" and size == 1:  # has no neighbor
            continue
        assert text.startswith("CommunicatorError: ") and SAYS in text, (name, text)
        if name.startswith("mpi_") and "wait" not in name:
            assert text.startswith(f"CommunicatorError: {name.partition('(')[0]}: "), (name, text)
    # The messages started before the fork arrive, and all calls work.
    np.testing.assert_array_equal(prepared["mpi_wait of a receive"](), X)
    np.testing.assert_array_equal(prepared["mpi_wait of a sum"](), size * X)
    np.testing.assert_array_equal(prepared["mpi_exchange"](), X)
    np.testing.assert_array_equal(prepared["jit"](), 2 * size * X + 1.0)
    np.testing.assert_array_equal(prepared["gradient"]()[1], 2.0 * X)
    np.testing.assert_array_equal(prepared["unprepared comm"](), size * X)
    np.testing.assert_array_equal(prepared["Domain.exchange"]()[1:-1], X)


def squares(k: int) -> float:
    compiled = mpiad.jit(lambda x: anp.sum(x**2))
    return float(compiled(np.full(3, float(k)))) + mpiad.mpi_rank() / 100.0


def test_a_pool_of_forked_processes_computes(rank: int, size: int) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.map(squares, range(4))
    np.testing.assert_allclose(found, [3.0 * k * k + rank / 100.0 for k in range(4)])
    assert mpiad.mpi_allreduce(1.0) == size


NOT_STARTED = """
import os, sys, warnings
warnings.filterwarnings("ignore", message=".*use of fork")  # since Python 3.12, in a process with threads
from mpi4py import MPI
import mpiad
child = os.fork() if MPI.COMM_WORLD.rank == 1 else -1
if child == 0:
    try:
        mpiad.mpi_allreduce(1.0)
    except mpiad.errors.CommunicatorError as error:
        print(str(error)[:50], flush=True)
    os._exit(7)
if child > 0:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(mpiad.mpi_allreduce(1.0), flush=True)
"""


@pytest.mark.launches
def test_a_forked_process_does_not_start_the_library(mpirun: Callable[..., Any]) -> None:
    done = mpirun(2, NOT_STARTED, env={"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["2.0", "2.0", f"mpi_allreduce: {SAYS}"[:50]]


def test_a_traced_call_in_a_forked_process_raises(size: int) -> None:
    def fun(x: Any) -> Any:
        error = in_child(lambda: mpiad.mpi_allreduce(x))
        assert isinstance(error, CommunicatorError) and SAYS in str(error)
        return mpiad.mpi_allreduce(anp.sum(x * x))

    np.testing.assert_array_equal(mpiad.grad(fun)(X), 2.0 * X)
