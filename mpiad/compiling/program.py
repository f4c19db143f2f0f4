"""Straight-line arithmetic in static single assignment: each value has a number and is computed once.

A program has no branches and no loops: its values are scalars, real or boolean, each computed from values before it.
Its inputs are in groups (a state, parameters, seeds), whose names and sizes are the caller's choice. Inputs and constants
are instructions, too, so that a program is one list.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import autograd
import numpy as np

from mpiad._typing import Array
from mpiad.compiling.operations import OPERATIONS

# Errors for an f that can't be compiled, with the line.


# Frames below these folders are not the user's own.
_PATHS, _PACKAGES = sysconfig.get_paths(), (Path(np.__file__).parent, Path(autograd.__file__).parent)
_FOLDERS = _PATHS["stdlib"], _PATHS["purelib"], *_PACKAGES, Path(__file__).parents[1]
_LIBRARIES = tuple(str(Path(folder).resolve()) for folder in _FOLDERS)


class Untraceable(TypeError):
    """Report an f that can't be turned into straight-line arithmetic, with the user's file and line."""

    def __init__(self, reason: str, place: str):
        super().__init__(f"{place}: {reason}")
        self.reason, self.place = reason, place


class Refusal(TypeError):
    """Leave f when it asks a symbol for something unsupported; `trace` makes an `Untraceable` of it."""


def where_raised(traceback: TracebackType | None, f: object) -> str:
    """Return the innermost line of the user's in a traceback, else the place of f."""
    place = place_of(f)
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not name.startswith(_LIBRARIES) and not str(Path(name).resolve()).startswith(_LIBRARIES):
            place = f"{name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def place_of(f: object) -> str:
    """Return the file and line of f's definition, or its name if it has none."""
    code = getattr(f, "__code__", None) or getattr(type(f).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(f)


# The name of a group, and a place in it.
Input: TypeAlias = "tuple[str, int]"


class Instruction(NamedTuple):
    """One value."""

    operation: str  # a name of the catalogue, or "input" or "constant"
    arguments: tuple[int, ...] = ()  # numbers of the values that it is computed from, all smaller than its own
    # Value of a constant, float or bool; for an input its group and its place in it; else None.
    value: float | bool | Input | None = None


class Program:
    """A computation on groups of scalars.

    It can't be changed. Two programs of equal content are equal, and compute the same.

    `groups`: the number of scalars in each group of inputs; they may occur or not. Groups given without their
    names come in this order. `instructions`: in an order in which they can be computed. `outputs`: numbers of the
    result values.
    """

    def __init__(self, groups: Mapping[str, int], instructions: Iterable[Instruction], outputs: Iterable[int]):
        self.groups, self.instructions, self.outputs = dict(groups), tuple(instructions), tuple(outputs)

    @cached_property
    def content(self) -> tuple:
        """Its content, by which programs are compared: 0 and -0 differ, and NaN equals NaN."""
        instructions = tuple((op, arguments, exact(value)) for op, arguments, value in self.instructions)
        return tuple(self.groups.items()), self.outputs, instructions

    @cached_property
    def numbers(self) -> dict[int, float]:
        """Constants that are numbers, by those of their instructions; without exponents that become products and roots."""
        exponents = {x.arguments[1] for x in self.instructions if x.operation == "power"}
        constants = ((i, x.value) for i, x in enumerate(self.instructions) if x.operation == "constant")
        found = {i: value for i, value in constants if isinstance(value, float)}
        return {i: value for i, value in found.items() if i not in exponents or not (2 * value).is_integer()}

    @cached_property
    def structure(self) -> tuple:
        """The content without `numbers`."""
        kept = (None if i in self.numbers else x for i, x in enumerate(self.instructions))
        return tuple(self.groups.items()), self.outputs, tuple(kept)

    def with_inputs(self, inputs: Mapping[int, Input], groups: Mapping[str, int]) -> Program:
        """Return the program with some `numbers` replaced by inputs, in groups that are longer by as many."""
        made = (Instruction("input", (), inputs[i]) if i in inputs else x for i, x in enumerate(self.instructions))
        return Program({**self.groups, **groups}, made, self.outputs)

    @property
    def cost(self) -> int:
        """The number of operations, inputs and constants not counted."""
        return sum(bool(instruction.arguments) for instruction in self.instructions)

    def reads(self, group: str) -> bool:
        """Return whether an input of a group occurs."""
        return any(op == "input" and value[0] == group for op, _, value in self.instructions)  # type: ignore[index]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Program) and self.content == other.content)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.content)

    def __repr__(self) -> str:
        return f"<Program of {self.cost} operations>"


def is_boolean(instructions: Sequence[Instruction], number: int) -> bool:
    """Return whether the value of an instruction is boolean."""
    operation, arguments, value = instructions[number]
    if operation == "where":
        return is_boolean(instructions, arguments[1])
    return OPERATIONS[operation].boolean if operation in OPERATIONS else isinstance(value, bool)


def exact(value: float | bool | Input | None) -> str:
    """Return a text that two values share only if they are the same number of the same kind, the sign of 0 included."""
    return value.hex() if isinstance(value, float) else repr(value)


def evaluated(program: Program, *groups: Sequence[Any] | Array) -> list[Any]:
    """Return the outputs of a program by NumPy, one operation after the other: the reference for compiled forms.

    Each group has one entry per input; arrays of one shape represent many evaluations.
    """
    inputs = dict(zip(program.groups, groups, strict=True))
    values: list[Any] = []
    with np.errstate(all="ignore"):
        for operation, arguments, value in program.instructions:
            if operation == "constant":
                values.append(value)
            elif operation == "input":
                group, place = value  # type: ignore[misc]
                values.append(inputs[group][place])
            else:
                values.append(OPERATIONS[operation].function(*(values[i] for i in arguments)))
    return [values[i] for i in program.outputs]
