"""Minimum cuts of graphs, by maximum flow.

Source: Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation", Soviet Mathematics
Doklady 11 (1970).
"""

from __future__ import annotations

from collections.abc import Sequence


def side_of_source(count: int, edges: Sequence[tuple[int, int, float]]) -> set[int]:
    """Return the vertices that a minimum cut leaves on the side of vertex 0, the source; vertex 1 is the sink.

    `count`: the number of vertices; `edges`: start, end and capacity, which may be infinite.
    """
    # Edge 2k + 1 is edge 2k in reverse: its capacity is the flow along edge 2k.
    ends, capacities, leaving = list[int](), list[float](), [list[int]() for _ in range(count)]
    for start, end, capacity in edges:
        leaving[start].append(len(ends))
        leaving[end].append(len(ends) + 1)
        ends += [end, start]
        capacities += [capacity, 0.0]
    while True:
        levels, reached = {0: 0}, [0]
        for vertex in reached:  # `reached` grows: breadth first
            for edge in leaving[vertex]:
                if capacities[edge] and ends[edge] not in levels:
                    levels[ends[edge]] = levels[vertex] + 1
                    reached.append(ends[edge])
        if 1 not in levels:
            return set(levels)
        _add_flow(ends, capacities, leaving, levels)


def _add_flow(ends: list[int], capacities: list[float], leaving: list[list[int]], levels: dict[int, int]) -> None:
    """Add flow along paths of increasing level until none is left."""
    left = [list(reversed(edges)) for edges in leaving]  # the edges that may still be part of a path
    path: list[int] = []
    while True:
        vertex = ends[path[-1]] if path else 0
        if vertex == 1:
            flow = min(capacities[edge] for edge in path)
            for edge in path:
                capacities[edge] -= flow
                capacities[edge ^ 1] += flow
            path.clear()
        elif left[vertex]:
            edge = left[vertex][-1]
            if capacities[edge] and levels.get(ends[edge]) == levels[vertex] + 1:
                path.append(edge)
            else:
                left[vertex].pop()
        elif path:
            left[ends[path.pop() ^ 1]].pop()
        else:
            return
