"""Watched communicators and requests do what mpi4py's do, and the proof that waits can't end."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpiad.errors import CommunicationMismatchError
from mpiad.transport.watch import deadlock_proof, program_calls
from mpiad.transport.watch.deadlock_proof import (
    COLLECTIVE,
    RECEIVE,
    SEND,
    Counts,
    Operation,
    State,
    Stream,
    ThreadWait,
    is_open,
    is_same_wait,
    stuck_ranks,
)  # fmt: skip
from mpiad.transport.watch.program_calls import watched


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
    program_calls._REQUESTS[MPI.Request].Waitall(requests, statuses)
    assert y.tolist() == [left, left] and statuses[0].source == left and len(statuses) == 2
    assert requests[0] == MPI.REQUEST_NULL
    requests = [comm.isend({"rank": rank}, right), comm.irecv(source=left)]
    assert program_calls._REQUESTS[MPI.Request].waitall(requests)[1] == {"rank": left}
    y = np.zeros(1)
    comm.Sendrecv(np.full(1, float(rank)), right, 1, y, left, 1, statuses[0])
    assert y == left and statuses[0].tag == 1
    assert comm.sendrecv(rank, right, source=left) == left


def counts(comm: Any) -> Counts:
    """Return the present counts, without streams in which nothing is counted."""
    present = program_calls.counts()[comm.key]
    return present._replace(receives={stream: count for stream, count in present.receives.items() if count})


@pytest.mark.also_on(2)
def test_messages_are_counted_before_sends_and_receives(comm: Any, rank: int, size: int) -> None:
    x, y = np.zeros(1), np.zeros(1)
    right, left = (rank + 1) % size, (rank - 1) % size
    receive = comm.Irecv(y, left, 9)
    assert counts(comm).receives == {(left, 9): 1} and counts(comm).requests == 1
    comm.Send(x, dest=right, tag=9)
    receive.Wait()
    comm.Sendrecv(x, right, 7, y, left, 8 if size == 9 else 7)
    assert counts(comm).sends == {(right, 9): 1, (right, 7): 1} and counts(comm).receives == {(left, 9): 1, (left, 7): 1}
    assert watched(comm.bare).key == comm.key  # messages may be sent by one of them, and received by the other


def test_messages_whose_source_or_tag_is_not_known_are_counted_when_they_are_received(comm: Any, rank: int) -> None:
    for receive in (
        lambda: comm.recv(),
        lambda: comm.recv(None, rank, MPI.ANY_TAG, None),
        lambda: comm.recv(source=MPI.ANY_SOURCE, tag=4, status=MPI.Status()),
        lambda: comm.mprobe().recv(),
        lambda: comm.improbe(rank, 4).recv(),
        lambda: comm.irecv(source=rank).wait(),
        lambda: program_calls._REQUESTS[MPI.Request].waitall([comm.irecv()]),
    ):
        before = counts(comm).receives.get((rank, 4), 0)
        request = comm.isend(1, rank, 4)
        comm.probe()
        assert counts(comm).receives.get((rank, 4), 0) == before
        receive()
        request.wait()
        assert counts(comm).receives == {(rank, 4): before + 1}
    assert comm.improbe(rank, 4) is None and counts(comm).receives == {(rank, 4): before + 1}
    pending = comm.irecv()
    assert counts(comm).receives[MPI.ANY_SOURCE, MPI.ANY_TAG] == 1
    comm.isend(1, rank, 4).wait()
    while not pending.test()[0]:
        pass
    assert counts(comm).receives[MPI.ANY_SOURCE, MPI.ANY_TAG] == 1  # a test doesn't tell which message it was


def test_starts_of_persistent_requests_are_counted(comm: Any, rank: int) -> None:
    x, y = np.zeros(1), np.zeros(1)
    requests = [comm.Send_init(x, rank, 2), comm.Recv_init(y, rank, MPI.ANY_TAG)]
    for k in range(2):
        assert counts(comm).receives == ({(rank, 2): k} if k else {})
        requests[0].Start()
        requests[1].Start()
        assert counts(comm).sends == {(rank, 2): k + 1} and counts(comm).receives[rank, MPI.ANY_TAG] == 1
        program_calls._REQUESTS[MPI.Request].Waitall(requests)
    for request in requests:
        request.Free()


def test_an_end_without_a_partner_is_not_counted(comm: Any, rank: int, size: int) -> None:
    x, right = np.zeros(1), (rank + 1) % size
    comm.Recv(x, MPI.PROC_NULL)
    receive = comm.Irecv(np.zeros(1))
    comm.Sendrecv_replace(x, right, 3, MPI.PROC_NULL)
    receive.Wait()
    assert counts(comm).sends == {(right, 3): 1} and sum(counts(comm).receives.values()) == 1
    call = comm.Isendrecv_replace(x, MPI.PROC_NULL, 0, MPI.PROC_NULL).call
    assert call.operations() == []


@pytest.mark.serial
@pytest.mark.parametrize("event", ["exception", "cancel", "thread", "tags", "no number"])
def test_nothing_is_known_without_the_order_of_messages(comm: Any, event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(tag: int = 4, dest: Any = 0) -> None:
        request = comm.isend(1, dest, tag)
        comm.recv()
        request.wait()

    message()
    assert counts(comm).sends == {(0, 4): 1}
    if event == "exception":
        with pytest.raises(TypeError):
            comm.Send(object(), 0, 4)
    elif event == "cancel":
        request = comm.Irecv(np.zeros(1), 0, 4)
        request.Cancel()
        request.Wait()
    elif event == "thread":
        thread = threading.Thread(target=message)
        thread.start()
        thread.join()
    elif event == "tags":
        monkeypatch.setattr(deadlock_proof, "_MOST_STREAMS", 3)
        for tag in range(5):
            message(tag)
    else:
        message(dest=np.array(0))
    assert counts(comm).sends is None


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


Table = dict[Stream, int] | None


def calls(sends: Table = {}, receives: Table = {}, collectives: int = 0, recent: tuple[str, ...] = (), **more: int) -> Any:  # noqa: B006
    """Return the counts of a rank in its state."""
    return {"counts": {1: Counts(collectives, recent, sends, receives or {}, **more)}}


def waits(*operations: Operation, any_suffices: bool = False, **counted: Any) -> State:
    """Return the state of a rank with one thread, which waits; by default it has counted its operations."""
    for kind, table in ((SEND, "sends"), (RECEIVE, "receives")):
        streams = {(op.peers[0] if len(op.peers) == 1 else -2, op.tag): 1 for op in operations if op.kind == kind}
        counted[table] = counted.get(table, streams)
    counted["collectives"] = counted.get(
        "collectives", max([op.number for op in operations if op.kind == COLLECTIVE] or [0])
    )
    counted["recent"] = counted.get("recent", tuple(op.name for op in operations if op.kind == COLLECTIVE))
    threads = [ThreadWait(1.0, 1.0, any_suffices, list(operations))]
    return {"state": "waits", "threads": threads, "all_wait": True, **calls(**counted)}


def send(dest: int, tag: int = 0, number: int = 1) -> Operation:
    return Operation(SEND, "Send", 1, (dest,), number, tag)


def receive(*sources: int, tag: int = 0, number: int = 1) -> Operation:
    is_any = is_open((0, tag)) or len(sources) > 1
    return Operation(RECEIVE, "Recv", 1, sources, 0 if is_any else number, tag, is_any)


def collective(name: str, size: int, number: int = 1) -> Operation:
    return Operation(COLLECTIVE, name, 1, tuple(range(size)), number)


COMPUTES: State = {"state": "computes", **calls()}
LEFT: State = {"state": "left", **calls()}
ANY, FROM_ANY = MPI.ANY_TAG, MPI.ANY_SOURCE
IN_BCAST = waits(collective("Bcast", 2))


@pytest.mark.serial
@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([waits(receive(1)), waits(receive(0))], {0, 1}),
        ([waits(receive(1)), COMPUTES], set()),
        ([waits(receive(1)), None], set()),
        ([waits(receive(1)), LEFT], {0, 1}),
        ([waits(receive(1)), waits(send(0))], set()),
        ([waits(receive(1, tag=2)), waits(send(0, tag=3))], {0, 1}),
        ([waits(receive(1, tag=ANY)), waits(send(0, tag=3))], set()),
        ([waits(send(1)), waits(send(0))], {0, 1}),
        ([waits(receive(0, 1, 2)), waits(receive(0)), COMPUTES], set()),
        ([waits(receive(0, 1, 2)), waits(receive(0)), LEFT], {0, 1, 2}),
        ([waits(receive(1), receive(2)), waits(receive(0)), COMPUTES], {0, 1}),
        ([waits(receive(1), receive(2), any_suffices=True), waits(receive(0)), COMPUTES], set()),
        ([IN_BCAST, waits(receive(0))], {0, 1}),
        ([IN_BCAST, waits(receive(0), collectives=1, recent=("Bcast",))], set()),
        ([waits(collective("Gatherv", 2)), waits(collective("Gather", 2))], set()),
        ([waits(collective("Ibarrier", 2)), waits(collective("barrier", 2))], set()),
        ([IN_BCAST, waits(collective("Barrier", 2))], {0, 1}),
        ([IN_BCAST, waits(collective("Barrier", 2, 2), recent=("Bcast", "Barrier"))], set()),
        ([waits(collective("Bcast", 3)), COMPUTES, waits(receive(0))], {0, 2}),
        ([waits(), waits(receive(0))], set()),
    ],
)  # fmt: skip
def test_ranks_that_cannot_go_on(states: list[State | None], expected: set[int]) -> None:
    assert stuck_ranks(states) == expected


@pytest.mark.serial
@pytest.mark.parametrize(
    ("states", "expected"),
    [
        # Messages in flight: rank 1 has sent, without waiting until rank 0 has received.
        ([waits(receive(1)), waits(receive(0), sends={(0, 0): 1})], set()),
        ([waits(receive(0, 1)), waits(receive(0), sends={(0, 0): 1})], set()),
        ([waits(receive(1, tag=ANY)), waits(receive(0), sends={(0, 5): 1})], set()),
        ([waits(receive(1)), LEFT | calls(sends={(0, 0): 1})], {1}),
        # They have been received: by earlier receives, or by one of a request.
        ([waits(receive(1, number=2)), waits(receive(0), sends={(0, 0): 1})], {0, 1}),
        ([waits(receive(0, 1), receives={(1, 0): 1}), waits(receive(0), sends={(0, 0): 1})], {0, 1}),
        ([waits(receive(0, 1), receives={(1, 0): 1}), waits(receive(0), sends={(0, 0): 2})], set()),
        # They have another tag, another receiver.
        ([waits(receive(1)), waits(receive(0), sends={(0, 3): 1})], {0, 1}),
        ([waits(receive(1)), waits(receive(0), sends={(1, 0): 1})], {0, 1}),
        # A receive of an unknown message, which a request has started before another request: it may be that of the latter.
        ([waits(receive(0, 1), receives={(1, 0): 1}, requests=1), waits(receive(0), sends={(0, 0): 1})], set()),
        # Acknowledgements in flight: the message has been received, possibly by a receive from any rank.
        ([waits(send(1)), waits(receive(0, tag=3), receives={(0, 0): 1})], set()),
        ([waits(send(1, number=2)), waits(receive(0, tag=3), receives={(0, 0): 1})], {0, 1}),
        ([waits(send(1)), waits(receive(0, tag=3), receives={(FROM_ANY, 0): 1})], set()),
        ([waits(send(1)), waits(receive(0, tag=3), receives={(0, ANY): 1})], set()),
        ([waits(send(1)), waits(receive(0, tag=3), receives={(FROM_ANY, 3): 1})], {0, 1}),
        # Counts that aren't known: of the receiver, of the sender, and of a communicator that a rank has freed.
        ([waits(receive(1), sends=None), waits(receive(0))], set()),
        ([waits(receive(1)), waits(receive(0), sends=None)], set()),
        ([waits(receive(1)), waits(receive(0)) | {"counts": {}}], set()),
        ([IN_BCAST, LEFT | {"counts": {}}], {1}),
    ],
)  # fmt: skip
def test_messages_on_their_way_prevent_the_proof(states: list[State | None], expected: set[int]) -> None:
    assert stuck_ranks(states) == expected


@pytest.mark.serial
def test_only_a_thread_that_has_polled_is_in_the_same_wait() -> None:
    before = waits(receive(1))
    polled, other = ([ThreadWait(began, 1.5, False, [receive(1)])] for began in (1.0, 2.0))
    assert not is_same_wait(before, before)
    assert is_same_wait(before, before | {"threads": polled})
    assert not is_same_wait(before, before | {"threads": other})
    assert not is_same_wait(before, COMPUTES) and not is_same_wait(None, before) and is_same_wait(LEFT, LEFT)


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
