"""Materialization: the choice of the arrays that are kept in memory. Other arrays are computed at each read.

Operands of communications and calls, and the program's results, must be in memory. Another array is kept if this is cheaper
than computing its entries again at each read, or if otherwise many of its operands would have to stay in memory.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from mpiad._typing import Shape
from mpiad.programs.array_program import IN_MEMORY, SHORT, ArrayProgram, Node
from mpiad.programs.index_maps import IndexMap, broadcast, composed, identity, inverse, long_axes, shifted, to_long, within
from mpiad.programs.schedule import working_in_place

# Kinds of nodes that Python runs ("cuts"), which read and write whole arrays.
_CUTS = frozenset({"communicate", "call"})

# Costs of operations, in units of an addition; `_KEEPING` is the cost of storing an entry and reading it again.
_COSTS = {"divide": 4, "sqrt": 5, "power": 8, "where": 1}
_CALL, _KEEPING = 20, 8
_SIMPLE = frozenset(
    """add subtract multiply negative absolute maximum minimum fmax fmin less less_equal greater greater_equal equal
    not_equal logical_and logical_or logical_not invert square positive fabs sign cast truth conjugate isnan isfinite isinf
    at_least at_most""".split()
)
# Limits of an expression: its depth, and the numbers of arrays and eras (see `_era`) that it reads. Iterations in `kept`.
_DEEPEST, _MOST_LEAVES, _MOST_ERAS, _ROUNDS = 120, 12, 6, 4


class _Use(NamedTuple):
    # A read of a node in a loop.
    cut: float  # index of the cut before which the loop runs
    shape: Shape  # index space of the loop
    map: IndexMap  # from the loop's indices to those of the node


class Materialization:
    """Decides which arrays are kept in memory."""

    def __init__(self, program: ArrayProgram):
        self.program, self.nodes = program, program.nodes
        self.needed = program.needed()
        self.cuts = [n for n in self.needed if self.nodes[n].kind in _CUTS]
        self.users: dict[int, list[int]] = {}  # for each node, the needed nodes that read it
        for n in self.needed:
            for x in self.nodes[n].inputs:
                self.users.setdefault(x, []).append(n)
        self.anchored: set[int] = set()  # operands of cuts, stored before the cuts; outputs, stored at the end of a part

    def kept(self) -> set[int]:
        """Return the nodes that are kept in memory, except those whose kind is always in memory."""
        forced = kept = self._forced()
        # A fixed-point iteration: the costs depend on the kept nodes, and the decision which nodes to keep on the costs.
        for _ in range(_ROUNDS):
            costs, leaves, long = self._costs(kept)
            kept = self._decided_by(forced | long, costs, leaves)
        return kept

    def _decided_by(self, forced: set[int], costs: dict[int, int], leaves: dict[int, int]) -> set[int]:
        position = {n: k for k, n in enumerate(self.cuts)}
        uses: dict[int, set[_Use]] = {n: set() for n in self.needed}
        kept: set[int] = set()
        before = [sum(self.nodes[n].part <= part for n in self.cuts) for part in range(len(self.program.ends))]
        for place, n in enumerate(self.program.outputs):
            # Outputs are read between the last cut of their part and the next cut.
            part = bisect(self.program.ends, place)
            at = before[part] - 0.5 if part < len(before) else len(self.cuts)
            uses[n].add(_Use(at, long_axes(self.nodes[n].shape), to_long(self.nodes[n].shape)))
        for n in reversed(self.needed):
            node = self.nodes[n]
            if node.kind in IN_MEMORY:
                at = position.get(n)
                for x in node.inputs if at is not None else ():
                    shape = self.nodes[x].shape
                    uses[x].add(_Use(at, long_axes(shape), to_long(shape)))  # type: ignore[arg-type]
                continue
            is_cheap = len(uses[n]) < 2 or node.kind in ("number", "view", "join")
            repeated = 0 if is_cheap else (_times(node.shape, uses[n]) - 1) * (costs[n] + leaves[n] - 1)
            if n in forced or repeated > _KEEPING:
                kept.add(n)
                cut = min((use.cut for use in uses[n]), default=len(self.cuts)) if n in self.anchored else self._era(n)
                shape = self.nodes[node.inputs[0]].shape if node.kind in ("reduce", "reshape") else node.shape
                uses[n] = {_Use(cut, long_axes(shape), to_long(shape))}
            for x, map in reads_of(self.program, node):
                uses[x].update([use._replace(map=composed(map, use.map)) for use in uses[n]])
        return kept

    def _era(self, n: int) -> int:
        """Return the index of the first cut after a node: the era in which it is computed."""
        return bisect(self.cuts, n)

    def _costs(self, forced: set[int]) -> tuple[dict[int, int], dict[int, int], set[int]]:
        """Return the cost of an entry of each node, the number of arrays that it reads, and further nodes to be kept.

        The further nodes are deep expressions, and nodes that read arrays of many eras, such as a sum over all time steps.
        Otherwise all these arrays would have to stay in memory.
        """
        costs: dict[int, int] = {}
        sets: dict[int, frozenset[int]] = {}
        deep: dict[int, int] = {}
        eras: dict[int, frozenset[int]] = {}
        long: set[int] = set()
        for n in self.needed:
            node = self.nodes[n]
            if node.kind in IN_MEMORY:
                costs[n], sets[n], deep[n] = 0, frozenset([n]), 0
                eras[n] = frozenset() if node.kind in ("input", "constant") else frozenset([self._era(n)])
                continue
            stored = [x for x in node.inputs if x in forced or x in long]
            computed = [x for x in node.inputs if x not in forced and x not in long]
            costs[n] = sum(costs[x] for x in computed) + (self._own_cost(node) if node.kind == "elementwise" else 0)
            found = frozenset(stored).union(*(sets[x] for x in computed))
            sets[n] = found if len(found) <= _MOST_LEAVES else frozenset(sorted(found)[:_MOST_LEAVES])
            deep[n] = 1 + max((deep[x] for x in computed), default=0)
            eras[n] = frozenset(map(self._era, stored)).union(*(eras[x] for x in computed))
            # Running sums of results or cotangents are kept. Otherwise each step would compute the whole sum again.
            runs_on = self.program.contracts or node.part > 0
            crowded = runs_on and len(found) > _MOST_LEAVES and len(self.users.get(n, ())) > 1
            if node.kind == "elementwise" and (deep[n] > _DEEPEST or len(eras[n]) > _MOST_ERAS or crowded):
                long.add(n)
        return costs, {n: len(found) for n, found in sets.items()}, long

    def _own_cost(self, node: Node) -> int:
        name = node.data[0]
        by = self.nodes[node.inputs[-1]]
        if by.kind == "number" and name in ("divide", "power"):
            return 1 if name == "divide" else 2 if by.data in (2.0, 3.0) else _COSTS[name]
        return _COSTS.get(name, 1 if name in _SIMPLE else _CALL)

    def _forced(self) -> set[int]:
        forced = set()
        joined: dict[int, bool] = {}
        for n in self.needed:
            node = self.nodes[n]
            joined[n] = node.kind not in (*IN_MEMORY, "reduce", "reshape") and (
                node.kind in ("join", "update") or any(joined[x] for x in node.inputs)
            )
            if node.kind == "reduce":
                forced.add(n)
                if joined[node.inputs[0]] and len(node.data[1]) < len(self.nodes[node.inputs[0]].shape):
                    forced.add(node.inputs[0])
            elif node.kind == "reshape":
                forced.update((n, node.inputs[0]))
            elif node.kind == "elementwise":
                own = self.program.precision(n)
                forced.update(x for x in node.inputs if self.program.precision(x) not in (None, own))
            elif node.kind in _CUTS:
                operator = working_in_place(node)
                for x in node.inputs:
                    self._force(x, self.anchored)
                    if operator is None or not operator.changes_given or self.is_shared(x):
                        self._force(x, forced)
        for n in self.program.outputs:
            self._force(n, forced)
            self._force(n, self.anchored)
        return {n for n in forced if self.nodes[n].kind not in (*IN_MEMORY, "number")}

    def _force(self, n: int, forced: set[int]) -> None:
        """Add a node to `forced`; instead of a join, add its parts; instead of a view of all entries, add its source."""
        node = self.nodes[n]
        if node.kind == "join":
            for x in node.inputs:
                self._force(x, forced)
        elif node.kind == "view" and inverse(node.data, self.nodes[node.inputs[0]].shape, node.shape) is not None:
            self._force(node.inputs[0], forced)
        elif node.kind != "view":
            forced.add(n)

    def is_shared(self, n: int) -> bool:
        """Return whether several nodes read a node, or it is an output."""
        return len(self.users[n]) > 1 or n in self.program.outputs


def _times(shape: Shape, uses: Collection[_Use]) -> int:
    """Return the number of times that loops compute an entry of an array that isn't kept."""
    short = [k for k, n in enumerate(shape) if 1 < n <= SHORT]
    whole, fixed = 0, Counter[tuple[int, ...]]()
    for use in uses:
        places = [use.map[k] for k in short]
        if not short or any(axis.source is not None for axis in places):
            whole += 1
            continue
        along = {axis.source for axis in use.map}
        # An entry is computed for each index along axes of the loop that the array doesn't have.
        fixed[tuple([axis.offset for axis in places])] += math.prod(n for k, n in enumerate(use.shape) if k not in along)
    return min(len(uses), whole + max(fixed.values(), default=0))


def reads_of(program: ArrayProgram, node: Node) -> Iterable[tuple[int, IndexMap]]:
    """Yield the nodes that a node reads, with their index maps."""
    if node.kind == "elementwise":
        for x in node.inputs:
            yield x, broadcast(program.nodes[x].shape, node.shape)
    elif node.kind == "view":
        yield node.inputs[0], node.data
    elif node.kind == "join":
        start = 0
        for x in node.inputs:
            yield x, shifted(identity(len(node.shape)), node.data, -start)
            start += program.nodes[x].shape[node.data]
    elif node.kind == "update":
        base, block = node.inputs
        own = identity(len(node.shape))
        yield base, own
        yield block, within(own, node.data)
    elif node.kind in ("reduce", "reshape"):
        yield node.inputs[0], identity(len(program.nodes[node.inputs[0]].shape))
