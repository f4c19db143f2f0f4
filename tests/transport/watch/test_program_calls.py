"""Watched communicators and requests do what mpi4py's do, and the proof that waits can't end."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpiad.errors import CommunicationMismatchError
from mpiad.transport.watch import program_calls
from mpiad.transport.watch.program_calls import COLLECTIVE, RECEIVE, SEND, Operation, ThreadWait, watched
from mpiad.transport.watch.status import State, _is_same_wait, stuck_ranks


@pytest.fixture
def comm() -> Any:
    """A watched duplicate of the world."""
    found = watched(MPI.COMM_WORLD.Dup())
    yield found
    found.Free()


@pytest.mark.also_on(3)
def test_constructors_return_watched_communicators(comm: Any, rank: int, size: int) -> None:
    grid = comm.Create_cart([size])
    graph = comm.Create_dist_graph_adjacent([(rank - 1) % size], [(rank + 1) % size])
    made = [comm.Dup(), comm.Clone(), comm.Split(0, -rank), comm.Split_type(MPI.COMM_TYPE_SHARED), grid, graph]
    made.append(grid.Sub([True]))
    assert all(hasattr(each, "members") and each.size == size for each in made)
    assert isinstance(grid, MPI.Cartcomm) and isinstance(graph, MPI.Distgraphcomm)
    assert made[2].members == tuple(reversed(range(size)))
    assert len({each.key for each in made if each.members == tuple(range(size))}) == len(made) - (size > 1)
    assert graph.neighbor_allgather(rank) == [(rank - 1) % size]
    assert comm.Split(MPI.UNDEFINED) == MPI.COMM_NULL
    for each in made:
        each.Free()


@pytest.mark.also_on(2)
def test_requests(comm: Any, rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    y, statuses = np.zeros(2), [MPI.Status()]
    requests = [comm.Irecv(y, left, 3), comm.Isend(np.full(2, float(rank)), right, 3)]
    assert all(isinstance(request, MPI.Request) for request in requests)
    program_calls._ProgramRequest.Waitall(requests, statuses)
    assert y.tolist() == [left, left] and statuses[0].source == left and len(statuses) == 2
    assert requests[0] == MPI.REQUEST_NULL and not program_calls.pending()
    requests = [comm.isend({"rank": rank}, right), comm.irecv(source=left)]
    assert program_calls._ProgramRequest.waitall(requests)[1] == {"rank": left}
    y = np.zeros(1)
    comm.Sendrecv(np.full(1, float(rank)), right, 1, y, left, 1, statuses[0])
    assert y == left and statuses[0].tag == 1
    assert comm.sendrecv(rank, right, source=left) == left


def test_pending_operations(comm: Any, rank: int, size: int) -> None:
    receive = comm.Irecv(np.zeros(1), rank, 9)
    assert program_calls.pending() == [Operation(RECEIVE, "Irecv", comm.key, (rank,), 9)]
    comm.Send(np.ones(1), rank, 9)
    while program_calls.pending():  # MPI may need some calls
        pass
    receive.Wait()


def test_the_world_is_pickled_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MPI, "COMM_WORLD", watched(MPI.COMM_WORLD, "world"))
    assert pickle.loads(pickle.dumps(MPI.COMM_WORLD)) is MPI.COMM_WORLD


@pytest.mark.also_on(2)
def test_collectives_are_compared_in_debug_mode(rank: int, size: int) -> None:
    import mpiad

    with mpiad.debug.checked():
        found = watched(MPI.COMM_WORLD.Dup())
        x, y = np.ones(2), np.zeros(2)
        found.Allreduce([x, MPI.DOUBLE] if rank else x, y)  # buffers of unknown types aren't compared
        assert y.tolist() == [size, size]
        if size > 1:
            with pytest.raises(CommunicationMismatchError, match="the root differs"):
                found.Bcast(x, rank)
            with pytest.raises(CommunicationMismatchError, match="the shape differs"):
                found.Allreduce(np.ones(1 + rank), y)
            with pytest.raises(CommunicationMismatchError, match="the operation differs"):
                found.Barrier() if rank else found.allgather(1)
        found.Free()


def waits(
    *operations: Operation, pending: tuple[Operation, ...] = (), counts: Any = None, any_suffices: bool = False
) -> State:
    """Return the state of a rank with one thread, which waits."""
    threads = [ThreadWait(1.0, 1.0, any_suffices, list(operations))]
    return {"state": "waits", "threads": threads, "all_wait": True, "pending": pending, "counts": counts or {}}


def send(dest: int, tag: int = 0) -> Operation:
    return Operation(SEND, "Send", 1, (dest,), tag)


def receive(*sources: int, tag: int = 0) -> Operation:
    return Operation(RECEIVE, "Recv", 1, sources, tag)


def collective(name: str, size: int, number: int = 1) -> Operation:
    return Operation(COLLECTIVE, name, 1, tuple(range(size)), number)


COMPUTES: State = {"state": "computes", "counts": {}, "pending": ()}
LEFT: State = {"state": "left", "counts": {}, "pending": ()}


@pytest.mark.serial
@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([waits(receive(1)), waits(receive(0))], {0, 1}),
        ([waits(receive(1)), COMPUTES], set()),
        ([waits(receive(1)), None], set()),
        ([waits(receive(1)), LEFT], {0, 1}),
        ([waits(receive(1)), LEFT | {"pending": [send(0)]}], {1}),
        ([waits(receive(1)), waits(send(0))], set()),
        ([waits(receive(1, tag=2)), waits(send(0, tag=3))], {0, 1}),
        ([waits(receive(1, tag=MPI.ANY_TAG)), waits(send(0, tag=3))], set()),
        ([waits(receive(1)), waits(receive(0), pending=(send(0),))], set()),
        ([waits(receive(0, 1, 2)), waits(receive(0)), COMPUTES], set()),
        ([waits(receive(0, 1, 2)), waits(receive(0)), LEFT], {0, 1, 2}),
        ([waits(receive(1), receive(2)), waits(receive(0)), COMPUTES], {0, 1}),
        ([waits(receive(1), receive(2), any_suffices=True), waits(receive(0)), COMPUTES], set()),
        ([waits(collective("Bcast", 2), counts={1: 1}), waits(receive(0))], {0, 1}),
        ([waits(collective("Bcast", 2), counts={1: 1}), waits(receive(0), counts={1: 1})], set()),
        ([waits(collective("Gatherv", 2), counts={1: 1}), waits(collective("Gather", 2), counts={1: 1})], set()),
        ([waits(collective("Bcast", 2), counts={1: 1}), waits(collective("Barrier", 2), counts={1: 1})], {0, 1}),
        ([waits(collective("Bcast", 3), counts={1: 1}), COMPUTES, waits(receive(0))], {0, 2}),
        ([waits(), waits(receive(0))], set()),
    ],
)  # fmt: skip
def test_ranks_that_cannot_go_on(states: list[State | None], expected: set[int]) -> None:
    assert stuck_ranks(states) == expected


@pytest.mark.serial
def test_only_a_thread_that_has_polled_is_in_the_same_wait() -> None:
    before = waits(receive(1))
    polled, other = ([ThreadWait(began, 1.5, False, [receive(1)])] for began in (1.0, 2.0))
    assert not _is_same_wait(before, before)
    assert _is_same_wait(before, before | {"threads": polled})
    assert not _is_same_wait(before, before | {"threads": other})
    assert not _is_same_wait(before, COMPUTES) and not _is_same_wait(None, before) and _is_same_wait(LEFT, LEFT)


@pytest.mark.serial
def test_lines_come_from_stacks_of_faulthandler() -> None:
    from mpiad.transport.core.calls import place_in_dump

    lines = [
        " (most recent call first):",
        '  File "/x/y.py", line 7 in g',
        "",
        "Thread 0x1",
        '  File "/x/z.py", line 1 in h',
    ]
    assert place_in_dump("\n".join(lines)) == "y.py:7 in g" and not place_in_dump("")
