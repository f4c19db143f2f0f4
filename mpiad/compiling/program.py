"""Straight-line arithmetic in static single assignment: each value has a number and is computed once.

A program has no branches and no loops: its values are scalars, real or boolean, each computed from values before it.
Inputs and constants are instructions of kinds of their own, so that a program is one list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from mpiad.compiling.operations import OPERATIONS

__all__ = ["INPUTS", "Instruction", "Program"]

# The kinds of instruction without arguments, beside "constant"; the value says which one.
INPUTS = ("state", "parameter", "time", "seed")


class Instruction(NamedTuple):
    """One value.

    Parameters
    ----------
    operation : str
        A name of the catalogue, or "state", "parameter", "time", "seed" or "constant".
    arguments : tuple of int
        Numbers of the values that it is computed from, all smaller than its own.
    value : float, bool or int, optional
        Of a constant; of an input its place. Time has none.
    """

    operation: str
    arguments: tuple[int, ...] = ()
    value: float | bool | int | None = None


class Program:
    """What is computed from a state, parameters, time, and seeds (cotangents or tangents).

    It can't be changed. Two programs of equal digest compute the same.

    Parameters
    ----------
    states, parameters, seeds : int
        How many scalars of each kind may occur as inputs.
    instructions : iterable of Instruction
        In an order in which they can be computed.
    outputs : iterable of int
        Numbers of the values that are wanted.

    Attributes
    ----------
    states, parameters, seeds : int
    instructions : tuple of Instruction
    outputs : tuple of int
    """

    def __init__(
        self, states: int, parameters: int, instructions: Iterable[Instruction], outputs: Iterable[int], seeds: int = 0
    ):
        self.states, self.parameters, self.seeds = states, parameters, seeds
        self.instructions, self.outputs = tuple(instructions), tuple(outputs)

    @cached_property
    def content(self) -> tuple:
        """All that it consists of, by which programs are compared: 0 and -0 differ, and NaN is itself."""
        instructions = tuple((op, arguments, exact(value)) for op, arguments, value in self.instructions)
        return self.states, self.parameters, self.seeds, self.outputs, instructions

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, the same in all processes."""
        text = [f"{self.states} {self.parameters} {self.seeds} {self.outputs}"]
        text += [f"{op} {arguments} {exact(value)}" for op, arguments, value in self.instructions]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()

    @property
    def cost(self) -> int:
        """The number of operations, inputs and constants not counted."""
        return sum(bool(instruction.arguments) for instruction in self.instructions)

    def is_boolean(self, number: int) -> bool:
        """Tell whether a value is boolean."""
        operation, arguments, value = self.instructions[number]
        if operation == "where":
            return self.is_boolean(arguments[1])
        return OPERATIONS[operation].boolean if operation in OPERATIONS else isinstance(value, bool)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Program) and self.content == other.content)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.content)

    def __repr__(self) -> str:
        return f"<Program of {self.cost} operations, {self.digest[:12]}>"


def exact(value: float | bool | int | None) -> str:
    """Return a text that two values share only where they are the same number of the same kind, the sign of 0 included."""
    return value.hex() if isinstance(value, float) else repr(value)
