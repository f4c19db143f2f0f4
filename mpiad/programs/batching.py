"""Programs of several reverse passes that run together ("lanes").

A backward program is linear in the cotangents. `Batched` derives a program in which the cotangents, and all arrays that
depend on them, have a first axis for the lanes.

A communication takes the arrays of all lanes at once if it does so without a program (`Step.combined`). Otherwise it is
made once per lane, as without a program, since other ranks may run theirs without one. A function that NumPy runs on whole
arrays is called once per lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array, Shape
from mpiad.programs.array_program import COMPUTED, ArrayProgram, Node, Slot, broadcast, with_lanes
from mpiad.programs.device_replay import replays_of
from mpiad.programs.message_numbers import is_numbered
from mpiad.programs.traced_array import Step, mapped


class Batched:
    """A program of some reverse passes for several lanes; raises a NotImplementedError if there is no such program."""

    def __init__(self, program: ArrayProgram, residuals: int, lanes: int):
        self.old, self.lanes, self.program = program, lanes, ArrayProgram()
        self.numbers: dict[int, int] = {}  # of the nodes in the new program
        self.with_lanes = set(program.inputs[residuals:])  # nodes that depend on the cotangents
        # The nodes of all lanes, for sends, which have no result, and for requests.
        self._of_lanes: dict[int, list[int]] = {}
        self.program.constants = program.constants
        for n in program.inputs:
            node = program.nodes[n]
            if node.dtype == object:
                raise NotImplementedError
            shape = (lanes, *node.shape) if n in self.with_lanes else node.shape
            self.numbers[n] = self.program.input(shape, node.dtype)
            self._weaken(n)
        for n in program.needed():
            if n not in self.numbers:
                node = program.nodes[n]
                self.program.site = node.site
                self.numbers[n] = self._node(n, node)
                self._weaken(n)
        self.program.outputs = list(map(self._over_lanes, program.outputs))
        self.program.device = program.device
        self.replays = replays_of(self.program)

    def _weaken(self, n: int) -> None:
        if n in self.old.weak:
            if n in self.with_lanes:
                raise NotImplementedError
            self.program.weak.add(self.numbers[n])

    def _over_lanes(self, n: int) -> int:
        """Return an array with lanes, which are equal if it doesn't depend on the seeds."""
        x, node = self.numbers[n], self.old.nodes[n]
        if n in self.with_lanes:
            return x
        if node.dtype not in COMPUTED:
            raise NotImplementedError
        shape = (self.lanes, *node.shape)
        return self.program.view(x, broadcast(node.shape, shape), shape)

    def _node(self, n: int, node: Node) -> int:
        """Append the node for all lanes, or a copy of the node if it doesn't depend on the seeds."""
        inputs = [self.numbers[x] for x in node.inputs]
        if node.kind != "communicate" and not any(x in self.with_lanes for x in node.inputs):
            return self.program.add(node.kind, inputs, node.shape, node.dtype, node.data)
        self.with_lanes.add(n)
        program, shape = self.program, (self.lanes, *node.shape)
        if node.kind == "elementwise":
            self._store([self.numbers[x] for x in node.inputs if x not in self.with_lanes])
            for k, x in enumerate(node.inputs):
                if x in self.with_lanes:  # axes of length 1 after the lanes, so that it is broadcast
                    own = self.old.nodes[x].shape
                    inputs[k] = program.reshape(inputs[k], (self.lanes, *[1] * (len(node.shape) - len(own)), *own))
            return program.add("elementwise", inputs, shape, node.dtype, node.data)
        if node.kind == "view":
            return program.view(inputs[0], with_lanes(node.data), shape)
        if node.kind == "gather":
            reads, axis = node.data
            return program.add("gather", inputs, shape, node.dtype, (with_lanes(reads), axis + 1))
        if node.kind == "segment_sum":
            return program.add("segment_sum", inputs, shape, node.dtype, node.data + 1)
        if node.kind == "reshape":
            return program.reshape(inputs[0], shape)
        if node.kind == "join":
            return program.join([self._over_lanes(x) for x in node.inputs], node.data + 1)
        if node.kind == "update":
            whole, block = map(self._over_lanes, node.inputs)
            return program.update(whole, block, (0, *node.data))
        if node.kind == "reduce":
            name, axes = node.data
            return program.add("reduce", inputs, shape, node.dtype, (name, tuple([axis + 1 for axis in axes])))
        if node.kind == "communicate":
            return self._communication(n, node, shape)
        if node.kind != "call":
            raise NotImplementedError
        step = _per_lane(node.data, [x in self.with_lanes for x in node.inputs], self.lanes)
        return program.add("call", inputs, shape, node.dtype, step)

    def _store(self, operands: list[int]) -> None:
        """Keep operands without lanes in memory: otherwise a loop would compute them once per lane."""
        while operands:
            node = self.program.nodes[x := operands.pop()]
            if node.kind == "elementwise":
                self.program.stored.add(x)
            elif node.kind in ("view", "join", "update"):
                operands += node.inputs

    def _communication(self, n: int, node: Node, shape: Shape) -> int:
        call: Step = node.data
        if call.kind not in ("communicate", "operate") or node.dtype not in COMPUTED and node.dtype != object:
            raise NotImplementedError
        if not call.combined:
            return self._communication_per_lane(n, node)
        first, *others = node.inputs or (-1,)
        if call.args[:1] != (Slot(0),) or node.dtype == object or call.kind == "communicate" and is_numbered(call.args[1]):
            raise NotImplementedError
        # The cotangent of a result on which nothing depends is the number zero. Interpreted lanes send it per lane, too.
        is_zero = first not in self.with_lanes and self.old.nodes[first].kind == "number"
        if any(x in self.with_lanes for x in others) or not (is_zero or first in self.with_lanes):
            raise NotImplementedError
        inputs = [self._over_lanes(first), *[self.numbers[x] for x in others]]
        return self.program.add("communicate", inputs, shape, node.dtype, call)

    def _communication_per_lane(self, n: int, node: Node) -> int:
        program, made = self.program, list[int]()
        for lane in range(self.lanes):
            inputs = [self._of_lane(x, lane) for x in node.inputs]
            made.append(program.add("communicate", inputs, node.shape, node.dtype, node.data))
        if node.dtype == object:
            self._of_lanes[n] = made
            return made[0]
        return program.join([program.reshape(x, (1, *node.shape)) for x in made], 0)

    def _of_lane(self, n: int, lane: int) -> int:
        if n not in self.with_lanes:
            return self.numbers[n]
        if n in self._of_lanes:
            return self._of_lanes[n][lane]
        return self.program.reshape(self.program.slice(self.numbers[n], 0, lane, lane + 1), self.old.nodes[n].shape)


def _per_lane(call: Step, with_lanes: Sequence[bool], lanes: int) -> Step:
    """Return a call that makes the given call once per lane, and stacks the results."""

    def called(*arrays: Array) -> Array:
        def of_lane(x: Any, lane: int) -> Any:
            if not isinstance(x, Slot):
                return x
            return arrays[x.place][lane] if with_lanes[x.place] else arrays[x.place]

        made = []
        for lane in range(lanes):
            args, kwargs = (mapped(part, lambda x: of_lane(x, lane)) for part in (call.args, call.kwargs))  # noqa: B023
            made.append(call.fun(*args, **kwargs))
        return np.stack(made)

    called.__name__ = getattr(call.fun, "__name__", "call")
    return call._replace(fun=called, args=tuple([Slot(k) for k in range(len(with_lanes))]), kwargs={})
