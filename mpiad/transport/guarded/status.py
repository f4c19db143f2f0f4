"""Each rank's current call, reported to a rank that asks: by a thread of each rank, over a communicator of its own.

A rank whose wait has expired asks all others, makes the table of the answers and sends it to those that wait with it,
which raise the same. If MPI allows no second thread, ranks answer from inside their own waits only.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections import defaultdict
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm
from mpiad.errors import DeadlockError
from mpiad.transport import calls
from mpiad.transport.departure import farewell
from mpiad.transport.guarded import communicator, message_counts, timed_waits
from mpiad.transport.guarded.descriptions import rank_ranges, table_of_ranks
from mpiad.transport.guarded.timed_waits import Departure, Waiting, departed
from mpiad.transport.notices import threads_may_communicate

# The wait-for table: the waiting ranks, those they wait for, the call, the time, and the cycle if there is one.


State = dict[str, Any]
_LONGEST = 10  # ranks of a cycle in a sentence


class Finding(NamedTuple):
    """The result of the search after a wait took too long."""

    text: str
    table: str
    ranks: tuple[int, ...]  # those that raise: they wait, and for each other
    cycle: tuple[int, ...]


def finding_of(states: list[State | None], asker: int) -> Finding:
    """Make the table from the states of all ranks of the world."""
    edges = _edges(states)
    cycle = _from_first(_cycle(edges, asker))
    ranks = _together(edges, asker)
    rows = [_row(rank, state, edges.get(rank, [])) for rank, state in enumerate(states)]
    table = table_of_ranks(("state", "call", "where", "waits for"), rows)
    # The sentence doesn't depend on the rank whose wait expired first.
    lines = [_headline(states, min(cycle or ranks), cycle, edges), table]
    lines += [f"Rank {rank}: {state['hint']}." for rank, state in enumerate(states) if state and state.get("hint")]
    lines += message_counts.unreceived([state and state["ledger"] for state in states])
    lines.append("The communicators of these waits can't be used before mpiad.reset(comm).")
    return Finding("\n".join(lines), table, ranks, cycle)


def _edges(states: list[State | None]) -> dict[int, list[int]]:
    """Return the ranks that each one waits for: its partner, or those that haven't come to a collective.

    Ranks that wait in the same collective share one list, which makes the searches below linear in the number of ranks.
    """
    here: dict[tuple[str, int], list[int]] = defaultdict(list)
    edges: dict[int, list[int]] = {}
    for rank, state in enumerate(states):
        if state is None or state["state"] != "waits":
            continue
        if "peers" in state:
            edges[rank] = list(state["peers"])
        else:
            here[state["key"], state["number"]].append(rank)
    for (key, number), ranks in here.items():
        come = set(ranks)
        members = states[ranks[0]]["members"]  # type: ignore[index]
        missing = [other for other in members if other not in come and not _has_come(states[other], key, number)]
        edges |= dict.fromkeys(ranks, missing)
    return edges


def _has_come(state: State | None, key: str, number: int) -> bool:
    return state is not None and state["counts"].get(key, 0) >= number


def _cycle(edges: dict[int, list[int]], start: int) -> tuple[int, ...]:
    """Return a cycle of waits that can be reached from a rank; empty if there is none."""
    path, ahead = {start: None}, [iter(edges.get(start, ()))]  # not by recursion: a ring may have thousands of ranks
    done: set[int] = set()
    while ahead:
        for other in ahead[-1]:
            # It is on the current search path, so the path from it on is a cycle.
            if other in path:
                ranks = list(path)
                return (*ranks[ranks.index(other) :], other)
            # Lists are shared by all ranks that wait together, so each is searched once: by identity.
            if other in edges and id(edges[other]) not in done:
                path[other] = None
                ahead.append(iter(edges[other]))
                break
        else:
            ahead.pop()
            rank, _ = path.popitem()
            done.add(id(edges.get(rank)))
    return ()


def _together(edges: dict[int, list[int]], start: int) -> tuple[int, ...]:
    """Return the waiting ranks that are joined to one by waits: in either direction, or for the same missing rank."""
    waiters, awaited, lists = defaultdict(list), defaultdict(set), {id(ranks): ranks for ranks in edges.values()}
    for rank, ranks in edges.items():
        waiters[id(ranks)].append(rank)
    for key, ranks in lists.items():
        for rank in ranks:
            awaited[rank].add(key)
    found, new, seen = {start}, [start], set()
    while new:
        rank = new.pop()
        for key in awaited[rank] | ({id(edges[rank])} if rank in edges else set()):
            if key in seen:
                continue
            seen.add(key)
            fresh = {*lists[key], *waiters[key]} - found
            found |= fresh
            new += fresh
    return tuple(sorted(rank for rank in found if rank in edges))


def _row(rank: int, state: State | None, awaited: list[int]) -> tuple[str, ...]:
    if state is None:
        return str(rank), "no answer", "-", "-", "-"
    if state["state"] == "left":
        return str(rank), f"left {_shown(state)} s ago", state["how"], state["place"], "-"
    if state["state"] == "computes":
        return str(rank), "computes", "-", state["place"], "-"
    call = f"{state['call']}({state['arguments']})"
    return str(rank), f"waits {_shown(state)} s", call, state["place"], _listed(awaited) or "nobody"


def _shown(state: State) -> str:
    """Return a state's age as text: without tenths of a second for a long one."""
    seconds = state["seconds"]
    return f"{seconds:.0f}" if seconds >= 1 else f"{seconds:.1f}"


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_ranges(sorted(ranks))}" if ranks else ""


def _from_first(cycle: tuple[int, ...]) -> tuple[int, ...]:
    """Return a cycle that begins, and ends, with its lowest rank."""
    if not cycle:
        return cycle
    start = cycle.index(min(cycle))
    return (*cycle[start:-1], *cycle[:start], cycle[start])


def _headline(states: list[State | None], rank: int, cycle: tuple[int, ...], edges: dict[int, list[int]]) -> str:
    state: State = states[rank]  # type: ignore[assignment]
    text = f"rank {rank} has waited for {_shown(state)} seconds in {state['call']} at {state['place']}"
    if cycle:
        return f"{text}, and this wait can't end: {_arrows(cycle)}. Let one of them act first."
    gone = [other for other in edges[rank] if (states[other] or {}).get("state") == "left"]
    if gone:
        return f"{text}, for {_listed(gone)}, which left the program: all ranks must make the same calls."
    return f"{text}, longer than the limit allows (MPIAD_TIMEOUT, or that of checked)."


def _arrows(cycle: tuple[int, ...]) -> str:
    shown = [f"rank {rank}" for rank in cycle]
    if len(shown) > _LONGEST:
        shown[_LONGEST - 2 : -2] = [f"... ({len(cycle) - 1} ranks)"]
    return " -> ".join(shown)


_ASK, _TOLD, _VERDICT, _LEFT = 1, 2, 3, 4
_TICK = 0.02  # seconds between two looks of the thread
_PATIENCE = 1.0  # seconds for an answer, besides those for the number of ranks
_APART = 1e-3  # seconds between the ranks' questions


class Responder:
    """Answers questions about this rank, and asks about the others; made by all ranks together."""

    def __init__(self, comm: Comm):
        self._comm = comm
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._patience = _PATIENCE + _APART * comm.size
        self._sends: list[list[Any]] = []  # for each a buffer, then its request
        self._asked = 0
        self._asking = False
        self._leaving_since: float | None = None
        self._ear, self._mouth = threading.Lock(), threading.Lock()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.start()

    def start(self) -> None:
        """Begin to answer."""
        self._done.clear()
        if threads_may_communicate() and self._comm.size > 1:
            self._thread = threading.Thread(target=self._respond, name="mpiad-status", daemon=True)
            self._thread.start()
        timed_waits.set_reporter(self.expire, None if self._thread is not None else self.answer)

    def stop(self) -> None:
        """Answer no more."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _respond(self) -> None:
        while not self._done.wait(_TICK):
            self.answer()

    def answer(self) -> None:
        """Answer pending questions and notices."""
        with self._ear:
            while (come := self._taken(_ASK)) is not None:
                source, (number,) = come
                self._post([source], _TOLD, (number, self._state()))
            while (come := self._taken(_LEFT)) is not None:
                source, (counts, sends, how, place) = come
                departed[source] = Departure(counts, sends, how, place, perf_counter())
            while (come := self._taken(_VERDICT)) is not None:
                _, (told, found) = come
                timed_waits.tell(told[self._comm.rank], DeadlockError(*found))

    def announce(self, sends: bool) -> None:
        """Notify all other ranks that this one has left the program."""
        self._leaving_since = self._leaving_since or perf_counter()
        with self._ear:
            self._post(self._others, _LEFT, (communicator.counts(), sends, *farewell()))

    def hear_departures(self) -> None:
        """Receive the notices of all others, which have been sent: some MPIs complain of unreceived messages."""
        until = perf_counter() + self._patience
        # With a limit: a rank may have been ended from outside, without a notice.
        while len(departed) < len(self._others) and perf_counter() < until:
            self.answer()
            time.sleep(_TICK / 20)

    def expire(self, waiting: Waiting) -> Exception:
        """Return the exception of a wait that has taken too long, and notify the ranks that wait with it."""
        # One after the other: with the first one's verdict the others needn't ask all ranks.
        self._await_verdict(waiting, _APART * self._comm.rank)
        if waiting.verdict is not None:
            return waiting.verdict
        self._asking = True
        try:
            states = self._ask_all()
            self.answer()
            if waiting.verdict is not None:  # another rank was faster
                return waiting.verdict
            found = finding_of(states, self._comm.rank)
            # If several ranks ask at the same time, one of them makes the table.
            first = min([self._comm.rank, *[r for r in found.ranks if (states[r] or {}).get("asking")]])
            if first != self._comm.rank:
                self._await_verdict(waiting, self._patience)
                if waiting.verdict is not None:
                    return waiting.verdict
            told = {rank: states[rank]["wait"] for rank in found.ranks if rank != self._comm.rank}  # type: ignore[index]
            self._post(list(told), _VERDICT, (told, found))
            return DeadlockError(*found)
        finally:
            self._asking = False

    def _await_verdict(self, waiting: Waiting, seconds: float) -> None:
        until = perf_counter() + seconds
        while waiting.verdict is None and perf_counter() < until:
            self.answer()
            time.sleep(_TICK / 4)

    def _ask_all(self) -> list[dict[str, Any] | None]:
        states: list[dict[str, Any] | None] = [None] * self._comm.size
        states[self._comm.rank] = self._state()
        self._asked += 1
        self._post(self._others, _ASK, (self._asked,))
        until, missing = perf_counter() + self._patience, set(self._others)
        while perf_counter() < until and missing:
            self.answer()
            come = self._taken(_TOLD)
            if come is None:
                time.sleep(_TICK / 10)
            # An answer to an earlier question may come late, and is outdated.
            elif come[1][0] == self._asked:
                states[come[0]] = come[1][1]
                missing.discard(come[0])
        for rank in missing:
            states[rank] = _departure(rank)
        return states

    def _state(self) -> dict[str, Any]:
        """Return this rank's current state."""
        main: int = threading.main_thread().ident  # type: ignore[assignment]
        every = timed_waits.who_waits()
        waiting = every.get(main) or next(iter(every.values()), None)
        common = {"asking": self._asking, "counts": communicator.counts(), "ledger": message_counts.summary()}
        if self._leaving_since is not None:
            how, place = farewell()
            seconds = perf_counter() - self._leaving_since
            return common | {"state": "left", "how": how, "place": place, "seconds": seconds}
        if waiting is not None:
            seconds = perf_counter() - waiting.began
            return common | {"state": "waits", "wait": waiting.number, "seconds": seconds} | waiting.what.report()
        frame = sys._current_frames().get(main)
        return common | {"state": "computes", "place": calls.site_of(frame).text}

    def _post(self, ranks: list[int], tag: int, value: object) -> None:
        buffer = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        with self._mouth:
            self._sends = [held for held in self._sends if len(held) < 2 or not held[1].Test()]
            for rank in ranks:
                self._sends.append(held := [buffer])
                # In one step: at an interrupt the buffer is held as long as MPI may use it.
                held.extend(map(self._comm.Isend, (buffer,), (rank,), (tag,)))

    def _taken(self, tag: int) -> tuple[int, Any] | None:
        status = MPI.Status()
        message = self._comm.Improbe(MPI.ANY_SOURCE, tag, status)
        if message is None:
            return None
        buffer = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
        message.Recv([buffer, MPI.BYTE])
        return status.source, pickle.loads(buffer.tobytes())


def _departure(rank: int) -> dict[str, Any] | None:
    """Return a rank's notice of its leaving, if it answers no more; None if it hasn't left."""
    gone = departed.get(rank)
    if gone is None:
        return None
    seconds = perf_counter() - gone.heard
    return {
        "state": "left", "how": gone.how, "place": gone.place, "seconds": seconds, "counts": gone.counts, "ledger": None,
    }  # fmt: skip
