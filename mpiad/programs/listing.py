"""A compiled program as text: its operations with the user's lines, its loops, its messages."""

from __future__ import annotations

import math
from typing import Any

from mpiad.programs.array_program import Call, Node
from mpiad.programs.replay import Replays
from mpiad.programs.schedule import Loop


class Listing:
    """What a compiled function does, step by step; ``print(jit(f).program(x))`` shows it.

    Attributes
    ----------
    operations : str
        The arrays in the order of the source, each with what it is made of and the user's line.
    loops : str
        The loops and calls that compute them, with what was fused and the bytes that are read and written.
    kernels : list of str
        The loops' texts.
    """

    def __init__(self, name: str, replays: Replays):
        self._name, self._replays = name, replays
        self._nodes: list[Node] = replays.schedule.program.nodes

    @property
    def operations(self) -> str:
        """The arrays, one a line."""
        lines = []
        for n in self._replays.schedule.program.needed():
            node = self._nodes[n]
            what = f"{_name_of(node)}({', '.join(f'%{x}' for x in node.inputs)})"
            lines.append(f"{f'%{n}: {node.dtype}{list(node.shape)} = {what}':72}  {_line(node)}".rstrip())
        return "\n".join(lines)

    @property
    def loops(self) -> str:
        """The loops and calls, one a line."""
        schedule, lines = self._replays.schedule, []
        for step, text in zip(schedule.steps, self._replays.texts):
            if isinstance(step, Loop):
                copies = [item.copies for item in step.items]
                made = ", ".join(f"%{item.node}{' (copy)' * copy}" for item, copy in zip(step.items, copies))
                loaded = {b for b, _ in text.loads} & set(text.buffers)  # type: ignore[union-attr]
                read, written = (sum(map(self._bytes, part)) for part in (loaded, text.written))  # type: ignore[union-attr]
                where = " in place" * bool(text.over)  # type: ignore[union-attr]
                lines.append(f"loop over {list(step.shape)}: {made}; reads {read} bytes, writes {written}{where}")
            else:
                node = self._nodes[step.node]
                lines.append(f"{_name_of(node)} -> %{step.node}{' in place' * step.in_place}  {_line(node)}")
        return "\n".join(lines)

    @property
    def kernels(self) -> list[str]:
        """The texts of the loops."""
        return [text.text for text in self._replays.texts if text is not None]

    def _bytes(self, b: int) -> int:
        found = self._replays.schedule.buffers[b]
        return math.prod(found.shape) * found.dtype.itemsize

    def __str__(self) -> str:
        return f"program of {self._name}\n{self.operations}\n\n{self.loops}"


def _line(node: Node) -> str:
    return "" if node.site is None else f"{node.site.text}"


def _name_of(node: Node) -> str:
    if node.kind == "elementwise":
        return node.data[0]
    if isinstance(node.data, Call):
        fun: Any = node.data.fun
        return getattr(fun, "__name__", repr(fun))
    if node.kind == "reduce":
        return f"{node.data[0]} over {list(node.data[1])}"
    return f"{node.kind} {node.data}" if node.kind == "number" else node.kind
