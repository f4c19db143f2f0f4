"""Construction and simplification of programs: common subexpressions are shared, and constants are folded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import numpy as np

from mpiad.compiling.operations import OPERATIONS
from mpiad.compiling.program import Input, Instruction, Program, Refusal, exact, is_boolean

# Algebraic simplifications of operations, which don't change a value.
#
# All are exact, NaN and infinity included, but for the sign of a zero: x + 0 is x also if x is -0. So 0 · x stays, and
# so does x - x. The square of a modulus is computed without the root, exact to rounding: |z|² is its usual use in f.


def _inner(builder: Builder, x: int, operation: str) -> int | None:
    """Return the argument of x if x is that operation of one argument, else None."""
    instruction = builder.instructions[x]
    return instruction.arguments[0] if instruction.operation == operation else None


def _add(b: Builder, x: int, y: int) -> int | None:
    if b.value(x) == 0:
        return y
    if b.value(y) == 0:
        return x
    for left, right in ((x, y), (y, x)):
        minus = _inner(b, right, "negative")
        if minus is not None:
            return b.call("subtract", left, minus)
    return None


def _subtract(b: Builder, x: int, y: int) -> int | None:
    if b.value(y) == 0:
        return x
    if b.value(x) == 0:
        return b.call("negative", y)
    minus = _inner(b, y, "negative")
    return None if minus is None else b.call("add", x, minus)


def _square_of_modulus(b: Builder, x: int) -> int | None:
    operation, parts, _ = b.instructions[x]
    return b.call("add", *(b.call("multiply", part, part) for part in parts)) if operation == "modulus" else None


def _multiply(b: Builder, x: int, y: int) -> int | None:
    square = _square_of_modulus(b, x) if x == y else None
    if square is not None:
        return square
    if b.value(y) is not None:
        x, y = y, x
    if b.value(x) == 1:
        return y
    if b.value(x) == -1:
        return b.call("negative", y)
    first, second = _inner(b, x, "negative"), _inner(b, y, "negative")
    if second is not None and b.value(x) is not None:
        return b.call("multiply", b.call("negative", x), second)
    return None if first is None or second is None else b.call("multiply", first, second)


def _divide(b: Builder, x: int, y: int) -> int | None:
    by = b.value(y)
    if by == 1:
        return x
    # The reciprocal of a power of two is exact.
    if by and math.isfinite(by) and abs(math.frexp(by)[0]) == 0.5 and abs(math.log2(abs(by))) < 100:
        return b.call("multiply", x, b.constant(1 / by))
    return None


def _absolute(b: Builder, x: int) -> int | None:
    minus = _inner(b, x, "negative")
    if minus is not None:
        return b.call("absolute", minus)
    return x if _inner(b, x, "absolute") is not None else None


def _logical(decisive: bool) -> Callable[..., int | None]:
    def rule(b: Builder, x: int, y: int) -> int | None:
        for one, other in ((x, y), (y, x)):
            if b.value(one) is not None:
                return one if bool(b.value(one)) is decisive else other
        return x if x == y else None

    return rule


def _where(b: Builder, condition: int, x: int, y: int) -> int | None:
    known = b.value(condition)
    if known is not None:
        return x if known else y
    if x == y:
        return x
    if b.is_boolean(x) and b.value(x) is True and b.value(y) is False:
        return condition
    opposite = _inner(b, condition, "logical_not")
    return None if opposite is None else b.call("where", opposite, y, x)


# For maximum and minimum.
def _same(b: Builder, x: int, y: int) -> int | None:
    return x if x == y else None


# 0^0 is 1 and so is NaN^0.
def _power(b: Builder, x: int, y: int) -> int | None:
    exponent = b.value(y)
    if exponent == 0:
        return b.constant(1.0)
    if exponent == 2:
        return _square_of_modulus(b, x)
    return x if exponent == 1 else None


_RULES: dict[str, Callable[..., int | None]] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "divide": _divide,
    "negative": lambda b, x: _inner(b, x, "negative"),
    "absolute": _absolute,
    "logical_not": lambda b, x: _inner(b, x, "logical_not"),
    "logical_and": _logical(False),
    "logical_or": _logical(True),
    "where": _where,
    "maximum": _same,
    "minimum": _same,
    "fmax": _same,
    "fmin": _same,
    "power": _power,
}


# Far more than registers hold, and still quick to trace.
_MOST = 50_000


class Builder:
    """Makes a program, instruction by instruction.

    `refused` (or None): the first reason for which the program can't be made, kept in case f catches the exception.
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
        """Return the numbers of the real and the imaginary part of a complex value, None if it is real."""
        instruction = self.instructions[number]
        return instruction.arguments if instruction.operation == "complex" else None

    def call(self, operation: str, *arguments: int) -> int:
        """Return the number of an operation's value, or of a simpler one that equals it."""
        rule = _RULES.get(operation)
        simpler = None if rule is None else rule(self, *arguments)
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
        """Return the value of a constant, None if it isn't one."""
        instruction = self.instructions[number]
        return instruction.value if instruction.operation == "constant" else None  # type: ignore[return-value]

    def is_boolean(self, number: int) -> bool:
        """Return whether a value is boolean."""
        return is_boolean(self.instructions, number)

    def program(self, groups: Mapping[str, int], outputs: Sequence[int]) -> Program:
        """Return the program of some outputs, without the values that they don't need."""
        # Arguments precede the values computed from them, so one pass from the end finds all that is needed.
        needed = set(outputs)
        for number in range(len(self.instructions) - 1, -1, -1):
            if number in needed:
                needed.update(self.instructions[number].arguments)
        new = {old: place for place, old in enumerate(sorted(needed))}
        kept = (self.instructions[old] for old in new)
        moved = [Instruction(op, tuple(new[i] for i in arguments), value) for op, arguments, value in kept]
        return Program(groups, moved, [new[i] for i in outputs])

    def _number(self, instruction: Instruction) -> int:
        # Not the instruction itself, since 0 == -0, 1 == True, and NaN != NaN.
        key = (instruction.operation, instruction.arguments, exact(instruction.value))
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.instructions)
            if number >= _MOST:
                self.refuse(f"it has more than {_MOST} operations on scalars")
            self.instructions.append(instruction)
        return number


def simplify(program: Program, known: Mapping[Input, float] | None = None) -> Program:
    """Return a program of the same values with less to compute, simplified by `Builder.call`.

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
