"""In debug mode a statement that drops what the rank receives is logged with its line, once; other calls aren't."""

from __future__ import annotations

import logging

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad

pytestmark = pytest.mark.unguarded

ALL, NONE, ROOT, OTHERS = "all", "none", "root", "others"
# Statements, and the ranks that receive something by them, among at least two.
STATEMENTS = {
    "mpiad.mpi_bcast(x)": OTHERS,
    "mpiad.mpi_bcast(x, root=size - 1)": "but the last",
    "mpiad.mpi_sum(x)": ROOT,
    "mpiad.mpi_reduce(x)": ROOT,
    "mpiad.mpi_reduce(x, MPI.MAX)": ROOT,
    "mpiad.mpi_reduce(x, MPI.PROD, root=size - 1)": "the last",
    "mpiad.mpi_allreduce(x)": ALL,
    "mpiad.mpi_allreduce(x, op=MPI.MIN)": ALL,
    "mpiad.mpi_gather(x)": ROOT,
    "mpiad.mpi_gather(x, axis=0)": ROOT,
    "mpiad.mpi_allgather(x)": ALL,
    "mpiad.mpi_scatter(np.ones((size, 2)) if rank == 0 else None)": OTHERS,
    "mpiad.mpi_reduce_scatter(np.ones((size, 2)))": ALL,
    "mpiad.mpi_alltoall(np.ones(size))": ALL,
    "mpiad.mpi_alltoall(np.ones(size), [1] * size)": ALL,
    "mpiad.mpi_scan(x)": ALL,
    "mpiad.mpi_exscan(x)": ALL,
    "mpiad.mpi_neighbor_allgather(x, comm=ring)": ALL,
    "mpiad.mpi_neighbor_alltoall(np.ones(2), comm=ring)": ALL,
    "mpiad.mpi_send(x, after); y = mpiad.mpi_recv(x, before)": NONE,
    "y = mpiad.mpi_send(x, after); mpiad.mpi_recv(x, before)": ALL,
    "y = mpiad.mpi_send(x, after); mpiad.mpi_recv(like=x, source=before)": ALL,
    "mpiad.mpi_recv(x, None)": NONE,
    "mpiad.mpi_sendrecv(x, 0, size - 1)": ROOT,
    "mpiad.mpi_exchange(x, after, before)": ALL,
    "mpiad.mpi_exchange(x, after if rank < size - 1 else None, before if rank else None)": OTHERS,
    "r = mpiad.mpi_isend(x, after); mpiad.mpi_wait(r); y = mpiad.mpi_recv(x, before)": NONE,
    "y = mpiad.mpi_send(x, after); r = mpiad.mpi_irecv(x, before); mpiad.mpi_wait(r)": ALL,
    "r = mpiad.mpi_irecv(x, None); mpiad.mpi_wait(r)": NONE,
    "rs = [mpiad.mpi_irecv(x, before), mpiad.mpi_isend(x, after)]; mpiad.mpi_waitall(rs)": ALL,
    "r = mpiad.mpi_iallreduce(x); mpiad.mpi_wait(r)": ALL,
    "mpiad.mpi_barrier()": NONE,
    "domain.exchange(u)": ALL,
    "domain.exchange(u, boundary='edge')": ALL,
    "begun = domain.begin_exchange(u); domain.end_exchange(begun)": ALL,
    "domain.sum(u)": ALL,
    "domain.norm(u)": ALL,
    "domain.dot(u, u)": ALL,
    "domain.max(u)": ALL,
    "domain.gather(u)": ROOT,
    "domain.scatter(np.ones(16) if rank == 0 else None)": OTHERS,
    "domain.interpolate(u, np.array([[3.0]]))": ALL,
    "domain.minimize(lambda m: domain.sum((m - 1.0) ** 2), u, options={'maxiter': 2})": NONE,
    "ghosts.fetch(x)": ALL,
    "ghosts.accumulate(np.ones(3 * size))": ALL,
    "mpiad.GhostExchange(np.arange(3 * size), (3 * rank, 3 * rank + 3))": NONE,
    "fft.forward(np.ones(fft.local_shape))": ALL,
    "mpiad.parallel.synchronize({'w': x})": OTHERS,
    "mpiad.parallel.allreduce_(x)": NONE,
    "mpiad.parallel.bcast_(x)": NONE,
    "mpiad.value_and_grad(lambda x: mpiad.mpi_allreduce(anp.sum(x)))(x)": NONE,
    "mpiad.minimize(lambda x: anp.sum(x**2), np.ones(2))": NONE,
    "y = mpiad.mpi_allreduce(x)": NONE,
    "_ = mpiad.mpi_allreduce(x)": NONE,
    "[mpiad.mpi_allreduce(x)]": NONE,
    "mpiad.mpi_allreduce(x).sum()": NONE,
    "x += mpiad.mpi_allreduce(x)": NONE,
    "if mpiad.mpi_allreduce(1.0): pass": NONE,
    "for _ in range(3): mpiad.mpi_allreduce(x)": ALL,
    "with np.errstate(all='raise'): mpiad.mpi_allreduce(*[x], **{})": ALL,
}


def receives(who, rank, size):
    last = rank == size - 1
    return {ALL: True, NONE: False, ROOT: rank == 0, OTHERS: rank > 0, "the last": last, "but the last": not last}[who]


@pytest.fixture(scope="module")
def made_once():
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    return {
        "domain": mpiad.Domain(16), "ghosts": mpiad.GhostExchange(np.arange(3 * size), (3 * rank, 3 * rank + 3)),
        "ring": MPI.COMM_WORLD.Create_cart([size], [True]), "fft": mpiad.fft.DistributedFFT((16, 16)),
    }  # fmt: skip


@pytest.fixture
def names(made_once, rank, size):
    return {
        **made_once, "mpiad": mpiad, "MPI": MPI, "np": np, "anp": anp, "rank": rank, "size": size, "x": np.ones(3) * rank,
        "u": np.ones(made_once["domain"].local_shape), "after": (rank + 1) % size, "before": (rank - 1) % size,
    }  # fmt: skip


def logged(caplog):
    return [text for text in caplog.messages if "is dropped" in text]


@pytest.mark.mpi(min_size=2)
def test_statements(names, caplog, rank, size):
    """All in one debug mode, to enter which takes longer than what a statement does."""
    with mpiad.debug.checked(), caplog.at_level(logging.WARNING, "mpiad"):
        for number, (statement, who) in enumerate(STATEMENTS.items()):
            run = compile(statement, f"program_{number}.py", "exec")
            given = {**names, "x": names["x"].copy(), "u": names["u"].copy()}  # some write into them
            caplog.clear()
            for _ in range(2):  # once per line
                exec(run, given)
            found = logged(caplog)
            assert len(found) == receives(who, rank, size), statement
            told = f" at program_{number}.py:1 is dropped"
            assert all(f"rank {rank}: the result of " in text and told in text for text in found), statement


@pytest.mark.few(4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("line", "how"),
    list(enumerate(["plain", "value_and_grad", "jvp", "jit", "gradient of jit", "scan"], 2)),
    ids=lambda x: str(x),
)
def test_lines_of_functions(line, how, caplog, rank):
    names = {"mpiad": mpiad, "anp": anp}
    text = "def work(x):\n    mpiad.mpi_bcast(x)\n    return anp.sum(mpiad.mpi_bcast(x) ** 2)\n"
    exec(compile("\n" * (line - 2) + text, "program.py", "exec"), names)  # each line is logged once
    work = names["work"]
    calls = {
        "plain": work,
        "value_and_grad": mpiad.value_and_grad(work),
        "jvp": lambda x: mpiad.jvp(work, x, x),
        "jit": mpiad.jit(work),
        "gradient of jit": mpiad.value_and_grad(mpiad.jit(work)),
        "scan": lambda x: mpiad.timestepping.scan(lambda u, k: u + work(x), 0.0, 3),
    }
    with mpiad.debug.checked(), caplog.at_level(logging.WARNING, "mpiad"):
        for _ in range(3):
            calls[how](np.ones(3))
    found = logged(caplog)
    assert len(found) == (rank > 0)
    assert all(f"the result of mpi_bcast at program.py:{line} in work is dropped" in text for text in found)


@pytest.mark.mpi(min_size=2)
def test_silent_without_debug_mode(names, caplog):
    with caplog.at_level(logging.WARNING, "mpiad"):
        exec("mpiad.mpi_allreduce(x)\n", names)
    assert not logged(caplog) or mpiad.transport.watch.watch_settings.debug()


def test_one_rank_receives_nothing(names, caplog):
    own = MPI.COMM_SELF
    names |= {"comm": own, "domain": mpiad.Domain(16, comm=own)}
    with mpiad.debug.checked(), caplog.at_level(logging.WARNING, "mpiad"):
        calls = "mpiad.mpi_allreduce(x, comm=comm)", "mpiad.mpi_bcast(x, comm=comm)", "mpiad.mpi_scan(x, comm=comm)"
        exec("\n".join([*calls, "mpiad.mpi_exchange(x, 0, 0, comm=comm)", "domain.sum(np.ones(16))"]), names)
    assert not logged(caplog)
