"""The choice of residuals: what the forward program of a derivative stores for the backward program.

The backward program reads values of the forward one. It gets them as residuals, or computes them again from others. The
choice is a minimum cut of the graph of values: storing an entry has a cost, and so has each operation that is repeated,
the same as in the fusion of loops.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpiad.programs.fusion import COSTS, KEEPING
from mpiad.programs.recorder import Recorder
from mpiad.programs.traced_array import PYTHON_NUMBERS, Constant, Ref, Step, array_of, cast, mapped, quotient, take

_READING = 3  # the cost of reading an entry of an argument, in the units of `COSTS`; that of storing one is `KEEPING`
# Operations that cost as much as an addition, and aren't in `COSTS`.
_SIMPLE = {cast, quotient, np.where, np.real, np.imag, np.bitwise_and, np.bitwise_or}
# Operations that move entries, which a loop reads at another index.
_MOVES = {take, array_of, np.roll, np.concatenate, np.stack, np.transpose, np.reshape, np.squeeze, np.swapaxes}


_Pair: TypeAlias = tuple[Ref, int]  # a value: its reference, and the index of its node or -1


class _Value(NamedTuple):
    parents: tuple[_Pair, ...]  # what the value is computed from
    cost: float  # per entry; infinite if the value isn't computed again


def chosen(
    recorder: Recorder, nodes: Sequence[Any], read: Sequence[_Pair], free: Container[int]
) -> tuple[list[_Pair], list[Any]]:
    """Return the values that the forward program stores, and the nodes that the backward program repeats, in order.

    `nodes`: those of the forward program; `read`: the values that the backward program reads; `free`: the numbers of the
    values that are in memory anyway: arguments and results.
    """
    values = _graph(recorder, nodes, read)
    if all(math.isinf(values[pair].cost) or pair[0].number in free for pair in read):
        return list(read), []
    again = _cut(recorder, values, read, free)
    ends = {*read, *[parent for pair in again for parent in values[pair].parents]}
    return sorted(ends - again), [nodes[index] for index in sorted(index for _, index in again) if index >= 0]


def _graph(recorder: Recorder, nodes: Sequence[Any], ends: Sequence[_Pair]) -> dict[_Pair, _Value]:
    """Return the values from which `ends` are computed."""
    steps = {out: step for step in recorder.steps for out in step.outs}
    # A number has several nodes if functions of the user return their arguments.
    first: dict[Ref, int] = {}
    for node in nodes:
        if type(node.like) is Ref:
            first.setdefault(node.like, node.index)
    values: dict[_Pair, _Value] = {}
    waiting = list(ends)
    while waiting:
        pair = waiting.pop()
        if pair in values:
            continue
        step, node = steps.get(pair[0].number), nodes[pair[1]] if pair[1] >= 0 else None
        parents: tuple[_Pair, ...] = ()
        cost = math.inf
        if step is not None and step.kind == "call" and (node is None or node.pull is not None):
            of_inputs = {} if node is None else {nodes[index].like: index for index in node.inputs}
            constants = None if node is None else _references_in((node.pull.args, node.pull.params))
            references = _references_in((step.args, step.kwargs))
            # The step that returns a node's result may read only what the node reads.
            if constants is None or {*of_inputs, *constants}.issuperset(references):
                parents = tuple([(x, of_inputs.get(x, first.get(x, -1))) for x in references])
                cost = _cost(step)
        values[pair] = _Value(parents, cost)
        waiting += parents if math.isfinite(cost) else ()
    # Loops read the entries of neighbors from memory.
    moved = [pair for pair, value in values.items() if math.isfinite(value.cost) and steps[pair[0].number].fun in _MOVES]
    for x in {parent for pair in moved for parent in values[pair].parents}.difference(moved):
        values[x] = values[x]._replace(cost=math.inf)
    return values


def _references_in(x: object) -> list[Ref]:
    found: dict[Ref, None] = {}
    mapped(x, lambda x: found.setdefault(x) if type(x) is Ref else None)
    return list(found)


def _cost(step: Step) -> float:
    if step.fun is take:
        key = step.args[1]
        if any(type(part) in (Ref, Constant) for part in (key if type(key) is tuple else (key,))):
            return math.inf
    if step.fun is np.power:
        return 2 if type(step.args[1]) in PYTHON_NUMBERS and step.args[1] in (2, 3) else math.inf
    if step.fun in _SIMPLE or step.fun in _MOVES:
        return 1
    return COSTS.get(step.fun.__name__, math.inf) if isinstance(step.fun, np.ufunc) else math.inf


def _cut(recorder: Recorder, values: dict[_Pair, _Value], ends: Sequence[_Pair], free: Container[int]) -> set[_Pair]:
    """Return the values that are cheaper computed again than stored."""
    # Each value has two vertices: on the side of the sink is the first one if the value is computed again, and the second
    # one if the backward program has the value. The source is vertex 0, and the sink vertex 1.
    place = {pair: 2 * k + 2 for k, pair in enumerate(values)}
    edges: list[tuple[int, int, float]] = [(place[pair] + 1, 1, math.inf) for pair in ends]
    for pair, value in values.items():
        number, first = pair[0].number, place[pair]
        size = max(math.prod(recorder.specs[number][0]), 1)
        edges += [(0, first, size * value.cost), (first, first + 1, size * (_READING if number in free else KEEPING))]
        if math.isfinite(value.cost):
            edges += [(place[parent] + 1, first, math.inf) for parent in value.parents]
    reached = side_of_source(2 * len(values) + 2, edges)
    return {pair for pair, first in place.items() if first not in reached}


# Minimum cuts of graphs, by maximum flow.
#
# Source: Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation", Soviet
# Mathematics Doklady 11 (1970).


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
