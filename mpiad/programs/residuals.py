"""The choice of residuals: what the forward program of a derivative stores for the backward program.

The backward program reads values of the forward one. It gets them as residuals, or computes them again from others. The
choice is a minimum cut of the graph of values: storing an entry has a cost, and so has each operation that is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad.programs.minimum_cut import side_of_source
from mpiad.programs.recorder import Recorder
from mpiad.programs.traced_array import PYTHON_NUMBERS, Constant, Ref, Step, array_of, cast, mapped, quotient, take

# Costs per entry, in units of an addition: of an entry that is stored and read again, or only read since it is an argument.
_KEEPING, _READING = 8, 3
# Operations that loops compute in one cycle or two, without the reads; all but these and the next are never repeated.
_SIMPLE = {cast, quotient} | {
    getattr(np, name)
    for name in """add subtract multiply negative positive absolute square conjugate sign real imag where maximum minimum
    fmax fmin less less_equal greater greater_equal equal not_equal logical_and logical_or logical_not bitwise_and
    bitwise_or invert""".split()
}
_DIVISIONS = {np.divide, np.sqrt}
# Operations that move entries, which a loop reads at another index.
_MOVES = {take, array_of, np.roll, np.concatenate, np.stack, np.transpose, np.reshape, np.squeeze, np.swapaxes}


class _Value(NamedTuple):
    # A value of the forward program: its reference, its node or -1, what it is computed from, and the cost of that.
    reference: Ref
    node: int
    parents: tuple[int, ...]
    cost: float  # per entry; infinite if the value isn't computed again


def chosen(
    recorder: Recorder, nodes: Sequence[Any], read: Sequence[tuple[Ref, int]], free: Iterable[int]
) -> tuple[list[tuple[Ref, int]], list[Any]]:
    """Return the values that the forward program stores, and the nodes that the backward program repeats, in order.

    `nodes`: those of the forward program; `read`: the values that the backward program reads, each with the index of its
    node or -1; `free`: the numbers of the values that are in memory anyway: arguments and results.
    """
    values = _graph(recorder, nodes, [x.number for x, _ in read])
    free = set(free)
    if all(math.isinf(values[x.number].cost) or x.number in free for x, _ in read):
        return list(read), []
    again = _cut(recorder, values, [x.number for x, _ in read], free)
    ends = {x.number for x, _ in read} | {parent for number in again for parent in values[number].parents}
    stored = [values[number] for number in sorted(ends - again)]
    repeated = [nodes[k] for k in sorted(values[number].node for number in again) if k >= 0]
    return [(value.reference, value.node) for value in stored], repeated


def _graph(recorder: Recorder, nodes: Sequence[Any], ends: Sequence[int]) -> dict[int, _Value]:
    """Return the values from which those with the numbers `ends` are computed."""
    steps = {out: step for step in recorder.steps for out in step.outs}
    of_nodes: dict[int, Any] = {}
    for node in nodes:
        if type(node.like) is Ref:
            of_nodes.setdefault(node.like.number, node)
    values: dict[int, _Value] = {}
    waiting = list(ends)
    while waiting:
        number = waiting.pop()
        if number in values:
            continue
        node, step = of_nodes.get(number), steps.get(number)
        parents: tuple[int, ...] = ()
        cost = math.inf
        if step is not None and step.kind == "call" and (node is None or node.pull is not None):
            parents = _numbers_in((step.args, step.kwargs))
            if node is None or _is_one_step(nodes, node, parents):
                cost = _cost(step)
        values[number] = _Value(Ref(number), -1 if node is None else node.index, parents, cost)
        waiting += parents if math.isfinite(cost) else ()
    # Loops read the entries of neighbors from memory.
    moved = [number for number, value in values.items() if math.isfinite(value.cost) and steps[number].fun in _MOVES]
    for x in {parent for number in moved for parent in values[number].parents}.difference(moved):
        values[x] = values[x]._replace(cost=math.inf)
    return values


def _numbers_in(x: object) -> tuple[int, ...]:
    found: dict[int, None] = {}
    mapped(x, lambda x: found.setdefault(x.number) if type(x) is Ref else None)
    return tuple(found)


def _reads_arrays(key: object) -> bool:
    return any(type(part) in (Ref, Constant) for part in (key if type(key) is tuple else (key,)))


def _is_one_step(nodes: Sequence[Any], node: Any, parents: Sequence[int]) -> bool:
    """Return whether the step that returns a node's result reads nothing but what the node reads."""
    likes = [nodes[index].like for index in node.inputs]
    own = {like.number for like in likes if type(like) is Ref} | {*_numbers_in((node.pull.args, node.pull.params))}
    return own >= set(parents)


def _cost(step: Step) -> float:
    if step.fun is take and _reads_arrays(step.args[1]):
        return math.inf
    if step.fun is np.power and type(step.args[1]) in PYTHON_NUMBERS and step.args[1] in (2, 3):
        return 2
    return 1 if step.fun in _SIMPLE or step.fun in _MOVES else 4 if step.fun in _DIVISIONS else math.inf


def _cut(recorder: Recorder, values: dict[int, _Value], ends: Sequence[int], free: set[int]) -> set[int]:
    """Return the numbers of the values that are cheaper computed again than stored."""
    # Each value has two vertices: on the side of the sink is the first one if the value is computed again, and the second
    # one if the backward program has the value. The source is vertex 0, and the sink vertex 1.
    place = {number: 2 * k + 2 for k, number in enumerate(values)}
    edges: list[tuple[int, int, float]] = []
    for number, value in values.items():
        size, first = max(math.prod(recorder.specs[number][0]), 1), place[number]
        edges += [(0, first, size * value.cost), (first, first + 1, size * (_READING if number in free else _KEEPING))]
        if math.isfinite(value.cost):
            edges += [(place[parent] + 1, first, math.inf) for parent in value.parents]
    edges += [(place[number] + 1, 1, math.inf) for number in dict.fromkeys(ends)]
    reached = side_of_source(2 * len(values) + 2, edges)
    return {number for number, first in place.items() if first not in reached}
