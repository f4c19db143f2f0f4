"""The wait-for table: who waits for whom, in which call, since when, and the cycle if there is one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from mpiad.transport.guarded import message_counts
from mpiad.transport.guarded.rank_tables import rank_ranges, table_of_ranks

State = dict[str, Any]
_LONGEST = 10  # ranks of a cycle in a sentence


class Finding(NamedTuple):
    """What was found when a wait took too long."""

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
    # Whichever rank's wait expired first, the sentence is the same.
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
    """Return a cycle of waits that can be reached from a rank; empty where there is none."""
    path, ahead = {start: None}, [iter(edges.get(start, ()))]  # not by recursion: a ring may have thousands of ranks
    done: set[int] = set()
    while ahead:
        for other in ahead[-1]:
            # It is among those that the search came by, so the path from it on is a cycle.
            if other in path:
                ranks = list(path)
                return (*ranks[ranks.index(other) :], other)
            # Lists are shared by all who wait together, so each is searched once: by identity.
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
    """Return a state's age: tenths of a second tell nothing about a long one."""
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
