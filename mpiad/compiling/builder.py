"""Programs under construction: nothing is computed twice, and constants are folded; programs rebuilt with less in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import numpy as np

from mpiad.compiling.identities import identity
from mpiad.compiling.operations import OPERATIONS
from mpiad.compiling.program import Input, Instruction, Program, exact, is_boolean
from mpiad.compiling.trace_errors import Refusal

# Far more than registers hold, and still quick to trace.
_MOST = 50_000


class Builder:
    """Makes a program, instruction by instruction.

    `refused` (or None): the first reason why the program can't be made, kept in case that f catches the exception.
    """

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.refused: str | None = None
        self._known: dict[tuple, int] = {}

    def refuse(self, reason: str) -> NoReturn:
        """Leave f by a Refusal."""
        self.refused = self.refused or reason
        raise Refusal(reason)

    def constant(self, value: float | bool) -> int:
        """Return the number of a constant, real or boolean."""
        return self._number(Instruction("constant", (), value if isinstance(value, bool) else float(value)))

    def input(self, group: str, place: int = 0) -> int:
        """Return the number of an input."""
        return self._number(Instruction("input", (), (group, place)))

    def pair(self, real: int, imag: int) -> int:
        """Return the number of a complex value. It stands for its parts, and no program has it."""
        return self._number(Instruction("complex", (real, imag)))

    def parts(self, number: int) -> tuple[int, ...] | None:
        """Return the numbers of the real and the imaginary part of a complex value, None where it is real."""
        instruction = self.instructions[number]
        return instruction.arguments if instruction.operation == "complex" else None

    def call(self, operation: str, *arguments: int) -> int:
        """Return the number of an operation's value, simplified where that is possible."""
        simpler = identity(self, operation, arguments)
        if simpler is not None:
            return simpler
        values = [self.value(argument) for argument in arguments]
        if None not in values:
            with np.errstate(all="ignore"):
                return self.constant(OPERATIONS[operation].function(*values).item())
        # So that x y and y x are one value.
        if OPERATIONS[operation].commutes:
            arguments = tuple(sorted(arguments))
        return self._number(Instruction(operation, arguments))

    def value(self, number: int) -> float | bool | None:
        """Return the value of a constant, None where it isn't one."""
        instruction = self.instructions[number]
        return instruction.value if instruction.operation == "constant" else None  # type: ignore[return-value]

    def is_boolean(self, number: int) -> bool:
        """Tell whether a value is boolean."""
        return is_boolean(self.instructions, number)

    def program(self, groups: Mapping[str, int], outputs: Sequence[int]) -> Program:
        """Return the program of some outputs, without what they don't need."""
        # Arguments come before what is made of them, so one pass from the end finds all that is needed.
        needed = set(outputs)
        for number in range(len(self.instructions) - 1, -1, -1):
            if number in needed:
                needed.update(self.instructions[number].arguments)
        new = {old: place for place, old in enumerate(sorted(needed))}
        kept = (self.instructions[old] for old in new)
        moved = [Instruction(op, tuple(new[i] for i in arguments), value) for op, arguments, value in kept]
        return Program(groups, moved, [new[i] for i in outputs])

    def _number(self, instruction: Instruction) -> int:
        # Not the instruction itself, for which 0 is -0, 1 is True, and NaN nothing at all.
        key = (instruction.operation, instruction.arguments, exact(instruction.value))
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.instructions)
            if number >= _MOST:
                self.refuse(f"it has more than {_MOST} operations on scalars")
            self.instructions.append(instruction)
        return number


def simplify(program: Program, known: Mapping[Input, float] | None = None) -> Program:
    """Return a program of the same values with less to compute; `identities` says which changes are made.

    `known` has the values of inputs that are known, by groups and places; the places of the others stay as they are.
    """
    builder = Builder()
    new = copied(builder, program, known)
    return builder.program(program.groups, [new[output] for output in program.outputs])


def copied(
    builder: Builder, program: Program, known: Mapping[Input, float] | None = None, call: Callable[..., int] | None = None
) -> list[int]:
    """Write a program's instructions into a builder, operations by `call`, and return their new numbers."""
    new, call = list[int](), call or builder.call
    for operation, arguments, value in program.instructions:
        if operation == "constant":
            new.append(builder.constant(value))  # type: ignore[arg-type]
        elif operation == "input":
            given = (known or {}).get(value)  # type: ignore[arg-type]
            new.append(builder.input(*value) if given is None else builder.constant(float(given)))  # type: ignore[misc]
        else:
            new.append(call(operation, *(new[i] for i in arguments)))
    return new
