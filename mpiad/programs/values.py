"""Nodes among the arguments of a step."""

from __future__ import annotations

from typing import Any

from mpiad.programs.array_program import ArrayProgram

__all__ = ["Opaque", "Value", "axes_of"]


class Opaque(Exception):
    """Report that a step isn't taken apart."""


class Value:
    """A node among the arguments of a step."""

    __slots__ = ("dtype", "number", "shape")

    def __init__(self, program: ArrayProgram, number: int):
        node = program.nodes[number]
        self.number, self.shape, self.dtype = number, node.shape, node.dtype


def axes_of(axis: Any, ndim: int) -> set[int]:
    """Return the axes that NumPy means by one or several."""
    return {int(k) % ndim for k in (axis if isinstance(axis, (tuple, list)) else (axis,))}
