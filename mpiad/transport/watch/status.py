"""Deadlock reports: a thread of each rank answers questions about the rank's current call, on a separate communicator.

A rank whose wait has exceeded its deadline asks all others, makes a table of the answers, and sends it to the ranks that
are connected with it by waits. These raise the same error. If MPI doesn't allow a second thread, ranks answer only during
their own waits.

Waits in the program's own calls (`program_calls`) can't raise an error, so the table ends the job: after the deadline, or
at once if two looks at all ranks, a second apart, prove that the wait can't end (`deadlock_proof`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import itemgetter
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

from mpiad._typing import Comm, Rank
from mpiad.errors import DeadlockError
from mpiad.transport.core import calls
from mpiad.transport.core.polling import StateExchange, threads_may_communicate
from mpiad.transport.watch import communicator, message_headers, program_calls, timed_waits, watch_settings
from mpiad.transport.watch.call_agreement import rank_ranges, table_of_ranks
from mpiad.transport.watch.deadlock_proof import Counts, State, is_same_wait, partners, stuck_ranks
from mpiad.transport.watch.program_calls import ProgramCall
from mpiad.transport.watch.timed_waits import Departure, Waiting, departed

Node: TypeAlias = "int | tuple[str, int]"  # a rank; or the key and the number of a collective
Graph = dict[Node, list[Node]]
_LONGEST = 10  # maximum number of ranks of a cycle that a message lists


class Finding(NamedTuple):
    """The contents of a DeadlockError; `ranks`: those that raise it, since they are connected by waits."""

    text: str
    table: str
    ranks: tuple[int, ...]
    cycle: tuple[int, ...]


_UNUSABLE = "The communicators of these waits can't be used before mpiad.reset(comm)."


def finding_of(states: list[State | None], asker: int, consequence: str = _UNUSABLE) -> Finding:
    """Return the contents of the error for the states of all ranks; `asker`: the rank whose wait has taken too long."""
    graph = _wait_graph(states)
    cycle, connected = _cycle(graph, asker), _component(graph, asker)
    ranks = tuple(sorted(node for node in graph if node in connected and isinstance(node, int)))
    rows = [_row(rank, state, _awaited(graph, rank)) for rank, state in enumerate(states)]
    table = table_of_ranks(("state", "call", "where", "waits for"), rows)
    deserted = [rank for rank in ranks if _departed(states, graph, rank)]
    lines = [_headline(states, min(cycle or deserted or ranks), cycle, graph), table]
    lines += [f"Rank {rank}: {state['hint']}." for rank, state in enumerate(states) if state and state.get("hint")]
    lines += message_headers.unreceived([state["ledger"] if state else None for state in states])
    lines.append(consequence)
    return Finding("\n".join(lines), table, ranks, cycle)


def _wait_graph(states: list[State | None]) -> Graph:
    """Return the nodes (ranks, collectives) that each node waits for: the graph is linear in the number of ranks."""
    waiting = [(rank, state) for rank, state in enumerate(states) if state is not None and state["state"] == "waits"]
    graph: Graph = {}
    for rank, state in waiting:
        if "threads" in state:
            operations = [operation for wait in state["threads"] for operation in wait.operations]
            awaited = {partner for operation in operations for partner in partners(states, rank, operation) or ()}
            # A receive from any rank could also receive from the rank itself.
            graph[rank] = sorted(awaited - {rank} or awaited)
        else:
            graph[rank] = state["peers"] if "peers" in state else [_collective(state)]
    for node, members in {_collective(state): state["members"] for _, state in waiting if "key" in state}.items():
        counts = {other: (states[other] or {}).get("counts", {}).get(node[0], 0) for other in members}
        graph[node] = [other for other in members if counts[other] < node[1] and graph.get(other) != [node]]
    return graph


_collective = itemgetter("key", "number")


def _awaited(graph: Graph, rank: int) -> list[int]:
    """Return the ranks for which a rank waits."""
    nodes = graph.get(rank, [])
    return [other for node in nodes for other in (graph[node] if isinstance(node, tuple) else [node])]  # type: ignore[misc]


def _cycle(graph: Graph, start: int) -> tuple[int, ...]:
    """Return a cycle of waits that can be reached from a rank, from its lowest rank to the same rank; empty if none."""
    # A depth-first search, without recursion, since a cycle may have thousands of ranks.
    path, ahead, done = dict[Node, None]({start: None}), [iter(graph.get(start, []))], set[Node]()
    while ahead:
        for node in ahead[-1]:
            if node in path:
                nodes = list(path)
                ranks = [other for other in nodes[nodes.index(node) :] if isinstance(other, int)]
                first = ranks.index(min(ranks))
                return (*ranks[first:], *ranks[: first + 1])
            if node in graph and node not in done:
                path[node] = None
                ahead.append(iter(graph[node]))
                break
        else:
            ahead.pop()
            done.add(path.popitem()[0])
    return ()


def _component(graph: Graph, start: int) -> set[Node]:
    """Return the nodes that are connected with a rank by waits."""
    neighbors: dict[Node, set[Node]] = defaultdict(set)
    for node, awaited in graph.items():
        for other in awaited:
            neighbors[node].add(other)
            neighbors[other].add(node)
    found, new = set[Node]({start}), list[Node]([start])
    while new:
        fresh = neighbors[new.pop()] - found
        found |= fresh
        new += fresh
    return found


def _row(rank: int, state: State | None, awaited: list[int]) -> tuple[str, ...]:
    if state is None:
        return str(rank), "no answer", "-", "-", "-"
    if state["state"] == "left":
        return str(rank), f"left {_shown(state)} s ago", state["how"], state["place"], "-"
    if state["state"] == "computes":
        return str(rank), "computes", state.get("call", "-"), state["place"], "-"
    call = f"{state['call']}({state['arguments']})"
    return str(rank), f"waits {_shown(state)} s", call, state["place"], _listed(awaited) or "nobody"


def _shown(state: State) -> str:
    seconds = state["seconds"]
    return f"{seconds:.0f}" if seconds >= 0.95 else f"{seconds:.1f}"  # 0.96 is "1", not "1.0"


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_ranges(sorted(ranks))}" if ranks else ""


def _headline(states: list[State | None], rank: int, cycle: tuple[int, ...], graph: Graph) -> str:
    state: State = states[rank]  # type: ignore[assignment]
    text = f"rank {rank} has waited for {_shown(state)} seconds in {state['call']} at {state['place']}"
    if cycle:
        shown = [f"rank {rank}" for rank in cycle]
        if len(shown) > _LONGEST:
            shown[_LONGEST - 2 : -2] = [f"... ({len(cycle) - 1} ranks)"]
        mixed = any(timed_waits.ONE_LIBRARY in (states[rank] or {}).get("hint", "") for rank in cycle)
        advice = "The lines below the table say why." if mixed else "Let one of these ranks communicate in another order."
        return f"{text}, and this wait can't end: {' -> '.join(shown)}. {advice}"
    if gone := _departed(states, graph, rank):
        return f"{text}, for {_listed(gone)}, which left the program: all ranks must make the same calls."
    return f"{text}, longer than the limit (MPIAD_TIMEOUT, or the timeout of mpiad.debug.checked)."


def _departed(states: list[State | None], graph: Graph, rank: int) -> list[Rank]:
    """Return the ranks that have left the program of those that a rank waits for."""
    return [other for other in _awaited(graph, rank) if (states[other] or {}).get("state") == "left"]


_ERROR, _LEFT = 3, 4  # kinds of messages in addition to those of `StateExchange`
_TICK = 0.02  # seconds between two polls of the thread
_PATIENCE = 1.0  # seconds to wait for answers, to which _APART is added for each rank
_APART = 1e-3  # seconds between the questions of consecutive ranks
_DOUBTFUL_AFTER, _SETTLED_AFTER = 0.3, 1.0  # seconds of a wait in a call of the program, and between the answers
_STALLED_AFTER = 2.0  # seconds
_NEXT_DOUBT = 0.5  # part of the duration of a wait after which the others are asked again


class Responder(StateExchange):
    """Answers questions about this rank, and asks the others; the constructor is collective."""

    def __init__(self, comm: Comm):
        super().__init__(comm, self._present_state, _TICK, "mpiad-status")
        self._patience = _PATIENCE + _APART * comm.size
        self._asking = False
        self._left: tuple[str, str, float] | None = None  # how, where and when this rank left the program
        self._end_job: Callable[[str], None] | None = None  # if the program's own calls are watched
        self._doubt = _Doubt()
        self.start()

    def start(self) -> None:
        """Start to answer."""
        super().start()
        timed_waits.set_reporter(self.expire, self.answer if self.thread is None else None)

    def watch_program(self, end_job: Callable[[str], None]) -> None:
        """Call `end_job` with a table if a wait in the program's own calls can't end, or takes too long."""
        self._end_job, self._stalls = end_job, _Stalls(self._comm)
        if self.thread is None and threads_may_communicate():  # on one rank
            self.thread = threading.Thread(target=self._respond, name=self._name, daemon=True)
            self.thread.start()

    def answer(self) -> None:
        """Answer questions, and have doubts about the program's own calls if the thread of this object calls."""
        super().answer()
        if self._end_job is not None and threading.current_thread() is self.thread and not self._asking:
            self._stalls.postpone()
            self._examine(self._end_job)

    def _examine(self, end_job: Callable[[str], None]) -> None:
        """Ask the other ranks if calls of the program wait for long; end the job if they can't end."""
        waits = list(timed_waits.present_waits().values())
        doubt, now, limit = self._doubt, perf_counter(), watch_settings.present().timeout
        began = [wait.began for wait in waits]
        if began != doubt.began:
            doubt = self._doubt = _Doubt(began, now + _DOUBTFUL_AFTER)
        if len(departed) > doubt.departures:
            doubt.departures, doubt.due = len(departed), min(doubt.due, now + _DOUBTFUL_AFTER)
        if now < doubt.due or not waits or not all(isinstance(wait.what, ProgramCall) for wait in waits):
            return
        self._asking = True
        try:
            answers = self.ask_all(self._patience) | {self._comm.rank: self._present_state()}
        finally:
            self._asking = False
        states = [answers[r] if r in answers else _departure(r) or self._stalls.place(r) for r in range(self._comm.size)]
        kept = [state if is_same_wait(old, state) else None for old, state in zip(doubt.states or states, states)]
        is_late = limit is not None and now - min(began) > limit
        ranks = {self._comm.rank} if is_late else stuck_ranks(kept if doubt.states else states)
        if self._comm.rank not in ranks:
            doubt.states, doubt.due = None, now + max(_DOUBTFUL_AFTER, _NEXT_DOUBT * (now - max(began)))
            if limit is not None:
                doubt.due = min(doubt.due, max(now, min(began) + limit))
        elif is_late or doubt.states is not None:
            # One rank reports, preferably that with the latest wait, since the others ask less often.
            seconds = {
                rank: state["seconds"] for rank, state in enumerate(states) if state and rank in ranks and "wait" in state
            }
            latest = min(seconds.values()) + _SETTLED_AFTER / 2
            if doubt.deferred or self._comm.rank == min(rank for rank in seconds if seconds[rank] < latest):
                end_job(finding_of(states, self._comm.rank, "The job ends.").text)
            doubt.deferred, doubt.due = True, now + _SETTLED_AFTER
        else:
            doubt.states, doubt.due = states, now + _SETTLED_AFTER

    def _handle(self, source: Rank, kind: int, value: Any) -> None:
        if kind == _LEFT:
            counts, sends, how, place = value
            departed[source] = Departure(counts, sends, how, place, perf_counter())
        elif kind == _ERROR:
            waits, found = value
            timed_waits.set_error(waits[self._comm.rank], DeadlockError(*found))
        else:
            super()._handle(source, kind, value)

    def announce(self, how: str, place: str, sends: bool) -> None:
        """Notify all other ranks that this one has left the program; `sends`: whether messages from it are in flight."""
        self._left = self._left or (how, place, perf_counter())
        with self._receiving:
            self.post(self._others, _LEFT, (_counts(), sends, how, place))

    def receive_departures(self) -> None:
        """Receive the other ranks' notices, since some MPIs report unreceived messages."""
        until = perf_counter() + self._patience
        # A rank may have been killed before its notice, so the time is limited.
        while len(departed) < len(self._others) and perf_counter() < until:
            self.answer()
            time.sleep(_TICK / 20)

    def expire(self, waiting: Waiting) -> Exception:
        """Return the exception for a wait that has taken too long, and send it to the ranks that wait with it."""
        # Ranks ask in turn, since the error that the first one finds may make other questions unnecessary.
        self._await_error(waiting, _APART * self._comm.rank)
        if waiting.error is not None:
            return waiting.error
        self._asking = True
        try:
            answers = self.ask_all(self._patience) | {self._comm.rank: self._present_state()}
            states = [answers[rank] if rank in answers else _departure(rank) for rank in range(self._comm.size)]
            self.answer()
            if waiting.error is not None:  # another rank was faster
                return waiting.error
            found = finding_of(states, self._comm.rank)
            # If several ranks ask at the same time, one of them makes the table.
            first = min([self._comm.rank, *[r for r in found.ranks if (states[r] or {}).get("asking")]])
            if first != self._comm.rank:
                self._await_error(waiting, self._patience)
                if waiting.error is not None:
                    return waiting.error
            waits = {rank: states[rank]["wait"] for rank in found.ranks if rank != self._comm.rank}  # type: ignore[index]
            self.post(list(waits), _ERROR, (waits, found))
            return DeadlockError(*found)
        finally:
            self._asking = False

    def _await_error(self, waiting: Waiting, seconds: float) -> None:
        until = perf_counter() + seconds
        while waiting.error is None and perf_counter() < until:
            self.answer()
            time.sleep(_TICK / 4)

    def _present_state(self) -> State:
        main: int = threading.main_thread().ident  # type: ignore[assignment]
        # The counts are read before the waits: if these are still the same, they had begun before the counts were read.
        common = {"asking": self._asking, "counts": _counts(), "ledger": message_headers.summary()}
        every = timed_waits.present_waits()
        waiting = every.get(main) or next(iter(every.values()), None)
        if self._left is not None:
            return common | _left(*self._left)
        if waiting is not None:
            seconds = perf_counter() - waiting.began
            return common | {"state": "waits", "wait": waiting.began, "seconds": seconds} | waiting.what.report()
        return common | {"state": "computes", "place": calls.site_of(sys._current_frames().get(main)).text}


class _Doubt:
    """What is known about waits in the program's calls: when they `began`, and from when on the other ranks are asked."""

    def __init__(self, began: Sequence[float] = (), due: float = 0.0):
        self.began, self.due, self.departures = list(began), due, len(departed)
        self.states: list[State | None] | None = None  # the first answers if, by them, the wait can't end
        self.deferred = False  # whether another rank should have reported


class _Stalls:
    """The lines at which ranks of this node compute without answering, since a function in C keeps Python's lock.

    A thread of `faulthandler`, which doesn't need this lock, writes the rank's stack to a file that other ranks can read.
    """

    def __init__(self, comm: Comm):
        self._file, self._next = tempfile.TemporaryFile(), 0.0
        node = os.uname().nodename, os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0
        here = node, f"/proc/{os.getpid()}/fd/{self._file.fileno()}", threading.main_thread().ident
        self._here, self._all = here, comm.allgather(here)
        self.postpone()

    def postpone(self) -> None:
        """Note that this rank answers."""
        if perf_counter() > self._next:
            self._next = perf_counter() + _STALLED_AFTER / 4
            self._file.truncate(0)
            faulthandler.dump_traceback_later(_STALLED_AFTER, file=self._file)

    def place(self, rank: Rank) -> State | None:
        """Return the state of a rank that doesn't answer, if its stack can be read."""
        node, path, thread = self._all[rank]
        if node != self._here[0]:
            return None
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            stack = file.read().partition(f"Thread 0x{thread:016x}")[2]
            if place := calls.place_in_dump(stack):
                state = {"state": "computes", "call": "a function that keeps Python's lock", "place": place}
                return state | {"counts": {}, "ledger": None}
        return None


def _counts() -> dict[str | int, int | Counts]:
    """Return the numbers of collectives that this rank has begun, by label, and those of the program's calls, by key."""
    return communicator.counts() | program_calls.counts()


def _departure(rank: int) -> State | None:
    gone = departed.get(rank)
    return gone and _left(gone.how, gone.place, gone.noticed) | {"counts": gone.counts, "ledger": None}


def _left(how: str, place: str, since: float) -> State:
    return {"state": "left", "how": how, "place": place, "seconds": perf_counter() - since}
