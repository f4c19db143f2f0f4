"""Sums with results of exchanges: what is added to the result of a folded halo is added to the argument instead.

Folding a halo adds its entries to the cells of a block, here or on other ranks, and works in place. In a reverse pass, the
result is one term of a cotangent, y + fold(g). Computed in this order, the sum is a second array of the size of the block,
and takes a loop after the messages. But fold(g) + y = fold(g + E y), where E pads y with zeros. So the loop that computes g
adds y, and the buffer of g is the sum. This changes the order in which entries next to the halo are added.
"""

from __future__ import annotations

from copy import copy

from mpiad.programs.array_program import ArrayProgram, Node, beginning_at
from mpiad.programs.fusion import CUTS, working_in_place


def with_sums_absorbed(program: ArrayProgram) -> ArrayProgram:
    """Return the program with sums added before operators that work in place and only add to their result."""
    old, needed = program.nodes, program.needed()
    sums = _sums(program, needed)
    if not sums:
        return program
    new = copy(program)
    new.nodes, new._known, new._precisions = [], {}, {}
    numbers: dict[int, int] = {}  # of the old nodes in the new program

    def append(n: int) -> None:
        """Append a copy of a node, after the nodes that it reads."""
        stack = [n]
        while stack:
            missing = [x for x in old[stack[-1]].inputs if x not in numbers]
            if missing:
                stack += missing
            elif (x := stack.pop()) not in numbers:
                node = old[x]
                new.site, new.part = node.site, node.part
                inputs = [numbers[y] for y in node.inputs]
                numbers[x] = new.add(node.kind, inputs, node.shape, node.dtype, node.data)

    for n in needed:
        if n in numbers:
            continue
        if n not in sums:
            append(n)
            continue
        node, (g,) = old[n], old[n].inputs
        for x in [g, *[y for _, y in sums[n]]]:
            append(x)
        starts = _starts(node)
        total = new.view(numbers[g], beginning_at(starts), node.shape)
        for s, y in sums[n]:
            new.site, new.part = old[s].site, old[s].part
            total = new.elementwise([total, numbers[y]], node.shape, node.dtype, old[s].data)
        whole = new.update(numbers[g], total, starts)
        new.site = node.site
        folded = new.add("communicate", [whole], node.shape, node.dtype, node.data)
        numbers.update(dict.fromkeys([n, *[s for s, _ in sums[n]]], folded))
    new.inputs, new.outputs = ([numbers[n] for n in part] for part in (program.inputs, program.outputs))
    parts = program.stored, program.weak, program.on_host
    new.stored, new.weak, new.on_host = ({numbers[n] for n in part if n in numbers} for part in parts)
    new.site, new.part = program.site, program.part
    return new


def _sums(program: ArrayProgram, needed: list[int]) -> dict[int, list[tuple[int, int]]]:
    """Return for results of operators the sums of which they are a term, one after the other, each with its other term."""
    nodes = program.nodes
    if not any(_adds(nodes[n]) for n in needed):
        return {}
    users: dict[int, list[int]] = {}
    latest: dict[int, int] = {}  # the last cut on which each node depends
    for n in needed:
        for x in nodes[n].inputs:
            users.setdefault(x, []).append(n)
        latest[n] = n if nodes[n].kind in CUTS else max([latest[x] for x in nodes[n].inputs], default=-1)
    outputs, found = set(program.outputs), dict[int, list[tuple[int, int]]]()
    for n in filter(lambda n: _adds(nodes[n]), needed):
        end = n
        while end not in outputs and len(users.get(end, ())) == 1:
            (s,) = users[end]
            node = nodes[s]
            others = [x for x in node.inputs if x != end]
            is_sum = node.kind == "elementwise" and node.data[0] == "add" and len(others) == 1
            if not is_sum or node[2:4] != nodes[n][2:4] or node.part != nodes[n].part or latest[others[0]] >= n:
                break
            found.setdefault(n, []).append((s, others[0]))
            end = s
    return found


def _adds(node: Node) -> bool:
    operator = working_in_place(node)
    return operator is not None and operator.adds


def _starts(node: Node) -> tuple[int, ...]:
    """Return the index in the argument of the first entry of the result."""
    call = node.data
    inner = tuple(call.fun.in_place.result(*call.args[1:]))
    return (0,) * (len(node.shape) - len(inner)) + inner
