"""`Program`: straight-line arithmetic on scalars, in static single assignment form.

A program is a list of instructions without branches or loops. Each instruction computes one scalar, real or boolean, from
the scalars of preceding instructions. Its index in the list is called the number of its value. Inputs and constants are
also instructions. Inputs belong to groups (such as state and parameters), whose names and sizes the caller chooses.

A table is an instruction, too: constants or consecutive inputs, of which "lookup" reads the entry at a computed index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, reduce
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from mpiad._typing import Array

# The operations of programs, each as a NumPy function and as text in the kernel language.
#
# The kernel language is a subset of Python (see `translation`). Its function `where` computes both alternatives, since
# branches may prevent vectorization. The derivatives of the operations are in `derivatives`, under the same names.


class Operation(NamedTuple):
    """An operation of programs."""

    arity: int
    function: Callable[..., Any]  # the NumPy function with the same value
    # In the kernel language, with {0}, {1}, {2} for arguments, and {zero}, {one} for the constants 0 and 1; empty if the
    # operation is replaced by other operations (see `source.lowered`).
    text: str
    boolean: bool = False  # whether the value is boolean
    commutes: bool = False  # whether the arguments may be exchanged
    simple: bool = True  # whether it is a cheap vector instruction, not a call of a library


def _called(function: Callable[..., Any], name: str, arity: int = 1) -> Operation:
    return Operation(arity, function, f"{name}({', '.join(f'{{{i}}}' for i in range(arity))})", simple=False)


def _compared(sign: str, function: Callable[..., Any], commutes: bool = False) -> Operation:
    return Operation(2, function, f"{{0}} {sign} {{1}}", boolean=True, commutes=commutes)


def _chosen(condition: str, function: Callable[..., Any]) -> Operation:
    return Operation(2, function, f"where({condition}, {{0}}, {{1}})")


def _composed(function: Callable[..., Any], arity: int = 1) -> Operation:
    return Operation(arity, function, "", simple=False)


OPERATIONS: dict[str, Operation] = {
    "add": Operation(2, np.add, "{0} + {1}", commutes=True),
    "subtract": Operation(2, np.subtract, "{0} - {1}"),
    "multiply": Operation(2, np.multiply, "{0} * {1}", commutes=True),
    "divide": Operation(2, np.divide, "{0} / {1}"),
    "negative": Operation(1, np.negative, "-{0}"),
    "absolute": Operation(1, np.absolute, "abs({0})"),
    "sqrt": Operation(1, np.sqrt, "math.sqrt({0})"),
    # As in NumPy, and unlike Python and C, maximum and minimum are NaN if either argument is NaN.
    "maximum": _chosen("({0} > {1}) | ({0} != {0})", np.maximum),
    "minimum": _chosen("({0} < {1}) | ({0} != {0})", np.minimum),
    "fmax": _chosen("({0} > {1}) | ({1} != {1})", np.fmax),
    "fmin": _chosen("({0} < {1}) | ({1} != {1})", np.fmin),
    "sign": Operation(1, np.sign, "where({0} > {zero}, {one}, where({0} < {zero}, -{one}, abs({0})))"),
    "floor": Operation(1, np.floor, "np.floor({0})"),
    "ceil": Operation(1, np.ceil, "np.ceil({0})"),
    "trunc": Operation(1, np.trunc, "np.trunc({0})"),
    "rint": Operation(1, np.rint, "np.rint({0})"),
    "copysign": Operation(2, np.copysign, "math.copysign({0}, {1})"),
    "less": _compared("<", np.less),
    "less_equal": _compared("<=", np.less_equal),
    "greater": _compared(">", np.greater),
    "greater_equal": _compared(">=", np.greater_equal),
    "equal": _compared("==", np.equal, commutes=True),
    "not_equal": _compared("!=", np.not_equal, commutes=True),
    "logical_and": Operation(2, np.logical_and, "{0} & {1}", boolean=True, commutes=True),
    "logical_or": Operation(2, np.logical_or, "{0} | {1}", boolean=True, commutes=True),
    "logical_not": Operation(1, np.logical_not, "not {0}", boolean=True),
    "where": Operation(3, np.where, "where({0}, {1}, {2})"),
    # Powers with a small constant exponent become multiplications and roots.
    "power": _called(np.power, "math.pow", 2),
    "exp": _called(np.exp, "math.exp"),
    "expm1": _called(np.expm1, "math.expm1"),
    "log": _called(np.log, "math.log"),
    "log1p": _called(np.log1p, "math.log1p"),
    "log2": _called(np.log2, "np.log2"),
    "log10": _called(np.log10, "math.log10"),
    "cbrt": _called(np.cbrt, "np.cbrt"),
    "sin": _called(np.sin, "math.sin"),
    "cos": _called(np.cos, "math.cos"),
    "tan": _called(np.tan, "math.tan"),
    "arcsin": _called(np.arcsin, "math.asin"),
    "arccos": _called(np.arccos, "math.acos"),
    "arctan": _called(np.arctan, "math.atan"),
    "arctan2": _called(np.arctan2, "math.atan2", 2),
    "sinh": _called(np.sinh, "math.sinh"),
    "cosh": _called(np.cosh, "math.cosh"),
    "tanh": _called(np.tanh, "math.tanh"),
    "arcsinh": _called(np.arcsinh, "math.asinh"),
    "arccosh": _called(np.arccosh, "math.acosh"),
    "arctanh": _called(np.arctanh, "math.atanh"),
    "erf": _called(np.vectorize(math.erf, otypes=[float]), "math.erf"),
    "erfc": _called(np.vectorize(math.erfc, otypes=[float]), "math.erfc"),
    "hypot": _called(np.hypot, "math.hypot", 2),
    "fmod": _called(np.fmod, "np.fmod", 2),
    "remainder": _composed(np.remainder, 2),
    # The modulus of a complex number: hypot with another derivative at 0.
    "modulus": _composed(lambda x, y: np.hypot(x, y), 2),
    "stop_gradient": _composed(np.copy),
    "expit": _composed(lambda x: 1.0 / (1.0 + np.exp(-x))),
    "logit": _composed(lambda x: np.log(x / (1.0 - x))),
    # Maximum and minimum of three or more arguments.
    "largest": _composed(lambda *x: reduce(np.maximum, x), 3),
    "smallest": _composed(lambda *x: reduce(np.minimum, x), 3),
}


class Untraceable(TypeError):
    """Raised if a function can't be traced as straight-line arithmetic; the message names the user's file and line."""

    def __init__(self, reason: str, place: str):
        super().__init__(f"{place}: {reason}")
        self.reason, self.place = reason, place


class Refusal(TypeError):
    """Raised in a traced function by an unsupported operation on a symbol; the tracer turns it into `Untraceable`."""


def place_of(f: object) -> str:
    """Return file and line of f's definition, or its repr if it has no code."""
    code = getattr(f, "__code__", None) or getattr(type(f).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(f)


# The name of a group, and an index in it.
Input: TypeAlias = "tuple[str, int]"
# The name of a group, the first index in it, and the number of indices.
TableInputs: TypeAlias = "tuple[str, int, int]"


class Instruction(NamedTuple):
    """The computation of one value."""

    operation: str  # a name in `OPERATIONS`, "input", "constant", "table" or "lookup"
    arguments: tuple[int, ...] = ()  # the arguments' numbers, all smaller than this value's number
    # For a constant its value, float or bool; for an input its group and index in the group; for a table its constants, the
    # bytes of doubles, or the group, the first index and the number of its inputs; None for operations.
    value: float | bool | bytes | Input | TableInputs | None = None


class Program:
    """A computation on groups of scalars, immutable and compared by content; `outputs`: value numbers of the results."""

    def __init__(self, groups: Mapping[str, int], instructions: Iterable[Instruction], outputs: Iterable[int]):
        # `groups`: the number of scalars in each group, including unused ones, in the order of positional arguments.
        self.groups, self.instructions, self.outputs = dict(groups), tuple(instructions), tuple(outputs)

    @cached_property
    def content(self) -> tuple:
        """The content that is compared: 0 and -0 differ, and NaN equals NaN."""
        instructions = tuple((op, arguments, exact(value)) for op, arguments, value in self.instructions)
        return tuple(self.groups.items()), self.outputs, instructions

    @cached_property
    def numbers(self) -> dict[int, float | bytes]:
        """Float constants, without integer and half-integer exponents (see `source.lowered`), and tables, by number."""
        exponents = {x.arguments[1] for x in self.instructions if x.operation == "power"}
        floats = ((i, x.value) for i, x in enumerate(self.instructions) if isinstance(x.value, float))
        found: dict[int, Any] = {i: value for i, value in floats if i not in exponents or not (2 * value).is_integer()}
        return found | {i: x.value for i, x in enumerate(self.instructions) if isinstance(x.value, bytes)}

    @cached_property
    def structure(self) -> tuple:
        """The content without `numbers`."""
        kept = [None if i in self.numbers else x for i, x in enumerate(self.instructions)]
        lengths = [len(value) for value in self.numbers.values() if isinstance(value, bytes)]
        return tuple(self.groups.items()), self.outputs, (*kept, *lengths)

    def with_inputs(self, inputs: Mapping[int, Input | TableInputs], groups: Mapping[str, int]) -> Program:
        """Return the program with some constants of `numbers` replaced by inputs; `groups` has the new sizes."""
        new = {i: Instruction("input" if len(value) == 2 else "table", (), value) for i, value in inputs.items()}
        instructions = [new.get(i, x) for i, x in enumerate(self.instructions)]
        return Program({**self.groups, **groups}, instructions, self.outputs)

    @property
    def cost(self) -> int:
        """The number of operations, without inputs and constants."""
        return sum(bool(instruction.arguments) for instruction in self.instructions)

    def reads(self, group: str) -> bool:
        """Return whether the program has an input of this group."""
        return any(isinstance(value, tuple) and value[0] == group for _, _, value in self.instructions)

    @cached_property
    def booleans(self) -> list[bool]:
        """Whether each value is boolean; inputs are numbers."""
        found = list[bool]()
        for operation, arguments, value in self.instructions:
            boolean = OPERATIONS[operation].boolean if operation in OPERATIONS else isinstance(value, bool)
            found.append(boolean or (operation == "where" and found[arguments[1]]))
        return found

    @cached_property
    def tables(self) -> set[TableInputs]:
        """The inputs of its tables."""
        return {value for op, _, value in self.instructions if op == "table" and isinstance(value, tuple)}  # type: ignore[misc]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Program) and self.content == other.content)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.content)

    def __repr__(self) -> str:
        return f"<Program of {self.cost} operations>"


def exact(value: float | bool | bytes | Input | TableInputs | None) -> str | bytes:
    """Return a text that differs for different values, including types and signs of zero; bytes are returned unchanged."""
    return value.hex() if isinstance(value, float) else value if isinstance(value, bytes) else repr(value)


def evaluated(program: Program, *groups: Sequence[Any] | Array) -> list[Any]:
    """Return the outputs of a program, computed by one NumPy call per operation: the reference for compiled code."""
    with np.errstate(all="ignore"):
        return _function_of(program)(*groups)


def _entry(table: Array, index: Array) -> Array:
    """Return the entries of a table, shape (K,) or (K, n), at indices of shape (n,)."""
    places = np.asarray(index).astype(int) if isinstance(index, float) else index.astype(int)
    if table.ndim == 1:
        return table[places]
    return np.take_along_axis(table, np.broadcast_to(places, table.shape[1:])[None], axis=0)[0]


@lru_cache(256)
def _function_of(program: Program) -> Callable[..., list[Any]]:
    """Return the Python function of the groups that `evaluated` calls."""
    groups = {name: f"g{k}" for k, name in enumerate(program.groups)}
    names: dict[str, Any] = {name: operation.function for name, operation in OPERATIONS.items()}
    names |= {"stack": np.stack, "lookup": _entry}
    lines = [f"def function({', '.join(groups.values())}):"]
    for i, (operation, arguments, value) in enumerate(program.instructions):
        if operation == "constant":
            names[f"v{i}"] = value
        elif operation == "input":
            lines.append(f" v{i} = {groups[value[0]]}[{value[1]}]")  # type: ignore[index]
        elif operation == "table" and isinstance(value, tuple):
            group, first, count = value  # type: ignore[misc]
            lines.append(f" v{i} = stack([{groups[group]}[k] for k in range({first}, {first + count})])")
        elif operation == "table":
            names[f"v{i}"] = np.frombuffer(value)  # type: ignore[arg-type]
        else:
            lines.append(f" v{i} = {operation}({', '.join(f'v{k}' for k in arguments)})")
    exec("\n".join([*lines, f" return [{', '.join(f'v{i}' for i in program.outputs)}]"]), names)
    return names["function"]


# Construction of programs: common subexpression elimination and constant folding.


class Builder:
    """A program under construction. The number of a value is the index of the instruction that computes it."""

    def __init__(self, most: float = math.inf, single: bool = False) -> None:
        self._most = most  # a program with more operations is refused
        self._single = single  # whether constants, and operations on constants, are rounded to single precision
        self.instructions: list[Instruction] = []
        self.refused: str | None = None  # the first reason; stored, since the function may catch the Refusal
        self._known: dict[tuple, int] = {}

    def refuse(self, reason: str) -> NoReturn:
        """Store the reason if it is the first one, and raise a Refusal."""
        self.refused = self.refused or reason
        raise Refusal(reason)

    def constant(self, value: float | bool) -> int:
        """Return the number of a constant, real or boolean."""
        if self._single and not isinstance(value, bool):
            with np.errstate(over="ignore"):
                value = np.float32(value)  # type: ignore[assignment]
        return self.numbered(Instruction("constant", (), value if isinstance(value, bool) else float(value)))

    def input(self, group: str, place: int = 0) -> int:
        """Return the number of an input."""
        return self.numbered(Instruction("input", (), (group, place)))

    def table(self, entries: Array) -> int | None:
        """Return the number of a table of constants or consecutive inputs of a group; None for other entries."""
        if entries.dtype != object:
            return self.numbered(Instruction("table", (), np.asarray(entries, float).tobytes()))
        found = [self.instructions[entry.number] for entry in entries.tolist()]
        if not found or {x.operation for x in found} != {"input"}:
            return None
        group, first = found[0].value  # type: ignore[misc]
        if [x.value for x in found] != [(group, first + k) for k in range(len(found))]:
            return None
        return self.numbered(Instruction("table", (), (group, first, len(found))))

    def lookup(self, table: int, index: int) -> int:
        """Return the number of the entry of a table at an index, a whole number in its range."""
        value, place = self.instructions[table].value, self.value(index)
        if place is not None and isinstance(value, tuple):
            return self.input(value[0], value[1] + int(place))
        return self.numbered(Instruction("lookup", (table, index)))

    def pair(self, real: int, imag: int) -> int:
        """Return the number of a complex value; finished programs contain only the values of its parts."""
        return self.numbered(Instruction("complex", (real, imag)))

    def parts(self, number: int) -> tuple[int, ...] | None:
        """Return the numbers of the real and the imaginary part of a value; None if the value is real."""
        instruction = self.instructions[number]
        return instruction.arguments if instruction.operation == "complex" else None

    def call(self, operation: str, *arguments: int) -> int:
        """Return the number of an operation's value; an operation on constants is a constant."""
        values = [self.value(argument) for argument in arguments]
        if None not in values:
            with np.errstate(all="ignore"):
                return self.constant(OPERATIONS[operation].function(*values).item())
        # x + y and y + x are the same value.
        if OPERATIONS[operation].commutes:
            arguments = tuple(sorted(arguments))
        return self.numbered(Instruction(operation, arguments))

    def value(self, number: int) -> float | bool | None:
        """Return the value of a constant, or None for a value that isn't constant."""
        instruction = self.instructions[number]
        return instruction.value if instruction.operation == "constant" else None  # type: ignore[return-value]

    def is_boolean(self, number: int) -> bool:
        """Return whether a value is boolean."""
        operation, arguments, value = self.instructions[number]
        if operation == "where":
            return self.is_boolean(arguments[1])
        return OPERATIONS[operation].boolean if operation in OPERATIONS else isinstance(value, bool)

    def program(self, groups: Mapping[str, int], outputs: Sequence[int]) -> Program:
        """Return the program that computes the values with the numbers `outputs`, without unused values."""
        needed = set(outputs)
        # Arguments precede the values computed from them, so one backward pass finds all needed values.
        for number in range(len(self.instructions) - 1, -1, -1):
            if number in needed:
                needed.update(self.instructions[number].arguments)
        new = {old: place for place, old in enumerate(sorted(needed))}
        kept = (self.instructions[old] for old in new)
        moved = [Instruction(op, tuple(new[i] for i in arguments), value) for op, arguments, value in kept]
        return Program(groups, moved, [new[i] for i in outputs])

    def numbered(self, instruction: Instruction) -> int:
        """Return the number of an instruction, which is appended unless the program contains it."""
        # The constants themselves can't be keys, since 0 == -0, 1 == True, and NaN != NaN.
        key = (instruction.operation, instruction.arguments, exact(instruction.value))
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.instructions)
            if number >= self._most:
                self.refuse(f"it has more than {self._most} operations on scalars")
            self.instructions.append(instruction)
        return number


def simplify(program: Program, known: Mapping[Input, float] | None = None) -> Program:
    """Return an equivalent program with `known` inputs as constants, without repeated and constant operations."""
    builder = Builder()
    new = copy_program(builder, program, known)
    return builder.program(program.groups, [new[output] for output in program.outputs])


def copy_program(
    builder: Builder, program: Program, known: Mapping[Input, float] | None = None, call: Callable[..., int] | None = None
) -> list[int]:
    """Append a program's instructions to a builder, operations by `call` if given, and return the values' new numbers."""
    new, call = list[int](), call or builder.call
    for operation, arguments, value in program.instructions:
        if operation == "constant":
            new.append(builder.constant(value))  # type: ignore[arg-type]
        elif operation == "input":
            given = (known or {}).get(value)  # type: ignore[arg-type]
            new.append(builder.input(*value) if given is None else builder.constant(float(given)))  # type: ignore[misc]
        elif operation == "table":
            new.append(builder.numbered(Instruction(operation, (), value)))
        elif operation == "lookup":
            new.append(builder.lookup(*(new[i] for i in arguments)))
        else:
            new.append(call(operation, *(new[i] for i in arguments)))
    return new
