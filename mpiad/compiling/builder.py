"""Construction and simplification of programs: common subexpression elimination, constant folding, identities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import numpy as np

from mpiad.compiling.operations import OPERATIONS
from mpiad.compiling.program import Input, Instruction, Program, Refusal, exact, is_boolean, needed_values

# Algebraic simplifications.
#
# They are exact, also for NaN and infinity, with two exceptions. The sign of a zero may change: x + 0 becomes x, and 0 - x
# becomes -x. |z|², frequent in users' functions, is computed without a square root, so rounding differs. 0 · x and x - x
# aren't simplified, since they are NaN if x is NaN or infinite.


def _inner(builder: Builder, x: int, operation: str) -> int | None:
    """Return the argument if x is the result of the unary `operation`, else None."""
    instruction = builder.instructions[x]
    return instruction.arguments[0] if instruction.operation == operation else None


def _add(b: Builder, x: int, y: int) -> int | None:
    if b.value(x) == 0:
        return y
    if b.value(y) == 0:
        return x
    for left, right in ((x, y), (y, x)):
        negated = _inner(b, right, "negative")
        if negated is not None:
            return b.call("subtract", left, negated)
    return None


def _subtract(b: Builder, x: int, y: int) -> int | None:
    if b.value(y) == 0:
        return x
    if b.value(x) == 0:
        return b.call("negative", y)
    negated = _inner(b, y, "negative")
    return None if negated is None else b.call("add", x, negated)


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
    divisor = b.value(y)
    if divisor == 1:
        return x
    # The reciprocal of a power of two is exact.
    if divisor and math.isfinite(divisor) and abs(math.frexp(divisor)[0]) == 0.5 and abs(math.log2(abs(divisor))) < 100:
        return b.call("multiply", x, b.constant(1 / divisor))
    return None


def _absolute(b: Builder, x: int) -> int | None:
    negated = _inner(b, x, "negative")
    if negated is not None:
        return b.call("absolute", negated)
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


def _power(b: Builder, x: int, y: int) -> int | None:
    exponent = b.value(y)
    if exponent == 0:  # also for NaN, whose power 0 is 1
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
    **dict.fromkeys(("maximum", "minimum", "fmax", "fmin"), lambda b, x, y: x if x == y else None),
    "power": _power,
}

# The maximum number of operations limits the time of a trace.
_MAX_OPERATIONS = 50_000


class Builder:
    """A program under construction. The number of a value is the index of the instruction that computes it.

    `refused`: the first reason why the traced function can't be compiled, or None. The reason is stored, since the function
    may catch the exception that reports it.
    """

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.refused: str | None = None
        self._known: dict[tuple, int] = {}

    def refuse(self, reason: str) -> NoReturn:
        """Store the reason if it is the first one, and raise a Refusal."""
        self.refused = self.refused or reason
        raise Refusal(reason)

    def constant(self, value: float | bool) -> int:
        """Return the number of a constant, real or boolean."""
        return self._number(Instruction("constant", (), value if isinstance(value, bool) else float(value)))

    def input(self, group: str, place: int = 0) -> int:
        """Return the number of an input."""
        return self._number(Instruction("input", (), (group, place)))

    def pair(self, real: int, imag: int) -> int:
        """Return the number of a complex value; finished programs contain only the values of its parts."""
        return self._number(Instruction("complex", (real, imag)))

    def parts(self, number: int) -> tuple[int, ...] | None:
        """Return the numbers of the real and the imaginary part of a value; None if the value is real."""
        instruction = self.instructions[number]
        return instruction.arguments if instruction.operation == "complex" else None

    def call(self, operation: str, *arguments: int) -> int:
        """Return the number of an operation's value, after simplification."""
        rule = _RULES.get(operation)
        simpler = None if rule is None else rule(self, *arguments)
        if simpler is not None:
            return simpler
        values = [self.value(argument) for argument in arguments]
        if None not in values:
            with np.errstate(all="ignore"):
                return self.constant(OPERATIONS[operation].function(*values).item())
        # x + y and y + x are the same value.
        if OPERATIONS[operation].commutes:
            arguments = tuple(sorted(arguments))
        return self._number(Instruction(operation, arguments))

    def value(self, number: int) -> float | bool | None:
        """Return the value of a constant, or None for a value that isn't constant."""
        instruction = self.instructions[number]
        return instruction.value if instruction.operation == "constant" else None  # type: ignore[return-value]

    def is_boolean(self, number: int) -> bool:
        """Return whether a value is boolean."""
        return is_boolean(self.instructions, number)

    def program(self, groups: Mapping[str, int], outputs: Sequence[int]) -> Program:
        """Return the program that computes the values with the numbers `outputs`, without unused values."""
        new = {old: place for place, old in enumerate(sorted(needed_values(self.instructions, outputs)))}
        kept = (self.instructions[old] for old in new)
        moved = [Instruction(op, tuple(new[i] for i in arguments), value) for op, arguments, value in kept]
        return Program(groups, moved, [new[i] for i in outputs])

    def _number(self, instruction: Instruction) -> int:
        # The constants themselves can't be keys, since 0 == -0, 1 == True, and NaN != NaN.
        key = (instruction.operation, instruction.arguments, exact(instruction.value))
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.instructions)
            if number >= _MAX_OPERATIONS:
                self.refuse(f"it has more than {_MAX_OPERATIONS} operations on scalars")
            self.instructions.append(instruction)
        return number


def simplify(program: Program, known: Mapping[Input, float] | None = None) -> Program:
    """Return a program with the same outputs, simplified by `Builder.call`.

    `known`: values of some inputs, by group and index, which become constants. The other inputs keep their indices.
    """
    builder = Builder()
    new = copy_program(builder, program, known)
    return builder.program(program.groups, [new[output] for output in program.outputs])


def copy_program(
    builder: Builder, program: Program, known: Mapping[Input, float] | None = None, call: Callable[..., int] | None = None
) -> list[int]:
    """Append a program's instructions to a builder, and return the new numbers of the values.

    `call` appends the operations; by default it is ``builder.call``, which simplifies them.
    """
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
