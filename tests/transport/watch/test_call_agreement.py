"""Ranks that are about to do different things all raise the same table, and can go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.errors import CommunicationMismatchError
from mpiad.transport.watch import switch, watch_settings
from mpiad.transport.watch.watch_settings import Settings

pytestmark = pytest.mark.mpi(min_size=2)
X = np.ones(3)
WIDE, TALL = np.ones((2, 3)), np.ones((3, 2))

# What differs, and what rank 0 and the others do.
DIFFERENT: dict[str, tuple[str, Callable[[], Any], Callable[[], Any]]] = {
    "order": ("operation", lambda: mpiad.mpi_allreduce(X), lambda: mpiad.mpi_bcast(X)),
    "barrier": ("operation", lambda: mpiad.mpi_barrier(), lambda: mpiad.mpi_scan(X)),
    "root of bcast": ("root", lambda: mpiad.mpi_bcast(X, 0), lambda: mpiad.mpi_bcast(X, 1)),
    "root of sum": ("root", lambda: mpiad.mpi_sum(X, 1), lambda: mpiad.mpi_sum(X, 0)),
    "root of scatter": ("root", lambda: mpiad.mpi_scatter(X, 1, 0), lambda: mpiad.mpi_scatter(X, 0, 0)),
    "root of gather": ("root", lambda: mpiad.mpi_gather(X, 1), lambda: mpiad.mpi_gather(X, 0)),
    "reduction": ("reduction", lambda: mpiad.mpi_allreduce(X, MPI.MAX), lambda: mpiad.mpi_allreduce(X, MPI.MIN)),
    "shape": ("shape", lambda: mpiad.mpi_allreduce(np.ones(3)), lambda: mpiad.mpi_allreduce(np.ones(4))),
    "shape of the same size": ("shape", lambda: mpiad.mpi_scan(np.ones((2, 3))), lambda: mpiad.mpi_scan(np.ones((3, 2)))),
    "shape of a maximum": ("shape", lambda: mpiad.mpi_allreduce(WIDE, MPI.MAX), lambda: mpiad.mpi_allreduce(TALL, MPI.MAX)),
    "dtype": ("dtype", lambda: mpiad.mpi_allreduce(X), lambda: mpiad.mpi_allreduce(X.astype("f4"))),
    "integer among floats": ("dtype", lambda: mpiad.mpi_allreduce(1), lambda: mpiad.mpi_allreduce(1.0)),
    "function of one operation": ("operation", lambda: mpiad.mpi_scan(X), lambda: mpiad.mpi_exscan(X)),
    "gradient on one": ("operation", lambda: mpiad.grad(anp.sum)(X), lambda: mpiad.mpi_allreduce(X)),
    "printing": ("operation", lambda: mpiad.mpi_print("text"), lambda: mpiad.mpi_barrier()),
}


@contextmanager
def deadline_alone() -> Iterator[None]:
    """As under MPIAD_TIMEOUT: calls are compared, without their lines."""
    before = watch_settings.present()
    switch.apply(Settings(timeout=20.0))
    yield
    switch.apply(before)


def without_lines() -> Any:
    return mpiad.debug.checked(call_sites=False)


@pytest.mark.parametrize("watched", [without_lines, deadline_alone])
def test_what_differs_is_named_on_all_ranks(watched: Any, rank: int, size: int) -> None:
    with watched():  # once for all cases: to begin and end it takes longer than they do
        for case, (name, first, other) in DIFFERENT.items():
            try:
                (first if rank == 0 else other)()
            except CommunicationMismatchError as error:
                caught = error
            else:
                pytest.fail(f"{case}: no difference was found")
            assert f"the {name} differs" in str(caught), case
            every = MPI.COMM_WORLD.allgather(str(caught))
            assert every == [every[0]] * size, case
            lines = caught.table.splitlines()
            assert len(lines) == 1 + size and all("test_call_agreement.py:" in line for line in lines[1:]), case
            assert caught.ranks == tuple(range(size)), case
            assert mpiad.mpi_allreduce(1) == size, case
    assert mpiad.mpi_allreduce(1) == size


def test_lines_may_differ_with_a_deadline_alone(rank: int, size: int) -> None:
    with deadline_alone():
        total = mpiad.mpi_allreduce(1.0) if rank == 0 else mpiad.mpi_allreduce(2.0)
        J, g = mpiad.value_and_grad(lambda x: mpiad.mpi_allreduce(x) if rank else mpiad.mpi_allreduce(2 * x))(1.0)
    assert (total, J, g) == (2.0 * size - 1, size + 1.0, 1.0 if rank else 2.0)


@pytest.mark.parametrize("watched", [mpiad.debug.checked, without_lines, deadline_alone])
def test_a_branch_of_some_ranks_is_named_before_the_shapes(watched: Any, rank: int, size: int) -> None:
    """K-means, where some ranks look for empty clusters, and others are at the next sum."""
    text = r"the call site differs \(shape too\)\. .* a branch that some ranks don't take"
    with watched(), pytest.raises(CommunicationMismatchError, match=text) as caught:
        if rank == 0:
            mpiad.mpi_allreduce(np.ones(3))
        mpiad.mpi_allreduce(np.ones((3, 2)))
    first, second = caught.value.table.splitlines()[1:3]
    places = [int(line.partition(".py:")[2].split()[0]) for line in (first, second)]
    assert "shape (3,)" in first and "shape (3, 2)" in second and places[1] == places[0] + 1
    assert mpiad.mpi_allreduce(1) == size


def test_sums_are_named_beside_other_reductions(rank: int) -> None:
    with pytest.raises(CommunicationMismatchError) as caught:
        mpiad.mpi_allreduce(X, MPI.MAX if rank == 0 else MPI.SUM)
    first, second = caught.value.table.splitlines()[1:3]
    assert "op=MAX, shape (3,)" in first and "op=SUM, shape (3,)" in second


def test_the_wrong_one_of_two_communicators(rank: int, size: int) -> None:
    first, second = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()
    mpiad.mpi_init(first)
    mpiad.mpi_init(second)
    with pytest.raises(CommunicationMismatchError, match="the communicator differs"):
        mpiad.mpi_allreduce(1.0, comm=first if rank == 0 else second)
    assert mpiad.mpi_allreduce(1, comm=first) + mpiad.mpi_allreduce(1, comm=second) == 2 * size
    first.Free()
    second.Free()


@pytest.mark.parametrize("watched", [mpiad.debug.checked, deadline_alone])
@pytest.mark.parametrize(
    ("name", "first", "other"),
    [
        ("shape", np.ones(3), np.ones(2)),
        ("shape", np.ones((2, 3)), np.ones((3, 2))),
        ("dtype", np.ones(2), np.ones(2, "f4")),
    ],
    ids=["length", "shape of the same size", "dtype"],
)
def test_a_nonblocking_reduction_is_compared_at_its_end(
    name: str, first: Any, other: Any, watched: Any, rank: int, size: int
) -> None:
    with watched():
        request = mpiad.mpi_iallreduce(first if rank == 0 else other)
        with pytest.raises(CommunicationMismatchError, match=f"the {name} differs"):
            mpiad.mpi_wait(request)
        mpiad.reset()
        assert mpiad.mpi_wait(mpiad.mpi_iallreduce(1)) == size


@pytest.mark.parametrize("watched", [mpiad.debug.checked, deadline_alone])
def test_a_nonblocking_reduction_needn_t_start_at_once(watched: Any, rank: int, size: int) -> None:
    """A comparison that waits at the start would hang here; lines may differ with a deadline alone."""

    def start() -> Any:
        return mpiad.mpi_iallreduce(1)

    with watched():
        if rank == 0:
            request = start() if watched is not deadline_alone else mpiad.mpi_iallreduce(1)
            for peer in range(1, size):
                mpiad.mpi_send(1.0, peer)
        else:
            mpiad.mpi_recv(0.0, 0)
            request = start()
        assert mpiad.mpi_wait(request) == size


def test_a_reduction_started_on_one_rank_too_early(rank: int) -> None:
    requests = [mpiad.mpi_iallreduce(1)] if rank == 0 else []
    with pytest.raises(CommunicationMismatchError, match="number of mpi_iallreduce calls before differs"):
        mpiad.mpi_allreduce(1)
    if rank > 0:
        requests.append(mpiad.mpi_iallreduce(1))
    with pytest.raises(CommunicationMismatchError, match="call site differs"):
        mpiad.mpi_waitall(requests)
    mpiad.reset()


def test_a_reset_forgets_reductions_that_one_rank_has_started(rank: int, size: int) -> None:
    if rank == 0:
        mpiad.mpi_iallreduce(1)
    with pytest.raises(CommunicationMismatchError) as caught:
        mpiad.mpi_allreduce(1)
    first, second = caught.value.table.splitlines()[1:3]
    assert "after 1 mpi_iallreduce" in first and "after 0 mpi_iallreduce" in second
    mpiad.reset()
    assert mpiad.mpi_allreduce(1) == size


def test_ranks_in_another_order_are_named_as_in_the_world(rank: int, size: int) -> None:
    mpiad.mpi_allreduce(1)  # the world's order comes first
    turned = MPI.COMM_WORLD.Split(0, -rank)
    request = mpiad.mpi_iallreduce(np.ones(2 + (rank == 0)), comm=turned)
    with pytest.raises(CommunicationMismatchError) as caught:
        mpiad.mpi_wait(request)
    assert "shape (3,)" in caught.value.table.splitlines()[1]
    assert "shape (2,)" in caught.value.table.splitlines()[2]
    mpiad.reset(turned)
    turned.Free()
    mpiad.reset()


def test_long_names_are_cut_short_on_all_ranks() -> None:
    scope: dict[str, Any] = {}
    name = "名" * 500
    exec(f"def {name}(start):\n    return start(1)\n", scope)  # noqa: S102 - a line of such a name
    request = scope[name](mpiad.mpi_iallreduce)
    assert mpiad.mpi_wait(request) == MPI.COMM_WORLD.size


def test_threads_agree_apart(rank: int, size: int) -> None:
    """Each thread in its own order: reductions of one must not be met by those of the other."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("the MPI doesn't allow threads")
    comms = [MPI.COMM_WORLD.Dup() for _ in range(2)]
    for comm in comms:
        mpiad.mpi_init(comm)

    def work(comm: Any, pause: float) -> list[Any]:
        found = []
        for _ in range(5):
            time.sleep(pause)
            found.append(mpiad.mpi_wait(mpiad.mpi_iallreduce(1, comm=comm)))
            found.append(mpiad.mpi_allreduce(1, comm=comm))
        return found

    first, second = (0.0, 0.02) if rank == 0 else (0.02, 0.0)
    with ThreadPoolExecutor(1) as beside:
        other = beside.submit(work, comms[1], second)
        assert work(comms[0], first) == [size] * 10
        assert other.result() == [size] * 10
    for comm in comms:
        comm.Free()


def test_an_adjoint_is_named_by_its_forward_call(rank: int, size: int) -> None:
    def loss(x: Any) -> Any:
        y = mpiad.mpi_allreduce(x)
        z = mpiad.mpi_bcast(x)
        return anp.sum(y * z)

    vjp, _ = mpiad.make_vjp(loss)(X)
    with pytest.raises(CommunicationMismatchError) as caught:
        if rank == 0:
            mpiad.mpi_barrier()
        else:
            vjp(1.0)
    first, other = caught.value.table.splitlines()[1:3]
    assert "mpi_barrier" in first and "adjoint of mpi_bcast" in other
    assert "in loss (run by test_call_agreement.py:" in other
    vjp, _ = mpiad.make_vjp(loss)(X)
    np.testing.assert_array_equal(vjp(1.0)[0] if isinstance(vjp(1.0), tuple) else vjp(1.0), vjp(1.0))


def test_what_may_differ(rank: int, size: int) -> None:
    assert len(mpiad.mpi_allgather(np.ones(rank), axis=0)) == size * (size - 1) // 2
    mpiad.mpi_gather(np.ones((2, rank)), axis=1)
    template = X if rank == 0 else None
    assert mpiad.mpi_bcast(template).shape == (3,)
    mpiad.mpi_scatter(np.ones(7) if rank == 1 else None, root=1, axis=0)
    if rank == 0:
        mpiad.mpi_bcast(X)
    else:
        mpiad.mpi_bcast(np.ones((2, 2), int))
    total = mpiad.mpi_sum(X) if rank == 0 else mpiad.mpi_sum(2 * X)
    assert total[0] == (2 * size - 1 if rank == 0 else 0)


def test_parts_of_the_world_agree_alone(rank: int, size: int) -> None:
    half = MPI.COMM_WORLD.Split(rank % 2, -rank)
    if rank % 2:
        assert mpiad.mpi_allreduce(1, comm=half) == half.size
    else:
        assert mpiad.mpi_bcast(rank, comm=half) == half.bcast(rank)
    half.Free()
