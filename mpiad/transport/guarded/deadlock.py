"""The wait-for table: who waits for whom, in which call, since when, and the cycle if there is one."""

from __future__ import annotations

from typing import Any, NamedTuple

from mpiad.transport.guarded import ledger
from mpiad.transport.guarded.mismatch import columns

__all__ = ["Finding", "finding_of"]

State = dict[str, Any]


class Finding(NamedTuple):
    """What was found when a wait took too long.

    Attributes
    ----------
    text, table : str
    ranks : tuple of int
        Those that raise: they wait, and for each other.
    cycle : tuple of int
    """

    text: str
    table: str
    ranks: tuple[int, ...]
    cycle: tuple[int, ...]


def finding_of(states: list[State | None], asker: int) -> Finding:
    """Make the table from the states of all ranks of the world."""
    edges = {rank: _awaited(rank, states) for rank in range(len(states)) if _waits(states[rank])}
    cycle = _from_first(_cycle(edges, asker))
    ranks = _together(edges, asker)
    rows = [_row(rank, state, edges.get(rank, [])) for rank, state in enumerate(states)]
    table = columns(("rank", "state", "call", "where", "waits for"), rows)
    # Whichever rank's wait expired first, the sentence is the same.
    lines = [_headline(states, min(cycle or ranks), cycle, edges), table]
    lines += [f"Rank {rank}: {state['hint']}." for rank, state in enumerate(states) if state and state.get("hint")]
    lines += ledger.unreceived([state and state["ledger"] for state in states])
    lines.append("The communicators of these waits can't be used before mpiad.reset(comm).")
    return Finding("\n".join(lines), table, ranks, cycle)


def _waits(state: State | None) -> bool:
    return state is not None and state["state"] == "waits"


def _awaited(rank: int, states: list[State | None]) -> list[int]:
    """Return the ranks that one waits for: its partner, or those that haven't come to a collective."""
    state: State = states[rank]  # type: ignore[assignment]
    if "peers" in state:
        return list(state["peers"])
    key, number = state["key"], state["number"]
    missing = []
    for other in state["members"]:
        found = states[other]
        if other != rank and (found is None or found["counts"].get(key, 0) < number):
            missing.append(other)
    return missing


def _cycle(edges: dict[int, list[int]], start: int) -> tuple[int, ...]:
    """Return a cycle of waits that can be reached from a rank; empty where there is none."""
    path: list[int] = []
    done: set[int] = set()

    def visit(rank: int) -> tuple[int, ...]:
        if rank in path:
            return (*path[path.index(rank) :], rank)
        if rank in done or rank not in edges:
            return ()
        path.append(rank)
        for other in edges[rank]:
            if found := visit(other):
                return found
        path.pop()
        done.add(rank)
        return ()

    return visit(start)


def _together(edges: dict[int, list[int]], start: int) -> tuple[int, ...]:
    """Return the waiting ranks that are joined to one by waits, in either direction."""
    found, new = {start}, [start]
    while new:
        rank = new.pop()
        near = set(edges.get(rank, ())) | {other for other, awaited in edges.items() if rank in awaited}
        # Those who wait for the same missing rank are stuck with it.
        shared = {other for other, awaited in edges.items() if set(awaited) & set(edges.get(rank, ()))}
        for other in (near | shared) - found:
            if other in edges:
                found.add(other)
                new.append(other)
    return tuple(sorted(found))


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
    """Return a state's age: tenths of a second tell nothing about a long one."""
    seconds = state["seconds"]
    return f"{seconds:.0f}" if seconds >= 1 else f"{seconds:.1f}"


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" if ranks else ""


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
        return f"{text}, and this wait can't end: rank {' -> rank '.join(map(str, cycle))}. Let one of them act first."
    gone = [other for other in edges[rank] if (states[other] or {}).get("state") == "left"]
    if gone:
        return f"{text}, for {_listed(gone)}, which left the program: all ranks must make the same calls."
    return f"{text}, longer than MPIAD_TIMEOUT allows."
