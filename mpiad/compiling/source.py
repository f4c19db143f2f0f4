"""The text of a program: one assignment to a local scalar for each operation, in the kernel language.

f itself is computed as it is written, so that its values are those of the vectorized path. In tangents and adjoints
products that are added may become `fma`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import mul
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from mpiad.compiling.builder import Builder, copied
from mpiad.compiling.c_translation import c_lines
from mpiad.compiling.operations import OPERATIONS
from mpiad.compiling.program import Program
from mpiad.compiling.symbols import Symbol, choose, whole_power

# Operations without a machine instruction, in terms of others.
#
# They stay whole until a program becomes text, so that derivatives are taken of f as written: those of a power by its
# factors, or of the largest of three by pairs, would differ from autograd's at zeros and ties.


# Twelve multiplications at most.
_LARGEST_EXPONENT = 64


# Both the text and the vector width of a kernel are derived from it.
@lru_cache(32)
def lowered(program: Program) -> Program:
    """Return a program of the same values, to a few roundings, in operations that have a text."""
    builder = Builder()

    def call(operation: str, *arguments: int) -> int:
        simpler = _RULES[operation](*[Symbol(builder, i) for i in arguments]) if operation in _RULES else None
        return builder.call(operation, *arguments) if simpler is None else simpler.number

    new = copied(builder, program, call=call)
    return builder.program(program.groups, [new[i] for i in program.outputs])


def are_simple(programs: Iterable[Program]) -> bool:
    """Return whether programs have no calls, around which registers must be saved: more for wider vectors."""
    operations = {made.operation for program in programs for made in lowered(program).instructions}
    return all(OPERATIONS[operation].simple for operation in operations & OPERATIONS.keys())


def _power(x: Symbol, y: Symbol) -> Symbol | None:
    """Return a power of a small constant exponent by multiplications and a root; None for other exponents."""
    exponent = x.builder.value(y.number)
    if exponent is None or abs(exponent) > _LARGEST_EXPONENT or (2 * exponent) % 1:
        return None
    made = whole_power(x, int(abs(exponent)), mul)
    if exponent % 1:
        root = x.sqrt()
        made = root if made is None else made * root
        # The root of -0 is -0, and a quotient by it would be -inf.
        made = abs(made) if exponent < 0 else made
    if made is None:
        return Symbol(x.builder, x.builder.constant(1.0))
    return made if exponent > 0 else 1.0 / made


def _by_pairs(operation: str) -> Callable[..., Symbol]:
    def made(first: Symbol, *others: Symbol) -> Symbol:
        for other in others:
            first = first.call(operation, other)
        return first

    return made


# It has the sign of the divisor, unlike C's.
def _remainder(x: Symbol, y: Symbol) -> Symbol:
    rest = x.fmod(y)
    return choose((rest != 0.0) & ((rest < 0.0) ^ (y < 0.0)), rest + y, rest)


# A call of hypot would keep a loop over lanes from being vectorized.
def _modulus(x: Symbol, y: Symbol) -> Symbol:
    larger, smaller = abs(x).maximum(abs(y)), abs(x).minimum(abs(y))
    ratio = smaller / choose(larger == 0.0, 1.0, larger)
    return larger * (ratio * ratio + 1.0).sqrt()


_RULES: dict[str, Callable[..., Symbol | None]] = {
    "power": _power,
    "largest": _by_pairs("maximum"),
    "smallest": _by_pairs("minimum"),
    "remainder": _remainder,
    "modulus": _modulus,
    "expit": lambda x: 1.0 / (1.0 + (-x).exp()),
    "logit": lambda x: (x / (1.0 - x)).log(),
}


# The expressions for the inputs of each group.
Names: TypeAlias = "Mapping[str, Sequence[str]]"

# For values a b + c: the numbers of a, b and c, and the format of the expression.
_Sums = dict[int, tuple[int, int, int, str]]


def number(value: float | bool, single: bool = False) -> str:
    """Return a number as source, in double or single precision."""
    if isinstance(value, bool):
        return str(value)
    text = repr(abs(float(value))) if math.isfinite(value) else f"math.{'nan' if math.isnan(value) else 'inf'}"
    # In parentheses: the places are next to operators.
    text = f"(-{text})" if math.copysign(1, value) < 0 else text
    # Python's numbers are double, and would make the rest double.
    return f"np.float32({text})" if single else text


def numbered(name: str, count: int) -> list[str]:
    """Return names with their numbers."""
    return [f"{name}{i}" for i in range(count)]


def indented(lines: list[str], depth: int = 1) -> list[str]:
    """Return indented lines."""
    return ["    " * depth + line for line in lines]


def lines(program: Program, names: Names, outputs: Sequence[str], dtype: DTypeLike = float, prefix: str = "v") -> list[str]:
    """Return statements, without indentation, that compute a program's outputs.

    `names` has the expressions of each group's inputs, repeated at each use, so give local scalars. The outputs
    are assigned, one after the other, after everything has been computed. The dtype is float64 or float32. The names of
    local scalars begin with `prefix`; two programs in one function need different ones.
    """
    program = lowered(program)
    texts, made = _texts(program, names, np.dtype(dtype) == np.float32, prefix, {})
    return made + [f"{target} = {texts[i]}" for target, i in zip(outputs, program.outputs, strict=True)]


def function_source(
    program: Program, name: str, names: Names, arguments: Sequence[str], fused: bool = False, dtype: DTypeLike = float,
    language: str = "python",
) -> str:  # fmt: skip
    """Return the text of a function of scalars that returns the outputs as a tuple; in C it gives them to references.

    `names` gives the names of each group's inputs, and `arguments` their order in the function's signature. With `fused`
    products that are added are rounded once. In C numbers are `real`, and the function `INLINE`.
    """
    if language == "c":
        outputs = numbered("out", len(program.outputs))
        given = [f"const real {x}" for x in arguments] + [f"real& {x}" for x in outputs]
        body = indented(c_lines(lines(program, names, outputs, dtype), outputs))
        return "\n".join([f"INLINE void {name}({', '.join(given)}) {{", *body, "}"])
    program = lowered(program)
    texts, made = _texts(program, names, np.dtype(dtype) == np.float32, "v", _sums(program) if fused else {})
    body = [*made, f"return ({', '.join(texts[o] for o in program.outputs)},)"]
    return "\n".join([f"def {name}({', '.join(arguments)}):", *indented(body)]) + "\n"


def _texts(program: Program, names: Names, single: bool, prefix: str, sums: _Sums) -> tuple[dict[int, str], list[str]]:
    """Return the expression for each value, and the lines that compute them."""
    texts: dict[int, str] = {}
    made: list[str] = []
    for i in sorted(_needed(program, sums)):
        operation, arguments, value = program.instructions[i]
        if operation == "constant":
            texts[i] = number(value, single)  # type: ignore[arg-type]
        elif operation == "input":
            group, place = value  # type: ignore[misc]
            texts[i] = names[group][place]
        else:
            if i in sums:
                *places, form = sums[i]
                text = form.format(*(texts[j] for j in places))
            else:
                zero, one = number(0.0, single), number(1.0, single)
                text = OPERATIONS[operation].text.format(*(texts[j] for j in arguments), zero=zero, one=one)
            texts[i] = f"{prefix}{i}"
            made.append(f"{texts[i]} = {text}")
    return texts, made


def _sums(program: Program) -> _Sums:
    found = {}
    for i, (operation, arguments, _) in enumerate(program.instructions):
        if operation not in ("add", "subtract"):
            continue
        x, y = arguments
        sign = "" if operation == "add" else "-"
        for product, other, form in ((y, x, f"fma({sign}{{0}}, {{1}}, {{2}})"), (x, y, f"fma({{0}}, {{1}}, {sign}{{2}})")):
            if program.instructions[product].operation == "multiply":
                found[i] = (*program.instructions[product].arguments, other, form)
                break
    return found


def _needed(program: Program, sums: _Sums) -> set[int]:
    """Return the values that are computed: not products that have become a part of a sum."""
    needed: set[int] = set(program.outputs)
    for i in range(len(program.instructions) - 1, -1, -1):
        if i in needed:
            needed.update(sums[i][:3] if i in sums else program.instructions[i].arguments)
    return needed
