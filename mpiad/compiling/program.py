"""`Program`: straight-line arithmetic on scalars, in static single assignment form.

A program is a list of instructions without branches or loops. Each instruction computes one scalar, real or boolean, from
the scalars of preceding instructions. Its index in the list is called the number of its value. Inputs and constants are
also instructions. Inputs belong to groups (such as state and parameters), whose names and sizes the caller chooses.
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

# Folders of code that isn't the user's.
_PATHS, _PACKAGES = sysconfig.get_paths(), (Path(np.__file__).parent, Path(autograd.__file__).parent)
_FOLDERS = _PATHS["stdlib"], _PATHS["purelib"], *_PACKAGES, Path(__file__).parents[1]
_LIBRARIES = tuple(str(Path(folder).resolve()) for folder in _FOLDERS)


class Untraceable(TypeError):
    """Raised if a function can't be traced as straight-line arithmetic; the message names the user's file and line."""

    def __init__(self, reason: str, place: str):
        super().__init__(f"{place}: {reason}")
        self.reason, self.place = reason, place


class Refusal(TypeError):
    """Raised in a traced function by an unsupported operation on a symbol; `trace_program` turns it into `Untraceable`."""


def where_raised(traceback: TracebackType | None, f: object) -> str:
    """Return file and line of the innermost frame of user code in a traceback, or of f's definition if there is none."""
    place = place_of(f)
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not name.startswith(_LIBRARIES) and not str(Path(name).resolve()).startswith(_LIBRARIES):
            place = f"{name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def place_of(f: object) -> str:
    """Return file and line of f's definition, or its repr if it has no code."""
    code = getattr(f, "__code__", None) or getattr(type(f).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(f)


# The name of a group, and an index in it.
Input: TypeAlias = "tuple[str, int]"


class Instruction(NamedTuple):
    """The computation of one value."""

    operation: str  # a name in `OPERATIONS`, "input" or "constant"
    arguments: tuple[int, ...] = ()  # the arguments' numbers, all smaller than this value's number
    # For a constant its value, float or bool; for an input its group and index in the group; None for operations.
    value: float | bool | Input | None = None


class Program:
    """A computation on groups of scalars, immutable and compared by content.

    `groups`: the number of scalars in each group of inputs, including unused ones; their order is the order of positional
    arguments. `instructions`: each follows its arguments. `outputs`: value numbers of the results.
    """

    def __init__(self, groups: Mapping[str, int], instructions: Iterable[Instruction], outputs: Iterable[int]):
        self.groups, self.instructions, self.outputs = dict(groups), tuple(instructions), tuple(outputs)

    @cached_property
    def content(self) -> tuple:
        """The content that is compared: 0 and -0 differ, and NaN equals NaN."""
        instructions = tuple((op, arguments, exact(value)) for op, arguments, value in self.instructions)
        return tuple(self.groups.items()), self.outputs, instructions

    @cached_property
    def numbers(self) -> dict[int, float]:
        """Float constants by value number, without integer and half-integer exponents (see `source.lowered`)."""
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
        """Return the program with some constants of `numbers` replaced by inputs; `groups` has the new sizes."""
        instructions = (Instruction("input", (), inputs[i]) if i in inputs else x for i, x in enumerate(self.instructions))
        return Program({**self.groups, **groups}, instructions, self.outputs)

    @property
    def cost(self) -> int:
        """The number of operations, without inputs and constants."""
        return sum(bool(instruction.arguments) for instruction in self.instructions)

    def reads(self, group: str) -> bool:
        """Return whether the program has an input of this group."""
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


def needed_values(
    instructions: Sequence[Instruction], outputs: Iterable[int], terms: Mapping[int, tuple[int, ...]] | None = None
) -> set[int]:
    """Return the values from which the outputs are computed; `terms` replaces the arguments of some instructions."""
    needed = set(outputs)
    # Arguments precede the values computed from them, so one backward pass finds all needed values.
    for number in range(len(instructions) - 1, -1, -1):
        if number in needed:
            needed.update((terms or {}).get(number, instructions[number].arguments))
    return needed


def is_boolean(instructions: Sequence[Instruction], number: int) -> bool:
    """Return whether the value of an instruction is boolean."""
    operation, arguments, value = instructions[number]
    if operation == "where":
        return is_boolean(instructions, arguments[1])
    return OPERATIONS[operation].boolean if operation in OPERATIONS else isinstance(value, bool)


def exact(value: float | bool | Input | None) -> str:
    """Return a text that differs for different values, including types and signs of zero."""
    return value.hex() if isinstance(value, float) else repr(value)


def evaluated(program: Program, *groups: Sequence[Any] | Array) -> list[Any]:
    """Return the outputs of a program, computed by one NumPy call per operation: the reference for compiled code.

    `groups`: for each group, the values of its inputs, which may be arrays.
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
